"""Gates that every channel of the keys has of its own: their sums over the rows of a chunk, and decays from them.

With ``G[t, d]`` the sum of the gates of channel d from the chunk's first row to row t, natural log, an exponential is
taken only of ``G_t``, ``G_C - G_t`` and other differences that are never above zero.

With fp32 operands (DOT) sums are taken in fp64 and kept as two fp32 numbers, so that the difference of two sums is
right to an ulp of the difference. 16-bit operands round more than fp32 sums lose.
"""

import triton
import triton.language as tl

from chunkwise_triton.common.tiles import block_program, load_row, load_rows, store_rows

# exp of a gate below it is 0 in fp32; the sums of a chunk stay small enough for their digits to count.
LOWEST_CHANNEL_GATE = tl.constexpr(-110.0)


@triton.jit
def sum_channel_gates(g, first, t, rows, head, HEADS, columns, WIDTH, DOT: tl.constexpr):
    """G of all rows of a chunk from its gates, as (high, low); rows past the chunk's last add nothing."""
    gates = load_rows(g, first, t, rows, head, HEADS, columns, WIDTH).to(tl.float32)  # [C, BLOCK_K]
    gates = tl.maximum(gates, LOWEST_CHANNEL_GATE)
    if tl.float32 == DOT:
        sums = tl.cumsum(gates.to(tl.float64), 0)
        high = sums.to(tl.float32)
        low = (sums - high.to(tl.float64)).to(tl.float32)
    else:
        high = tl.cumsum(gates, 0)
        low = tl.zeros_like(high)
    return high, low


@triton.jit(do_not_specialize=["T", "per_row"])
def channel_gate_kernel(
    g, g_cumsum, g_low, cu_seqlens, table, T, per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_K: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """G ``[B, T, H, K]`` fp32 for BLOCK_K columns of a chunk; with fp32 operands also what rounding took from it."""
    parts: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    part, _, h, _, first, rows = block_program(parts, H, cu_seqlens, table, T, per_row, C, RAGGED)
    if rows <= 0:
        return
    t = tl.arange(0, C)
    kk = part * BLOCK_K + tl.arange(0, BLOCK_K)
    high, low = sum_channel_gates(g, first, t, rows, h, H, kk, K, DOT)
    if tl.float32 == DOT:
        store_rows(g_low, low, first, t, rows, h, H, kk, K)
    store_rows(g_cumsum, high, first, t, rows, h, H, kk, K)


@triton.jit
def channel_sums(g_cumsum, g_low, first, t, rows, head, HEADS, columns, WIDTH, DOT: tl.constexpr):
    """G at the rows t as (high, low), each ``[len(t), BLOCK_K]`` fp32; low is 0 unless the operands are fp32."""
    high = load_rows(g_cumsum, first, t, rows, head, HEADS, columns, WIDTH)
    low = tl.zeros_like(high)
    if tl.float32 == DOT:
        low = load_rows(g_low, first, t, rows, head, HEADS, columns, WIDTH)
    return high, low


@triton.jit
def channel_totals(g_cumsum, g_low, first, rows, head, HEADS, columns, WIDTH, DOT: tl.constexpr):
    """G at the chunk's last row as (high, low), each ``[BLOCK_K]`` fp32."""
    high = load_row(g_cumsum, first + rows - 1, head, HEADS, columns, WIDTH)
    low = tl.zeros_like(high)
    if tl.float32 == DOT:
        low = load_row(g_low, first + rows - 1, head, HEADS, columns, WIDTH)
    return high, low


@triton.jit
def decay_to_end(high, low, high_end, low_end, DOT: tl.constexpr):
    """``exp(G_C - G_t)`` ``[rows, BLOCK_K]``; 1 or less also behind the chunk's last row, where G reads as 0."""
    exponent = high_end[None, :] - high
    if tl.float32 == DOT:
        exponent += low_end[None, :] - low
    return tl.exp(exponent)


@triton.jit
def matrix_sums(keep, x, DOT: tl.constexpr):
    """``y[j] = sum_t keep[j, t] x[t]`` for ``[C, C]`` booleans and ``[C, BLOCK_K]`` fp32, right to 16 bits or more."""
    if tl.bfloat16 == DOT:
        ones = keep.to(tl.bfloat16)
        high = x.to(tl.bfloat16)
        low = (x - high.to(tl.float32)).to(tl.bfloat16)
        result = tl.dot(ones, low)
        result = tl.dot(ones, high, result)
    else:
        result = tl.dot(keep.to(tl.float32), x, input_precision="tf32x3")
    return result
