"""Products of pairs of rows of a chunk under decays of their own for each channel, and their gradients:

    P[t, s] = sum_d exp(G[t, d] - G[s, d]) left[t, d] right[s, d]   (s <= t)

A decay that differs from channel to channel cannot be taken out of the sum over d. Two ways lead through the matrix
product, and each block of channels of each chunk takes the one that its gates allow:

- Where the whole chunk decays by no more than :func:`mild` allows, ``exp(G_t) exp(-G_s)``: one product.
- Else the chunk is halved again and again. Where t lies in the lower and s in the upper half of a block, with m the
  last row of the upper half, ``exp(G_t - G_m) exp(G_m - G_s)``: neither exponent is above zero, whatever the gates are.
  Every pair s < t meets so on exactly one level (6 of them for 64 rows), and a pair s = t knows no decay.
"""

import triton
import triton.language as tl

from chunkwise_triton.common.channel_gates import channel_sums, channel_totals, decay_to_end, matrix_sums
from chunkwise_triton.common.tiles import load_rows

# How far a chunk may decay (natural log) for exp(-G) to be an operand: in bf16, which reaches as far as fp32, until
# what lies above the diagonal, and is thrown away, could overflow where it counts; in fp16 while exp(-G) right does not
# overflow (and see FP16_MOST) nor exp(G) left lose digits; in fp32 while rounding G costs no more than rounding right.
MILD_BF16 = tl.constexpr(64.0)
MILD_FP16 = tl.constexpr(2.0)
MILD_FP32 = tl.constexpr(1.0)
FP16_MOST = tl.constexpr(6e4)


@triton.jit
def mild(high_end, right, DOT: tl.constexpr):
    """Whether the chunk's decays ``exp(G_C)`` allow ``exp(-G_s) right_s`` as an operand in DOT.

    ``high_end`` ``[BLOCK_K]`` fp32 is G at the chunk's last row, ``right`` ``[C, BLOCK_K]``.
    """
    total = tl.max(-high_end, 0)
    if tl.bfloat16 == DOT:
        result = total <= MILD_BF16
    elif tl.float16 == DOT:
        most = tl.max(tl.max(tl.abs(right.to(tl.float32)), 1), 0)
        result = (total <= MILD_FP16) & (most * tl.exp(tl.minimum(total, MILD_FP16)) <= FP16_MOST)
    else:
        result = total <= MILD_FP32
    return result


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
def block_pairs(
    left, right, high, low, is_mild, g_cumsum, g_low, first, rows, head, HEADS, columns, WIDTH,
    C: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """What a block of channels adds to P, ``[C, C]`` fp32; above the diagonal it holds anything.

    Args:
        left, right: ``[C, BLOCK_K]``, rows behind the chunk's last and columns past the width are 0.
        high, low: G of these rows and channels (``channel_sums``).
        is_mild: what :func:`mild` says.
        g_cumsum, g_low, first, rows, head, HEADS, columns, WIDTH: where G lies.
    """
    x, y = left.to(tl.float32), right.to(tl.float32)
    if is_mild:
        pairs = tl.dot((x * tl.exp(high)).to(DOT), tl.trans((y * tl.exp(-high)).to(DOT)), input_precision="tf32x3")
    else:
        LEVELS: tl.constexpr = 4 if C == 16 else 5 if C == 32 else 6  # of C = 64
        t = tl.arange(0, C)
        pairs = tl.where(t[:, None] == t[None, :], tl.sum(x * y, 1)[:, None], 0.0)
        for level in range(LEVELS):
            factor = _to_middle(high, low, level, g_cumsum, g_low, first, rows, head, HEADS, columns, WIDTH, C, DOT)
            found = tl.dot((x * factor).to(DOT), tl.trans((y * factor).to(DOT)), input_precision="tf32x3")
            pairs += tl.where(_between(level, C), found, 0.0)
    return pairs


@triton.jit
def channel_pairs(
    left, right, g_cumsum, g_low, first, rows, head,
    HEADS: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """P ``[C, C]`` fp32 for the rows of a chunk of one head of left and right ``[B, T, HEADS, K]``; 0 above the
    diagonal."""
    t = tl.arange(0, C)
    result = tl.zeros((C, C), tl.float32)
    for begin in range(0, K, BLOCK_K):
        kk = begin + tl.arange(0, BLOCK_K)
        x = load_rows(left, first, t, rows, head, HEADS, kk, K)  # [C, BLOCK_K]
        y = load_rows(right, first, t, rows, head, HEADS, kk, K)  # [C, BLOCK_K]
        high, low = channel_sums(g_cumsum, g_low, first, t, rows, head, HEADS, kk, K, DOT)
        high_end, _low_end = channel_totals(g_cumsum, g_low, first, rows, head, HEADS, kk, K, DOT)
        result += block_pairs(
            x, y, high, low, mild(high_end, y, DOT), g_cumsum, g_low, first, rows, head, HEADS, kk, K, C, DOT
        )
    return tl.where(t[:, None] >= t[None, :], result, 0.0)


@triton.jit
def without_diagonal(d_pairs, C: tl.constexpr, DOT: tl.constexpr):
    """Of ``[C, C]``: what lies below the diagonal, in DOT, and the diagonal ``[C]``."""
    t = tl.arange(0, C)
    own = tl.sum(tl.where(t[:, None] == t[None, :], d_pairs, 0.0), 1)
    return tl.where(t[:, None] > t[None, :], d_pairs, 0.0).to(DOT), own


@triton.jit
def block_pairs_backward(
    left, right, d_entry, d_exit, d_below, high, low, high_end, low_end, is_mild,
    g_cumsum, g_low, first, rows, head, HEADS, columns, WIDTH, C: tl.constexpr, DOT: tl.constexpr, HAS_DG: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of channels through pairs of rows and through the states at the chunk's ends.

    A pair s = t knows no decay: with ``own`` the gradient of P's diagonal (:func:`without_diagonal`) the caller adds
    ``own right`` and ``own left``; nothing there reaches the gates.

    Args:
        left, right, high, low, is_mild: as for ``block_pairs``; ``high_end``, ``low_end`` are G at the last row.
        d_entry, d_exit: ``[C, BLOCK_K]`` fp32, the gradients of ``exp(G_t) left_t`` and ``exp(G_C - G_s) right_s``.
        d_below: of P below the diagonal, ``[C, C]`` in DOT.

    Returns:
        Those of left, of right and, where HAS_DG, of the gates, each ``[C, BLOCK_K]`` fp32.
    """
    t = tl.arange(0, C)
    if is_mild:
        grow = tl.exp(-high)
        at_right = (right.to(tl.float32) * grow).to(DOT)
        d_left = tl.dot(d_below, at_right, d_entry, input_precision="tf32x3")
        shrink = tl.exp(high)
        at_left = (left.to(tl.float32) * shrink).to(DOT)
        d_gates = at_left.to(tl.float32) * d_left
        d_left *= shrink
        d_right = d_exit * tl.exp(high_end)[None, :]
        through = tl.sum(at_right.to(tl.float32) * d_right, 0)
        d_right = tl.dot(tl.trans(d_below), at_left, d_right, input_precision="tf32x3")
        if HAS_DG:
            # A pair of which both rows are behind a gate is added and taken away again: from the same rounded operands,
            # and in a mild chunk it is no larger than what stays.
            d_gates -= at_right.to(tl.float32) * d_right
            d_gates = matrix_sums(t[:, None] <= t[None, :], d_gates, DOT) + through[None, :]
        d_right *= grow
    else:
        LEVELS: tl.constexpr = 4 if C == 16 else 5 if C == 32 else 6  # of C = 64
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
