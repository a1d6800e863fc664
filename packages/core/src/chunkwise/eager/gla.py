"""`chunk_gla` in chunkwise PyTorch, with an explicit backward.

Inside a chunk, with `G_t` the sum of the gates up to row t, a number for each channel of the keys, and `S` the entry
state:

    P[t, s] = sum_d exp(G_t - G_s)[d] q_t[d] k_s[d]   (s <= t)
    o = scale ((exp(G) q) S + P v)          S' = diag(exp(G_C)) S + sum_t (exp(G_C - G_t) k_t) v_t^T

Yang, Wang, Shen, Panda, Kim: "Gated Linear Attention Transformers with Hardware-Efficient Training", section 4.
Everything is computed in fp32; all gates are natural-log decays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from chunkwise.eager.channel_decay import (
    ChannelDecays,
    channel_decays,
    pair_products,
    pair_products_backward,
    state_gates_gradient,
)
from chunkwise.eager.chunks import ChunkGroup
from chunkwise.eager.linear_attention import linear_attention

LEAN = "gla64@1"
"""Residuals `g_cumsum` `[B, T, H, K]` fp32."""
FULL = "gla-states64@1"
"""LEAN and the entry state of every chunk, `states` `[slots, H, K, V]` fp32: no state has to be carried again."""


class _Chunk(NamedTuple):
    """Inputs of the chunks of a group, packed and widened to fp32, and their decays."""

    q: Tensor  # [chunks, H, C, K]
    k: Tensor  # [chunks, H, C, K]
    v: Tensor  # [chunks, H, C, V]
    decays: ChannelDecays

    @property
    def g_cumsum(self) -> Tensor:
        return self.decays.high

    @property
    def query(self) -> Tensor:
        return self.q * self.decays.from_start

    @property
    def key_out(self) -> Tensor:
        return self.k * self.decays.to_end

    @property
    def whole(self) -> Tensor:
        return self.decays.whole

    def pairs(self) -> Tensor:
        return pair_products(self.decays, [self.q], [self.k])[0, 0]

    def gradients(self, d_pairs: Tensor, d_query: Tensor, d_key_out: Tensor, d_whole: Tensor) -> dict[str, Tensor]:
        (d_q,), (d_k,), d_g = pair_products_backward(self.decays, [self.q], [self.k], d_pairs[None, None])
        by_query, by_exit = d_query.mul_(self.decays.from_start), d_key_out.mul_(self.decays.to_end)
        d_g += state_gates_gradient(by_query * self.q, by_exit * self.k, d_whole * self.whole)
        return {"q": by_query.add_(d_q), "k": by_exit.add_(d_k), "g": d_g}


def _pack(group: ChunkGroup, inputs: Any) -> _Chunk:
    """Gather the rows of a group and compute the decays inside its chunks."""
    q, k, v, g = (group.pack(x) for x in (inputs.q, inputs.k, inputs.v, inputs.g))
    return _Chunk(q, k, v, channel_decays(g))


forward, backward = linear_attention(_pack, FULL)
