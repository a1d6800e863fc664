"""Decays of their own for each channel of the keys, inside a chunk.

    P[t, s] = sum_d exp(G[t, d] - G[s, d]) x[t, d] y[s, d]

with ``G[t, d]`` the sum of the gates of channel d up to row t. What differs from channel to channel cannot be taken out
of the sum, so ``exp(G_t - G_s)`` is split at a reference row m, ``exp(G_t - G_m) exp(G_m - G_s)``: factors of the rows
on the left and on the right of a product of matrices. Where m lies, and which pairs meet in one product, is a *level*:

    CENTRED   one level, m the chunk's middle row. Exponents reach half a chunk of gates, so gates need a lower bound.
    else      the chunk is halved again and again: level l has blocks of ``2^(l + 1)`` rows, whose lower half meets the
              upper one at m, the upper half's last row. No exponent is above zero, whatever the gates are, and every
              pair s < t meets on exactly one level.

A pair s = t knows no decay. BEFORE stands for rows that read the state before their own token, with ``G_{t-1}`` in
place of ``G_t`` and pairs s < t.

Sums of gates are those of ``channel_gates``.
"""

import triton
import triton.language as tl

from chunkwise_triton.common.channel_gates import matrix_sums
from chunkwise_triton.common.tiles import load_rows

LOG2E = tl.constexpr(1.4426950408889634)
LN2_HIGH = tl.constexpr(0.693359375)
"""ln(2) in so few digits that its products with integers up to 2^14 are exact, and what it lacks."""
LN2_LOW = tl.constexpr(-2.12194440054690583e-4)


@triton.jit
def chunk_sums(g_cumsum, g_low, first, t, rows, head, HEADS, columns, WIDTH, DOT: tl.constexpr):
    """G of the rows t, which may be -1: nothing is summed yet. Rows past the chunk's last add nothing."""
    row = tl.minimum(t, rows - 1)
    at = ((first + row[:, None]) * HEADS + head) * WIDTH + columns[None, :]
    mask = (row >= 0)[:, None] & (columns < WIDTH)[None, :]
    high = tl.load(g_cumsum + at, mask=mask, other=0.0)  # [rows of t, columns] fp32
    low = high
    if tl.float32 == DOT:
        low = tl.load(g_low + at, mask=mask, other=0.0)
    return high, low


@triton.jit
def decay_between(high, low, from_high, from_low, DOT: tl.constexpr):
    """``exp(G_t - G_s)``; with fp32 operands right to fp32 however large the exponent is.

    An exponent of 75 has an ulp of 2^-17, which is a part of its exponential, and so of ``exp(G_t - G_m) exp(G_m -
    G_s)`` where it is nearly 1: what rounding takes from the difference, and from its multiple of log2(e), is kept.
    """
    exponent = high - from_high
    if tl.float32 == DOT:
        taken = exponent - high
        lost = (high - (exponent - taken)) - (from_high + taken)
        power = tl.floor(exponent * LOG2E + 0.5)
        rest = (exponent - power * LN2_HIGH) - power * LN2_LOW
        return tl.exp(rest + (lost + (low - from_low))) * tl.exp2(power)
    return tl.exp(exponent)


@triton.jit
def decay_from_start(high, low, DOT: tl.constexpr):
    """``exp(G_t)``."""
    if tl.float32 == DOT:
        high += low
    return tl.exp(high)


