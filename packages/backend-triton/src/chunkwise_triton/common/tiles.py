"""Tiles of rows and of states: which chunk a program works on, loads and stores that are masked at every edge.

Addresses are 64-bit before anything is multiplied. Rows past the chunk's last and columns past the width read as 0 and
are not written.
"""

import triton
import triton.language as tl

from chunkwise_triton.common.chunks import locate


@triton.jit
def chunk_program(HEADS: tl.constexpr, cu_seqlens, table, T, per_row, C: tl.constexpr, RAGGED: tl.constexpr):
    """Slot, head, first row and number of rows of a program that works on one chunk of one head."""
    slot = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    _, first, rows = locate(slot, cu_seqlens, table, T, per_row, C, RAGGED)
    return slot, head, first, rows


@triton.jit
def block_program(
    BLOCKS: tl.constexpr, HEADS: tl.constexpr, cu_seqlens, table, T, per_row, C: tl.constexpr, RAGGED: tl.constexpr
):
    """Block, slot, head, sequence, first row and number of rows of a program that works on one of a chunk's blocks of
    columns."""
    block = tl.program_id(0) % BLOCKS
    head = tl.program_id(0) // BLOCKS % HEADS
    slot = tl.program_id(0) // BLOCKS // HEADS
    n, first, rows = locate(slot, cu_seqlens, table, T, per_row, C, RAGGED)
    return block, slot, head, n, first, rows


@triton.jit
def load_rows(x, first, t, rows, head, HEADS, columns, WIDTH):
    """Rows ``first + t`` of one head of ``[B, T, HEADS, WIDTH]``, those with ``t < rows``."""
    at = ((first + t[:, None]) * HEADS + head) * WIDTH + columns[None, :]
    return tl.load(x + at, mask=(t < rows)[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def load_rows_above(x, first, t, rows, head, HEADS, columns, WIDTH):
    """Rows ``first + t - 1``; there is none above the chunk's first."""
    at = ((first + t[:, None] - 1) * HEADS + head) * WIDTH + columns[None, :]
    return tl.load(x + at, mask=((t > 0) & (t <= rows))[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def load_row(x, row, head, HEADS, columns, WIDTH):
    """One row of one head of ``[B, T, HEADS, WIDTH]``, ``[len(columns)]``."""
    return tl.load(x + (row * HEADS + head) * WIDTH + columns, mask=columns < WIDTH, other=0.0)


@triton.jit
def store_rows(x, value, first, t, rows, head, HEADS, columns, WIDTH):
    """Write what ``load_rows`` would read, in x's dtype."""
    at = ((first + t[:, None]) * HEADS + head) * WIDTH + columns[None, :]
    mask = (t < rows)[:, None] & (columns < WIDTH)[None, :]
    tl.store(x + at, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def row_pointer(x, row, head, HEADS, WIDTH):
    """Where a row (int64) of one head of ``[rows, HEADS, WIDTH]`` begins."""
    return x + (row * HEADS + head) * WIDTH


@triton.jit
def load_live(x, live, MASKED: tl.constexpr):
    """The numbers at some pointers, MASKED: 0 where they are not live."""
    if MASKED:
        return tl.load(x, mask=live, other=0.0)
    return tl.load(x)


@triton.jit
def load_tile(x, rows, stride, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr, live, MASKED: tl.constexpr):
    """A tile of BLOCK columns whose rows are ``stride`` elements apart; MASKED: of the live rows.

    Offsets are 32-bit from a 64-bit pointer, so that loops over tiles move the pointer alone.
    """
    at = x + (rows[:, None] * stride + columns[None, :])
    if MASKED:
        return tl.load(at, mask=live[:, None] & (columns < WIDTH)[None, :], other=0.0)
    if BLOCK == WIDTH:
        return tl.load(at)
    return tl.load(at, mask=(columns < WIDTH)[None, :], other=0.0)


@triton.jit
def store_tile(x, value, rows, stride, columns, WIDTH, live):
    """Write what ``load_tile`` would read, in x's dtype."""
    mask = live[:, None] & (columns < WIDTH)[None, :]
    tl.store(x + (rows[:, None] * stride + columns[None, :]), value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def load_vector(x, first, t, rows, head, HEADS):
    """One number a row of ``[B, T, HEADS]``, in fp32."""
    return tl.load(x + (first + t) * HEADS + head, mask=t < rows, other=0.0).to(tl.float32)


@triton.jit
def store_vector(x, value, first, t, rows, head, HEADS):
    """Write what ``load_vector`` would read, in x's dtype."""
    tl.store(x + (first + t) * HEADS + head, value.to(x.dtype.element_ty), mask=t < rows)


@triton.jit
def load_state(x, slot, head, HEADS, K, V, rows, columns):
    """A block of one state of ``[slots, HEADS, K, V]``."""
    at = (slot.to(tl.int64) * HEADS + head) * K * V + rows[:, None] * V + columns[None, :]
    return tl.load(x + at, mask=(rows < K)[:, None] & (columns < V)[None, :], other=0.0)


@triton.jit
def store_state(x, value, slot, head, HEADS, K, V, rows, columns):
    """Write what ``load_state`` would read, in x's dtype."""
    at = (slot.to(tl.int64) * HEADS + head) * K * V + rows[:, None] * V + columns[None, :]
    tl.store(x + at, value.to(x.dtype.element_ty), mask=(rows < K)[:, None] & (columns < V)[None, :])
