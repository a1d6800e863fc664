"""Where a chunk lies: dense by arithmetic, ragged by a table that is built on the device in every call.

Chunks of a sequence start at its first row. A chunk's slot is its place when chunks are counted sequence by sequence;
there are at most ``B * ceil(T / C)`` slots dense and ``ceil(T / C) + N`` ragged, a bound from shapes alone, so that no
call waits for the device. Slots that no chunk takes hold the sequence -1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from chunkwise_triton.common.launch import launch

_SCAN_BLOCK = 1024
_LOOKUP_BLOCK = 128


@dataclass(frozen=True)
class ChunkMap:
    """The chunks of one call.

    Args:
        slots: how many programs cover all chunks.
        chunks_per_row: ``ceil(T / C)``.
        cu_seqlens: int32 ``[N+1]``, or a tensor that is never read when dense.
        first_slots: int32 ``[N+1]``, the slot of each sequence's first chunk; never read when dense.
        table: int32 ``[slots, 2]``, sequence and chunk within it of each slot; never read when dense.
    """

    ragged: bool
    slots: int
    sequences: int
    chunks_per_row: int
    cu_seqlens: Tensor
    first_slots: Tensor
    table: Tensor


def chunk_map(like: Tensor, cu_seqlens: Tensor | None, chunk_size: int) -> ChunkMap:
    """The map for tensors ``[B, T, ...]``; two small launches when ragged, none when dense."""
    batch, rows = like.shape[:2]
    per_row = triton.cdiv(rows, chunk_size)
    if cu_seqlens is None:
        return ChunkMap(False, batch * per_row, batch, per_row, like, like, like)
    sequences = cu_seqlens.shape[0] - 1
    slots = per_row + sequences
    first_slots = torch.empty(sequences + 1, dtype=torch.int32, device=like.device)
    table = torch.empty(slots, 2, dtype=torch.int32, device=like.device)
    launch(_count_kernel, 1, (cu_seqlens, first_slots, sequences, rows), {"C": chunk_size, "BLOCK": _SCAN_BLOCK})
    steps = max(sequences, 1).bit_length()
    blocks = triton.cdiv(slots, _LOOKUP_BLOCK)
    launch(_lookup_kernel, blocks, (first_slots, table, sequences, slots, steps), {"BLOCK": _LOOKUP_BLOCK})
    return ChunkMap(True, slots, sequences, per_row, cu_seqlens, first_slots, table)


@triton.jit
def sequence_rows(cu_seqlens, n, T):
    """First row and number of rows of sequence n; bad offsets are clamped, never read past the tensors."""
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens + n), 0), T)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens + n + 1), start), T)
    return start, end - start


@triton.jit(do_not_specialize=["N", "T"])
def _count_kernel(cu_seqlens, first_slots, N, T, C: tl.constexpr, BLOCK: tl.constexpr):
    """first_slots[n] = sum over m < n of ceil(length_m / C), clamped to the bound that the table was made for."""
    carry = tl.zeros((), tl.int32)
    tl.store(first_slots, carry)
    offsets = tl.arange(0, BLOCK)
    limit = (T + C - 1) // C + N
    for begin in range(0, N, BLOCK):
        n = begin + offsets
        live = n < N
        start = tl.minimum(tl.maximum(tl.load(cu_seqlens + n, mask=live, other=0), 0), T)
        end = tl.minimum(tl.maximum(tl.load(cu_seqlens + n + 1, mask=live, other=0), start), T)
        counts = tl.where(live, (end - start + C - 1) // C, 0)
        sums = tl.minimum(carry + tl.cumsum(counts, 0), limit)
        tl.store(first_slots + n + 1, sums, mask=live)
        carry = tl.minimum(carry + tl.sum(counts, 0), limit)


@triton.jit(do_not_specialize=["N", "slots", "steps"])
def _lookup_kernel(first_slots, table, N, slots, steps, BLOCK: tl.constexpr):
    """Binary search of the sequence that owns each slot: the last n with first_slots[n] <= slot."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = slot < slots
    low = tl.zeros((BLOCK,), tl.int32)
    high = tl.zeros((BLOCK,), tl.int32) + N
    for _ in range(steps):
        middle = (low + high + 1) // 2
        below = tl.load(first_slots + middle, mask=live, other=0) <= slot
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle - 1)
    owned = low < N
    first = tl.load(first_slots + low, mask=live, other=0)
    tl.store(table + 2 * slot, tl.where(owned, low, -1), mask=live)
    tl.store(table + 2 * slot + 1, slot - first, mask=live)


@triton.jit
def locate(slot, cu_seqlens, table, T, per_row, C: tl.constexpr, RAGGED: tl.constexpr):
    """Sequence, first row (int64, of all B * T) and number of rows of the chunk in a slot; no rows in an empty one."""
    if RAGGED:
        n = tl.load(table + 2 * slot)
        chunk = tl.load(table + 2 * slot + 1)
        start, length = sequence_rows(cu_seqlens, tl.maximum(n, 0), T)
        first = start.to(tl.int64) + chunk * C
        rows = tl.where(n < 0, 0, tl.minimum(length - chunk * C, C))
    else:
        n = slot // per_row
        chunk = slot % per_row
        first = n.to(tl.int64) * T + chunk * C
        rows = tl.minimum(T - chunk * C, C)
    return n, first, rows


@triton.jit
def sequence_span(n, cu_seqlens, T, RAGGED: tl.constexpr):
    """First row (int64, of all B * T) and number of rows of sequence n."""
    if RAGGED:
        start, length = sequence_rows(cu_seqlens, n, T)
        first = start.to(tl.int64)
    else:
        first = n.to(tl.int64) * T
        length = T
    return first, length


@triton.jit
def span(n, cu_seqlens, first_slots, T, per_row, C: tl.constexpr, RAGGED: tl.constexpr):
    """First row (int64), number of rows and first slot of sequence n."""
    first, length = sequence_span(n, cu_seqlens, T, RAGGED)
    slot = tl.load(first_slots + n) if RAGGED else n * per_row
    return first, length, slot
