"""Kernels of the DPLR delta rule. One program works on one chunk of one head.

Inside a chunk, with ``G_t`` the sum of the gates up to row t, a number for each channel of the keys, S the entry state
and all products over channels weighted by the decay between their rows:

    P_qk[t, s], P_qb[t, s] = scale <q_t, k_s>, scale <q_t, b_s> under exp(G_t - G_s)        (s <= t)
    P_ak[t, s], P_ab[t, s] = <a_t, k_s>, <a_t, b_s> under exp(G_{t-1} - G_s)                (s < t)
    M = (I - P_ab)^-1      w = -M (exp(G_{t-1}) a)      u = M P_ak v - w S
    o = scale (exp(G) q) S + P_qk v + P_qb u
    S' = diag(exp G_C) S + sum_t (exp(G_C - G_t) k_t) v_t^T + (exp(G_C - G_t) b_t) u_t^T

Widths are taken BLOCK_K columns of K and BV columns of V at a time, powers of two; columns past K and V are masked.
DOT is the dtype of the products' operands: bf16, or fp32 (tf32x3). fp16 ends where decays are small, so fp16
activations are widened. What is decayed goes through memory in that dtype. Every product accumulates in fp32.
"""

import triton
import triton.language as tl

from chunkwise_triton.common.channel_decay import (
    chunk_sums,
    decay_between,
    decay_from_start,
    meeting_pairs,
    pair_products,
    reference_rows,
    sums_over_rows,
)
from chunkwise_triton.common.channel_gates import channel_totals, decay_to_end
from chunkwise_triton.common.chunk_products import exact_products, row_products, rows_by_state
from chunkwise_triton.common.chunks import sequence_span
from chunkwise_triton.common.tiles import (
    block_program,
    chunk_program,
    load_rows,
    load_rows_above,
    load_state,
    store_rows,
)
from chunkwise_triton.common.tril_inverse import unit_lower_inverse


@triton.jit(do_not_specialize=["T", "per_row"])
def prepare_kernel(
    q, k, v, a, b, g_cumsum, g_low, d_o, inverse, q_k, q_b, a_k, q_in, k_out, b_out, w, u, d_u, whole, scale,
    cu_seqlens, table, T, per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_K: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, RAGGED: tl.constexpr,
    CENTRED: tl.constexpr, INVERT: tl.constexpr, KEEP: tl.constexpr, SOLVE: tl.constexpr,
    HAS_DO: tl.constexpr,
):  # fmt: skip
    """What a chunk knows without its entry state.

    INVERT, of the forward: M is computed (stored where KEEP), and P_qk and P_qb are stored. Else, of the backward, M is
    read, P_qk and P_ak are stored, and d_u gets P_qb^T d_o where HAS_DO. SOLVE: u gets M P_ak v.
    """
    slot, h, first, rows = chunk_program(H, cu_seqlens, table, T, per_row, C, RAGGED)
    if rows <= 0:
        return
    t = tl.arange(0, C)
    if INVERT or HAS_DO:
        by_k, by_b = pair_products(
            q, k, b, g_cumsum, g_low, first, rows, h, H, K, C, BLOCK_K, DOT, CENTRED, False
        )  # fmt: skip
        store_rows(q_k, by_k * scale, first, t, rows, h, H, t, C)
        by_b = (by_b * scale).to(DOT)
        if INVERT:
            store_rows(q_b, by_b, first, t, rows, h, H, t, C)
        else:
            for begin in range(0, V, BV):
                vv = begin + tl.arange(0, BV)
                d = load_rows(d_o, first, t, rows, h, H, vv, V).to(DOT)  # [C, BV]
                tile = tl.dot(tl.trans(by_b), d, input_precision="tf32x3")
                store_rows(d_u, tile, first, t, rows, h, H, vv, V)
    by_k, by_b = pair_products(
        a, k, b, g_cumsum, g_low, first, rows, h, H, K, C, BLOCK_K, DOT, CENTRED, True
    )  # fmt: skip
    if INVERT:
        # In fp32: a and b are the caller's, and what fp16 holds is no bound for them.
        m = unit_lower_inverse(-by_b, C, tl.float32).to(DOT)
        if KEEP:
            store_rows(inverse, m, first, t, rows, h, H, t, C)
    else:
        m = load_rows(inverse, first, t, rows, h, H, t, C).to(DOT)  # [C, C]
        store_rows(a_k, by_k, first, t, rows, h, H, t, C)
    for begin in range(0, K, BLOCK_K):
        kk = begin + tl.arange(0, BLOCK_K)
        high, low = chunk_sums(g_cumsum, g_low, first, t, rows, h, H, kk, K, DOT)
        end_high, end_low = channel_totals(g_cumsum, g_low, first, rows, h, H, kk, K, DOT)
        q_tile = load_rows(q, first, t, rows, h, H, kk, K).to(tl.float32)  # [C, BLOCK_K]
        store_rows(q_in, q_tile * decay_from_start(high, low, DOT) * scale, first, t, rows, h, H, kk, K)
        to_end = decay_to_end(high, low, end_high, end_low, DOT)
        k_tile = load_rows(k, first, t, rows, h, H, kk, K).to(tl.float32)  # [C, BLOCK_K]
        store_rows(k_out, k_tile * to_end, first, t, rows, h, H, kk, K)
        b_tile = load_rows(b, first, t, rows, h, H, kk, K).to(tl.float32)  # [C, BLOCK_K]
        store_rows(b_out, b_tile * to_end, first, t, rows, h, H, kk, K)
        high, low = chunk_sums(g_cumsum, g_low, first, t - 1, rows, h, H, kk, K, DOT)
        a_tile = load_rows(a, first, t, rows, h, H, kk, K).to(tl.float32)  # [C, BLOCK_K]
        a_in = (a_tile * -decay_from_start(high, low, DOT)).to(DOT)
        store_rows(w, tl.dot(m, a_in, input_precision="tf32x3"), first, t, rows, h, H, kk, K)
        at = (slot.to(tl.int64) * H + h) * K + kk
        tl.store(whole + at, decay_from_start(end_high, end_low, DOT), mask=kk < K)
    if SOLVE:
        solve = tl.dot(m, by_k.to(DOT), input_precision="tf32x3").to(DOT)
        for begin in range(0, V, BV):
            vv = begin + tl.arange(0, BV)
            v_tile = load_rows(v, first, t, rows, h, H, vv, V).to(DOT)  # [C, BV]
            store_rows(u, tl.dot(solve, v_tile, input_precision="tf32x3"), first, t, rows, h, H, vv, V)


