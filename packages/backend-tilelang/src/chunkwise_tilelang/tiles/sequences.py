"""Where a chunk lies. Dense by arithmetic; ragged by the offsets, read on the device in every call.

Chunks of C rows start at a sequence's first row. Chunk i of sequence n has the slot ``start // C + n + i``: no two
chunks share one, and there are no more than ``T // C + N``, so that nothing is counted first. Some slots stay empty.
Offsets are clamped: bad ones give wrong rows, never rows of other tensors.

A *place* is a sequence, or a segment of one; a *band* is the same few chunks of every place of a dense call, from
``first`` on ``count`` of them, counted from the place's own first chunk. A place has ``width`` slots where not all
chunks are kept at once, and a band's are there from slot ``at`` on. The last place of a sequence may have fewer chunks
than the others, and then fewer or none of a band.

A *cut* is before every chunk whose number in its sequence is a multiple of :data:`ENTRY_CHUNKS`, but the first. The
state there has the slot that ``entry_states`` of the residual formats gives it: ``row // (ENTRY_CHUNKS * C) - 1`` of so
many slots for each row of the batch.
"""

from typing import Any

import tilelang.language as T  # noqa: N812 - TileLang's parser knows it by this name

from chunkwise.autograd.residuals import ENTRY_CHUNKS


def first_and_end(cu_seqlens: Any, n: Any, rows: Any) -> tuple[Any, Any]:
    """First row of a sequence, and the first row behind it."""
    start = T.max(T.min(cu_seqlens[n], rows), 0)
    return start, T.max(T.min(cu_seqlens[n + 1], rows), start)


@T.macro
def sequence_rows(n, cu_seqlens, rows, chunk_size, ragged):
    """Row of the batch, first row in it, number of rows and first slot of sequence n."""
    batch, start, length, slot = (T.alloc_var("int32") for _ in range(4))
    if ragged:
        begin, end = first_and_end(cu_seqlens, n, rows)
        batch = 0
        start = begin
        length = end - begin
        slot = begin // chunk_size + n
    else:
        batch = n
        start = 0
        length = rows
        slot = n * T.ceildiv(rows, chunk_size)
    return batch, start, length, slot


@T.macro
def owner_of(slot, cu_seqlens, sequences, steps, rows, width):
    """The last sequence whose first slot, of ``width`` rows, is not behind a slot: ``steps`` halvings find it."""
    low, high = (T.alloc_var("int32") for _ in range(2))
    low = 0
    high = sequences - 1
    for _ in T.serial(steps):
        middle = (low + high + 1) // 2
        before = T.max(T.min(cu_seqlens[middle], rows), 0) // width + middle <= slot
        low = T.Select(before, middle, low)
        high = T.Select(before, high, middle - 1)
    return low