@triton.jit
def reference_rows(level, C: tl.constexpr, CENTRED: tl.constexpr):
    """Of each row of a chunk on a level: its reference row, whether it stands on the left, whether on the right."""
    t = tl.arange(0, C)
    if CENTRED:
        middle = t * 0 + (C // 2 - 1)
        left = t >= 0
        right = left
    else:
        middle = ((t >> (level + 1)) << (level + 1)) + (1 << level) - 1
        left = ((t >> level) & 1) == 1
        right = ((t >> level) & 1) == 0
    return middle, left, right


@triton.jit
def meeting_pairs(level, C: tl.constexpr, CENTRED: tl.constexpr, BEFORE: tl.constexpr):
    """The pairs ``[t, s]`` of a level whose product decays: s < t, and s < t - 1 for BEFORE."""
    t = tl.arange(0, C)
    row, column = t[:, None], t[None, :]
    pairs = row > column + 1 if BEFORE else row > column
    if not CENTRED:
        pairs = pairs & ((row >> (level + 1)) == (column >> (level + 1)))
    return pairs


@triton.jit
def pair_products(
    x, y, z, g_cumsum, g_low, first, rows, head,
    HEADS: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr,
    CENTRED: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """P of x with y and of x with z, each ``[C, C]`` fp32, zero above the diagonal (and on it, for BEFORE)."""
    LEVELS: tl.constexpr = 1 if CENTRED else 4 if C == 16 else 5 if C == 32 else 6
    t = tl.arange(0, C)
    row, column = t[:, None], t[None, :]
    by_y = tl.zeros((C, C), tl.float32)
    by_z = tl.zeros((C, C), tl.float32)
    for begin in range(0, K, BLOCK_K):
        kk = begin + tl.arange(0, BLOCK_K)
        x_tile = load_rows(x, first, t, rows, head, HEADS, kk, K).to(tl.float32)  # [C, BLOCK_K]
        y_tile = load_rows(y, first, t, rows, head, HEADS, kk, K).to(tl.float32)  # [C, BLOCK_K]
        z_tile = load_rows(z, first, t, rows, head, HEADS, kk, K).to(tl.float32)  # [C, BLOCK_K]
        high, low = chunk_sums(g_cumsum, g_low, first, t, rows, head, HEADS, kk, K, DOT)
        x_high, x_low = high, low
        if BEFORE:
            x_high, x_low = chunk_sums(g_cumsum, g_low, first, t - 1, rows, head, HEADS, kk, K, DOT)
        if not (CENTRED or BEFORE):
            by_y += tl.where(row == column, tl.sum(x_tile * y_tile, 1)[:, None], 0.0)
            by_z += tl.where(row == column, tl.sum(x_tile * z_tile, 1)[:, None], 0.0)
        for level in range(LEVELS):
            middle, left, right = reference_rows(level, C, CENTRED)
            m_high, m_low = chunk_sums(g_cumsum, g_low, first, middle, rows, head, HEADS, kk, K, DOT)
            on_left = tl.where(left[:, None], decay_between(x_high, x_low, m_high, m_low, DOT), 0.0)
            on_right = tl.where(right[:, None], decay_between(m_high, m_low, high, low, DOT), 0.0)
            x_dot = (x_tile * on_left).to(DOT)
            to_y = tl.dot(x_dot, tl.trans((y_tile * on_right).to(DOT)), input_precision="tf32x3")
            to_z = tl.dot(x_dot, tl.trans((z_tile * on_right).to(DOT)), input_precision="tf32x3")
            if not CENTRED:
                same = (row >> (level + 1)) == (column >> (level + 1))
                to_y = tl.where(same, to_y, 0.0)
                to_z = tl.where(same, to_z, 0.0)
            by_y += to_y
            by_z += to_z
    keep = row > column if BEFORE else row >= column
    return tl.where(keep, by_y, 0.0), tl.where(keep, by_z, 0.0)


@triton.jit
def sums_over_rows(x, level, C: tl.constexpr, DIRECTION: tl.constexpr, WHOLE: tl.constexpr, DOT: tl.constexpr):
    """For each row j of ``[C, columns]`` fp32 the sum over the rows t >= j, t > j or t < j, right to 16 bits (bf16) or
    to fp32.

    WHOLE: of the chunk, else of the half of a level's block that j lies in.
    """
    t = tl.arange(0, C)
    row, column = t[:, None], t[None, :]
    if DIRECTION == "from":
        added = column >= row
    elif DIRECTION == "after":
        added = column > row
    else:
        added = column < row
    if not WHOLE:
        added = added & ((row >> level) == (column >> level))
    return matrix_sums(added, x, DOT)
