"""Launches of simple GLA: allocates what the kernels write and calls them in order."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from chunkwise.verifier.facts import Facts
from chunkwise_triton.common.call import Call, build_once, meta_inputs, or_any
from chunkwise_triton.common.chunk_products import output_kernel
from chunkwise_triton.common.launch import aligned
from chunkwise_triton.common.state_scan import scan_backward_kernel, scan_kernel
from chunkwise_triton.simple_gla import kernels
from chunkwise_triton.simple_gla.implementations import FULL
from chunkwise_triton.simple_gla.schedules import Fused, Split

Outputs = tuple[tuple[Tensor, Tensor | None], dict[str, Tensor]]
_GATE_WARPS = 1  # a chunk's gates are 64 numbers


def forward(schedule: Split, inputs: Any, save: str | None) -> Outputs:
    """``(o, final_state)`` and the residuals of the format ``save``; entry states go through memory."""
    call = Call(schedule, inputs, inputs.q, inputs.k)
    gates = call.sum_gates(_GATE_WARPS)
    final = call.state() if inputs.output_final_state else None
    states = _scan(call, schedule, gates, inputs.initial_state, final, torch.float32 if save == FULL else None)
    o = call.rows(call.v)
    call.per_chunk(
        output_kernel, schedule.output, call.heads,
        call.q, call.k, call.v, call.g, states, o, call.scale, GATED=call.gated,
    )  # fmt: skip
    saved = _gate_sums(call, gates, save)
    return (o, final), {**saved, "states": states} if save == FULL else saved


def forward_fused(schedule: Fused, inputs: Any, save: str | None) -> Outputs:
    """``(o, final_state)`` and the residuals of the lean format, in one pass over the tokens."""
    call = Call(schedule, inputs, inputs.q, inputs.k)
    gates = call.sum_gates(_GATE_WARPS, low=True)
    initial, final = inputs.initial_state, call.state() if inputs.output_final_state else None
    o = call.rows(call.v)
    call.per_state(
        kernels.fused_kernel, schedule.fused,
        call.q, call.k, call.v, *(gates[name] for name in ("g_cumsum", "g_low", "to_end", "whole")), o,
        or_any(initial, o), or_any(final, o), call.scale,
        GATED=call.gated, HAS_INITIAL=initial is not None, HAS_FINAL=final is not None,
    )  # fmt: skip
    return (o, final), _gate_sums(call, gates, save)


def _gate_sums(call: Call, gates: dict[str, Tensor], save: str | None) -> dict[str, Tensor]:
    if save is None:
        return {}
    if call.gated:
        return {"g_cumsum": gates["g_cumsum"]}
    return {"g_cumsum": call.v.new_zeros(call.v.shape[:3], dtype=torch.float32)}


def _scan(
    call: Call,
    schedule: Split,
    gates: dict[str, Tensor],
    initial: Tensor | None,
    final: Tensor | None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The entry state of every chunk, in the activations' dtype unless another is asked for."""
    states = call.states(dtype)
    call.per_state(
        scan_kernel, schedule.scan,
        call.k, call.k, call.v, call.k, call.v, gates["to_end"], gates["whole"],
        states, states, or_any(initial, states), or_any(final, states),
        DELTA=False, GATED=call.gated, DECAYED=False, LOW_RANK=False,
        ENTRY_CHUNKS=0, HAS_INITIAL=initial is not None, HAS_FINAL=final is not None,
    )  # fmt: skip
    return states


def backward(
    schedule: Split, inputs: Any, residuals: Any, grads: tuple[Tensor | None, Tensor | None], needs: frozenset[str]
) -> dict[str, Tensor]:
    """The gradients named in ``needs``, from the gradients of o and of final_state."""
    call = Call(schedule, inputs, inputs.q, inputs.k)
    d_o, d_final = grads
    states = residuals.tensors.get("states")
    if not aligned(d_o, d_final, states):
        call.key = None
    gates = call.sum_gates(_GATE_WARPS)
    if states is None:
        states = _scan(call, schedule, gates, inputs.initial_state, None)
    d_states, d_initial = call.states(), call.state() if "initial_state" in needs else None
    call.per_state(
        scan_backward_kernel, schedule.scan_backward,
        call.q, call.k, call.k, gates["g_cumsum"], gates["to_end"], gates["whole"], or_any(d_o, call.v), d_states,
        d_states, or_any(d_initial, d_states), or_any(d_final, d_states), call.scale,
        DELTA=False, GATED=call.gated, DECAYED=False, HAS_DO=d_o is not None,
        HAS_INITIAL=d_initial is not None, HAS_FINAL=d_final is not None,
    )  # fmt: skip
    found = {name: call.rows(getattr(call, name)) for name in ("q", "k", "v")}
    if "g" in needs:
        found["g"] = call.rows(call.g)
    call.per_chunk(
        kernels.gradient_kernel, schedule.gradient, call.heads,
        call.q, call.k, call.v, call.g, gates["to_end"], gates["whole"], states, or_any(d_o, call.v), d_states,
        or_any(inputs.initial_state, d_states), or_any(d_final, d_states),
        found["q"], found["k"], found["v"], found.get("g", call.v), call.scale,
        GATED=call.gated, HAS_DO=d_o is not None, HAS_DG="g" in needs,
        HAS_INITIAL=inputs.initial_state is not None, HAS_FINAL=d_final is not None, ASYNC=schedule.asynchronous,
    )  # fmt: skip
    if d_initial is not None:
        found["initial_state"] = d_initial
    return {name: found[name] for name in needs}


def compile(schedule: Split | Fused, facts: Facts, parts: Sequence[str]) -> None:
    """Build the kernels of a call's parts: the call itself, on ``meta`` tensors. Nothing where they were built."""
    build_once(_build, schedule, facts, parts, (("H", "K", "V"), ("ragged", "output_final_state")))


_AXES = {"q": "B T H K", "k": "B T H K", "v": "B T H V", "g": "B T H", "initial_state": "N H K V"}


def _build(schedule: Split | Fused, facts: Facts, parts: Sequence[str]) -> None:
    inputs = meta_inputs(schedule, facts, _AXES, ("output_final_state",))
    if isinstance(schedule, Fused):
        forward_fused(schedule, inputs, facts.residuals)
        return
    if "forward" in parts:
        forward(schedule, inputs, facts.residuals)
    if "backward" in parts:
        final = inputs.v.float() if inputs.output_final_state else None  # kernels are compiled by dtype, not by shape
        saved = {"states": inputs.v.float()} if facts.residuals == FULL else {}
        backward(schedule, inputs, SimpleNamespace(tensors=saved), (inputs.v, final), facts.needs)
