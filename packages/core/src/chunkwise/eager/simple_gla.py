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

from chunkwise.eager.channel_decay import LOWEST_GATE
from chunkwise.eager.chunks import ChunkGroup
from chunkwise.eager.linear_attention import linear_attention
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
    scores: Tensor  # [chunks, H, C, C] q k^T
    decay: Tensor  # [chunks, H, C, C] exp(D), zero above the diagonal
    g_cumsum: Tensor  # [chunks, H, C] G
    from_start: Tensor  # [chunks, H, C, 1] exp(G_t)
    to_end: Tensor  # [chunks, H, C, 1] exp(G_C - G_t)

    @property
    def query(self) -> Tensor:
        return self.q * self.from_start

    @property
    def key_out(self) -> Tensor:
        return self.k * self.to_end

    @property
    def whole(self) -> Tensor:
        return self.from_start[..., -1, :]

    def pairs(self) -> Tensor:
        return self.scores * self.decay

    def gradients(self, d_pairs: Tensor, d_query: Tensor, d_key_out: Tensor, d_whole: Tensor) -> dict[str, Tensor]:
        rows = self.k.shape[2]
        d_scores = d_pairs.mul_(self.decay)
        by_query, by_exit = d_query.mul_(self.from_start), d_key_out.mul_(self.to_end)
        # exp(G_t) is moved by every gate up to row t, exp(G_C - G_t) by every gate after it, exp(G_C) by all.
        d_g = segment_sums_backward(d_scores * self.scores)
        d_g += multiply_last((by_query * self.q).sum(-1), ones_lower(rows, d_g))
        d_g += multiply_last((by_exit * self.k).sum(-1), ones_lower(rows, d_g, -1).mT)
        d_g += d_whole.sum(-1, keepdim=True) * self.whole
        return {"q": by_query + d_scores @ self.k, "k": by_exit + d_scores.mT @ self.q, "g": d_g}


def _pack(group: ChunkGroup, inputs: Any) -> _Chunk:
    """Gather the rows of a group and compute the decays inside its chunks; no gate is a gate of zero."""
    q, k, v = (group.pack(x) for x in (inputs.q, inputs.k, inputs.v))
    g = torch.zeros_like(q[..., 0]) if inputs.g is None else group.pack(inputs.g).clamp_(min=LOWEST_GATE)
    high, low = prefix_sums(g)
    sums = segment_sums(high, low)
    return _Chunk(
        q=q,
        k=k,
        v=v,
        scores=q @ k.mT,
        # The exponential of a large sum needs the digits that rounding it to fp32 took away.
        from_start=high.exp().mul_(low.exp()).unsqueeze(-1),
        to_end=sums[..., -1, :].exp().unsqueeze(-1),
        decay=sums.exp_().tril_(),  # inf above the diagonal is overwritten, not multiplied
        g_cumsum=high,
    )


forward, backward = linear_attention(_pack, FULL)
