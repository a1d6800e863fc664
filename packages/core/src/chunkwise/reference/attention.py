"""Softmax attention with sinks, evaluated directly, in the dtype of its inputs.

In fp64 this is the oracle that every implementation is measured against. It uses out-of-place operations only, so
autograd differentiates it; it holds whole matrices of scores by design.
"""

from __future__ import annotations

import torch
from torch import Tensor

from chunkwise.reference.recurrence import Offsets, sequence_bounds, widest


def visible(
    queries: int, keys: int, *, causal: bool, window_size: int | None, device: torch.device | str = "cpu"
) -> Tensor:
    """Which keys a query sees, `[queries, keys]`: with `p = i + keys - queries`, those with `p - W < j <= p`.

    All of them where attention is not causal; the ends of both sequences are aligned.
    """
    if not causal:
        return torch.ones(queries, keys, dtype=torch.bool, device=device)
    position = torch.arange(queries, device=device).unsqueeze(1) + (keys - queries)
    key = torch.arange(keys, device=device)
    seen = key <= position
    return seen if window_size is None else seen & (key > position - window_size)


def sink_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    *,
    scale: float,
    window_size: int | None = None,
    causal: bool = True,
    cu_seqlens_q: Offsets | None = None,
    cu_seqlens_k: Offsets | None = None,
) -> tuple[Tensor, Tensor]:
    """`o_i = sum_j exp(s_ij - lse_i) v_j`, `s_ij = scale q_i . k_j`, `lse_i = log(exp(sink) + sum_j exp(s_ij))`.

    Shapes: q `[B, T, HQ, D]`, k, v `[B, S, HK, D]`, sinks `[HQ]` (natural log); query head h reads key head
    `h // (HQ // HK)`. Computed in the widest dtype given. Keys that no query sees may hold anything.

    Returns:
        `(o, lse)`: o shaped like q, lse `[B, HQ, T]`, both zero in rows of no sequence. A query that sees no key has
        o = 0 and lse = sink.

    Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks"; one learned logit a head in place
    of a first token, as in gpt-oss.
    """
    dtype = widest(q, k, v, sinks)
    q, k, v, sinks = (x.to(dtype) for x in (q, k, v, sinks))
    queries = zip(*sequence_bounds(q.shape[0], q.shape[1], cu_seqlens_q), strict=True)
    keys = zip(*sequence_bounds(k.shape[0], k.shape[1], cu_seqlens_k), strict=True)
    rows, key_rows, value_rows = (x.flatten(0, 1) for x in (q, k, v))
    outputs, sums, index = [rows[:0]], [rows[:0, :, 0]], [torch.arange(0)]  # keep the graph where there is no query
    for (start, count), (first, others) in zip(queries, keys, strict=True):
        seen = visible(count, others, causal=causal, window_size=window_size, device=q.device)
        span = slice(first, first + others)
        o, lse = _one_sequence(rows[start : start + count] * scale, key_rows[span], value_rows[span], sinks, seen)
        outputs.append(o)
        sums.append(lse)
        index.append(torch.arange(start, start + count))
    place = torch.cat(index).to(q.device)
    o = torch.zeros_like(rows).index_copy(0, place, torch.cat(outputs)).view_as(q)
    lse = torch.zeros_like(rows[..., 0]).index_copy(0, place, torch.cat(sums)).view(q.shape[:3])
    return o, lse.transpose(1, 2)


def _one_sequence(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """q `[t, HQ, D]`, scaled, k, v `[s, HK, D]`, seen `[t, s]` -> o `[t, HQ, D]`, lse `[t, HQ]`."""
    unseen = seen.any(0).logical_not()[:, None, None]
    group = q.shape[1] // k.shape[1]
    k, v = (x.masked_fill(unseen, 0.0).repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k).masked_fill(seen.logical_not(), -torch.inf)
    sink = sinks[:, None, None].expand(-1, q.shape[0], 1)
    every = torch.cat([scores, sink], -1)
    top = every.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top.isneginf(), 0.0)
    weights = (every - top).exp()
    total = weights.sum(-1, keepdim=True)
    nothing = total == 0  # no key and a sink of -inf
    total = total.masked_fill(nothing, 1.0)
    o = torch.einsum("hij,jhd->ihd", weights[..., :-1] / total, v)
    lse = (top + total.log()).masked_fill(nothing, -torch.inf)
    return o, lse.squeeze(-1).mT
