"""Gates of a chunk: sums of log decays, and the decays between rows, without cancellation.

Sums are taken in fp64 and kept as two fp32 numbers, so that the difference of two sums is right to an ulp of the
difference, not of the sums. All gates are natural-log decays.
"""

import triton
import triton.language as tl

from chunkwise_triton.common.chunks import locate

# exp is 0 in fp32 far above this; a gate of -inf would give NaN in inf - inf.
LOWEST_GATE = tl.constexpr(-1e4)


@triton.jit
def chunk_gates(g, first, rows, head, HEADS, C: tl.constexpr):
    """Inclusive sums of g ``[B, T, HEADS]`` over the rows of a chunk as (high, low), each ``[C]`` fp32."""
    t = tl.arange(0, C)
    values = tl.load(g + (first + t) * HEADS + head, mask=t < rows, other=0.0).to(tl.float32)
    values = tl.maximum(values, LOWEST_GATE)
    sums = tl.cumsum(values.to(tl.float64), 0)
    high = sums.to(tl.float32)
    return high, (sums - high.to(tl.float64)).to(tl.float32)


@triton.jit(do_not_specialize=["T", "per_row"])
def gate_kernel(
    g, g_cumsum, to_end, whole, cu_seqlens, table, T, per_row,
    HV: tl.constexpr, C: tl.constexpr, HEADS: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Of every chunk: the inclusive sums G ``[B, T, HV]``, ``exp(G_C - G_t)`` and ``exp(G_C)`` ``[slots, HV]``."""
    blocks: tl.constexpr = (HV + HEADS - 1) // HEADS
    slot = tl.program_id(0) // blocks
    _, first, rows = locate(slot, cu_seqlens, table, T, per_row, C, RAGGED)
    if rows <= 0:
        return
    t = tl.arange(0, C)
    hv = tl.program_id(0) % blocks * HEADS + tl.arange(0, HEADS)
    mask = (t < rows)[:, None] & (hv < HV)[None, :]
    at = (first + t[:, None]) * HV + hv[None, :]
    values = tl.maximum(tl.load(g + at, mask=mask, other=0.0).to(tl.float32), LOWEST_GATE)  # [C, HEADS]
    sums = tl.cumsum(values.to(tl.float64), 0)
    total = tl.sum(values.to(tl.float64), 0)
    tl.store(g_cumsum + at, sums.to(tl.float32), mask=mask)
    tl.store(to_end + at, tl.exp((total[None, :] - sums).to(tl.float32)), mask=mask)
    tl.store(whole + slot.to(tl.int64) * HV + hv, tl.exp(total.to(tl.float32)), mask=hv < HV)


@triton.jit
def pair_decay(high, low, C: tl.constexpr):
    """``exp(G_t - G_s)`` ``[C, C]`` for s <= t, zero above the diagonal; masked before exp, so nothing overflows."""
    t = tl.arange(0, C)
    keep = t[:, None] >= t[None, :]
    exponent = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    return tl.where(keep, tl.exp(tl.where(keep, exponent, 0.0)), 0.0)


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
