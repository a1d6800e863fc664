"""Where chunks lie: one layout for dense and ragged sequences, built on the host from their lengths.

Rows `[B, T]` are cut into chunks of `chunk_size` tokens from the first row of each sequence, and packed to
`[chunks, H, rows, D]`. Chunks are ordered step by step: first the first chunk of every sequence, then the
second chunk of those that have one, and so on, longest sequences first. The i-th step of a scan over chunks is
then one slice of the packed tensors, and it concerns a prefix of the states.

    layout    all chunks of a call
      table   sequences of similar length, whose states are carried together
        group as many successive steps of a table as are computed at once, which bounds the temporary memory
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from chunkwise.autograd.residuals import ENTRY_CHUNKS

# Sequences up to these lengths are packed apart from longer ones: padding stays below a factor of four.
_SHORT = (4, 16)


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Where the rows of chunks lie; those past a chunk's own tokens are padding and hold zeros."""

    tokens: Tensor
    """`[chunks, rows]` row of `[B * T]` behind each packed row; 0 behind padding."""
    live: Tensor | None
    """`[chunks, rows]` False at padding; None when there is none."""

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return self.tokens.shape[0]

    def pack(self, x: Tensor) -> Tensor:
        """`[B, T, H, D]` -> fp32 `[chunks, H, rows, D]`, or `[B, T, H]` -> `[chunks, H, rows]`."""
        heads, width = x.shape[2], x.shape[3:]
        index = self.tokens.unsqueeze(1) * heads + torch.arange(heads, device=x.device).unsqueeze(1)
        packed = x.reshape(-1, *width).index_select(0, index.flatten()).view(*index.shape, *width).float()
        if self.live is not None:
            # Filled, not multiplied: the row read in place of padding may hold NaN.
            blank = self.live.logical_not().unsqueeze(1)
            packed.masked_fill_(blank.unsqueeze(-1) if width else blank, 0.0)
        return packed

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        """Write the live rows of `[chunks, H, rows, ...]` to their places in `out` `[B, T, H, ...]`."""
        rows = packed.transpose(1, 2).to(out.dtype)
        if self.live is None:
            tokens, rows = self.tokens.flatten(), rows.flatten(0, 1)
        else:
            tokens, rows = self.tokens[self.live], rows[self.live]
        out.flatten(0, 1).index_copy_(0, tokens, rows)