@T.macro
def chunk_rows(slot, cu_seqlens, sequences, steps, rows, chunk_size, ragged):
    """Row of the batch, first row in it and number of rows of the chunk in a slot; none in an empty slot."""
    batch, first, count = (T.alloc_var("int32") for _ in range(3))
    if ragged:
        n = owner_of(slot, cu_seqlens, sequences, steps, rows, chunk_size)
        begin, end = first_and_end(cu_seqlens, n, rows)
        batch = 0
        first = begin + (slot - begin // chunk_size - n) * chunk_size
        count = T.max(T.min(end - first, chunk_size), 0)  # a second empty slot lies further behind the end
    else:
        batch = slot // T.ceildiv(rows, chunk_size)
        first = slot % T.ceildiv(rows, chunk_size) * chunk_size
        count = T.min(rows - first, chunk_size)
    return batch, first, count


@T.macro
def chunk_ends(slot, cu_seqlens, sequences, steps, rows, chunk_size, ragged):
    """Sequence of the chunk in a slot; 1 or 0 for whether it is the first one there, and whether it is the last."""
    n, opens, closes = (T.alloc_var("int32") for _ in range(3))
    if ragged:
        n = owner_of(slot, cu_seqlens, sequences, steps, rows, chunk_size)
        begin, end = first_and_end(cu_seqlens, n, rows)
        index = slot - begin // chunk_size - n
        opens = T.Select(index == 0, 1, 0)
        closes = T.Select(begin + (index + 1) * chunk_size >= end, 1, 0)
    else:
        n = slot // T.ceildiv(rows, chunk_size)
        opens = T.Select(slot % T.ceildiv(rows, chunk_size) == 0, 1, 0)
        closes = T.Select((slot + 1) % T.ceildiv(rows, chunk_size) == 0, 1, 0)
    return n, opens, closes


@T.macro
def segment_rows(slot, cu_seqlens, sequences, steps, rows, chunk_size, chunks, ragged):
    """Sequence, first row, number of rows and first chunk's slot of the segment of ``chunks`` chunks in a slot.

    Segments have slots as chunks have. The last value says whether one ends its sequence (1), another follows (0), or
    the slot is empty (-1); an empty sequence has one segment without rows.
    """
    n, first, count, chunk, ends = (T.alloc_var("int32") for _ in range(5))
    width = chunks * chunk_size
    if ragged:
        n = owner_of(slot, cu_seqlens, sequences, steps, rows, width)
        begin, end = first_and_end(cu_seqlens, n, rows)
        index = slot - begin // width - n
        first = begin + index * width
        count = T.max(T.min(end - first, width), 0)
        chunk = begin // chunk_size + n + index * chunks
        ends = T.Select(index > 0 and first >= end, -1, T.Select(first + width >= end, 1, 0))
    else:
        n = slot // T.ceildiv(rows, width)
        first = slot % T.ceildiv(rows, width) * width
        count = T.min(rows - first, width)
        chunk = n * T.ceildiv(rows, chunk_size) + first // chunk_size
        ends = T.Select(first + width >= rows, 1, 0)
    return n, first, count, chunk, ends


@T.macro
def walked(place, begin, count, chunk_size, width, band):
    """First row, number of rows and first slot of a band ``(first, count, at)`` in a place of ``count`` rows."""
    start, length, slot = (T.alloc_var("int32") for _ in range(3))
    start = begin + band[0] * chunk_size
    length = T.max(T.min(count - band[0] * chunk_size, band[1] * chunk_size), 0)
    slot = place * width + band[2]
    return start, length, slot


@T.macro
def band_slots(index, rows, chunk_size, chunks, width, band):
    """Of chunk ``index`` of a band ``(first, count, at, size)``: its slot among all chunks, and its slot of a place.

    ``size`` is the number of chunks that the band has of a sequence altogether.
    """
    # Variables, since TileLang puts an expression wherever its name stands; nothing is negative that is divided.
    first, count, at, size = band
    rest, n, place, slot = (T.alloc_var("int32") for _ in range(4))
    n = T.truncdiv(index, size)
    rest = index - n * size
    place = T.truncdiv(rest, count)  # of the sequence: only its last one may have less than ``count`` of the band
    rest -= place * count
    slot = n * T.ceildiv(rows, chunk_size) + place * chunks + first + rest
    place += n * T.truncdiv(T.ceildiv(rows, chunk_size) + chunks - 1, chunks)
    return slot, place * width + at + rest


@T.macro
def entry_of(place, batch, start, chunk_size, cuts):
    """Where the state is that a band begins with, whose first row is ``start``: at a cut, or by place without cuts."""
    entry = T.alloc_var("int32")
    # A place that ends before the band has no such state, and uses none.
    entry = T.Select(cuts != 0, batch * cuts + T.min(start // (ENTRY_CHUNKS * chunk_size), cuts) - 1, place)
    return entry


@T.macro
def cut_behind(before, batch, start, chunk_size, cuts):
    """The block's first chunk that has a cut before it, behind ``before`` chunks of its sequence, and the cut's slot.

    A row of the batch has ``cuts`` slots. Without slots no chunk is found.
    """
    turn, slot = (T.alloc_var("int32") for _ in range(2))
    turn = T.Select(before == 0, ENTRY_CHUNKS, (ENTRY_CHUNKS - before % ENTRY_CHUNKS) % ENTRY_CHUNKS)
    slot = batch * cuts + (start + turn * chunk_size) // (ENTRY_CHUNKS * chunk_size) - 1
    turn = T.Select(cuts == 0, -1, turn)
    return turn, slot


@T.macro
def segments_of(n, cu_seqlens, rows, chunk_size, chunks, ragged):
    """Slot of a sequence's first segment of ``chunks`` chunks, and how many it has: one at least."""
    slot, count = (T.alloc_var("int32") for _ in range(2))
    width = chunks * chunk_size
    if ragged:
        begin, end = first_and_end(cu_seqlens, n, rows)
        slot = begin // width + n
        count = T.max(T.ceildiv(end - begin, width), 1)
    else:
        slot = n * T.ceildiv(rows, width)
        count = T.ceildiv(rows, width)
    return slot, count
