"""Where a chunk lies. Dense by arithmetic; ragged by the offsets, read on the device in every call.

Chunks of C rows start at a sequence's first row. Chunk i of sequence n has the slot ``start // C + n + i``: no two
chunks share one, and there are no more than ``T // C + N``, so that nothing is counted first. Some slots stay empty.
Offsets are clamped: bad ones give wrong rows, never rows of other tensors.
"""

from typing import Any

import tilelang.language as T  # noqa: N812 - TileLang's parser knows it by this name


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
def chunk_rows(slot, cu_seqlens, sequences, steps, rows, chunk_size, ragged):
    """Row of the batch, first row in it and number of rows of the chunk in a slot; none in an empty slot.

    The owner of a slot is the last sequence whose first slot is not behind it: ``steps`` halvings find it.
    """
    batch, first, count, low, high = (T.alloc_var("int32") for _ in range(5))
    if ragged:
        low = 0
        high = sequences - 1
        for _ in T.serial(steps):
            middle = (low + high + 1) // 2
            before = T.max(T.min(cu_seqlens[middle], rows), 0) // chunk_size + middle <= slot
            low = T.Select(before, middle, low)
            high = T.Select(before, high, middle - 1)
        begin, end = first_and_end(cu_seqlens, low, rows)
        batch = 0
        first = begin + (slot - begin // chunk_size - low) * chunk_size
        count = T.min(end - first, chunk_size)
    else:
        batch = slot // T.ceildiv(rows, chunk_size)
        first = slot % T.ceildiv(rows, chunk_size) * chunk_size
        count = T.min(rows - first, chunk_size)
    return batch, first, count
