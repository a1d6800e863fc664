"""`sink_attention` in blocks of PyTorch, with an explicit backward.

A tile is a block of queries with the keys that any of them sees, or a block of keys with the queries that see any of
them: both spans are contiguous, so a row outside every window is in no tile. Tiles of similar size are computed
together; what is held at once grows with a span, never with `T * S`. With `P` the weights and `D` the gradient of `o`:

    P_ij = exp(s_ij - lse_i)            delta_i = sum_j P_ij D_i . v_j - d_lse_i = o_i . D_i - d_lse_i
    dS_ij = P_ij (D_i . v_j - delta_i)  d_sink = -sum_i exp(sink - lse_i) delta_i

The queries' gradient is summed over a tile's keys, the keys' over a tile's queries, so no sum depends on the order in
which tiles run. Dao, Fu, Ermon, Rudra, Re: "FlashAttention", appendix B, with one more term in the denominator.
`delta` is the sum over the keys, not `o . D`. Where a key has nearly all the weight, `D . v - delta` is what two like
numbers leave: from the same products both lose alike, and rounding of `o` has no part in it.
Everything is computed in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from chunkwise.eager.calls import elements_at_once
from chunkwise.eager.chunks import PackedRows
from chunkwise.eager.precision import exact_matmuls

_LEAST_ROWS = 16
"""A block has no fewer rows, however long its span is."""


@dataclass(frozen=True, eq=False)
class _Sequences:
    """First row in `[B * T]` or `[B * S]` and length of each sequence, on the host."""

    starts: Tensor
    lengths: Tensor
    rows: int
    """All rows, those of padding included."""

    @property
    def live(self) -> int:
        """Rows that belong to a sequence; the others lie behind them."""
        return int((self.starts + self.lengths).max()) if self.starts.numel() else 0


@dataclass(frozen=True, eq=False)
class _Tiles:
    """Tiles of one size that are computed together."""

    queries: PackedRows
    keys: PackedRows
    lead: Tensor | None
    """`[n]`: query r of a tile sees key u where `r + lead - W < u <= r + lead`; None where it sees all."""
    window: int | None

    @cached_property
    def hidden(self) -> Tensor | None:
        """`[n, 1, 1, rows, keys]` True where a query does not see a key, and at padding; None where it sees all."""
        device = self.queries.tokens.device
        hidden = None
        if self.lead is not None:
            rows, keys = (torch.arange(p.tokens.shape[1], device=device) for p in (self.queries, self.keys))
            ahead = keys - rows.unsqueeze(1) - self.lead[:, None, None]
            hidden = ahead > 0 if self.window is None else (ahead > 0) | (ahead <= -self.window)
        for live, axis in ((self.queries.live, 2), (self.keys.live, 1)):
            if live is not None:
                dead = live.logical_not().unsqueeze(axis)
                hidden = dead if hidden is None else hidden | dead
        return None if hidden is None else hidden[:, None, None]


@dataclass(frozen=True, eq=False)
class _Plan:
    """All that is known of a call on the host."""

    queries: _Sequences
    keys: _Sequences
    heads: tuple[int, int]
    width: int
    causal: bool
    window: int | None
    block: int
    device: torch.device

    def query_tiles(self) -> Iterator[_Tiles]:
        """Blocks of queries with the keys that they see; blocks that see none are left out."""
        owner, first, count = _blocks(self.queries.lengths, self._rows(self.keys.lengths))
        others = self.keys.lengths[owner]
        position = first + others - self.queries.lengths[owner]
        begin, end = torch.zeros_like(others), others
        if self.causal:
            end = torch.minimum(position + count, others).clamp(min=0)
        if self.window is not None:
            begin = torch.minimum((position - self.window + 1).clamp(min=0), end)
        span = _Span(owner, first, count), _Span(owner, begin, end - begin)
        yield from self._together(*span, position - begin, by_query=True)

    def key_tiles(self) -> Iterator[_Tiles]:
        """Blocks of keys with the queries that see them; blocks that nobody sees are left out."""
        unseen = torch.zeros_like(self.keys.lengths)  # in front of the first query's window; may hold NaN
        if self.window is not None:
            unseen = (self.keys.lengths - self.queries.lengths - self.window + 1).clamp(min=0)
            unseen = torch.minimum(unseen, self.keys.lengths)
        owner, first, count = _blocks(self.keys.lengths - unseen, self._rows(self.queries.lengths))
        first = first + unseen[owner]
        others = self.queries.lengths[owner]
        shift = self.keys.lengths[owner] - others
        begin, end = torch.zeros_like(others), others
        if self.causal:
            begin = torch.minimum((first - shift).clamp(min=0), others)
        if self.window is not None:
            end = torch.minimum(first + count - 1 + self.window - shift, others)
        end = torch.maximum(end, begin)
        span = _Span(owner, begin, end - begin), _Span(owner, first, count)
        yield from self._together(*span, begin + shift - first, by_query=False)

    def _rows(self, others: Tensor) -> int:
        """Rows of a block: fewer where the span of one block would pass what is computed at once."""
        longest = int(others.max()) if others.numel() else 0
        span = longest if self.window is None else min(longest, self.window + self.block)
        fitting = elements_at_once(self.device) // max(self.heads[0] * span, 1)
        return max(_LEAST_ROWS, min(self.block, fitting))

    def _together(self, queries: _Span, keys: _Span, lead: Tensor, *, by_query: bool) -> Iterator[_Tiles]:
        """The tiles of every size that occurs, as many at once as fit."""
        rows, columns = _rounded(queries.count), _rounded(keys.count)
        used = (queries.count > 0) & (keys.count > 0)
        for size_rows, size_columns in torch.stack([rows, columns], 1)[used].unique(dim=0).tolist():
            members = (used & (rows == size_rows) & (columns == size_columns)).nonzero().squeeze(1)
            each = self.heads[0] * max(size_rows * size_columns, (size_rows + size_columns) * self.width)
            for part in members.split(max(1, elements_at_once(self.device) // each)):
                yield _Tiles(
                    queries.rows(part, size_rows, self.queries.starts, self.device),
                    keys.rows(part, size_columns, self.keys.starts, self.device),
                    lead[part].to(self.device) if self.causal else None,
                    self.window,
                )


@dataclass(frozen=True, eq=False)
class _Span:
    """Successive rows of a sequence, one entry a tile."""

    owner: Tensor
    first: Tensor
    count: Tensor

    def rows(self, part: Tensor, size: int, starts: Tensor, device: torch.device) -> PackedRows:
        """The rows of some tiles, padded to `size`."""
        row = torch.arange(size)
        live = row < self.count[part].unsqueeze(1)
        tokens = torch.where(live, (starts[self.owner[part]] + self.first[part]).unsqueeze(1) + row, 0)
        return PackedRows(tokens.to(device), None if bool(live.all()) else live.to(device))


def _blocks(lengths: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Owner, first row within it and row count of blocks of at most `rows` rows."""
    counts = -(-lengths // rows)
    owner = torch.repeat_interleave(torch.arange(counts.shape[0]), counts)
    first = (torch.arange(owner.shape[0]) - (counts.cumsum(0) - counts)[owner]) * rows
    return owner, first, (lengths[owner] - first).clamp(max=rows)


def _rounded(counts: Tensor) -> Tensor:
    """Up to four steps within each power of two: few sizes occur, and padding stays below a quarter."""
    exponent = (counts.clamp(min=4).double() - 1).log2().floor().long() - 2
    step = torch.ones_like(counts) << exponent.clamp(min=0)
    return -(-counts // step) * step


def _sequences(x: Tensor, offsets: Tensor | None) -> _Sequences:
    batch, length = x.shape[:2]
    if offsets is None:
        return _Sequences(torch.arange(batch) * length, torch.full((batch,), length), batch * length)
    # Offsets that nobody could check on the host are clamped: a bad one gives wrong rows, never a wild read.
    bounds = offsets.to("cpu", torch.long).clamp(0, length)
    return _Sequences(bounds[:-1], bounds.diff().clamp(min=0), length)


def _plan(block: int, inputs: Any) -> _Plan:
    q_offsets = inputs.cu_seqlens_q if inputs.cu_seqlens_q_cpu is None else inputs.cu_seqlens_q_cpu
    k_offsets = inputs.cu_seqlens_k if inputs.cu_seqlens_k_cpu is None else inputs.cu_seqlens_k_cpu
    return _Plan(
        queries=_sequences(inputs.q, q_offsets),
        keys=_sequences(inputs.k, k_offsets),
        heads=(inputs.q.shape[2], inputs.k.shape[2]),
        width=inputs.q.shape[3],
        causal=inputs.causal,
        window=inputs.window_size,
        block=block,
        device=inputs.q.device,
    )


def _live(plan: _Plan, x: Tensor) -> Tensor:
    """`x` `[B, T, ...]` with zeros in rows of padding, whatever they hold."""
    if plan.queries.live == plan.queries.rows:
        return x
    x = x.clone()
    x.flatten(0, 1)[plan.queries.live :] = 0.0
    return x


class _Tile:
    """The packed inputs of some tiles, key head by key head: a group's queries are `[n, HK, G * rows, D]`."""

    def __init__(self, tiles: _Tiles, inputs: Any) -> None:
        self.tiles = tiles
        self.key_heads: int = inputs.k.shape[2]
        self.scale: float = inputs.scale
        self.q = self.by_key_head(inputs.q)
        self.k, self.v = (tiles.keys.pack(x) for x in (inputs.k, inputs.v))

    def by_key_head(self, x: Tensor) -> Tensor:
        """`[B, T, HQ, ...]` -> `[n, HK, G * rows, ...]`."""
        packed = self.tiles.queries.pack(x)
        chunks, heads, rows = packed.shape[:3]
        return packed.reshape(chunks, self.key_heads, heads // self.key_heads * rows, *packed.shape[3:])

    def by_head(self, x: Tensor) -> Tensor:
        """`[n, HK, G * rows, ...]` -> `[n, HQ, rows, ...]`."""
        rows = self.tiles.queries.tokens.shape[1]
        return x.reshape(x.shape[0], -1, rows, *x.shape[3:])

    def scores(self) -> Tensor:
        """`[n, HK, G * rows, keys]`, -inf where a query does not see a key."""
        scores: Tensor = (self.q * self.scale) @ self.k.mT
        if self.tiles.hidden is not None:
            rows = self.tiles.queries.tokens.shape[1]
            scores.unflatten(2, (-1, rows)).masked_fill_(self.tiles.hidden, -torch.inf)
        return scores

    def weights(self, lse: Tensor) -> Tensor:
        """`P`, from the sums of the forward `[B, T, HQ]`."""
        return self.scores().sub_(self.by_key_head(lse).unsqueeze(-1)).exp_()

    def weighted(self, weights: Tensor, d_o: Tensor) -> Tensor:
        """`P_ij D_i . v_j`; d_o packed."""
        products: Tensor = d_o @ self.v.mT
        return products.mul_(weights)

    def d_scores(self, weights: Tensor, weighted: Tensor, delta: Tensor) -> Tensor:
        """The gradient of the scores, times the scale, in the place of `weighted`; delta packed."""
        return weighted.addcmul_(weights, delta.unsqueeze(-1), value=-1.0).mul_(self.scale)


def forward(schedule: Any, inputs: Any, save: str | None) -> tuple[tuple[Tensor, Tensor | None], dict[str, Tensor]]:
    """Compute `(o, lse or None)` and the residual `lse` `[B, HQ, T]`."""
    q, sinks = inputs.q, inputs.sinks
    with exact_matmuls(q.device):
        plan = _plan(schedule.chunk_size, inputs)
        o = torch.zeros_like(q)
        lse = _live(plan, sinks.expand(q.shape[:3]).clone(memory_format=torch.contiguous_format))
        for tiles in plan.query_tiles():
            tile = _Tile(tiles, inputs)
            weights, sums = _softmax(tile, sinks)
            tiles.queries.unpack(tile.by_head(weights @ tile.v), o)
            tiles.queries.unpack(sums, lse)
    by_head = lse.transpose(1, 2).contiguous()
    return (o, by_head if inputs.return_lse else None), {} if save is None else {"lse": by_head.clone()}


def _softmax(tile: _Tile, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """The weights of a tile's keys `[n, HK, G * rows, keys]`, and lse `[n, HQ, rows]`."""
    scores = tile.scores()
    sink = sinks.view(1, -1, 1)
    top = torch.maximum(tile.by_head(scores.amax(-1)), sink)
    top = torch.where(top.isneginf(), 0.0, top)
    weights = scores.sub_(top.reshape(scores.shape[:3]).unsqueeze(-1)).exp_()
    total = tile.by_head(weights.sum(-1)) + (sink - top).exp()
    # No key and a sink of -inf: the sum is 0, and so is each weight.
    weights.div_(total.clamp(min=torch.finfo(torch.float32).tiny).reshape(scores.shape[:3]).unsqueeze(-1))
    return weights, top + total.log()


def backward(
    schedule: Any, inputs: Any, residuals: Any, grads: tuple[Tensor | None, Tensor | None], needs: frozenset[str]
) -> dict[str, Tensor]:
    """Compute the gradients named in `needs` from `grads = (d_o, d_lse)`; either may be None."""
    d_o, d_lse = grads
    found: dict[str, Tensor] = {}
    with exact_matmuls(inputs.q.device):
        plan = _plan(schedule.chunk_size, inputs)
        lse = residuals.tensors["lse"].transpose(1, 2).contiguous()
        lse = torch.where(lse.isneginf(), 0.0, lse)  # such a query sees no key: every weight is exp(-inf - 0)
        delta = _live(plan, torch.zeros_like(lse) if d_lse is None else -d_lse.transpose(1, 2))
        d_o = torch.zeros_like(inputs.q) if d_o is None else d_o
        if needs - {"v"}:
            d_q = torch.zeros_like(inputs.q) if "q" in needs else None
            delta = _row_sums(plan, inputs, lse, d_o, delta, d_q)
            found = {} if d_q is None else {"q": d_q}
        if "sinks" in needs:
            share = torch.where(inputs.sinks.isneginf(), 0.0, (inputs.sinks - lse).exp())
            found["sinks"] = -_live(plan, share * delta).sum((0, 1))
        if needs & {"k", "v"}:
            found |= _key_gradients(plan, inputs, lse, d_o, delta, needs & {"k", "v"})
    return found


def _row_sums(plan: _Plan, inputs: Any, lse: Tensor, d_o: Tensor, d_lse: Tensor, d_q: Tensor | None) -> Tensor:
    """`delta`, from `-d_lse` `[B, T, HQ]`, and the gradient of q into `d_q`: a tile holds every key of its queries."""
    delta = d_lse.clone(memory_format=torch.contiguous_format)
    for tiles in plan.query_tiles():
        tile = _Tile(tiles, inputs)
        weights = tile.weights(lse)
        weighted = tile.weighted(weights, tile.by_key_head(d_o))
        own = weighted.sum(-1) + tile.by_key_head(delta)
        tiles.queries.unpack(tile.by_head(own), delta)
        if d_q is not None:
            tiles.queries.unpack(tile.by_head(tile.d_scores(weights, weighted, own) @ tile.k), d_q)
    return delta


def _key_gradients(
    plan: _Plan, inputs: Any, lse: Tensor, d_o: Tensor, delta: Tensor, needs: frozenset[str]
) -> dict[str, Tensor]:
    found = {name: torch.zeros_like(getattr(inputs, name)) for name in needs}
    for tiles in plan.key_tiles():
        tile = _Tile(tiles, inputs)
        weights, packed = tile.weights(lse), tile.by_key_head(d_o)
        if "v" in needs:
            tiles.keys.unpack(weights.mT @ packed, found["v"])
        if "k" in needs:
            d_scores = tile.d_scores(weights, tile.weighted(weights, packed), tile.by_key_head(delta))
            tiles.keys.unpack(d_scores.mT @ tile.q, found["k"])
    return found