@triton.jit(do_not_specialize=["T", "per_row"])
def low_rank_output_kernel(
    q_in, v, u, q_k, q_b, states, o, cu_seqlens, table, T, per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_K: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """o of a chunk, from its entry state and u."""
    slot, h, first, rows = chunk_program(H, cu_seqlens, table, T, per_row, C, RAGGED)
    if rows <= 0:
        return
    t = tl.arange(0, C)
    by_k = load_rows(q_k, first, t, rows, h, H, t, C).to(DOT)  # [C, C]
    by_b = load_rows(q_b, first, t, rows, h, H, t, C).to(DOT)  # [C, C]
    for begin in range(0, V, BV):
        vv = begin + tl.arange(0, BV)
        tile = tl.zeros((C, BV), tl.float32)
        for begin_k in range(0, K, BLOCK_K):
            kk = begin_k + tl.arange(0, BLOCK_K)
            q_tile = load_rows(q_in, first, t, rows, h, H, kk, K).to(DOT)  # [C, BLOCK_K]
            s = load_state(states, slot, h, H, K, V, kk, vv).to(DOT)  # [BLOCK_K, BV]
            tile += tl.dot(q_tile, s, input_precision="tf32x3")
        x = load_rows(v, first, t, rows, h, H, vv, V).to(DOT)  # [C, BV]
        tile += tl.dot(by_k, x, input_precision="tf32x3")
        x = load_rows(u, first, t, rows, h, H, vv, V).to(DOT)  # [C, BV]
        tile += tl.dot(by_b, x, input_precision="tf32x3")
        store_rows(o, tile, first, t, rows, h, H, vv, V)


@triton.jit(do_not_specialize=["T", "per_row"])
def value_gradient_kernel(
    v, u, inverse, q_k, a_k, k_out, d_o, d_u, d_states, dv, d_qk, d_qb, d_ak, d_ab, scale,
    cu_seqlens, table, T, per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_K: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, RAGGED: tl.constexpr,
    HAS_DO: tl.constexpr,
):  # fmt: skip
    """dv, and the gradients of the four P, from d_u, which becomes ``d_rhs = M^T d_u`` in place.

    u = M rhs with rhs = P_ak v + (exp(G_{t-1}) a) S, so dP_ab = d_rhs u^T and dP_ak = d_rhs v^T. What is stored of the
    gradients above the diagonals means nothing.
    """
    slot, h, first, rows = chunk_program(H, cu_seqlens, table, T, per_row, C, RAGGED)
    if rows <= 0:
        return
    t = tl.arange(0, C)
    m = load_rows(inverse, first, t, rows, h, H, t, C).to(DOT)  # [C, C]
    reads = load_rows(a_k, first, t, rows, h, H, t, C).to(DOT)  # [C, C]
    by_v = tl.zeros((C, C), tl.float32)
    by_u = tl.zeros((C, C), tl.float32)
    for begin in range(0, V, BV):
        vv = begin + tl.arange(0, BV)
        d = load_rows(d_u, first, t, rows, h, H, vv, V).to(DOT)  # [C, BV]
        d_rhs = tl.dot(tl.trans(m), d, input_precision="tf32x3").to(DOT)
        store_rows(d_u, d_rhs, first, t, rows, h, H, vv, V)
        x = load_rows(v, first, t, rows, h, H, vv, V).to(DOT)  # [C, BV]
        by_v += tl.dot(d_rhs, tl.trans(x), input_precision="tf32x3")
        x = load_rows(u, first, t, rows, h, H, vv, V).to(DOT)  # [C, BV]
        by_u += tl.dot(d_rhs, tl.trans(x), input_precision="tf32x3")
        dv_tile = tl.dot(tl.trans(reads), d_rhs, input_precision="tf32x3")
        for begin_k in range(0, K, BLOCK_K):
            kk = begin_k + tl.arange(0, BLOCK_K)
            k_tile = load_rows(k_out, first, t, rows, h, H, kk, K).to(DOT)  # [C, BLOCK_K]
            ds = load_state(d_states, slot, h, H, K, V, kk, vv).to(DOT)  # [BLOCK_K, BV]
            dv_tile += tl.dot(k_tile, ds, input_precision="tf32x3")
        if HAS_DO:
            attention = load_rows(q_k, first, t, rows, h, H, t, C).to(DOT)  # [C, C]
            d = load_rows(d_o, first, t, rows, h, H, vv, V).to(DOT)  # [C, BV]
            dv_tile += tl.dot(tl.trans(attention), d, input_precision="tf32x3")
        store_rows(dv, dv_tile, first, t, rows, h, H, vv, V)
    store_rows(d_ak, by_v, first, t, rows, h, H, t, C)
    store_rows(d_ab, by_u, first, t, rows, h, H, t, C)
    if HAS_DO:
        by_v = row_products(d_o, v, first, rows, h, H, V, C, BV, DOT) * scale
        store_rows(d_qk, by_v, first, t, rows, h, H, t, C)
        by_u = row_products(d_o, u, first, rows, h, H, V, C, BV, DOT) * scale
        store_rows(d_qb, by_u, first, t, rows, h, H, t, C)


@triton.jit
def own_row(d, before: tl.constexpr):
    """``d[t, t - before]`` ``[C, 1]`` of ``[C, C]``; zero where there is no such row."""
    t = tl.arange(0, d.shape[0])
    return tl.sum(tl.where(t[:, None] == t[None, :] + before, d.to(tl.float32), 0.0), 1)[:, None]


@triton.jit
def own_column(d, after: tl.constexpr):
    """``d[s + after, s]`` ``[C, 1]`` of ``[C, C]``; zero where there is no such row."""
    t = tl.arange(0, d.shape[0])
    one = tl.sum(tl.where(t[:, None] == t[None, :] + after, d.to(tl.float32), 0.0), 0)
    return one[:, None]


@triton.jit(do_not_specialize=["T", "per_row"])
def key_gradient_kernel(
    q, k, v, a, b, u, g_cumsum, g_low, states, d_o, d_rhs, d_states, initial_state, d_final,
    d_qk, d_qb, d_ak, d_ab, dq, dk, da, db, dg, scale, cu_seqlens, table, T, per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_K: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, RAGGED: tl.constexpr,
    CENTRED: tl.constexpr, HAS_DO: tl.constexpr, HAS_DG: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr,
):  # fmt: skip
    """Gradients of BLOCK_K columns of q, k, a, b and the gates, through both states of a chunk and its pairs of rows.

    Pairs whose product knows no decay, (t, t) of q and (t, t - 1) of a, are taken apart, in fp32: where gates are
    strong they are all that is large, and the gates' gradient must not hold them.
    """
    PARTS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    LEVELS: tl.constexpr = 1 if CENTRED else 4 if C == 16 else 5 if C == 32 else 6
    part, slot, h, n, first, rows = block_program(PARTS, H, cu_seqlens, table, T, per_row, C, RAGGED)
    if rows <= 0:
        return
    t = tl.arange(0, C)
    kk = part * BLOCK_K + tl.arange(0, BLOCK_K)
    dq_tile = tl.zeros((C, BLOCK_K), tl.float32)
    dk_tile = tl.zeros((C, BLOCK_K), tl.float32)
    da_tile = tl.zeros((C, BLOCK_K), tl.float32)
    db_tile = tl.zeros((C, BLOCK_K), tl.float32)
    dg_tile = tl.zeros((C, BLOCK_K), tl.float32)
    # What the gates up to a row, and up to the row before, receive from it: summed once, at the end.
    at_row = tl.zeros((C, BLOCK_K), tl.float32)
    at_before = tl.zeros((C, BLOCK_K), tl.float32)

    # Through pairs of rows. Tiles are loaded where they are used: registers are what this kernel runs out of.
    for level in range(LEVELS):
        middle, left, right = reference_rows(level, C, CENTRED)
        m_high, m_low = chunk_sums(g_cumsum, g_low, first, middle, rows, h, H, kk, K, DOT)
        high, low = chunk_sums(g_cumsum, g_low, first, t, rows, h, H, kk, K, DOT)
        on_right = tl.where(right[:, None], decay_between(m_high, m_low, high, low, DOT), 0.0)
        tile = load_rows(k, first, t, rows, h, H, kk, K).to(tl.float32)  # [C, BLOCK_K]
        k_dot = (tile * on_right).to(DOT)
        tile = load_rows(b, first, t, rows, h, H, kk, K).to(tl.float32)  # [C, BLOCK_K]
        b_dot = (tile * on_right).to(DOT)
        by_k = tl.zeros((C, BLOCK_K), tl.float32)
        by_b = tl.zeros((C, BLOCK_K), tl.float32)
        if HAS_DO:
            pairs = meeting_pairs(level, C, CENTRED, False)
            weights_k = tl.where(pairs, load_rows(d_qk, first, t, rows, h, H, t, C), 0.0).to(DOT)  # [C, C]
            weights_b = tl.where(pairs, load_rows(d_qb, first, t, rows, h, H, t, C), 0.0).to(DOT)  # [C, C]
            by_left = tl.dot(weights_k, k_dot, input_precision="tf32x3")
            by_left += tl.dot(weights_b, b_dot, input_precision="tf32x3")
            on_left = tl.where(left[:, None], decay_between(high, low, m_high, m_low, DOT), 0.0)
            dq_tile += by_left * on_left
            tile = load_rows(q, first, t, rows, h, H, kk, K).to(tl.float32)  # [C, BLOCK_K]
            left_dot = (tile * on_left).to(DOT)
            by_k += tl.dot(tl.trans(weights_k), left_dot, input_precision="tf32x3")
            by_b += tl.dot(tl.trans(weights_b), left_dot, input_precision="tf32x3")
            if HAS_DG:
                # From the rounded operands, so that both ends of a pair give the gates the same number.
                if CENTRED:
                    at_row += by_left * left_dot.to(tl.float32)
                else:
                    dg_tile += sums_over_rows(by_left * left_dot.to(tl.float32), level, C, "from", False, DOT)
        pairs = meeting_pairs(level, C, CENTRED, True)
        weights_k = tl.where(pairs, load_rows(d_ak, first, t, rows, h, H, t, C), 0.0).to(DOT)  # [C, C]
        weights_b = tl.where(pairs, load_rows(d_ab, first, t, rows, h, H, t, C), 0.0).to(DOT)  # [C, C]
        by_left = tl.dot(weights_k, k_dot, input_precision="tf32x3")
        by_left += tl.dot(weights_b, b_dot, input_precision="tf32x3")
        high, low = chunk_sums(g_cumsum, g_low, first, t - 1, rows, h, H, kk, K, DOT)
        on_left = tl.where(left[:, None], decay_between(high, low, m_high, m_low, DOT), 0.0)
        da_tile += by_left * on_left
        tile = load_rows(a, first, t, rows, h, H, kk, K).to(tl.float32)  # [C, BLOCK_K]
        left_dot = (tile * on_left).to(DOT)
        by_k += tl.dot(tl.trans(weights_k), left_dot, input_precision="tf32x3")
        by_b += tl.dot(tl.trans(weights_b), left_dot, input_precision="tf32x3")
        dk_tile += by_k * on_right
        db_tile += by_b * on_right
        if HAS_DG:
            at_right = by_k * k_dot.to(tl.float32) + by_b * b_dot.to(tl.float32)
            if CENTRED:
                # Every pair is in both sums; with the undecayed ones left out they cancel to an ulp of what decays.
                at_row -= at_right
                at_before += by_left * left_dot.to(tl.float32)
            else:
                dg_tile += sums_over_rows(by_left * left_dot.to(tl.float32), level, C, "after", False, DOT)
                dg_tile += sums_over_rows(at_right, level, C, "before", False, DOT)

    # Through the states, and through pairs that know no decay. No loads are moved over a barrier: without them all
    # tiles of the kernel are fetched in front, and spilled.
    tl.debug_barrier()
    if HAS_DO:
        high, low = chunk_sums(g_cumsum, g_low, first, t, rows, h, H, kk, K, DOT)
        by_state = rows_by_state(d_o, states, slot, first, rows, h, kk, HV, K, V, C, BV, DOT)
        by_state *= decay_from_start(high, low, DOT) * scale
        dq_tile += by_state
        tile = load_rows(q, first, t, rows, h, H, kk, K).to(tl.float32)  # [C, BLOCK_K]
        if HAS_DG:
            at_row += by_state * tile
        own = own_row(load_rows(d_qk, first, t, rows, h, H, t, C), 0)
        dk_tile += own * tile
        dq_tile += own * load_rows(k, first, t, rows, h, H, kk, K).to(tl.float32)
        own = own_row(load_rows(d_qb, first, t, rows, h, H, t, C), 0)
        db_tile += own * tile
        dq_tile += own * load_rows(b, first, t, rows, h, H, kk, K).to(tl.float32)
        store_rows(dq, dq_tile, first, t, rows, h, H, kk, K)
        tl.debug_barrier()
    high, low = chunk_sums(g_cumsum, g_low, first, t - 1, rows, h, H, kk, K, DOT)
    by_state = rows_by_state(d_rhs, states, slot, first, rows, h, kk, HV, K, V, C, BV, DOT)
    by_state *= decay_from_start(high, low, DOT)
    da_tile += by_state
    tile = load_rows(a, first, t, rows, h, H, kk, K).to(tl.float32)  # [C, BLOCK_K]
    if HAS_DG:
        at_before += by_state * tile
    tile = load_rows(a, first, t + 1, rows, h, H, kk, K).to(tl.float32)  # [C, BLOCK_K]
    weights = load_rows(d_ak, first, t, rows, h, H, t, C)  # [C, C]
    dk_tile += own_column(weights, 1) * tile
    da_tile += own_row(weights, 1) * load_rows_above(k, first, t, rows, h, H, kk, K).to(tl.float32)
    weights = load_rows(d_ab, first, t, rows, h, H, t, C)  # [C, C]
    db_tile += own_column(weights, 1) * tile
    da_tile += own_row(weights, 1) * load_rows_above(b, first, t, rows, h, H, kk, K).to(tl.float32)
    store_rows(da, da_tile, first, t, rows, h, H, kk, K)
    tl.debug_barrier()
    high, low = chunk_sums(g_cumsum, g_low, first, t, rows, h, H, kk, K, DOT)
    end_high, end_low = channel_totals(g_cumsum, g_low, first, rows, h, H, kk, K, DOT)
    to_end = decay_to_end(high, low, end_high, end_low, DOT)
    by_state = rows_by_state(v, d_states, slot, first, rows, h, kk, HV, K, V, C, BV, DOT) * to_end
    store_rows(dk, dk_tile + by_state, first, t, rows, h, H, kk, K)
    leaving = by_state * load_rows(k, first, t, rows, h, H, kk, K).to(tl.float32)
    by_state = rows_by_state(u, d_states, slot, first, rows, h, kk, HV, K, V, C, BV, DOT) * to_end
    store_rows(db, db_tile + by_state, first, t, rows, h, H, kk, K)
    leaving += by_state * load_rows(b, first, t, rows, h, H, kk, K).to(tl.float32)
    if HAS_DG:
        dg_tile += sums_over_rows(leaving, 0, C, "before", True, DOT)
        dg_tile += sums_over_rows(at_row, 0, C, "from", True, DOT)
        dg_tile += sums_over_rows(at_before, 0, C, "after", True, DOT)
        start, length = sequence_span(n, cu_seqlens, T, RAGGED)
        through = exact_products(
            states, d_states, initial_state, d_final, slot, n, h, kk, first == start, first + rows == start + length,
            H, K, V, BV, HAS_INITIAL, HAS_FINAL,
        )  # fmt: skip
        dg_tile += (through * decay_from_start(end_high, end_low, DOT))[None, :]
        store_rows(dg, dg_tile, first, t, rows, h, H, kk, K)
