"""Products of pairs of rows of a chunk under decays of their own for each channel, and their gradients:

    P[t, s] = sum_d exp(G[t, d] - G[s, d]) left[t, d] right[s, d]   (s <= t)

A decay that differs from channel to channel cannot be taken out of the sum over d. Two ways lead through the matrix
product, and each chunk takes the one that its gates allow:

- mild: where the whole chunk decays by no more than :func:`mild` allows, ``exp(G_t) exp(-G_s)``: one product.
- robust, for any gates: the chunk is halved again and again. Where t lies in the lower and s in the upper half of a
  block, with m the last row of the upper half, ``exp(G_t - G_m) exp(G_m - G_s)``: neither exponent is above zero. Every
  pair s < t meets so on exactly one level (6 of them for 64 rows), and a pair s = t knows no decay.
"""

import triton
import triton.language as tl

from chunkwise_triton.common.channel_gates import channel_sums, decay_to_end, matrix_sums
from chunkwise_triton.common.tiles import load_rows

# exp(-bound) for the bounds (natural log) up to which exp(-G) may be part of an operand: 64 in bf16, which reaches as
# far as fp32 (what overflows lies above the diagonal and is thrown away); 2 in fp16, where exp(-G) / 8 stays below 1;
# 1 in fp32, so that rounding G costs no more than rounding a product.
MILD_BF16 = tl.constexpr(1.6e-28)
MILD_FP16 = tl.constexpr(0.1353)
MILD_FP32 = tl.constexpr(0.3679)


@triton.jit
def mild(least, DOT: tl.constexpr):
    """Whether the least of the decays ``exp(G_C)`` of a chunk's channels allows the short way."""
    LEAST: tl.constexpr = MILD_BF16 if tl.bfloat16 == DOT else MILD_FP16 if tl.float16 == DOT else MILD_FP32
    return least >= LEAST


@triton.jit
def mild_pairs(query, key_out, whole, DOT: tl.constexpr):
    """What a block of channels adds to P, ``[C, C]`` fp32, in a mild chunk; above the diagonal it holds anything.

    ``query`` is ``exp(G_t) left``, ``key_out`` ``exp(G_C - G_s) right``, both ``[C, BLOCK_K]``, ``whole`` ``exp(G_C)``.
    """
    UP: tl.constexpr = 8.0 if tl.float16 == DOT else 1.0
    LEAST: tl.constexpr = MILD_BF16 if tl.bfloat16 == DOT else MILD_FP16 if tl.float16 == DOT else MILD_FP32
    grow = 1.0 / UP / tl.maximum(whole, LEAST)  # finite in other chunks too
    at_right = (key_out.to(tl.float32) * grow[None, :]).to(DOT)
    return tl.dot(query.to(DOT), tl.trans(at_right), input_precision="tf32x3") * UP


@triton.jit
def _between(level, C: tl.constexpr):
    """``[C, C]``: where rows are in the lower and columns in the upper half of one block of ``2 << level`` rows."""
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return ((row >> (level + 1)) == (column >> (level + 1))) & ((row >> level) > (column >> level))


@triton.jit
def _to_middle(
    high, low, level, g_cumsum, g_low, first, rows, head, HEADS, columns, WIDTH, C: tl.constexpr, DOT: tl.constexpr
):
    """``exp(-|G_t - G_m|)`` ``[C, BLOCK_K]``, m the last row of the upper half of t's block of ``2 << level`` rows."""
    t = tl.arange(0, C)
    m = ((t >> (level + 1)) << (level + 1)) + (1 << level) - 1
    # A middle behind the chunk's last row reads as 0: no row of its lower half is there to need it.
    high_m, low_m = channel_sums(g_cumsum, g_low, first, m, rows, head, HEADS, columns, WIDTH, DOT)
    exponent = high - high_m
    if tl.float32 == DOT:
        exponent += low - low_m
    return tl.exp(-tl.abs(exponent))


