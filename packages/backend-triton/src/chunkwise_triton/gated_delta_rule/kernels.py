"""Kernels of the gated delta rule. One program works on one chunk of one head.

Inside a chunk, with ``G_t`` the sum of the gates up to row t, ``D[t, s] = exp(G_t - G_s)`` and S the entry state:

    A[t, s] = beta_t D[t, s] k_t . k_s  (s < t)        M = (I + A)^-1        P[t, s] = D[t, s] q_t . k_s  (s <= t)
    u = M (beta v)      w = M (beta exp(G) k)          v_new = u - w S
    o = scale (exp(G) q S + P v_new)                   S' = exp(G_C) S + sum_t exp(G_C - G_t) k_t v_new_t^T

Widths are taken BLOCK_K columns of K and BV columns of V at a time, powers of two; columns past K and V are masked.
DOT is the dtype of the products' operands; every product accumulates in fp32.
"""

import triton
import triton.language as tl

from chunkwise_triton.common.chunk_products import exact_products, row_products, state_products
from chunkwise_triton.common.chunks import sequence_span
from chunkwise_triton.common.gates import (
    chunk_gates,
    decayed,
    pair_decay,
    pair_gradient_to_gates,
    store_gates,
    sum_before,
    sum_from,
)
from chunkwise_triton.common.tiles import (
    block_program,
    chunk_program,
    load_rows,
    load_vector,
    store_rows,
    store_vector,
)
from chunkwise_triton.common.tril_inverse import unit_lower_inverse


