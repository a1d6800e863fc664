"""Launches of the DPLR delta rule: allocates what the kernels write and calls them in order."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from chunkwise.protocol import axes as protocol
from chunkwise.verifier.facts import Facts
from chunkwise_triton.common.call import Call, build_once, meta_inputs, or_any
from chunkwise_triton.common.launch import aligned
from chunkwise_triton.common.state_scan import scan_backward_kernel, scan_kernel
from chunkwise_triton.dplr_delta_rule import kernels
from chunkwise_triton.dplr_delta_rule.schedules import Schedule

LEAN = ("g_cumsum", "inverse")
FULL = (*LEAN, "u", "states")
Grads = tuple[Tensor | None, Tensor | None]


class _Call(Call):
    """With a, b and a gate for each channel of the keys; what is decayed is kept in the products' dtype."""

    schedule: Schedule

    def __init__(self, schedule: Schedule, inputs: Any) -> None:
        others = {name: getattr(inputs, name) for name in ("v", "scale", "initial_state", "cu_seqlens")}
        as_gated = SimpleNamespace(g=inputs.gk, **others)
        super().__init__(schedule, as_gated, inputs.q, inputs.k, inputs.a, inputs.b)
        self.a, self.b = inputs.a, inputs.b
        self.wide = protocol.DTYPES[schedule.dot]
        self.decays = {"CENTRED": schedule.centred}

    def pairs(self) -> Tensor:
        """Room for one number for each pair of rows of a chunk."""
        shape = (*self.v.shape[:3], self.schedule.chunk_size)
        return torch.empty(shape, dtype=self.wide, device=self.v.device)

    def gate_sums(self, known: Tensor | None = None) -> dict[str, Tensor]:
        """The sums of the gates, and what rounding took from them; ``known`` are sums that another call wrote."""
        if known is None or self.schedule.dot == "fp32":  # no residual format keeps what was rounded away
            return dict(zip(("g_cumsum", "g_low"), self.channel_sums(self.schedule.gates), strict=True))
        return {"g_cumsum": known, "g_low": known}


def forward(
    schedule: Schedule, inputs: Any, save: str | None
) -> tuple[tuple[Tensor, Tensor | None], dict[str, Tensor]]:
    """``(o, final_state)`` and the residuals of the format ``save``."""
    call = _Call(schedule, inputs)
    full = save is not None and _is_full(save)
    chunk = call.gate_sums()
    if save is not None:
        make = torch.zeros if call.map.ragged else torch.empty
        shape = (*call.v.shape[:3], schedule.chunk_size)
        chunk["inverse"] = make(shape, dtype=call.v.dtype, device=call.v.device)
    chunk["u"] = call.rows(call.v)
    _prepare(call, chunk, None, forward=True, solve=True)
    final = call.state() if inputs.output_final_state else None
    chunk["states"] = _scan(call, chunk, inputs.initial_state, final, call.states(torch.float32 if full else call.wide))
    o = call.rows(call.v)
    call.per_chunk(
        kernels.low_rank_output_kernel, schedule.output, call.heads,
        chunk["q_in"], call.v, chunk["u"], chunk["q_k"], chunk["q_b"], chunk["states"], o,
    )  # fmt: skip
    return (o, final), {name: chunk[name] for name in (FULL if full else LEAN if save else ())}


def _is_full(residuals: str) -> bool:
    return residuals.startswith("dplr-states")


def _prepare(call: _Call, chunk: dict[str, Tensor], d_o: Tensor | None, *, forward: bool, solve: bool) -> None:
    """What chunks know without their entry states, added to ``chunk``, which holds the sums of the gates; the inverse
    is computed in a forward, and read in a backward."""
    names = ("q_k", "q_b") if forward else ("q_k", "a_k")
    chunk |= {name: call.pairs() for name in names}
    chunk |= {name: torch.empty_like(call.k, dtype=call.wide) for name in ("q_in", "k_out", "b_out", "w")}
    chunk["whole"] = call.v.new_empty(call.map.slots, call.heads, call.key_width, dtype=torch.float32)
    if not forward:
        chunk["d_u"] = torch.empty_like(call.v, dtype=call.wide)
    keep = "inverse" in chunk
    outputs = ("inverse", "q_k", "q_b", "a_k", "q_in", "k_out", "b_out", "w", "u", "d_u", "whole")
    call.per_chunk(
        kernels.prepare_kernel, call.schedule.prepare, call.heads,
        call.q, call.k, call.v, call.a, call.b, chunk["g_cumsum"], chunk["g_low"], or_any(d_o, call.v),
        *(chunk.get(name, chunk["w"]) for name in outputs), call.scale,
        **call.decays, INVERT=forward, KEEP=forward and keep, SOLVE=solve, HAS_DO=d_o is not None,
    )  # fmt: skip


