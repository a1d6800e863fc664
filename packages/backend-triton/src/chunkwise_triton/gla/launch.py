"""Launches of GLA: allocates what the kernels write and calls them in order."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from chunkwise.verifier.facts import Facts
from chunkwise_triton.common.call import Call, build_once, meta_inputs, or_any
from chunkwise_triton.common.launch import aligned
from chunkwise_triton.common.state_scan import scan_backward_kernel, scan_kernel
from chunkwise_triton.gla import kernels
from chunkwise_triton.gla.implementations import FULL, LEAN
from chunkwise_triton.gla.schedules import Split

Sums = tuple[Tensor, Tensor]
"""G ``[B, T, H, K]`` fp32 and what rounding took from it, which is read with fp32 operands only."""


def forward(schedule: Split, inputs: Any, save: str | None) -> tuple[tuple[Tensor, Tensor | None], dict[str, Tensor]]:
    """``(o, final_state)`` and the residuals of the format ``save``."""
    call = Call(schedule, inputs, inputs.q, inputs.k)
    sums = call.channel_sums(schedule.gates)
    final = call.state() if inputs.output_final_state else None
    states = _scan(call, schedule, sums, inputs.initial_state, final, torch.float32 if save == FULL else None)
    o = call.rows(call.v)
    blocks = -(-call.value_width // schedule.output.block_v)
    call.per_chunk(
        kernels.output_kernel, schedule.output, call.heads * blocks,
        call.q, call.k, call.v, *sums, states, o, call.scale,
    )  # fmt: skip
    saved = {} if save is None else {"g_cumsum": sums[0]}
    return (o, final), {**saved, "states": states} if save == FULL else saved


def _scan(
    call: Call,
    schedule: Split,
    sums: Sums,
    initial: Tensor | None,
    final: Tensor | None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The entry state of every chunk, in the activations' dtype unless another is asked for."""
    states = call.states(dtype)
    call.per_state(
        scan_kernel, schedule.scan,
        call.k, call.k, call.v, call.k, call.v, *sums, states, or_any(initial, states), or_any(final, states),
        DELTA=False, GATED=True, CHANNELS=True, DECAYED=False, LOW_RANK=False,
        HAS_INITIAL=initial is not None, HAS_FINAL=final is not None,
    )  # fmt: skip
    return states


def backward(
    schedule: Split, inputs: Any, residuals: Any, grads: tuple[Tensor | None, Tensor | None], needs: frozenset[str]
) -> dict[str, Tensor]:
    """The gradients named in ``needs``, from the gradients of o and of final_state."""
    call = Call(schedule, inputs, inputs.q, inputs.k)
    d_o, d_final = grads
    states = residuals.tensors.get("states")
    g_cumsum = residuals.tensors["g_cumsum"]
    if not aligned(d_o, d_final, states, g_cumsum):
        call.key = None
    # No format keeps what rounding took from the sums.
    sums = call.channel_sums(schedule.gates) if schedule.dot == "fp32" else (g_cumsum, g_cumsum)
    if states is None:
        states = _scan(call, schedule, sums, inputs.initial_state, None)
    d_states, d_initial = call.states(), call.state() if "initial_state" in needs else None
    call.per_state(
        scan_backward_kernel, schedule.scan_backward,
        call.q, call.k, call.k, sums[0], *sums, or_any(d_o, call.v), d_states, d_states,
        or_any(d_initial, d_states), or_any(d_final, d_states), call.scale,
        DELTA=False, GATED=True, CHANNELS=True, DECAYED=False, HAS_DO=d_o is not None,
        HAS_INITIAL=d_initial is not None, HAS_FINAL=d_final is not None,
    )  # fmt: skip
    found = {name: call.rows(getattr(call, name)) for name in ("q", "k", "v")}
    if "g" in needs:
        found["g"] = call.rows(call.g)
    call.per_chunk(
        kernels.gradient_kernel, schedule.gradient, call.heads,
        call.q, call.k, call.v, *sums, states, or_any(d_o, call.v), d_states,
        or_any(inputs.initial_state, d_states), or_any(d_final, d_states),
        found["q"], found["k"], found["v"], found.get("g", call.v), call.scale,
        HAS_DO=d_o is not None, HAS_DG="g" in needs, HAS_INITIAL=inputs.initial_state is not None,
        HAS_FINAL=d_final is not None,
    )  # fmt: skip
    if d_initial is not None:
        found["initial_state"] = d_initial
    return {name: found[name] for name in needs}


def compile(schedule: Split, facts: Facts, parts: Sequence[str]) -> None:
    """Build the kernels of a call's parts: the call itself, on ``meta`` tensors. Nothing where they were built."""
    build_once(_build, schedule, facts, parts, (("H", "K", "V"), ("ragged", "output_final_state")))


_AXES = {"q": "B T H K", "k": "B T H K", "v": "B T H V", "g": "B T H K", "initial_state": "N H K V"}


def _build(schedule: Split, facts: Facts, parts: Sequence[str]) -> None:
    inputs = meta_inputs(schedule, facts, _AXES, ("output_final_state",))
    if "forward" in parts:
        forward(schedule, inputs, LEAN if facts.needs else None)
    if "backward" in parts:
        final = inputs.v.float() if inputs.output_final_state else None  # kernels are compiled by dtype, not by shape
        residuals = SimpleNamespace(tensors={"g_cumsum": inputs.g.float()})
        backward(schedule, inputs, residuals, (inputs.v, final), facts.needs)
