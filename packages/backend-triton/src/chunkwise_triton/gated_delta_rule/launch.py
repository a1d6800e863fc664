"""Launches of the gated delta rule, with or without its gate: allocates what the kernels write, calls them in order."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from chunkwise.autograd.residuals import ENTRY_CHUNKS, entry_slots
from chunkwise.verifier.facts import Facts
from chunkwise_triton.common.call import DTYPES, Call, build_once, meta_inputs, or_any
from chunkwise_triton.common.chunk_products import output_kernel
from chunkwise_triton.common.l2norm import l2_normalise, l2_normalise_backward
from chunkwise_triton.common.launch import aligned
from chunkwise_triton.common.state_scan import scan_backward_kernel, scan_kernel
from chunkwise_triton.gated_delta_rule import kernels
from chunkwise_triton.gated_delta_rule.schedules import Schedule

LEAN = ("g_cumsum", "inverse", "entry_states")
FULL = ("g_cumsum", "inverse", "w", "v_new", "states")
FIELDS = {"gdn-wy64@2": LEAN, "gdn-states64@1": FULL, "delta-wy64@2": LEAN[1:], "delta-states64@1": FULL[1:]}
"""What the residual formats of both ops keep."""


class _Call(Call):
    """With beta, and the parts of K that the state gradient's programs take."""

    schedule: Schedule

    def __init__(self, schedule: Schedule, inputs: Any) -> None:
        q, k = inputs.q, inputs.k
        if inputs.use_qk_l2norm_in_kernel:
            q, k = l2_normalise(q), l2_normalise(k)
        super().__init__(schedule, inputs, q, k, inputs.beta)
        self.beta = inputs.beta
        self.parts = -(-self.key_width // schedule.state_gradient.block_k)


def forward(
    schedule: Schedule, inputs: Any, save: str | None
) -> tuple[tuple[Tensor, Tensor | None], dict[str, Tensor]]:
    """``(o, final_state)`` and the residuals of the format ``save``."""
    call = _Call(schedule, inputs)
    inverse = None if save is None else inputs.v.new_empty(*inputs.beta.shape, schedule.chunk_size)
    saved = _solve(call, inverse, invert=True)
    final = call.state() if inputs.output_final_state else None
    if "entry_states" in FIELDS.get(save or "", ()):
        saved["entry_states"] = _entry_states(call)
    saved["states"] = _scan(call, saved, inputs.initial_state, final, saved.get("entry_states"))
    o = call.rows(inputs.v)
    call.per_chunk(
        output_kernel, schedule.output, call.value_heads,
        call.q, call.k, saved["v_new"], call.g, saved["states"], o, call.scale, GATED=call.gated,
    )  # fmt: skip
    return (o, final), {name: saved[name] for name in FIELDS.get(save or "", ())}


def _solve(call: _Call, inverse: Tensor | None, invert: bool) -> dict[str, Tensor]:
    """The gates, w and, in v_new's place, u; the inverse first, where ``invert``, which is kept where there is room."""
    saved = call.gates()
    saved["w"] = call.v.new_empty(*call.v.shape[:3], call.key_width)
    saved["v_new"] = torch.empty_like(call.v)
    saved["inverse"] = or_any(inverse, saved["w"])
    call.per_chunk(
        kernels.wy_kernel, call.schedule.wy, call.value_heads,
        call.k, call.v, call.g, call.beta, *(saved[name] for name in ("inverse", "w", "v_new")),
        *(saved[name] for name in ("g_cumsum", "to_end", "whole")),
        GATED=call.gated, INVERT=invert, KEEP=inverse is not None, INVERSE_DOT=DTYPES[call.schedule.inverse_dot],
    )  # fmt: skip
    return saved


def _entry_states(call: _Call) -> Tensor:
    """Room for the states that a lean format keeps; as in :meth:`Call.states`, zero where none is written."""
    batch, rows = call.v.shape[:2]
    sizes = {"T": rows, "C": call.schedule.chunk_size}
    shape = (batch, entry_slots(sizes, call.map.ragged)["entries"], call.value_heads, call.key_width, call.value_width)
    make = torch.zeros if call.map.ragged else torch.empty
    return make(shape, dtype=torch.float32, device=call.v.device)


def _scan(
    call: _Call, saved: dict[str, Tensor], initial: Tensor | None, final: Tensor | None, entries: Tensor | None = None
) -> Tensor:
    """Turn u into v_new; returns the entry state of every chunk, and fills in those to keep where there is room."""
    states = call.states()
    call.per_state(
        scan_kernel, call.schedule.scan,
        call.k, saved["w"], saved["v_new"], call.k, call.v, saved["to_end"], saved["whole"],
        states, or_any(entries, states), or_any(initial, states), or_any(final, states),
        DELTA=True, GATED=call.gated, DECAYED=False, LOW_RANK=False,
        ENTRY_CHUNKS=0 if entries is None else ENTRY_CHUNKS,
        HAS_INITIAL=initial is not None, HAS_FINAL=final is not None,
    )  # fmt: skip
    return states


def backward(
    schedule: Schedule, inputs: Any, residuals: Any, grads: tuple[Tensor | None, Tensor | None], needs: frozenset[str]
) -> dict[str, Tensor]:
    """The gradients named in ``needs``, from the gradients of o and of final_state."""
    call = _Call(schedule, inputs)
    d_o, d_final = grads
    if not aligned(d_o, d_final, *residuals.tensors.values()):
        call.key = None
    saved = dict(residuals.tensors)
    if "states" in saved:
        saved |= call.sum_gates()  # the decays that no residual format keeps
    else:
        saved = _solve(call, saved["inverse"], invert=False)
        saved["states"] = _scan(call, saved, inputs.initial_state, None)
    d_v_new, d_states, d_initial = _scan_backward(call, saved, d_o, d_final, "initial_state" in needs)
    found = _input_gradients(call, inputs, saved, grads, (d_v_new, d_states))
    if inputs.use_qk_l2norm_in_kernel:
        for name in ("q", "k"):
            found[name] = l2_normalise_backward(getattr(inputs, name), found[name])
    if d_initial is not None:
        found["initial_state"] = d_initial
    return {name: found[name] for name in needs}


def _scan_backward(
    call: _Call, saved: dict[str, Tensor], d_o: Tensor | None, d_final: Tensor | None, initial: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of v_new, of every chunk's exit state, and of the initial state where it is needed."""
    d_v_new, d_states = torch.empty_like(call.v), call.states()
    d_initial = call.state() if initial else None
    if d_o is not None:
        call.per_chunk(
            kernels.local_gradient_kernel, call.schedule.local, call.value_heads,
            call.q, call.k, call.g, d_o, d_v_new, call.scale, GATED=call.gated,
        )  # fmt: skip
    call.per_state(
        scan_backward_kernel, call.schedule.scan_backward,
        call.q, call.k, saved["w"], saved["g_cumsum"], saved["to_end"], saved["whole"],
        or_any(d_o, call.v), d_v_new, d_states,
        or_any(d_initial, d_states), or_any(d_final, d_states), call.scale,
        DELTA=True, GATED=call.gated, DECAYED=False, HAS_DO=d_o is not None,
        HAS_INITIAL=initial, HAS_FINAL=d_final is not None,
    )  # fmt: skip
    return d_v_new, d_states, d_initial


def _input_gradients(
    call: _Call,
    inputs: Any,
    saved: dict[str, Tensor],
    grads: tuple[Tensor | None, Tensor | None],
    flows: tuple[Tensor, Tensor],
) -> dict[str, Tensor]:
    """Gradients of q, k (of the normalised ones, in fp32, under the L2 norm), v, g and beta."""
    wide = torch.float32 if inputs.use_qk_l2norm_in_kernel else None
    found = {"q": call.rows(call.q, wide), "k": call.rows(call.k, wide)}
    found |= {name: call.rows(getattr(call, name)) for name in ("v", "beta")}
    found["g"] = call.rows(call.g) if call.gated else call.g
    (d_o, d_final), (d_v_new, d_states) = grads, flows
    schedule, d_o_or_any, has = call.schedule, or_any(d_o, call.v), {"PARTS": call.parts, "HAS_DO": d_o is not None}
    has["GATED"] = call.gated
    state_dq, state_dk = (torch.empty_like(x, dtype=torch.float32) for x in (call.q, call.k))
    sums = state_dq.new_empty(*call.beta.shape, 3 * call.parts + 1)
    state_sums = state_dq.new_empty(call.map.slots, call.value_heads, call.parts)
    call.per_chunk(
        kernels.solve_gradient_kernel, schedule.solve, call.value_heads,
        call.v, call.beta, saved["inverse"], d_v_new, found["v"], sums, PARTS=call.parts,
    )  # fmt: skip
    call.per_chunk(
        kernels.state_gradient_kernel, schedule.state_gradient, call.heads * call.parts,
        call.q, call.k, saved["g_cumsum"], saved["to_end"], call.beta, saved["v_new"], saved["states"], d_o_or_any,
        d_v_new, d_states, or_any(inputs.initial_state, d_states), or_any(d_final, d_states),
        state_dq, state_dk, sums, state_sums, call.scale,
        HAS_INITIAL=inputs.initial_state is not None, HAS_FINAL=d_final is not None,
        ASYNC=schedule.asynchronous, **has,
    )  # fmt: skip
    call.per_chunk(
        kernels.pair_gradient_kernel, schedule.pair_gradient, call.heads,
        call.q, call.k, call.g, call.beta, saved["v_new"], saved["whole"], d_o_or_any, d_v_new, state_dq, state_dk,
        sums, state_sums, *(found[name] for name in ("q", "k", "g", "beta")), call.scale, **has,
    )  # fmt: skip
    return found


def compile(schedule: Schedule, facts: Facts, parts: Sequence[str]) -> None:
    """Build the kernels of a call's parts: the call itself, on ``meta`` tensors. Nothing where they were built."""
    build_once(_build, schedule, facts, parts, (("H", "HV", "K", "V"), ("ragged", *_OPTIONS)))


_OPTIONS = ("output_final_state", "use_qk_l2norm_in_kernel")
_AXES = {"q": "B T H K", "k": "B T H K", "v": "B T HV V", "g": "B T HV", "beta": "B T HV", "initial_state": "N HV K V"}


def _build(schedule: Schedule, facts: Facts, parts: Sequence[str]) -> None:
    inputs = meta_inputs(schedule, facts, _AXES, _OPTIONS)
    (o, final), saved = forward(schedule, inputs, facts.residuals)
    if "backward" in parts:
        backward(schedule, inputs, SimpleNamespace(tensors=saved), (o, final), facts.needs)
