"""Addresses, 64-bit before anything is multiplied."""

import triton
import triton.language as tl


@triton.jit
def rows_pointer(x, first, t, head, HEADS, WIDTH, columns):
    """Pointers to rows ``first + t`` of one head of ``[B, T, HEADS, WIDTH]``; 64-bit before anything is multiplied."""
    return x + ((first + t[:, None]) * HEADS + head) * WIDTH + columns[None, :]


@triton.jit
def state_pointer(x, slot, head, HEADS, K, V, rows, columns):
    """Pointers to one state of ``[slots, HEADS, K, V]``."""
    return x + (slot.to(tl.int64) * HEADS + head) * K * V + rows[:, None] * V + columns[None, :]
