"""`chunk_simple_gla` in chunkwise PyTorch, with an explicit backward.

Inside a chunk, with `G_t` the sum of the gates up to row t, `D[t, s] = G_t - G_s`, and `S` the entry state:

    P[t, s] = exp(D[t, s]) q_t . k_s   (s <= t)
    o = scale (exp(G) q S + P v)          S' = exp(G_C) S + sum_t exp(G_C - G_t) k_t v_t^T

Yang, Wang, Shen, Panda, Kim: "Gated Linear Attention Transformers with Hardware-Efficient Training", section 4, for one
gate a head. Everything is computed in fp32; all gates are natural-log decays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from chunkwise.eager.calls import layout_of, states_or_zeros, walk, walk_back
from chunkwise.eager.chunks import ChunkGroup
from chunkwise.eager.gated_delta_rule import LOWEST_GATE, Schedule
from chunkwise.eager.precision import exact_matmuls
from chunkwise.eager.state_scan import accumulate_states, accumulate_states_backward
from chunkwise.eager.triangular import multiply_last, ones_lower, prefix_sums, segment_sums, segment_sums_backward

LEAN = "simple-gla64@1"
"""Residuals `g_cumsum` `[B, T, H]` fp32."""
FULL = "simple-gla-states64@1"
"""LEAN and the entry state of every chunk, `states` `[slots, H, K, V]` fp32: no state has to be carried again."""


class _Chunk(NamedTuple):
    """Inputs of the chunks of a group, packed and widened to fp32, and what follows from them alone."""

    q: Tensor  # [chunks, H, C, K]
    k: Tensor  # [chunks, H, C, K]
    v: Tensor  # [chunks, H, C, V]
    decay: Tensor  # [chunks, H, C, C] exp(D), zero above the diagonal
    g_cumsum: Tensor  # [chunks, H, C] G
    from_start: Tensor  # [chunks, H, C, 1] exp(G_t)
    to_end: Tensor  # [chunks, H, C, 1] exp(G_C - G_t)
    whole: Tensor  # [chunks, H] exp(G_C)
    scale: float


def forward(
    schedule: Schedule, inputs: Any, save: str | None
) -> tuple[tuple[Tensor, Tensor | None], dict[str, Tensor]]:
    """Compute `(o, final_state or None)` and the residuals of the format `save`, none when it is None."""
    v = inputs.v
    with exact_matmuls(v.device):
        layout = layout_of(schedule.chunk_size, inputs)
        final = states_or_zeros(inputs, layout, inputs.initial_state)
        saved = {} if save is None else {"g_cumsum": v.new_zeros(v.shape[:3], dtype=torch.float32)}
        o = v.new_empty(v.shape) if layout.covers else v.new_zeros(v.shape)
        if save == FULL:
            shape = (layout.slots, v.shape[2], inputs.k.shape[-1], v.shape[3])
            saved["states"] = v.new_zeros(shape, dtype=torch.float32)

        def compute(group: ChunkGroup, state: Tensor) -> dict[str, Tensor]:
            chunk = _pack(group, inputs)
            states = accumulate_states(group, chunk.k * chunk.to_end, chunk.whole, chunk.v, state)
            return {"o": _output(chunk, states), "g_cumsum": chunk.g_cumsum, "states": states}

        walk(layout, final, {**saved, "o": o}, compute)
    return (o, final if inputs.output_final_state else None), saved


def _output(chunk: _Chunk, states: Tensor) -> Tensor:
    q = chunk.q * chunk.scale
    attention = (q @ chunk.k.mT).mul_(chunk.decay)
    o = (q * chunk.from_start) @ states
    o.flatten(0, 1).baddbmm_(attention.flatten(0, 1), chunk.v.flatten(0, 1))
    return o


def backward(
    schedule: Schedule, inputs: Any, residuals: Any, grads: tuple[Tensor | None, Tensor | None], needs: frozenset[str]
) -> dict[str, Tensor]:
    """Compute the gradients named in `needs` from `grads = (d_o, d_final_state)`; either may be None."""
    d_o, d_final = grads
    with exact_matmuls(inputs.v.device):
        layout = layout_of(schedule.chunk_size, inputs)
        states = states_or_zeros(inputs, layout, inputs.initial_state)
        d_states = states_or_zeros(inputs, layout, d_final)
        rows = {name: torch.zeros_like(getattr(inputs, name)) for name in needs - {"initial_state"}}

        def recover(group: ChunkGroup, state: Tensor) -> tuple[_Chunk, Tensor]:
            chunk = _pack(group, inputs)
            return chunk, _entry_states(group, chunk, residuals, state)

        def gradients(group: ChunkGroup, known: tuple[_Chunk, Tensor], d_state: Tensor) -> dict[str, Tensor]:
            chunk, entry = known
            d_packed = torch.zeros_like(chunk.v) if d_o is None else group.pack(d_o).mul_(chunk.scale)
            return _gradients(group, chunk, entry, d_packed, d_state)

        walk_back(layout, states, d_states, rows, recover, gradients)
    return rows | ({"initial_state": d_states} if "initial_state" in needs else {})


def _entry_states(group: ChunkGroup, chunk: _Chunk, residuals: Any, state: Tensor) -> Tensor:
    """Read from a full format; from a lean one, carry `state` through the group once more."""
    if residuals.format == FULL:
        kept: Tensor = residuals.tensors["states"].index_select(0, group.slots)
        return kept
    return accumulate_states(group, chunk.k * chunk.to_end, chunk.whole, chunk.v, state)


def _gradients(group: ChunkGroup, chunk: _Chunk, states: Tensor, d_o: Tensor, d_state: Tensor) -> dict[str, Tensor]:
    """Packed gradients of one group; `d_state`, of the states after it, becomes that of those before it."""
    rows = chunk.k.shape[2]
    d_exit = accumulate_states_backward(group, chunk.q * chunk.from_start, chunk.whole, d_o, d_state)
    scores = chunk.q @ chunk.k.mT
    d_scores = (d_o @ chunk.v.mT).mul_(chunk.decay)
    by_query = (d_o @ states.mT).mul_(chunk.from_start)
    by_exit = (chunk.v @ d_exit.mT).mul_(chunk.to_end)
    # exp(G_t) is moved by every gate up to row t, exp(G_C - G_t) by every gate after it, exp(G_C) by all.
    d_g = segment_sums_backward(d_scores * scores)
    d_g += multiply_last((by_query * chunk.q).sum(-1), ones_lower(rows, d_g))
    d_g += multiply_last((by_exit * chunk.k).sum(-1), ones_lower(rows, d_g, -1).mT)
    d_g += ((states * d_exit).sum((-2, -1)) * chunk.whole).unsqueeze(-1)
    return {
        "q": by_query + d_scores @ chunk.k,
        "k": by_exit + d_scores.mT @ chunk.q,
        "v": (scores * chunk.decay).mT @ d_o + (chunk.k * chunk.to_end) @ d_exit,
        "g": d_g,
    }


def _pack(group: ChunkGroup, inputs: Any) -> _Chunk:
    """Gather the rows of a group and compute the decays inside its chunks; no gate is a gate of zero."""
    q, k, v = (group.pack(x) for x in (inputs.q, inputs.k, inputs.v))
    g = torch.zeros_like(q[..., 0]) if inputs.g is None else group.pack(inputs.g).clamp_(min=LOWEST_GATE)
    high, low = prefix_sums(g)
    sums = segment_sums(high, low)
    # The exponential of a large sum needs the digits that rounding it to fp32 took away.
    from_start = high.exp().mul_(low.exp())
    to_end = sums[..., -1, :].exp().unsqueeze(-1)
    return _Chunk(
        q=q,
        k=k,
        v=v,
        decay=sums.exp_().tril_(),  # inf above the diagonal is overwritten, not multiplied
        g_cumsum=high,
        from_start=from_start.unsqueeze(-1),
        to_end=to_end,
        whole=from_start[..., -1],
        scale=inputs.scale,
    )
