"""What the rows of a chunk give one another and the outputs, for all recurrences with a scalar decay.

Inside a chunk, with ``G_t`` the sum of the gates up to row t and S the entry state:

    P[t, s] = exp(G_t - G_s) q_t . k_s  (s <= t)        o = scale (exp(G) q S + P v_new)

Not GATED: every decay is 1, and no gate is read.
"""

import triton
import triton.language as tl

from chunkwise_triton.common.gates import chunk_gates, decayed
from chunkwise_triton.common.tiles import chunk_program, load_rows, load_state, store_rows


@triton.jit
def row_products(
    x, y, first, rows, head,
    HEADS: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """``x_t . y_s`` ``[C, C]`` fp32 for the rows of a chunk of one head of x and y ``[B, T, HEADS, K]``."""
    t = tl.arange(0, C)
    result = tl.zeros((C, C), tl.float32)
    for begin in range(0, K, BLOCK_K):
        kk = begin + tl.arange(0, BLOCK_K)
        x_tile = load_rows(x, first, t, rows, head, HEADS, kk, K).to(DOT)  # [C, BLOCK_K]
        y_tile = load_rows(y, first, t, rows, head, HEADS, kk, K).to(DOT)  # [C, BLOCK_K]
        result += tl.dot(x_tile, tl.trans(y_tile), input_precision="tf32x3")
    return result


@triton.jit
def rows_by_state(
    x, states, slot, first, rows, head, kk,
    HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """``x S^T`` ``[C, columns]`` fp32: rows of a chunk ``[B, T, HEADS, V]`` times columns kk of a state."""
    BLOCK_K: tl.constexpr = kk.shape[0]
    t = tl.arange(0, C)
    result = tl.zeros((C, BLOCK_K), tl.float32)
    for begin in range(0, V, BV):
        vv = begin + tl.arange(0, BV)
        x_tile = load_rows(x, first, t, rows, head, HEADS, vv, V).to(DOT)  # [C, BV]
        s = load_state(states, slot, head, HEADS, K, V, kk, vv).to(DOT)  # [BLOCK_K, BV]
        result += tl.dot(x_tile, tl.trans(s), input_precision="tf32x3")
    return result


@triton.jit
def state_products(
    v_new, d_o, d_rhs, states, d_states, slot, first, rows, hv, kk,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr,
    DELTA: tl.constexpr, HAS_DO: tl.constexpr, ASYNC: tl.constexpr,
):  # fmt: skip
    """Rows of a chunk times columns kk of its entry state S and of the gradient dS' of its exit state.

    Returns:
        ``d_o S^T``, ``d_rhs S^T`` (zero unless DELTA) and ``v_new dS'^T``, each ``[C, BLOCK_K]`` fp32, and
        ``sum_v S dS'`` ``[BLOCK_K]``.
    """
    BLOCK_K: tl.constexpr = kk.shape[0]
    # Where products run beside what follows them (ASYNC), a tile that feeds one as it is, and is read into registers
    # too, has one place in shared memory, which Triton (3.6, 3.7) loads anew while the product of the turn before may
    # still read it. There sum_v S dS' is the diagonal of one more product. Not so of states in fp32: they feed d_o S^T
    # through a tile of their own, which Triton waits for, and for all products with it. Without d_o nothing is loaded
    # ahead.
    SIXTEEN_BIT: tl.constexpr = ASYNC and tl.float32 != DOT
    DIAGONAL: tl.constexpr = SIXTEEN_BIT and states.dtype.element_ty == DOT
    STAGES: tl.constexpr = 1 if SIXTEEN_BIT and not DIAGONAL and not HAS_DO else None
    t = tl.arange(0, C)
    by_error = tl.zeros((C, BLOCK_K), tl.float32)
    by_exit = tl.zeros((C, BLOCK_K), tl.float32)
    by_query = tl.zeros((C, BLOCK_K), tl.float32)
    products = tl.zeros((BLOCK_K,), tl.float32)
    pairs = tl.zeros((BLOCK_K, BLOCK_K), tl.float32)
    for begin in tl.range(0, V, BV, num_stages=STAGES):
        vv = begin + tl.arange(0, BV)
        ds = load_state(d_states, slot, hv, HV, K, V, kk, vv)  # [BLOCK_K, BV]
        x = load_rows(v_new, first, t, rows, hv, HV, vv, V).to(DOT)  # [C, BV]
        by_exit += tl.dot(x, tl.trans(ds).to(DOT), input_precision="tf32x3")
        s = load_state(states, slot, hv, HV, K, V, kk, vv)  # [BLOCK_K, BV]
        if DELTA:
            d = load_rows(d_rhs, first, t, rows, hv, HV, vv, V).to(DOT)  # [C, BV]
            by_error += tl.dot(d, tl.trans(s).to(DOT), input_precision="tf32x3")
        if HAS_DO:
            d = load_rows(d_o, first, t, rows, hv, HV, vv, V).to(DOT)  # [C, BV]
            by_query += tl.dot(d, tl.trans(s).to(DOT), input_precision="tf32x3")
        if DIAGONAL:
            pairs += tl.dot(s, tl.trans(ds))
        else:
            products += tl.sum(s.to(tl.float32) * ds.to(tl.float32), 1)
    if DIAGONAL:
        row, column = tl.arange(0, BLOCK_K)[:, None], tl.arange(0, BLOCK_K)[None, :]
        products = tl.sum(tl.where(row == column, pairs, 0.0), 1)
    return by_query, by_error, by_exit, products


@triton.jit
def exact_products(
    states, d_states, initial_state, d_final, slot, n, head, kk, starts, ends,
    HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr,
):  # fmt: skip
    """``sum_v S dS'`` ``[BLOCK_K]`` of a chunk that starts or ends a sequence, from the call's own fp32 states there.

    The gate of a short sequence has nothing else in its gradient, and no input of 16 bit to blame for a rounded state.
    """
    total = tl.zeros((kk.shape[0],), tl.float32)
    for begin in range(0, V, BV):
        vv = begin + tl.arange(0, BV)
        s = load_state(states, slot, head, HEADS, K, V, kk, vv).to(tl.float32)  # [BLOCK_K, BV]
        if HAS_INITIAL:
            s = tl.where(starts, load_state(initial_state, n, head, HEADS, K, V, kk, vv), s)
        ds = load_state(d_states, slot, head, HEADS, K, V, kk, vv).to(tl.float32)  # [BLOCK_K, BV]
        if HAS_FINAL:
            ds = tl.where(ends, load_state(d_final, n, head, HEADS, K, V, kk, vv), ds)
        total += tl.sum(s * ds, 1)
    return total


@triton.jit(do_not_specialize=["T", "per_row"])
def output_kernel(
    q, k, v_new, g, states, o, scale, cu_seqlens, table, T, per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_K: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, RAGGED: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """o of a chunk, from v_new (v, where there is no delta rule) and the entry state."""
    slot, hv, first, rows = chunk_program(HV, cu_seqlens, table, T, per_row, C, RAGGED)
    if rows <= 0:
        return
    h = hv // (HV // H)
    t = tl.arange(0, C)
    high, low = chunk_gates(g, first, rows, hv, HV, C, GATED)
    scores = row_products(q, k, first, rows, h, H, K, C, BLOCK_K, DOT)
    attention = decayed(scores, high, low, C, GATED).to(DOT)
    from_start = tl.exp(high)[:, None]
    for begin in range(0, V, BV):
        vv = begin + tl.arange(0, BV)
        tile = tl.zeros((C, BV), tl.float32)
        for begin_k in range(0, K, BLOCK_K):
            kk = begin_k + tl.arange(0, BLOCK_K)
            q_tile = load_rows(q, first, t, rows, h, H, kk, K).to(DOT)  # [C, BLOCK_K]
            s = load_state(states, slot, hv, HV, K, V, kk, vv).to(DOT)  # [BLOCK_K, BV]
            tile += tl.dot(q_tile, s, input_precision="tf32x3")
        x = load_rows(v_new, first, t, rows, hv, HV, vv, V).to(DOT)  # [C, BV]
        if GATED:
            tile *= from_start
        tile += tl.dot(attention, x, input_precision="tf32x3")
        store_rows(o, tile * scale, first, t, rows, hv, HV, vv, V)