@dataclass(frozen=True, eq=False)
class ChunkGroup(PackedRows):
    """Successive steps of one table."""

    rows: int
    """Rows of a packed chunk."""
    active: tuple[int, ...]
    """How many sequences have a chunk, for each step."""
    slots: Tensor
    """`[chunks]` place of each chunk when chunks are counted sequence by sequence over the whole call."""
    cuts: Tensor | None
    """`[cuts]` the chunks that have ENTRY_CHUNKS or a multiple of it before them; None when there are none."""

    def unpack_entries(self, states: Tensor, out: Tensor, length: int) -> None:
        """Write the states before the cuts, of `[chunks, H, K, V]`, to their places in `out` `[B, entries, H, K, V]`;
        `length` rows are in each row of the batch."""
        if self.cuts is not None:
            first = self.tokens[self.cuts, 0]
            place = first % length // (ENTRY_CHUNKS * self.rows) - 1
            out[first // length, place] = states[self.cuts]


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """The chunks of sequences of similar length, packed to the same number of rows."""

    sequences: Tensor
    """`[n]` sequence numbers, by falling number of chunks."""
    groups: tuple[ChunkGroup, ...]
    """The steps of the scan, in order."""


@dataclass(frozen=True, eq=False)
class ChunkLayout:
    """All chunks of one call; empty sequences have none and are in no table."""

    sequences: int
    length: int
    """Rows `T` of each row of the batch."""
    slots: int
    """Bound on the number of chunks, from shapes alone: `B * ceil(T / C)`, ragged `ceil(T / C) + N`."""
    tables: tuple[ChunkTable, ...]
    covers: bool
    """Whether every row of `[B, T]` belongs to a sequence."""


@dataclass(frozen=True)
class Tiling:
    """How rows are cut and how many are computed at once."""

    chunk_size: int
    rows_at_once: int
    device: torch.device

    def tables(self, starts: Tensor, lengths: Tensor) -> tuple[ChunkTable, ...]:
        """Tables of the sequences at `starts` of `[B * T]`, for each class of lengths that occurs."""
        counts = self.counts(lengths)
        first_slots = counts.cumsum(0) - counts
        tables = []
        shorter = 0
        for bound in (*_SHORT, torch.iinfo(torch.long).max):
            members = ((lengths > shorter) & (lengths <= bound)).nonzero().squeeze(1)
            shorter = bound
            if members.shape[0] == 0:
                continue
            rows = _packed_rows(min(int(lengths[members].max()), self.chunk_size))
            members = members[counts[members].argsort(descending=True, stable=True)]
            for part in members.split(max(1, self.rows_at_once // rows)):
                groups = self._groups(rows, starts[part], lengths[part], first_slots[part])
                tables.append(ChunkTable(part.to(self.device), groups))
        return tuple(tables)

    def counts(self, lengths: Tensor) -> Tensor:
        """Number of chunks of sequences of these lengths."""
        return -(-lengths // self.chunk_size)

    def _groups(self, rows: int, starts: Tensor, lengths: Tensor, first_slots: Tensor) -> tuple[ChunkGroup, ...]:
        """Groups of a table whose chunk counts fall."""
        counts = self.counts(lengths)
        owner = torch.repeat_interleave(torch.arange(counts.shape[0]), counts)
        step = torch.arange(owner.shape[0]) - (counts.cumsum(0) - counts)[owner]
        active = torch.bincount(step).tolist()
        order = step.argsort(stable=True)
        owner, step = owner[order], step[order]

        cut = (step > 0) & (step % ENTRY_CHUNKS == 0)
        row = torch.arange(rows)
        first = starts[owner] + step * self.chunk_size
        size = (lengths[owner] - step * self.chunk_size).clamp(max=self.chunk_size)
        live = row < size.unsqueeze(1)
        tokens = torch.where(live, first.unsqueeze(1) + row, 0)
        slots = first_slots[owner] + step
        return tuple(
            ChunkGroup(
                rows=rows,
                active=tuple(counts),
                slots=slots[part].to(self.device),
                cuts=cut[part].nonzero().squeeze(1).to(self.device) if bool(cut[part].any()) else None,
                tokens=tokens[part].to(self.device),
                live=None if bool(live[part].all()) else live[part].to(self.device),
            )
            for part, counts in _runs(active, max(1, self.rows_at_once // rows))
        )


def dense_layout(batch: int, length: int, tiling: Tiling) -> ChunkLayout:
    """One sequence of `length` tokens in each row of the batch."""
    starts = torch.arange(batch) * length
    lengths = torch.full((batch,), length)
    return ChunkLayout(batch, length, int(tiling.counts(lengths).sum()), tiling.tables(starts, lengths), covers=True)


def ragged_layout(length: int, cu_seqlens: Tensor, tiling: Tiling) -> ChunkLayout:
    """Sequences packed into one row of `length` tokens; offsets on a GPU are copied to the host."""
    # Offsets that nobody could check on the host are clamped: a bad one gives wrong rows, never a wild read.
    offsets = cu_seqlens.to("cpu", torch.long).clamp(0, length)
    lengths = offsets.diff().clamp(min=0)
    slots = -(-length // tiling.chunk_size) + lengths.shape[0]
    covers = int(lengths.sum()) == length
    return ChunkLayout(lengths.shape[0], length, slots, tiling.tables(offsets[:-1], lengths), covers)


def _runs(active: list[int], limit: int) -> Iterator[tuple[slice, list[int]]]:
    """Successive steps of at most `limit` chunks together, or one step: their chunks, and their counts."""
    start = 0
    run: list[int] = []
    for count in active:
        if run and sum(run) + count > limit:
            yield slice(start, start + sum(run)), run
            start += sum(run)
            run = []
        run.append(count)
    if run:
        yield slice(start, start + sum(run)), run


def _packed_rows(longest: int) -> int:
    """The next power of two: the inverse and the decays of single channels halve a chunk again and again."""
    return 1 << (longest - 1).bit_length()
