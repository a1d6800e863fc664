"""Kernels of the gated delta rule. One program works on one chunk of one head.

Inside a chunk, with ``G_t`` the sum of the gates up to row t, ``D[t, s] = exp(G_t - G_s)`` and S the entry state:

    A[t, s] = beta_t D[t, s] k_t . k_s  (s < t)        M = (I + A)^-1        P[t, s] = D[t, s] q_t . k_s  (s <= t)
    u = M (beta v)      w = M (beta exp(G) k)          v_new = u - w S
    o = scale (exp(G) q S + P v_new)                   S' = exp(G_C) S + sum_t exp(G_C - G_t) k_t v_new_t^T

Shapes at loads: BK >= K and BV are powers of two, columns past K and V are masked. DOT is the dtype of the products'
operands; every product accumulates in fp32.
"""

import triton
import triton.language as tl

from chunkwise_triton.common.chunks import locate
from chunkwise_triton.common.gates import (
    chunk_gates,
    pair_decay,
    pair_gradient_to_gates,
    sum_before,
    sum_from,
)
from chunkwise_triton.common.pointers import rows_pointer, state_pointer
from chunkwise_triton.common.tril_inverse import unit_lower_inverse


@triton.jit(do_not_specialize=["T", "per_row"])
def wy_kernel(
    k, v, g, beta, inverse, w, u, cu_seqlens, table, T, per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, INVERSE_DOT: tl.constexpr,
    RAGGED: tl.constexpr, INVERT: tl.constexpr,
):  # fmt: skip
    """w and u of a chunk; M first, where INVERT, else it is read."""
    slot = tl.program_id(0) // HV
    hv = tl.program_id(0) % HV
    h = hv // (HV // H)
    _, first, rows = locate(slot, cu_seqlens, table, T, per_row, C, RAGGED)
    if rows <= 0:
        return
    t = tl.arange(0, C)
    kk = tl.arange(0, BK)
    live = t < rows
    k_tile = tl.load(
        rows_pointer(k, first, t, h, H, K, kk), mask=live[:, None] & (kk < K)[None, :], other=0.0
    )  # [C, BK]
    if INVERT:
        keys = tl.dot(k_tile.to(DOT), tl.trans(k_tile).to(DOT), input_precision="tf32x3")
    high, low = chunk_gates(g, first, rows, hv, HV, C)
    b = tl.load(beta + (first + t) * HV + hv, mask=live, other=0.0).to(tl.float32)
    m_at = rows_pointer(inverse, first, t, hv, HV, C, t)
    if INVERT:
        decay = pair_decay(high, low, C)
        a = tl.where(t[:, None] > t[None, :], decay * keys * b[:, None], 0.0)
        m = unit_lower_inverse(a, C, INVERSE_DOT).to(DOT)
        tl.store(m_at, m, mask=live[:, None])
    else:
        m = tl.load(m_at, mask=live[:, None], other=0.0).to(DOT)  # [C, C]
    scaled_k = (k_tile.to(tl.float32) * (b * tl.exp(high))[:, None]).to(DOT)
    w_tile = tl.dot(m, scaled_k, input_precision="tf32x3")
    tl.store(
        rows_pointer(w, first, t, hv, HV, K, kk), w_tile.to(w.dtype.element_ty),
        mask=live[:, None] & (kk < K)[None, :],
    )  # fmt: skip
    for begin in range(0, V, BV):
        vv = begin + tl.arange(0, BV)
        mask = live[:, None] & (vv < V)[None, :]
        v_tile = tl.load(rows_pointer(v, first, t, hv, HV, V, vv), mask=mask, other=0.0)  # [C, BV]
        u_tile = tl.dot(m, (v_tile.to(tl.float32) * b[:, None]).to(DOT), input_precision="tf32x3")
        tl.store(rows_pointer(u, first, t, hv, HV, V, vv), u_tile.to(u.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "per_row"])
