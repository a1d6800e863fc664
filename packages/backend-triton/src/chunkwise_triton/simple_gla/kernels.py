"""Kernels of simple GLA beside the shared ones: a forward in one pass, and all gradients of a chunk.

Inside a chunk, with ``G_t`` the sum of the gates up to row t, ``D[t, s] = exp(G_t - G_s)`` and S the entry state:

    P[t, s] = D[t, s] q_t . k_s  (s <= t)
    o = scale (exp(G) q S + P v)        S' = exp(G_C) S + sum_t exp(G_C - G_t) k_t v_t^T

Widths are taken BLOCK_K columns of K and BV columns of V at a time, powers of two; columns past K and V are masked.
DOT is the dtype of the products' operands; every product accumulates in fp32. Not GATED: every decay is 1.
"""

import triton
import triton.language as tl

from chunkwise_triton.common.chunk_products import exact_products, row_products, state_products
from chunkwise_triton.common.chunks import locate, sequence_span, span
from chunkwise_triton.common.gates import (
    chunk_gates,
    decayed,
    pair_gradient_to_gates,
    sum_before,
    sum_from,
)
from chunkwise_triton.common.tiles import (
    load_rows,
    load_state,
    load_vector,
    store_rows,
    store_state,
    store_vector,
)


@triton.jit(do_not_specialize=["T", "per_row"])
def fused_kernel(
    q, k, v, g_cumsum, g_low, to_end, whole, o, initial_state, final_state, scale,
    cu_seqlens, first_slots, T, per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr, DOT: tl.constexpr, RAGGED: tl.constexpr,
    GATED: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """o, and the state behind the last token, with no state written in between: a program carries BV columns of one."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    column = tl.program_id(0) % blocks
    h = tl.program_id(0) // blocks % H
    n = tl.program_id(0) // blocks // H
    first, length, slot = span(n, cu_seqlens, first_slots, T, per_row, C, RAGGED)
    t = tl.arange(0, C)
    kk = tl.arange(0, BK)
    vv = column * BV + tl.arange(0, BV)
    s = tl.zeros((BK, BV), tl.float32)
    if HAS_INITIAL:
        s = load_state(initial_state, n, h, H, K, V, kk, vv)  # [BK, BV] fp32
    chunks = (length + C - 1) // C
    for chunk in tl.range(0, chunks, num_stages=STAGES):
        rows = length - chunk * C
        at = first + chunk * C
        q_tile = load_rows(q, at, t, rows, h, H, kk, K).to(DOT)  # [C, BK]
        k_tile = load_rows(k, at, t, rows, h, H, kk, K).to(DOT)  # [C, BK]
        x = load_rows(v, at, t, rows, h, H, vv, V)  # [C, BV]
        high = tl.zeros((C,), tl.float32)
        low = tl.zeros((C,), tl.float32)
        if GATED:
            last = tl.minimum(t, rows - 1)  # rows past the chunk's last add nothing
            high = load_vector(g_cumsum, at, last, rows, h, H)
            low = load_vector(g_low, at, last, rows, h, H)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="tf32x3")
        attention = decayed(scores, high, low, C, GATED).to(DOT)
        tile = tl.dot(q_tile, s.to(DOT), input_precision="tf32x3")
        if GATED:
            tile *= tl.exp(high)[:, None]
        tile += tl.dot(attention, x.to(DOT), input_precision="tf32x3")
        store_rows(o, tile * scale, at, t, rows, h, H, vv, V)
        if GATED:
            s *= tl.load(whole + (slot + chunk).to(tl.int64) * H + h)
            x = x.to(tl.float32) * load_vector(to_end, at, t, rows, h, H)[:, None]
        s += tl.dot(tl.trans(k_tile), x.to(DOT), input_precision="tf32x3")
    if HAS_FINAL:
        store_state(final_state, s, n, h, H, K, V, kk, vv)


@triton.jit(do_not_specialize=["T", "per_row"])
def gradient_kernel(
    q, k, v, g, to_end, whole, states, d_o, d_states, initial_state, d_final, dq, dk, dv, dg, scale,
    cu_seqlens, table, T, per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_K: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, RAGGED: tl.constexpr,
    GATED: tl.constexpr, HAS_DO: tl.constexpr, HAS_DG: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, ASYNC: tl.constexpr,
):  # fmt: skip
    """All gradients of a chunk of a head, from its entry state and the gradient of its exit state; dg where HAS_DG."""
    slot = tl.program_id(0) // H
    h = tl.program_id(0) % H
    n, first, rows = locate(slot, cu_seqlens, table, T, per_row, C, RAGGED)
    if rows <= 0:
        return
    t = tl.arange(0, C)
    high, low = chunk_gates(g, first, rows, h, H, C, GATED)
    from_start = tl.full((C,), 1.0, tl.float32)
    end = tl.full((C,), 1.0, tl.float32)
    if GATED:
        from_start = tl.exp(high)
        end = load_vector(to_end, first, t, rows, h, H)
    if HAS_DO:
        scores = row_products(q, k, first, rows, h, H, K, C, BLOCK_K, DOT)
        d_scores = row_products(d_o, v, first, rows, h, H, V, C, BV, DOT)
        d_scores = decayed(d_scores, high, low, C, GATED) * scale
        if HAS_DG:
            g_grad = pair_gradient_to_gates(d_scores * scores, C)
        attention = (decayed(scores, high, low, C, GATED) * scale).to(DOT)
        d_scores_dot = d_scores.to(DOT)
    elif HAS_DG:
        g_grad = tl.zeros((C,), tl.float32)
    for begin in range(0, V, BV):
        vv = begin + tl.arange(0, BV)
        dv_tile = tl.zeros((C, BV), tl.float32)
        for begin_k in range(0, K, BLOCK_K):
            kk = begin_k + tl.arange(0, BLOCK_K)
            k_tile = load_rows(k, first, t, rows, h, H, kk, K).to(DOT)  # [C, BLOCK_K]
            ds = load_state(d_states, slot, h, H, K, V, kk, vv).to(DOT)  # [BLOCK_K, BV]
            dv_tile += tl.dot(k_tile, ds, input_precision="tf32x3")
        dv_tile *= end[:, None]
        if HAS_DO:
            d = load_rows(d_o, first, t, rows, h, H, vv, V).to(DOT)  # [C, BV]
            dv_tile += tl.dot(tl.trans(attention), d, input_precision="tf32x3")
        store_rows(dv, dv_tile, first, t, rows, h, H, vv, V)
    by_query_sums = tl.zeros((C,), tl.float32)
    by_exit_sums = tl.zeros((C,), tl.float32)
    through = 0.0
    for begin in range(0, K, BLOCK_K):
        kk = begin + tl.arange(0, BLOCK_K)
        dq_tile, _, dk_tile, products = state_products(
            v, d_o, v, states, d_states, slot, first, rows, h, kk, H, K, V, C, BV, DOT, False, HAS_DO, ASYNC
        )
        dq_tile *= (from_start * scale)[:, None]
        dk_tile *= end[:, None]
        k_tile = load_rows(k, first, t, rows, h, H, kk, K)  # [C, BLOCK_K]
        q_tile = load_rows(q, first, t, rows, h, H, kk, K)  # [C, BLOCK_K]
        if HAS_DG:
            by_query_sums += tl.sum(dq_tile * q_tile.to(tl.float32), 1)
            by_exit_sums += tl.sum(dk_tile * k_tile.to(tl.float32), 1)
            through += tl.sum(products, 0)
        if HAS_DO:
            dq_tile += tl.dot(d_scores_dot, k_tile.to(DOT), input_precision="tf32x3")
            dk_tile += tl.dot(tl.trans(d_scores_dot), q_tile.to(DOT), input_precision="tf32x3")
        store_rows(dq, dq_tile, first, t, rows, h, H, kk, K)
        store_rows(dk, dk_tile, first, t, rows, h, H, kk, K)
    if HAS_DG:
        if HAS_INITIAL or HAS_FINAL:
            begin, length = sequence_span(n, cu_seqlens, T, RAGGED)
            starts = first == begin
            ends = first + rows == begin + length
            if (starts & HAS_INITIAL) | (ends & HAS_FINAL):
                through = 0.0
                for begin_k in range(0, K, BLOCK_K):
                    through += tl.sum(
                        exact_products(
                            states, d_states, initial_state, d_final, slot, n, h, begin_k + tl.arange(0, BLOCK_K),
                            starts, ends, H, K, V, BV, HAS_INITIAL, HAS_FINAL,
                        ),
                        0,
                    )  # fmt: skip
        through *= tl.load(whole + slot.to(tl.int64) * H + h)
        g_grad += through + sum_from(by_query_sums, C) + sum_before(by_exit_sums, C)
        store_vector(dg, g_grad, first, t, rows, h, H)