def _scan(
    call: _Call, chunk: dict[str, Tensor], initial: Tensor | None, final: Tensor | None, states: Tensor
) -> Tensor:
    """Completes u, which holds M P_ak v; fills in the entry state of every chunk."""
    call.per_state(
        scan_kernel, call.schedule.scan,
        chunk["b_out"], chunk["w"], chunk["u"], chunk["k_out"], call.v, chunk["whole"], chunk["whole"],
        states, states, or_any(initial, states), or_any(final, states),
        DELTA=True, GATED=True, DECAYED=True, LOW_RANK=True,
        ENTRY_CHUNKS=0, HAS_INITIAL=initial is not None, HAS_FINAL=final is not None,
    )  # fmt: skip
    return states


def backward(schedule: Schedule, inputs: Any, residuals: Any, grads: Grads, needs: frozenset[str]) -> dict[str, Tensor]:
    """The gradients named in ``needs``, from the gradients of o and of final_state."""
    call = _Call(schedule, inputs)
    d_o, d_final = grads
    if not aligned(d_o, d_final, *residuals.tensors.values()):
        call.key = None
    chunk = {name: residuals.tensors[name] for name in residuals.tensors if name != "g_cumsum"}
    chunk |= call.gate_sums(residuals.tensors["g_cumsum"])
    lean = "states" not in chunk
    if lean:
        chunk["u"] = torch.empty_like(call.v)
    _prepare(call, chunk, d_o, forward=False, solve=lean)
    if lean:
        chunk["states"] = _scan(call, chunk, inputs.initial_state, None, call.states(call.wide))
    d_states, d_initial = call.states(call.wide), call.state() if "initial_state" in needs else None
    call.per_state(
        scan_backward_kernel, schedule.scan_backward,
        chunk["q_in"], chunk["b_out"], chunk["w"], chunk["whole"], chunk["whole"], chunk["whole"],
        or_any(d_o, call.v), chunk["d_u"], d_states, or_any(d_initial, d_states), or_any(d_final, d_states), call.scale,
        DELTA=True, GATED=True, DECAYED=True, HAS_DO=d_o is not None,
        HAS_INITIAL=d_initial is not None, HAS_FINAL=d_final is not None,
    )  # fmt: skip
    found = _input_gradients(call, inputs.initial_state, chunk, grads, d_states, "gk" in needs)
    if d_initial is not None:
        found["initial_state"] = d_initial
    return {name: found[name] for name in needs}


def _input_gradients(
    call: _Call, initial: Tensor | None, chunk: dict[str, Tensor], grads: Grads, d_states: Tensor, gates: bool
) -> dict[str, Tensor]:
    """Gradients of q, k, v, a, b and, where asked for, of the gates."""
    d_o, d_final = grads
    schedule, d_o_or_any, has = call.schedule, or_any(d_o, call.v), {"HAS_DO": d_o is not None}
    found = {name: call.rows(getattr(call, name)) for name in ("k", "v", "a", "b")}
    found["q"] = torch.zeros_like(call.q) if d_o is None else call.rows(call.q)
    if gates:
        found["gk"] = call.rows(call.g)
    d_pairs = [call.pairs() for _ in range(4)]
    call.per_chunk(
        kernels.value_gradient_kernel, schedule.value_gradient, call.heads,
        call.v, chunk["u"], chunk["inverse"], chunk["q_k"], chunk["a_k"], chunk["k_out"], d_o_or_any, chunk["d_u"],
        d_states, found["v"], *d_pairs, call.scale, **has,
    )  # fmt: skip
    parts = -(-call.key_width // schedule.key_gradient.block_k)
    call.per_chunk(
        kernels.key_gradient_kernel, schedule.key_gradient, call.heads * parts,
        call.q, call.k, call.v, call.a, call.b, chunk["u"], chunk["g_cumsum"], chunk["g_low"], chunk["states"],
        d_o_or_any, chunk["d_u"], d_states, or_any(initial, d_states), or_any(d_final, d_states), *d_pairs,
        *(found[name] for name in ("q", "k", "a", "b")), found.get("gk", call.g), call.scale,
        **call.decays, **has, HAS_DG=gates, HAS_INITIAL=initial is not None, HAS_FINAL=d_final is not None,
    )  # fmt: skip
    return found


def compile(schedule: Schedule, facts: Facts, parts: Sequence[str]) -> None:
    """Build the kernels of a call's parts: the call itself, on ``meta`` tensors. Nothing where they were built."""
    build_once(_build, schedule, facts, parts, (("H", "K", "V"), ("ragged", *_OPTIONS)))


_OPTIONS = ("output_final_state", "disable_recompute")
_AXES = dict.fromkeys(("q", "k", "a", "b", "gk"), "B T H K") | {"v": "B T H V", "initial_state": "N H K V"}


def _build(schedule: Schedule, facts: Facts, parts: Sequence[str]) -> None:
    inputs = meta_inputs(schedule, facts, _AXES, _OPTIONS)
    (o, final), saved = forward(schedule, inputs, facts.residuals)
    if "backward" in parts:
        backward(schedule, inputs, SimpleNamespace(tensors=saved), (o, final), facts.needs)
