"""Gates of a chunk: sums of log decays, and the decays between rows, without cancellation.

Sums are taken in fp64 and kept as two fp32 numbers, so that the difference of two sums is right to an ulp of the
difference, not of the sums. All gates are natural-log decays.
"""

import triton
import triton.language as tl

from chunkwise_triton.common.tiles import chunk_program, load_vector, store_vector

# exp is 0 in fp32 far above this; a gate of -inf would give NaN in inf - inf.
LOWEST_GATE = tl.constexpr(-1e4)


@triton.jit
def chunk_gates(g, first, rows, head, HEADS, C: tl.constexpr, GATED: tl.constexpr):
    """Inclusive sums of g ``[B, T, HEADS]`` over the rows of a chunk as (high, low), each ``[C]`` fp32.

    Not GATED: g is not read, and the sums are zeros that nothing uses.
    """
    t = tl.arange(0, C)
    high = tl.zeros((C,), tl.float32)
    low = tl.zeros((C,), tl.float32)
    if GATED:
        sums = tl.cumsum(tl.maximum(load_vector(g, first, t, rows, head, HEADS), LOWEST_GATE).to(tl.float64), 0)
        high = sums.to(tl.float32)
        low = (sums - high.to(tl.float64)).to(tl.float32)
    return high, low


@triton.jit
def store_gates(high, low, g_cumsum, to_end, whole, slot, first, rows, head, HEADS, C: tl.constexpr):
    """Write the sums G ``[B, T, HEADS]``, ``exp(G_C - G_t)`` and, ``[slots, HEADS]``, ``exp(G_C)`` of a chunk."""
    t = tl.arange(0, C)
    last = t == C - 1  # rows past the chunk's last add nothing
    high_end = tl.sum(tl.where(last, high, 0.0), 0)
    low_end = tl.sum(tl.where(last, low, 0.0), 0)
    store_vector(g_cumsum, high, first, t, rows, head, HEADS)
    store_vector(to_end, tl.exp((high_end - high) + (low_end - low)), first, t, rows, head, HEADS)
    tl.store(whole + slot.to(tl.int64) * HEADS + head, tl.exp(high_end))


@triton.jit(do_not_specialize=["T", "per_row"])
def gate_kernel(
    g, g_cumsum, g_low, to_end, whole, cu_seqlens, table, T, per_row,
    HV: tl.constexpr, C: tl.constexpr, RAGGED: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """``store_gates`` alone; LOW: also what rounding took from the sums, into g_low ``[B, T, HV]``."""
    slot, hv, first, rows = chunk_program(HV, cu_seqlens, table, T, per_row, C, RAGGED)
    if rows > 0:
        high, low = chunk_gates(g, first, rows, hv, HV, C, True)
        store_gates(high, low, g_cumsum, to_end, whole, slot, first, rows, hv, HV, C)
        if LOW:
            store_vector(g_low, low, first, tl.arange(0, C), rows, hv, HV)


@triton.jit
def pair_decay(high, low, C: tl.constexpr, TRANSPOSED: tl.constexpr = False):
    """``exp(G_t - G_s)`` ``[C, C]`` for s <= t, zero above the diagonal; masked before exp, so nothing overflows.

    TRANSPOSED: s are the rows.
    """
    t = tl.arange(0, C)
    exponent = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    keep = t[:, None] >= t[None, :]
    if TRANSPOSED:
        exponent = (high[None, :] - high[:, None]) + (low[None, :] - low[:, None])
        keep = t[:, None] <= t[None, :]
    return tl.where(keep, tl.exp(tl.where(keep, exponent, 0.0)), 0.0)


@triton.jit
def decayed(x, high, low, C: tl.constexpr, GATED: tl.constexpr, TRANSPOSED: tl.constexpr = False):
    """``exp(G_t - G_s) x[t, s]`` for s <= t, zero above the diagonal; not GATED: of x itself."""
    if GATED:
        result = x * pair_decay(high, low, C, TRANSPOSED)
    else:
        t = tl.arange(0, C)
        result = tl.where(t[:, None] <= t[None, :] if TRANSPOSED else t[:, None] >= t[None, :], x, 0.0)
    return result


@triton.jit
def pair_gradient_to_gates(grad, C: tl.constexpr):
    """``dg_j = sum_{t >= j} sum_{s < j} grad[t, s]``: what pairs of rows s < t give to the gates between them.

    The diagonal is left out, and nothing large is added and taken away again, so that gates under strong decay keep
    their digits.
    """
    t = tl.arange(0, C)
    below = tl.where(t[:, None] > t[None, :], grad, 0.0)
    between = tl.cumsum(below, 1) - below
    return tl.sum(tl.where(t[:, None] >= t[None, :], between, 0.0), 0)


@triton.jit
def sum_from(x, C: tl.constexpr):
    """``y_j = sum_{t >= j} x_t``."""
    t = tl.arange(0, C)
    return tl.sum(tl.where(t[:, None] >= t[None, :], x[:, None], 0.0), 0)


@triton.jit
def sum_before(x, C: tl.constexpr):
    """``y_j = sum_{s < j} x_s``."""
    t = tl.arange(0, C)
    return tl.sum(tl.where(t[:, None] < t[None, :], x[:, None], 0.0), 0)