@triton.jit
def robust_pairs(
    left, right, g_cumsum, g_low, first, rows, head,
    HEADS: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """P ``[C, C]`` fp32 for the rows of a chunk of one head of left and right ``[B, T, HEADS, K]``, 0 above the
    diagonal, from G ``[B, T, HEADS, K]`` as two numbers (``channel_gates``)."""
    LEVELS: tl.constexpr = 4 if C == 16 else 5 if C == 32 else 6  # of C = 64
    t = tl.arange(0, C)
    result = tl.zeros((C, C), tl.float32)
    for begin in range(0, K, BLOCK_K):
        kk = begin + tl.arange(0, BLOCK_K)
        x = load_rows(left, first, t, rows, head, HEADS, kk, K).to(tl.float32)  # [C, BLOCK_K]
        y = load_rows(right, first, t, rows, head, HEADS, kk, K).to(tl.float32)  # [C, BLOCK_K]
        high, low = channel_sums(g_cumsum, g_low, first, t, rows, head, HEADS, kk, K, DOT)
        result += tl.where(t[:, None] == t[None, :], tl.sum(x * y, 1)[:, None], 0.0)
        for level in range(LEVELS):
            factor = _to_middle(high, low, level, g_cumsum, g_low, first, rows, head, HEADS, kk, K, C, DOT)
            found = tl.dot((x * factor).to(DOT), tl.trans((y * factor).to(DOT)), input_precision="tf32x3")
            result += tl.where(_between(level, C), found, 0.0)
    return result


@triton.jit
def without_diagonal(d_pairs, C: tl.constexpr, DOT: tl.constexpr):
    """Of ``[C, C]``: what lies below the diagonal, in DOT, and the diagonal ``[C]`` fp32."""
    t = tl.arange(0, C)
    own = tl.sum(tl.where(t[:, None] == t[None, :], d_pairs.to(tl.float32), 0.0), 1)
    return tl.where(t[:, None] > t[None, :], d_pairs, 0.0).to(DOT), own


@triton.jit
def mild_pairs_backward(
    left, right, d_entry, d_exit, d_below, high, whole, C: tl.constexpr, DOT: tl.constexpr, HAS_DG: tl.constexpr
):
    """Gradients of a block of channels of a mild chunk, through pairs of rows and through the states at its ends.

    A pair s = t knows no decay: with ``own`` the gradient of P's diagonal (:func:`without_diagonal`) the caller adds
    ``own right`` and ``own left``; nothing there reaches the gates.

    Args:
        left, right, high: ``[C, BLOCK_K]``, high is G; whole: ``exp(G_C)`` ``[BLOCK_K]``.
        d_entry, d_exit: ``[C, BLOCK_K]`` fp32, the gradients of ``exp(G_t) left_t`` and ``exp(G_C - G_s) right_s``.
        d_below: of P below the diagonal, ``[C, C]`` in DOT.

    Returns:
        Those of left, of right and, where HAS_DG, of the gates, each ``[C, BLOCK_K]`` fp32.
    """
    UP: tl.constexpr = 8.0 if tl.float16 == DOT else 1.0
    t = tl.arange(0, C)
    grow, shrink = tl.exp(-high), tl.exp(high)
    at_right = (right.to(tl.float32) * (grow / UP)).to(DOT)
    d_left = d_entry + tl.dot(d_below, at_right, input_precision="tf32x3") * UP
    at_left = (left.to(tl.float32) * shrink).to(DOT)
    d_gates = at_left.to(tl.float32) * d_left
    d_right = tl.dot(tl.trans(d_below), at_left, input_precision="tf32x3")
    if HAS_DG:
        # A pair of which both rows are behind a gate is added and taken away again: from the same rounded operands,
        # and in a mild chunk it is no larger than what stays.
        d_gates -= at_right.to(tl.float32) * d_right * UP
        d_gates = matrix_sums(t[:, None] <= t[None, :], d_gates, DOT)
    d_right += d_exit * whole[None, :]
    if HAS_DG:  # what leaves by the exit from before a gate; from after it, it may be larger by any factor
        leaving = at_right.to(tl.float32) * d_exit * (whole * UP)[None, :]
        d_gates += matrix_sums(t[:, None] > t[None, :], leaving, DOT)
    return d_left * shrink, d_right * grow, d_gates


@triton.jit
def robust_pairs_backward(
    left, right, d_entry, d_exit, d_below, high, low, high_end, low_end,
    g_cumsum, g_low, first, rows, head, HEADS, columns, WIDTH, C: tl.constexpr, DOT: tl.constexpr, HAS_DG: tl.constexpr,
):  # fmt: skip
    """The same for any gates, from G as two numbers; ``high_end``, ``low_end`` are G at the chunk's last row."""
    LEVELS: tl.constexpr = 4 if C == 16 else 5 if C == 32 else 6  # of C = 64
    t = tl.arange(0, C)
    x, y = left.to(tl.float32), right.to(tl.float32)
    d_left, d_right = d_entry * tl.exp(high), d_exit * decay_to_end(high, low, high_end, low_end, DOT)
    d_gates = tl.zeros_like(x)
    if HAS_DG:  # exp(G_t) is moved by every gate up to row t, exp(G_C - G_t) by every gate after it
        d_gates += matrix_sums(t[:, None] <= t[None, :], d_left * x, DOT)
        d_gates += matrix_sums(t[:, None] > t[None, :], d_right * y, DOT)
    for level in range(LEVELS):
        factor = _to_middle(high, low, level, g_cumsum, g_low, first, rows, head, HEADS, columns, WIDTH, C, DOT)
        at_left, at_right = (x * factor).to(DOT), (y * factor).to(DOT)
        d_level = tl.where(_between(level, C), d_below, 0.0).to(DOT)
        d_at_left = tl.dot(d_level, at_right, input_precision="tf32x3")
        d_at_right = tl.dot(tl.trans(d_level), at_left, input_precision="tf32x3")
        d_left += d_at_left * factor
        d_right += d_at_right * factor
        if HAS_DG:  # exp(G_t - G_m) is moved by the gates after m up to t, exp(G_m - G_s) by those after s up to m
            half, lower = t >> level, ((t >> level) & 1)[:, None] == 1
            moved = (half[:, None] == half[None, :]) & (lower == (t[:, None] <= t[None, :]))
            d_at = at_left.to(tl.float32) * d_at_left + at_right.to(tl.float32) * d_at_right
            d_gates += matrix_sums(moved, d_at, DOT)
    return d_left, d_right, d_gates
