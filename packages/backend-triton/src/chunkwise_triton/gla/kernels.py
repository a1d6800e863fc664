"""Kernels of GLA beside the shared ones: outputs, and all gradients, of a chunk.

Inside a chunk, with ``G_t`` the sum of the gates up to row t, a number for each channel of the keys, and S the entry
state:

    P[t, s] = sum_d exp(G_t - G_s)[d] q_t[d] k_s[d]  (s <= t)
    o = scale ((exp(G) q) S + P v)        S' = diag(exp(G_C)) S + sum_t (exp(G_C - G_t) k_t) v_t^T

Widths are taken BLOCK_K columns of K and BV columns of V at a time, powers of two; columns past K and V are masked.
DOT is the dtype of the products' operands; every product accumulates in fp32.
"""

import triton
import triton.language as tl

from chunkwise_triton.common.channel_gates import channel_sums, channel_totals, decay_to_end
from chunkwise_triton.common.channel_products import (
    block_pairs,
    block_pairs_backward,
    channel_pairs,
    mild,
    without_diagonal,
)
from chunkwise_triton.common.chunk_products import exact_products, row_products, state_products
from chunkwise_triton.common.chunks import locate, sequence_span
from chunkwise_triton.common.tiles import load_rows, load_state, store_rows


@triton.jit(do_not_specialize=["T", "per_row"])
def output_kernel(
    q, k, v, g_cumsum, g_low, states, o, scale, cu_seqlens, table, T, per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_K: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """BV columns of o of a chunk, from its entry state."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    column = tl.program_id(0) % blocks
    h = tl.program_id(0) // blocks % H
    slot = tl.program_id(0) // blocks // H
    _, first, rows = locate(slot, cu_seqlens, table, T, per_row, C, RAGGED)
    if rows <= 0:
        return
    t = tl.arange(0, C)
    vv = column * BV + tl.arange(0, BV)
    attention = tl.zeros((C, C), tl.float32)
    tile = tl.zeros((C, BV), tl.float32)
    for begin in range(0, K, BLOCK_K):
        kk = begin + tl.arange(0, BLOCK_K)
        q_tile = load_rows(q, first, t, rows, h, H, kk, K)  # [C, BLOCK_K]
        k_tile = load_rows(k, first, t, rows, h, H, kk, K)  # [C, BLOCK_K]
        high, low = channel_sums(g_cumsum, g_low, first, t, rows, h, H, kk, K, DOT)
        high_end, _low_end = channel_totals(g_cumsum, g_low, first, rows, h, H, kk, K, DOT)
        s = load_state(states, slot, h, H, K, V, kk, vv).to(DOT)  # [BLOCK_K, BV]
        query = (q_tile.to(tl.float32) * tl.exp(high)).to(DOT)
        tile += tl.dot(query, s, input_precision="tf32x3")
        attention += block_pairs(
            q_tile, k_tile, high, low, mild(high_end, k_tile, DOT), g_cumsum, g_low, first, rows, h, H, kk, K, C, DOT
        )
    attention = tl.where(t[:, None] >= t[None, :], attention, 0.0).to(DOT)
    x = load_rows(v, first, t, rows, h, H, vv, V).to(DOT)  # [C, BV]
    tile += tl.dot(attention, x, input_precision="tf32x3")
    store_rows(o, tile * scale, first, t, rows, h, H, vv, V)


@triton.jit(do_not_specialize=["T", "per_row"])
def gradient_kernel(
    q, k, v, g_cumsum, g_low, states, d_o, d_states, initial_state, d_final, dq, dk, dv, dg, scale,
    cu_seqlens, table, T, per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_K: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, RAGGED: tl.constexpr,
    HAS_DO: tl.constexpr, HAS_DG: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr,
):  # fmt: skip
    """All gradients of a chunk of a head, from its entry state and the gradient of its exit state; dg where HAS_DG."""
    slot = tl.program_id(0) // H
    h = tl.program_id(0) % H
    n, first, rows = locate(slot, cu_seqlens, table, T, per_row, C, RAGGED)
    if rows <= 0:
        return
    t = tl.arange(0, C)
    if HAS_DO:
        attention = channel_pairs(q, k, g_cumsum, g_low, first, rows, h, H, K, C, BLOCK_K, DOT)
        attention = (attention * scale).to(DOT)
        d_pairs = row_products(d_o, v, first, rows, h, H, V, C, BV, DOT) * scale
    else:
        d_pairs = tl.zeros((C, C), tl.float32)
    d_below, own = without_diagonal(d_pairs, C, DOT)
    for begin in range(0, V, BV):
        vv = begin + tl.arange(0, BV)
        dv_tile = tl.zeros((C, BV), tl.float32)
        for begin_k in range(0, K, BLOCK_K):
            kk = begin_k + tl.arange(0, BLOCK_K)
            k_tile = load_rows(k, first, t, rows, h, H, kk, K).to(tl.float32)  # [C, BLOCK_K]
            high, low = channel_sums(g_cumsum, g_low, first, t, rows, h, H, kk, K, DOT)
            high_end, low_end = channel_totals(g_cumsum, g_low, first, rows, h, H, kk, K, DOT)
            key_out = (k_tile * decay_to_end(high, low, high_end, low_end, DOT)).to(DOT)
            ds = load_state(d_states, slot, h, H, K, V, kk, vv).to(DOT)  # [BLOCK_K, BV]
            dv_tile += tl.dot(key_out, ds, input_precision="tf32x3")
        if HAS_DO:
            d = load_rows(d_o, first, t, rows, h, H, vv, V).to(DOT)  # [C, BV]
            dv_tile += tl.dot(tl.trans(attention), d, input_precision="tf32x3")
        store_rows(dv, dv_tile, first, t, rows, h, H, vv, V)
    begin, length = sequence_span(n, cu_seqlens, T, RAGGED)
    starts = first == begin
    ends = first + rows == begin + length
    for begin_k in range(0, K, BLOCK_K):
        kk = begin_k + tl.arange(0, BLOCK_K)
        dq_tile, _by_error, dk_tile, through = state_products(
            v, d_o, v, states, d_states, slot, first, rows, h, kk, H, K, V, C, BV, DOT, False, HAS_DO
        )
        high, low = channel_sums(g_cumsum, g_low, first, t, rows, h, H, kk, K, DOT)
        high_end, low_end = channel_totals(g_cumsum, g_low, first, rows, h, H, kk, K, DOT)
        dq_tile *= scale
        q_tile = load_rows(q, first, t, rows, h, H, kk, K)  # [C, BLOCK_K]
        k_tile = load_rows(k, first, t, rows, h, H, kk, K)  # [C, BLOCK_K]
        dq_tile, dk_tile, dg_tile = block_pairs_backward(
            q_tile, k_tile, dq_tile, dk_tile, d_below, high, low, high_end, low_end, mild(high_end, k_tile, DOT),
            g_cumsum, g_low, first, rows, h, H, kk, K, C, DOT, HAS_DG,
        )  # fmt: skip
        store_rows(dq, dq_tile + own[:, None] * k_tile.to(tl.float32), first, t, rows, h, H, kk, K)
        store_rows(dk, dk_tile + own[:, None] * q_tile.to(tl.float32), first, t, rows, h, H, kk, K)
        if HAS_DG:
            if HAS_INITIAL or HAS_FINAL:  # noqa: SIM102 (the outer one is decided when the kernel is compiled)
                if (starts & HAS_INITIAL) | (ends & HAS_FINAL):
                    through = exact_products(
                        states, d_states, initial_state, d_final, slot, n, h, kk, starts, ends,
                        H, K, V, BV, HAS_INITIAL, HAS_FINAL,
                    )  # fmt: skip
            dg_tile += (through * tl.exp(high_end))[None, :]
            store_rows(dg, dg_tile, first, t, rows, h, H, kk, K)