@triton.jit(do_not_specialize=["T", "per_row"])
def wy_kernel(
    k, v, g, beta, inverse, w, u, g_cumsum, to_end, whole, cu_seqlens, table, T, per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_K: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, INVERSE_DOT: tl.constexpr,
    RAGGED: tl.constexpr, GATED: tl.constexpr, INVERT: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Gate sums, w and u of a chunk; M first, where INVERT (stored where KEEP), else it is read."""
    slot, hv, first, rows = chunk_program(HV, cu_seqlens, table, T, per_row, C, RAGGED)
    if rows <= 0:
        return
    h = hv // (HV // H)
    t = tl.arange(0, C)
    high, low = chunk_gates(g, first, rows, hv, HV, C, GATED)
    if GATED:
        store_gates(high, low, g_cumsum, to_end, whole, slot, first, rows, hv, HV, C)
    b = load_vector(beta, first, t, rows, hv, HV)
    if INVERT:
        keys = row_products(k, k, first, rows, h, H, K, C, BLOCK_K, DOT)
        a = tl.where(t[:, None] > t[None, :], decayed(keys, high, low, C, GATED) * b[:, None], 0.0)
        m = unit_lower_inverse(a, C, INVERSE_DOT).to(DOT)
        if KEEP:
            store_rows(inverse, m, first, t, rows, hv, HV, t, C)
    else:
        m = load_rows(inverse, first, t, rows, hv, HV, t, C).to(DOT)  # [C, C]
    from_start = b
    if GATED:
        from_start *= tl.exp(high)
    for begin in range(0, K, BLOCK_K):
        kk = begin + tl.arange(0, BLOCK_K)
        k_tile = load_rows(k, first, t, rows, h, H, kk, K).to(tl.float32)  # [C, BLOCK_K]
        w_tile = tl.dot(m, (k_tile * from_start[:, None]).to(DOT), input_precision="tf32x3")
        store_rows(w, w_tile, first, t, rows, hv, HV, kk, K)
    for begin in range(0, V, BV):
        vv = begin + tl.arange(0, BV)
        v_tile = load_rows(v, first, t, rows, hv, HV, vv, V).to(tl.float32)  # [C, BV]
        u_tile = tl.dot(m, (v_tile * b[:, None]).to(DOT), input_precision="tf32x3")
        store_rows(u, u_tile, first, t, rows, hv, HV, vv, V)


@triton.jit(do_not_specialize=["T", "per_row"])
def local_gradient_kernel(
    q, k, g, d_o, d_v_new, scale, cu_seqlens, table, T, per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_K: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, RAGGED: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """What the outputs of a chunk give to its own v_new: ``scale P^T d_o``."""
    _, hv, first, rows = chunk_program(HV, cu_seqlens, table, T, per_row, C, RAGGED)
    if rows <= 0:
        return
    h = hv // (HV // H)
    t = tl.arange(0, C)
    high, low = chunk_gates(g, first, rows, hv, HV, C, GATED)
    scores = row_products(k, q, first, rows, h, H, K, C, BLOCK_K, DOT)
    attention = (decayed(scores, high, low, C, GATED, TRANSPOSED=True) * scale).to(DOT)
    for begin in range(0, V, BV):
        vv = begin + tl.arange(0, BV)
        d = load_rows(d_o, first, t, rows, hv, HV, vv, V).to(DOT)  # [C, BV]
        tile = tl.dot(attention, d, input_precision="tf32x3")
        store_rows(d_v_new, tile, first, t, rows, hv, HV, vv, V)


@triton.jit(do_not_specialize=["T", "per_row"])
def solve_gradient_kernel(
    v, beta, inverse, d_v_new, dv, sums, cu_seqlens, table, T, per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_K: tl.constexpr, BV: tl.constexpr, PARTS: tl.constexpr, DOT: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Through the triangular solve ``v_new = M rhs``: d_v_new becomes ``d_rhs = M^T d_v_new``, in place.

    Gives dv, and in ``sums[..., 0]`` what d_rhs gives to beta by way of v.
    """
    _, hv, first, rows = chunk_program(HV, cu_seqlens, table, T, per_row, C, RAGGED)
    if rows <= 0:
        return
    t = tl.arange(0, C)
    b = load_vector(beta, first, t, rows, hv, HV)
    m = load_rows(inverse, first, t, rows, hv, HV, t, C).to(DOT)  # [C, C]
    by_value = tl.zeros((C,), tl.float32)
    for begin in range(0, V, BV):
        vv = begin + tl.arange(0, BV)
        dx = load_rows(d_v_new, first, t, rows, hv, HV, vv, V).to(DOT)  # [C, BV]
        d_rhs = tl.dot(tl.trans(m), dx, input_precision="tf32x3")
        store_rows(d_v_new, d_rhs, first, t, rows, hv, HV, vv, V)
        store_rows(dv, d_rhs * b[:, None], first, t, rows, hv, HV, vv, V)
        v_tile = load_rows(v, first, t, rows, hv, HV, vv, V).to(tl.float32)  # [C, BV]
        by_value += tl.sum(d_rhs * v_tile, 1)
    store_vector(sums, by_value, first, t, rows, hv * (3 * PARTS + 1), HV * (3 * PARTS + 1))


@triton.jit(do_not_specialize=["T", "per_row"])
def state_gradient_kernel(
    q, k, g_cumsum, to_end, beta, v_new, states, d_o, d_rhs, d_states, initial_state, d_final,
    dq, dk, sums, state_sums, scale, cu_seqlens, table, T, per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_K: tl.constexpr, BV: tl.constexpr, PARTS: tl.constexpr, DOT: tl.constexpr, RAGGED: tl.constexpr,
    GATED: tl.constexpr, HAS_DO: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr,
    ASYNC: tl.constexpr,
):  # fmt: skip
    """What reaches q, k and the gates of a chunk through its entry and its exit state, for BLOCK_K columns.

    dq and dk ``[B, T, H, K]`` fp32, summed over the value heads of a key head. ``sums`` ``[B, T, HV, 1 + 3 PARTS]``
    fp32 keeps, for each block of columns, the row sums that gates and beta need: by the query, by the error
    (``exp(G) S^T k``) and by the exit; ``state_sums`` ``[slots, HV, PARTS]`` the product of the entry state and the
    gradient of the exit state.
    """
    part, slot, h, n, first, rows = block_program(PARTS, H, cu_seqlens, table, T, per_row, C, RAGGED)
    if rows <= 0:
        return
    begin, length = sequence_span(n, cu_seqlens, T, RAGGED)
    starts = (first == begin) & HAS_INITIAL
    ends = (first + rows == begin + length) & HAS_FINAL
    t = tl.arange(0, C)
    kk = part * BLOCK_K + tl.arange(0, BLOCK_K)
    dq_tile = tl.zeros((C, BLOCK_K), tl.float32)
    dk_tile = tl.zeros((C, BLOCK_K), tl.float32)
    for j in range(HV // H):
        hv = h * (HV // H) + j
        by_query, by_error, by_exit, products = state_products(
            v_new, d_o, d_rhs, states, d_states, slot, first, rows, hv, kk, HV, K, V, C, BV, DOT, True, HAS_DO, ASYNC
        )
        from_start = tl.full((C,), 1.0, tl.float32)
        if GATED:
            from_start = tl.exp(load_vector(g_cumsum, first, t, rows, hv, HV))
            by_error *= from_start[:, None]
            by_exit *= load_vector(to_end, first, t, rows, hv, HV)[:, None]
        by_query *= (from_start * scale)[:, None]
        dq_tile += by_query
        dk_tile += by_exit - by_error * load_vector(beta, first, t, rows, hv, HV)[:, None]
        at = hv * (3 * PARTS + 1) + 1 + 3 * part
        # Loaded for each value head: registers are what this kernel runs out of.
        q_tile = load_rows(q, first, t, rows, h, H, kk, K).to(tl.float32)  # [C, BLOCK_K]
        k_tile = load_rows(k, first, t, rows, h, H, kk, K).to(tl.float32)  # [C, BLOCK_K]
        if GATED:
            store_vector(sums, tl.sum(by_query * q_tile, 1), first, t, rows, at, HV * (3 * PARTS + 1))
        store_vector(sums, tl.sum(by_error * k_tile, 1), first, t, rows, at + 1, HV * (3 * PARTS + 1))
        if GATED:
            store_vector(sums, tl.sum(by_exit * k_tile, 1), first, t, rows, at + 2, HV * (3 * PARTS + 1))
            if HAS_INITIAL or HAS_FINAL:  # noqa: SIM102 - the first is for the compiler, the second for the device
                if starts | ends:
                    products = exact_products(
                        states, d_states, initial_state, d_final, slot, n, hv, kk, starts, ends,
                        HV, K, V, BV, HAS_INITIAL, HAS_FINAL,
                    )  # fmt: skip
            tl.store(state_sums + (slot.to(tl.int64) * HV + hv) * PARTS + part, tl.sum(products, 0))
    store_rows(dq, dq_tile, first, t, rows, h, H, kk, K)
    store_rows(dk, dk_tile, first, t, rows, h, H, kk, K)


@triton.jit(do_not_specialize=["T", "per_row"])
def pair_gradient_kernel(
    q, k, g, beta, v_new, whole, d_o, d_rhs, state_dq, state_dk, sums, state_sums, dq, dk, dg, d_beta, scale,
    cu_seqlens, table, T, per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_K: tl.constexpr, BV: tl.constexpr, PARTS: tl.constexpr, DOT: tl.constexpr, RAGGED: tl.constexpr,
    GATED: tl.constexpr, HAS_DO: tl.constexpr,
):  # fmt: skip
    """What reaches q, k, g and beta through pairs of rows of a chunk; adds what came through the states (in PARTS).

    v_new = M (beta (v - exp(G) k S)), so dA = -d_rhs v_new^T. Value heads share q and k, so the gradients of the score
    matrices are summed over them before they are multiplied by q and k.
    """
    slot, h, first, rows = chunk_program(H, cu_seqlens, table, T, per_row, C, RAGGED)
    if rows <= 0:
        return
    t = tl.arange(0, C)
    d_scores = tl.zeros((C, C), tl.float32)
    d_keys = tl.zeros((C, C), tl.float32)
    for j in range(HV // H):
        hv = h * (HV // H) + j
        by_rhs = tl.zeros((C, C), tl.float32)
        by_output = tl.zeros((C, C), tl.float32)
        for begin in range(0, V, BV):
            vv = begin + tl.arange(0, BV)
            x = load_rows(v_new, first, t, rows, hv, HV, vv, V).to(DOT)  # [C, BV]
            d = load_rows(d_rhs, first, t, rows, hv, HV, vv, V).to(DOT)  # [C, BV]
            by_rhs += tl.dot(d, tl.trans(x), input_precision="tf32x3")
            if HAS_DO:
                d = load_rows(d_o, first, t, rows, hv, HV, vv, V).to(DOT)  # [C, BV]
                by_output += tl.dot(d, tl.trans(x), input_precision="tf32x3")
        high, low = chunk_gates(g, first, rows, hv, HV, C, GATED)
        b = load_vector(beta, first, t, rows, hv, HV)
        keep = t[:, None] > t[None, :]
        if GATED:
            decay = pair_decay(high, low, C)
            by_rhs = tl.where(keep, by_rhs * decay, 0.0)  # of k k^T, but for -beta
            by_output = by_output * decay * scale
        else:
            by_rhs = tl.where(keep, by_rhs, 0.0)
            by_output = tl.where(t[:, None] >= t[None, :], by_output * scale, 0.0)
        d_keys += by_rhs * b[:, None]
        d_scores += by_output
        # Computed for each value head: registers are what this kernel runs out of.
        weighted = by_rhs * row_products(k, k, first, rows, h, H, K, C, BLOCK_K, DOT)
        at = hv * (3 * PARTS + 1)
        b_grad = load_vector(sums, first, t, rows, at, HV * (3 * PARTS + 1)) - tl.sum(weighted, 1)
        for part in range(PARTS):
            b_grad -= load_vector(sums, first, t, rows, at + 3 * part + 2, HV * (3 * PARTS + 1))
        if GATED:
            scores = row_products(q, k, first, rows, h, H, K, C, BLOCK_K, DOT)
            g_grad = pair_gradient_to_gates(by_output * scores - weighted * b[:, None], C)
            by_state = tl.zeros((C,), tl.float32)
            by_exit = tl.zeros((C,), tl.float32)
            through = 0.0
            for part in range(PARTS):
                by_error = load_vector(sums, first, t, rows, at + 3 * part + 2, HV * (3 * PARTS + 1))
                by_state += load_vector(sums, first, t, rows, at + 3 * part + 1, HV * (3 * PARTS + 1)) - b * by_error
                by_exit += load_vector(sums, first, t, rows, at + 3 * part + 3, HV * (3 * PARTS + 1))
                through += tl.load(state_sums + (slot.to(tl.int64) * HV + hv) * PARTS + part)
            through *= tl.load(whole + slot.to(tl.int64) * HV + hv)
            g_grad += through + sum_from(by_state, C) + sum_before(by_exit, C)
            store_vector(dg, g_grad, first, t, rows, hv, HV)
        store_vector(d_beta, b_grad, first, t, rows, hv, HV)
    both_keys = (d_keys + tl.trans(d_keys)).to(DOT)
    d_scores_dot = d_scores.to(DOT)
    for begin in range(0, K, BLOCK_K):
        kk = begin + tl.arange(0, BLOCK_K)
        k_tile = load_rows(k, first, t, rows, h, H, kk, K).to(DOT)  # [C, BLOCK_K]
        q_tile = load_rows(q, first, t, rows, h, H, kk, K).to(DOT)  # [C, BLOCK_K]
        dk_tile = load_rows(state_dk, first, t, rows, h, H, kk, K)  # [C, BLOCK_K] fp32
        dk_tile -= tl.dot(both_keys, k_tile, input_precision="tf32x3")
        dk_tile += tl.dot(tl.trans(d_scores_dot), q_tile, input_precision="tf32x3")
        store_rows(dk, dk_tile, first, t, rows, h, H, kk, K)
        dq_tile = load_rows(state_dq, first, t, rows, h, H, kk, K)  # [C, BLOCK_K] fp32
        dq_tile += tl.dot(d_scores_dot, k_tile, input_precision="tf32x3")
        store_rows(dq, dq_tile, first, t, rows, h, H, kk, K)