def output_kernel(
    q, k, v_new, g, states, o, scale, cu_seqlens, table, T, per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """o of a chunk, from v_new and the entry state."""
    slot = tl.program_id(0) // HV
    hv = tl.program_id(0) % HV
    h = hv // (HV // H)
    _, first, rows = locate(slot, cu_seqlens, table, T, per_row, C, RAGGED)
    if rows <= 0:
        return
    t = tl.arange(0, C)
    kk = tl.arange(0, BK)
    live = t < rows
    key_mask = live[:, None] & (kk < K)[None, :]
    q_tile = tl.load(rows_pointer(q, first, t, h, H, K, kk), mask=key_mask, other=0.0)  # [C, BK]
    k_tile = tl.load(rows_pointer(k, first, t, h, H, K, kk), mask=key_mask, other=0.0)  # [C, BK]
    scores = tl.dot(q_tile.to(DOT), tl.trans(k_tile).to(DOT), input_precision="tf32x3")
    high, low = chunk_gates(g, first, rows, hv, HV, C)
    attention = (scores * pair_decay(high, low, C)).to(DOT)
    from_start = tl.exp(high)[:, None]
    for begin in range(0, V, BV):
        vv = begin + tl.arange(0, BV)
        mask = live[:, None] & (vv < V)[None, :]
        x = tl.load(rows_pointer(v_new, first, t, hv, HV, V, vv), mask=mask, other=0.0).to(DOT)  # [C, BV]
        s_mask = (kk < K)[:, None] & (vv < V)[None, :]
        s = tl.load(state_pointer(states, slot, hv, HV, K, V, kk, vv), mask=s_mask, other=0.0).to(DOT)  # [BK, BV]
        tile = tl.dot(q_tile.to(DOT), s, input_precision="tf32x3") * from_start
        tile += tl.dot(attention, x, input_precision="tf32x3")
        tl.store(rows_pointer(o, first, t, hv, HV, V, vv), (tile * scale).to(o.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "per_row"])
def local_gradient_kernel(
    q, k, g, d_o, d_v_new, scale, cu_seqlens, table, T, per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """What the outputs of a chunk give to its own v_new: ``scale P^T d_o``."""
    slot = tl.program_id(0) // HV
    hv = tl.program_id(0) % HV
    h = hv // (HV // H)
    _, first, rows = locate(slot, cu_seqlens, table, T, per_row, C, RAGGED)
    if rows <= 0:
        return
    t = tl.arange(0, C)
    kk = tl.arange(0, BK)
    live = t < rows
    key_mask = live[:, None] & (kk < K)[None, :]
    q_tile = tl.load(rows_pointer(q, first, t, h, H, K, kk), mask=key_mask, other=0.0)  # [C, BK]
    k_tile = tl.load(rows_pointer(k, first, t, h, H, K, kk), mask=key_mask, other=0.0)  # [C, BK]
    scores = tl.dot(q_tile.to(DOT), tl.trans(k_tile).to(DOT), input_precision="tf32x3")
    high, low = chunk_gates(g, first, rows, hv, HV, C)
    attention = tl.trans(scores * pair_decay(high, low, C) * scale).to(DOT)
    for begin in range(0, V, BV):
        vv = begin + tl.arange(0, BV)
        mask = live[:, None] & (vv < V)[None, :]
        d = tl.load(rows_pointer(d_o, first, t, hv, HV, V, vv), mask=mask, other=0.0).to(DOT)  # [C, BV]
        tile = tl.dot(attention, d, input_precision="tf32x3")
        tl.store(rows_pointer(d_v_new, first, t, hv, HV, V, vv), tile.to(d_v_new.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "per_row", "plane"])
def state_gradient_kernel(
    q, k, g_cumsum, to_end, beta, inverse, v_new, states, d_o, d_v_new, d_states, dq, dk, sums, state_sums, plane,
    scale, cu_seqlens, table, T, per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr, RAGGED: tl.constexpr,
    HAS_DO: tl.constexpr,
):  # fmt: skip
    """What reaches q, k and the gates of a chunk through its entry and its exit state, for BLOCK_K columns.

    dq and dk ``[B, T, H, K]`` fp32, summed over the value heads of a key head. ``sums`` ``[BK / BLOCK_K, 3, B, T, HV]``
    fp32 keeps, for these columns, the row sums that gates and beta need: by the query, by the error (``exp(G) S^T k``)
    and by the exit; ``state_sums`` ``[BK / BLOCK_K, slots, HV]`` the product of the entry state and the gradient of the
    exit state. ``plane`` is B T HV.
    """
    blocks: tl.constexpr = BK // BLOCK_K
    column = tl.program_id(0) % blocks
    h = tl.program_id(0) // blocks % H
    slot = tl.program_id(0) // blocks // H
    _, first, rows = locate(slot, cu_seqlens, table, T, per_row, C, RAGGED)
    if rows <= 0:
        return
    t = tl.arange(0, C)
    kk = column * BLOCK_K + tl.arange(0, BLOCK_K)
    live = t < rows
    key_mask = live[:, None] & (kk < K)[None, :]
    q_tile = tl.load(rows_pointer(q, first, t, h, H, K, kk), mask=key_mask, other=0.0)  # [C, BLOCK_K]
    k_tile = tl.load(rows_pointer(k, first, t, h, H, K, kk), mask=key_mask, other=0.0)  # [C, BLOCK_K]
    dq_tile = tl.zeros((C, BLOCK_K), tl.float32)
    dk_tile = tl.zeros((C, BLOCK_K), tl.float32)
    for j in range(HV // H):
        hv = h * (HV // H) + j
        row = (first + t) * HV + hv
        from_start = tl.exp(tl.load(g_cumsum + row, mask=live, other=0.0))
        end = tl.load(to_end + row, mask=live, other=0.0)
        b = tl.load(beta + row, mask=live, other=0.0).to(tl.float32)
        by_error = tl.zeros((C, BLOCK_K), tl.float32)
        by_exit = tl.zeros((C, BLOCK_K), tl.float32)
        by_query = tl.zeros((C, BLOCK_K), tl.float32)
        state_sum = tl.zeros((), tl.float32)
        for begin in range(0, V, BV):
            vv = begin + tl.arange(0, BV)
            mask = live[:, None] & (vv < V)[None, :]
            s_mask = (kk < K)[:, None] & (vv < V)[None, :]
            x = tl.load(rows_pointer(v_new, first, t, hv, HV, V, vv), mask=mask, other=0.0).to(DOT)  # [C, BV]
            dx = tl.load(rows_pointer(d_v_new, first, t, hv, HV, V, vv), mask=mask, other=0.0).to(DOT)  # [C, BV]
            s = tl.load(state_pointer(states, slot, hv, HV, K, V, kk, vv), mask=s_mask, other=0.0)  # [BLOCK_K, BV]
            ds = tl.load(state_pointer(d_states, slot, hv, HV, K, V, kk, vv), mask=s_mask, other=0.0)  # [BLOCK_K, BV]
            state_sum += tl.sum(s.to(tl.float32) * ds.to(tl.float32))
            by_exit += tl.dot(x, tl.trans(ds).to(DOT), input_precision="tf32x3")
            by_error += tl.dot(dx, tl.trans(s).to(DOT), input_precision="tf32x3")
            if HAS_DO:
                d = tl.load(rows_pointer(d_o, first, t, hv, HV, V, vv), mask=mask, other=0.0).to(DOT)  # [C, BV]
                by_query += tl.dot(d, tl.trans(s).to(DOT), input_precision="tf32x3")
        m = tl.load(rows_pointer(inverse, first, t, hv, HV, C, t), mask=live[:, None], other=0.0)  # [C, C]
        by_error = tl.dot(tl.trans(m).to(DOT), by_error.to(DOT), input_precision="tf32x3") * from_start[:, None]
        by_exit = by_exit * end[:, None]
        by_query = by_query * (from_start * scale)[:, None]
        dq_tile += by_query
        dk_tile += by_exit - by_error * b[:, None]
        k_wide = k_tile.to(tl.float32)
        at = sums + (column * 3).to(tl.int64) * plane + row
        tl.store(at, tl.sum(by_query * q_tile.to(tl.float32), 1), mask=live)
        tl.store(at + plane, tl.sum(by_error * k_wide, 1), mask=live)
        tl.store(at + 2 * plane, tl.sum(by_exit * k_wide, 1), mask=live)
        slots = tl.num_programs(0) // (H * blocks)
        tl.store(state_sums + (column.to(tl.int64) * slots + slot) * HV + hv, state_sum)
    tl.store(rows_pointer(dq, first, t, h, H, K, kk), dq_tile, mask=key_mask)
    tl.store(rows_pointer(dk, first, t, h, H, K, kk), dk_tile, mask=key_mask)


@triton.jit(do_not_specialize=["T", "per_row", "plane"])
def pair_gradient_kernel(
    q, k, v, g, beta, inverse, v_new, whole, d_o, d_v_new, state_dq, state_dk, sums, state_sums, plane,
    dq, dk, dv, dg, d_beta, scale, cu_seqlens, table, T, per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PARTS: tl.constexpr, DOT: tl.constexpr, RAGGED: tl.constexpr,
    HAS_DO: tl.constexpr,
):  # fmt: skip
    """What reaches the inputs through pairs of rows of a chunk; adds what came through the states (in PARTS parts).

    v_new = M (beta (v - exp(G) k S)): with d_rhs = M^T d_v_new, dA = -d_rhs v_new^T. Value heads share q and k, so
    the gradients of the score matrices are summed over them before they are multiplied by q and k.
    """
    h = tl.program_id(0) % H
    slot = tl.program_id(0) // H
    _, first, rows = locate(slot, cu_seqlens, table, T, per_row, C, RAGGED)
    if rows <= 0:
        return
    t = tl.arange(0, C)
    kk = tl.arange(0, BK)
    live = t < rows
    key_mask = live[:, None] & (kk < K)[None, :]
    q_tile = tl.load(rows_pointer(q, first, t, h, H, K, kk), mask=key_mask, other=0.0).to(DOT)  # [C, BK]
    k_tile = tl.load(rows_pointer(k, first, t, h, H, K, kk), mask=key_mask, other=0.0).to(DOT)  # [C, BK]
    keys = tl.dot(k_tile, tl.trans(k_tile), input_precision="tf32x3")
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="tf32x3")
    d_scores = tl.zeros((C, C), tl.float32)
    d_keys = tl.zeros((C, C), tl.float32)
    for j in range(HV // H):
        hv = h * (HV // H) + j
        row = (first + t) * HV + hv
        b = tl.load(beta + row, mask=live, other=0.0).to(tl.float32)
        m = tl.load(rows_pointer(inverse, first, t, hv, HV, C, t), mask=live[:, None], other=0.0)  # [C, C]
        m_t = tl.trans(m).to(DOT)
        by_rhs = tl.zeros((C, C), tl.float32)
        by_output = tl.zeros((C, C), tl.float32)
        b_grad = tl.zeros((C,), tl.float32)
        for begin in range(0, V, BV):
            vv = begin + tl.arange(0, BV)
            mask = live[:, None] & (vv < V)[None, :]
            dx = tl.load(rows_pointer(d_v_new, first, t, hv, HV, V, vv), mask=mask, other=0.0).to(DOT)  # [C, BV]
            d_rhs = tl.dot(m_t, dx, input_precision="tf32x3")
            tl.store(rows_pointer(dv, first, t, hv, HV, V, vv), (d_rhs * b[:, None]).to(dv.dtype.element_ty), mask=mask)
            v_tile = tl.load(rows_pointer(v, first, t, hv, HV, V, vv), mask=mask, other=0.0).to(tl.float32)  # [C, BV]
            b_grad += tl.sum(d_rhs * v_tile, 1)
            x = tl.load(rows_pointer(v_new, first, t, hv, HV, V, vv), mask=mask, other=0.0).to(DOT)  # [C, BV]
            by_rhs += tl.dot(d_rhs.to(DOT), tl.trans(x), input_precision="tf32x3")
            if HAS_DO:
                d = tl.load(rows_pointer(d_o, first, t, hv, HV, V, vv), mask=mask, other=0.0).to(DOT)  # [C, BV]
                by_output += tl.dot(d, tl.trans(x), input_precision="tf32x3")
        high, low = chunk_gates(g, first, rows, hv, HV, C)
        decay = pair_decay(high, low, C)
        by_rhs = tl.where(t[:, None] > t[None, :], by_rhs * decay, 0.0)  # of k k^T, but for -beta
        weighted = by_rhs * keys
        by_output = by_output * decay * scale
        d_keys += by_rhs * b[:, None]
        d_scores += by_output
        query_sum = tl.zeros((C,), tl.float32)
        error_sum = tl.zeros((C,), tl.float32)
        exit_sum = tl.zeros((C,), tl.float32)
        g_grad = pair_gradient_to_gates(by_output * scores - weighted * b[:, None], C)
        slots = tl.num_programs(0) // H
        for part in range(PARTS):
            at = sums + part * 3 * plane + row
            query_sum += tl.load(at, mask=live, other=0.0)
            error_sum += tl.load(at + plane, mask=live, other=0.0)
            exit_sum += tl.load(at + 2 * plane, mask=live, other=0.0)
            state_sum = tl.load(state_sums + (slot + part * slots).to(tl.int64) * HV + hv)
            g_grad += state_sum * tl.load(whole + slot.to(tl.int64) * HV + hv)
        g_grad += sum_from(query_sum - b * error_sum, C) + sum_before(exit_sum, C)
        b_grad -= error_sum + tl.sum(weighted, 1)
        tl.store(dg + row, g_grad.to(dg.dtype.element_ty), mask=live)
        tl.store(d_beta + row, b_grad.to(d_beta.dtype.element_ty), mask=live)
    dk_tile = tl.load(rows_pointer(state_dk, first, t, h, H, K, kk), mask=key_mask, other=0.0)  # [C, BK] fp32
    d_keys_dot = d_keys.to(DOT)
    dk_tile -= tl.dot(d_keys_dot, k_tile, input_precision="tf32x3")
    dk_tile -= tl.dot(tl.trans(d_keys_dot), k_tile, input_precision="tf32x3")
    d_scores_dot = d_scores.to(DOT)
    dk_tile += tl.dot(tl.trans(d_scores_dot), q_tile, input_precision="tf32x3")
    tl.store(rows_pointer(dk, first, t, h, H, K, kk), dk_tile.to(dk.dtype.element_ty), mask=key_mask)
    dq_tile = tl.load(rows_pointer(state_dq, first, t, h, H, K, kk), mask=key_mask, other=0.0)  # [C, BK] fp32
    dq_tile += tl.dot(d_scores_dot, k_tile, input_precision="tf32x3")
    tl.store(rows_pointer(dq, first, t, h, H, K, kk), dq_tile.to(dq.dtype.element_ty), mask=key_mask)
