"""Launches of GLA: allocates what the kernels write and calls them in order."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor

from chunkwise.verifier.facts import Facts
from chunkwise_triton.common.call import Call, build_once, meta_inputs, or_any
from chunkwise_triton.common.launch import aligned
from chunkwise_triton.common.schedules import Tile
from chunkwise_triton.common.state_scan import scan_backward_kernel, scan_kernel
from chunkwise_triton.gla import kernels
from chunkwise_triton.gla.implementations import FULL
from chunkwise_triton.gla.schedules import Split


class _Call(Call):
    """With what all kernels of a call share: the gate sums, the decayed queries and keys, the chunks' decays.

    ``low``, what rounding took from the sums, is written and read with fp32 operands only.
    """

    schedule: Split

    def __init__(self, schedule: Split, inputs: Any, g_cumsum: Tensor | None = None) -> None:
        super().__init__(schedule, inputs, inputs.q, inputs.k, g_cumsum)
        summed = g_cumsum is not None and schedule.dot != "fp32"  # no residual format keeps low
        self.sums = g_cumsum if g_cumsum is not None and summed else self.rows(self.g, torch.float32)
        self.low = torch.empty_like(self.sums) if schedule.dot == "fp32" else self.sums
        self.query, self.key_out = torch.empty_like(self.q), torch.empty_like(self.k)
        self.whole = self.sums.new_empty(self.map.slots, self.heads, self.key_width)
        self.per_chunk(
            kernels.decay_kernel, schedule.decay, self.blocks(schedule.decay),
            self.q, self.k, self.g, self.sums, self.low, self.query, self.key_out, self.whole, self.scale,
            SUMMED=summed,
        )  # fmt: skip

    def blocks(self, tile: Tile, of_values: bool = False) -> int:
        """How many blocks of K, or of V, the heads of a chunk have."""
        return self.heads * (-(-self.value_width // tile.block_v) if of_values else -(-self.key_width // tile.block_k))

    def scan(self, initial: Tensor | None, final: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """The entry state of every chunk, in the activations' dtype unless another is asked for."""
        states = self.states(dtype)
        self.per_state(
            scan_kernel, self.schedule.scan,
            self.key_out, self.key_out, self.v, self.v, self.v, self.whole, self.whole,
            states, states, or_any(initial, states), or_any(final, states),
            DELTA=False, GATED=True, DECAYED=True, LOW_RANK=False,
            ENTRY_CHUNKS=0, HAS_INITIAL=initial is not None, HAS_FINAL=final is not None,
        )  # fmt: skip
        return states

    def pairs(self) -> Tensor:
        """``scale P`` ``[B, T, H, C]``, written in steep chunks only."""
        pairs = self.q.new_empty(*self.q.shape[:3], self.schedule.chunk_size)
        width = triton.next_power_of_2(self.key_width)
        self.per_chunk(
            kernels.steep_pairs_kernel, self.schedule.steep_pairs, -(-self.heads // kernels.GROUP.value),
            self.q, self.k, self.sums, self.low, self.whole, pairs, self.scale, WIDTH=width,
        )  # fmt: skip
        return pairs


def forward(schedule: Split, inputs: Any, save: str | None) -> tuple[tuple[Tensor, Tensor | None], dict[str, Tensor]]:
    """``(o, final_state)`` and the residuals of the format ``save``."""
    call = _Call(schedule, inputs)
    final = call.state() if inputs.output_final_state else None
    states = call.scan(inputs.initial_state, final, torch.float32 if save == FULL else None)
    o = call.rows(call.v)
    call.per_chunk(
        kernels.output_kernel, schedule.output, call.blocks(schedule.output, of_values=True),
        call.query, call.key_out, call.whole, call.pairs(), call.v, states, o,
    )  # fmt: skip
    saved = {} if save is None else {"g_cumsum": call.sums}
    return (o, final), {**saved, "states": states} if save == FULL else saved


def backward(
    schedule: Split, inputs: Any, residuals: Any, grads: tuple[Tensor | None, Tensor | None], needs: frozenset[str]
) -> dict[str, Tensor]:
    """The gradients named in ``needs``, from the gradients of o and of final_state."""
    call = _Call(schedule, inputs, residuals.tensors["g_cumsum"])
    d_o, d_final = grads
    states = residuals.tensors.get("states")
    if not aligned(d_o, d_final, states):
        call.key = None
    if states is None:
        states = call.scan(inputs.initial_state, None)
    d_states, d_initial = call.states(), call.state() if "initial_state" in needs else None
    call.per_state(
        scan_backward_kernel, schedule.scan_backward,
        call.query, call.key_out, call.key_out, call.whole, call.whole, call.whole, or_any(d_o, call.v), d_states,
        d_states, or_any(d_initial, d_states), or_any(d_final, d_states), call.scale,
        DELTA=False, GATED=True, DECAYED=True, HAS_DO=d_o is not None, HAS_INITIAL=d_initial is not None,
        HAS_FINAL=d_final is not None,
    )  # fmt: skip
    found = _gradients(call, inputs, states, d_states, grads, "g" in needs)
    if d_initial is not None:
        found["initial_state"] = d_initial
    return {name: found[name] for name in needs}


def _gradients(
    call: _Call, inputs: Any, states: Tensor, d_states: Tensor, grads: tuple[Tensor | None, Tensor | None], gates: bool
) -> dict[str, Tensor]:
    """Gradients of q, k, v and, where ``gates``, of g, from those of the outputs and of the chunks' exit states."""
    schedule, (d_o, d_final) = call.schedule, grads
    found = {name: call.rows(getattr(call, name)) for name in ("q", "k", "v", *(("g",) if gates else ()))}
    pairs = call.v if d_o is None else call.pairs()  # not read without d_o
    d_pairs = torch.empty_like(pairs)
    call.per_chunk(
        kernels.value_gradient_kernel, schedule.value_gradient, call.blocks(schedule.value_gradient, of_values=True),
        call.query, call.key_out, call.whole, pairs, call.v, or_any(d_o, call.v), d_states, found["v"], d_pairs,
        call.scale, HAS_DO=d_o is not None,
    )  # fmt: skip
    arguments = (
        *(call.q, call.k, call.v, call.sums, call.low, call.whole, states, or_any(d_o, call.v), d_states, d_pairs),
        *(or_any(inputs.initial_state, d_states), or_any(d_final, d_states)),
        *(found["q"], found["k"], found.get("g", call.v), call.scale),
    )
    has = {"HAS_DO": d_o is not None, "HAS_DG": gates}
    has |= {"HAS_INITIAL": inputs.initial_state is not None, "HAS_FINAL": d_final is not None}
    has["ASYNC"] = schedule.asynchronous
    tile = schedule.gradient
    call.per_chunk(kernels.gradient_kernel, tile, call.blocks(tile), *arguments, **has)
    tile = schedule.steep_gradient
    groups = -(-call.blocks(tile) // kernels.GROUP.value)
    call.per_chunk(kernels.steep_gradient_kernel, tile, groups, *arguments, **has)
    return found


def compile(schedule: Split, facts: Facts, parts: Sequence[str]) -> None:
    """Build the kernels of a call's parts: the call itself, on ``meta`` tensors. Nothing where they were built."""
    build_once(_build, schedule, facts, parts, (("H", "K", "V"), ("ragged", "output_final_state")))


_AXES = {"q": "B T H K", "k": "B T H K", "v": "B T H V", "g": "B T H K", "initial_state": "N H K V"}


def _build(schedule: Split, facts: Facts, parts: Sequence[str]) -> None:
    inputs = meta_inputs(schedule, facts, _AXES, ("output_final_state",))
    if "forward" in parts:
        forward(schedule, inputs, facts.residuals)
    if "backward" in parts:
        final = inputs.v.float() if inputs.output_final_state else None  # kernels are compiled by dtype, not by shape
        states = {"states": inputs.v.float()} if facts.residuals == FULL else {}
        residuals = SimpleNamespace(tensors={"g_cumsum": inputs.g.float(), **states})
        backward(schedule, inputs, residuals, (inputs.v, final), facts.needs)
