"""Kernels of GLA beside the scan: decayed queries and keys, outputs and gradients of a chunk.

Inside a chunk, with ``G_t`` the sum of the gates up to row t, a number for each channel of the keys, and S the entry
state:

    P[t, s] = sum_d exp(G_t - G_s)[d] q_t[d] k_s[d]  (s <= t)
    o = scale ((exp(G) q) S + P v)        S' = diag(exp(G_C)) S + sum_t (exp(G_C - G_t) k_t) v_t^T

What is common to all kernels is ``query = scale exp(G) q`` and ``key_out = exp(G_C - G) k``, of the activations' dtype,
and ``whole = exp(G_C)`` ``[slots, H, K]`` fp32. P goes the short way where it can (``channel_products``); chunks that
decay further are *steep*, and what they need is left to kernels of their own, which skip all others.

Widths are taken BLOCK_K columns of K and BV columns of V at a time, powers of two; columns past K and V are masked.
DOT is the dtype of the products' operands; every product accumulates in fp32.
"""

import triton
import triton.language as tl

from chunkwise_triton.common.channel_gates import channel_sums, channel_totals, decay_to_end, sum_channel_gates
from chunkwise_triton.common.channel_products import (
    mild,
    mild_pairs,
    mild_pairs_backward,
    robust_pairs,
    robust_pairs_backward,
    without_diagonal,
)
from chunkwise_triton.common.chunk_products import exact_products, row_products, state_products
from chunkwise_triton.common.chunks import locate, sequence_span
from chunkwise_triton.common.tiles import block_program, load_rows, load_state, store_rows

GROUP = tl.constexpr(16)
"""How many blocks a program of the steep chunks' kernels looks at."""


@triton.jit
def load_whole(whole, slot, head, HEADS, columns, K):
    """``exp(G_C)`` of some channels of a chunk; 1 past the width."""
    return tl.load(whole + (slot.to(tl.int64) * HEADS + head) * K + columns, mask=columns < K, other=1.0)


@triton.jit(do_not_specialize=["T", "per_row"])
def decay_kernel(
    q, k, g, g_cumsum, g_low, query, key_out, whole, scale, cu_seqlens, table, T, per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_K: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, RAGGED: tl.constexpr,
    SUMMED: tl.constexpr,
):  # fmt: skip
    """query, key_out and whole of BLOCK_K channels of a chunk.

    SUMMED: g_cumsum is read. Else it is written, and with fp32 operands also what rounding took from it.
    """
    parts: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    part, slot, h, _, first, rows = block_program(parts, H, cu_seqlens, table, T, per_row, C, RAGGED)
    if rows <= 0:
        return
    t = tl.arange(0, C)
    kk = part * BLOCK_K + tl.arange(0, BLOCK_K)
    if SUMMED:
        high, low = channel_sums(g_cumsum, g_low, first, t, rows, h, H, kk, K, DOT)
        high_end, low_end = channel_totals(g_cumsum, g_low, first, rows, h, H, kk, K, DOT)
    else:
        high, low = sum_channel_gates(g, first, t, rows, h, H, kk, K, DOT)
        high_end = tl.sum(tl.where(t[:, None] == C - 1, high, 0.0), 0)
        low_end = tl.sum(tl.where(t[:, None] == C - 1, low, 0.0), 0)
        store_rows(g_cumsum, high, first, t, rows, h, H, kk, K)
        if tl.float32 == DOT:
            store_rows(g_low, low, first, t, rows, h, H, kk, K)
    tl.store(whole + (slot.to(tl.int64) * H + h) * K + kk, tl.exp(high_end), mask=kk < K)
    q_tile = load_rows(q, first, t, rows, h, H, kk, K).to(tl.float32)  # [C, BLOCK_K]
    store_rows(query, q_tile * tl.exp(high) * scale, first, t, rows, h, H, kk, K)
    k_tile = load_rows(k, first, t, rows, h, H, kk, K).to(tl.float32)  # [C, BLOCK_K]
    to_end = decay_to_end(high, low, high_end, low_end, DOT)
    store_rows(key_out, k_tile * to_end, first, t, rows, h, H, kk, K)


@triton.jit
def steep_blocks(whole, slot, block, blocks, K, WIDTH: tl.constexpr, DOT: tl.constexpr):
    """Whether any of GROUP blocks of WIDTH channels of ``whole[slot]``, from ``block`` on, is steep."""
    at = block + tl.arange(0, GROUP)
    parts: tl.constexpr = (K + WIDTH - 1) // WIDTH
    columns = (at % parts)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    address = slot.to(tl.int64) * (blocks // parts) * K + (at // parts)[:, None] * K + columns
    decays = tl.load(whole + address, mask=(at < blocks)[:, None] & (columns < K), other=1.0)  # [GROUP, WIDTH]
    return not mild(tl.min(tl.min(decays, 1), 0), DOT)


@triton.jit(do_not_specialize=["T", "per_row"])
def steep_pairs_kernel(
    q, k, g_cumsum, g_low, whole, pairs, scale, cu_seqlens, table, T, per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_K: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, RAGGED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """``scale P`` ``[B, T, H, C]`` of the steep chunks among those of GROUP heads; WIDTH is K or more."""
    groups: tl.constexpr = (H + GROUP - 1) // GROUP
    slot = tl.program_id(0) // groups
    head = tl.program_id(0) % groups * GROUP
    _, first, rows = locate(slot, cu_seqlens, table, T, per_row, C, RAGGED)
    if rows <= 0:
        return
    if steep_blocks(whole, slot, head, H, K, WIDTH, DOT):
        t = tl.arange(0, C)
        for h in range(head, tl.minimum(head + GROUP, H)):
            if not mild(tl.min(load_whole(whole, slot, h, H, tl.arange(0, WIDTH), K), 0), DOT):
                found = robust_pairs(q, k, g_cumsum, g_low, first, rows, h, H, K, C, BLOCK_K, DOT)
                store_rows(pairs, found * scale, first, t, rows, h, H, t, C)


@triton.jit
def chosen_pairs(attention, least, pairs, first, rows, h, H, C: tl.constexpr, DOT: tl.constexpr):
    """``scale P`` ``[C, C]`` in DOT, 0 above the diagonal: the sum of ``mild_pairs``, or what a steep chunk stored."""
    t = tl.arange(0, C)
    is_mild = mild(least, DOT)
    stored = load_rows(pairs, first, t, tl.where(is_mild, 0, rows), h, H, t, C).to(DOT)  # [C, C]
    return tl.where(is_mild, tl.where(t[:, None] >= t[None, :], attention, 0.0).to(DOT), stored)


@triton.jit(do_not_specialize=["T", "per_row"])
def output_kernel(
    query, key_out, whole, pairs, v, states, o, cu_seqlens, table, T, per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_K: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """BV columns of o of a chunk, from its entry state."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    column, slot, h, _, first, rows = block_program(blocks, H, cu_seqlens, table, T, per_row, C, RAGGED)
    if rows <= 0:
        return
    t = tl.arange(0, C)
    vv = column * BV + tl.arange(0, BV)
    attention = tl.zeros((C, C), tl.float32)
    tile = tl.zeros((C, BV), tl.float32)
    least = 1.0
    for begin in range(0, K, BLOCK_K):
        kk = begin + tl.arange(0, BLOCK_K)
        q_tile = load_rows(query, first, t, rows, h, H, kk, K).to(DOT)  # [C, BLOCK_K]
        s = load_state(states, slot, h, H, K, V, kk, vv).to(DOT)  # [BLOCK_K, BV]
        tile += tl.dot(q_tile, s, input_precision="tf32x3")
        k_tile = load_rows(key_out, first, t, rows, h, H, kk, K)  # [C, BLOCK_K]
        decay = load_whole(whole, slot, h, H, kk, K)
        attention += mild_pairs(q_tile, k_tile, decay, DOT)
        least = tl.minimum(least, tl.min(decay, 0))
    attention = chosen_pairs(attention, least, pairs, first, rows, h, H, C, DOT)
    x = load_rows(v, first, t, rows, h, H, vv, V).to(DOT)  # [C, BV]
    tile += tl.dot(attention, x, input_precision="tf32x3")
    store_rows(o, tile, first, t, rows, h, H, vv, V)


@triton.jit(do_not_specialize=["T", "per_row"])
def value_gradient_kernel(
    query, key_out, whole, pairs, v, d_o, d_states, dv, d_pairs, scale, cu_seqlens, table, T, per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_K: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, RAGGED: tl.constexpr, HAS_DO: tl.constexpr,
):  # fmt: skip
    """BV columns of dv of a chunk, from the gradient of its exit state; the first of them also the gradient of P
    ``[B, T, H, C]``."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    column, slot, h, _, first, rows = block_program(blocks, H, cu_seqlens, table, T, per_row, C, RAGGED)
    if rows <= 0:
        return
    t = tl.arange(0, C)
    vv = column * BV + tl.arange(0, BV)
    attention = tl.zeros((C, C), tl.float32)
    tile = tl.zeros((C, BV), tl.float32)
    least = 1.0
    for begin in range(0, K, BLOCK_K):
        kk = begin + tl.arange(0, BLOCK_K)
        k_tile = load_rows(key_out, first, t, rows, h, H, kk, K).to(DOT)  # [C, BLOCK_K]
        ds = load_state(d_states, slot, h, H, K, V, kk, vv).to(DOT)  # [BLOCK_K, BV]
        tile += tl.dot(k_tile, ds, input_precision="tf32x3")
        if HAS_DO:
            q_tile = load_rows(query, first, t, rows, h, H, kk, K)  # [C, BLOCK_K]
            decay = load_whole(whole, slot, h, H, kk, K)
            attention += mild_pairs(q_tile, k_tile, decay, DOT)
            least = tl.minimum(least, tl.min(decay, 0))
    if HAS_DO:
        attention = chosen_pairs(attention, least, pairs, first, rows, h, H, C, DOT)
        d = load_rows(d_o, first, t, rows, h, H, vv, V).to(DOT)  # [C, BV]
        tile += tl.dot(tl.trans(attention), d, input_precision="tf32x3")
    store_rows(dv, tile, first, t, rows, h, H, vv, V)
    if HAS_DO:  # noqa: SIM102 (the outer one is decided when the kernel is compiled)
        if column == 0:
            found = row_products(d_o, v, first, rows, h, H, V, C, BV, DOT) * scale
            store_rows(d_pairs, found, first, t, rows, h, H, t, C)


@triton.jit
def block_gradients(
    q, k, v, g_cumsum, g_low, whole, states, d_o, d_states, d_pairs, initial_state, d_final, dq, dk, dg, scale,
    slot, h, kk, cu_seqlens, table, T, per_row,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr,
    RAGGED: tl.constexpr, HAS_DO: tl.constexpr, HAS_DG: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, ROBUST: tl.constexpr, ASYNC: tl.constexpr,
):  # fmt: skip
    """dq, dk and dg of the channels kk of a chunk."""
    n, first, rows = locate(slot, cu_seqlens, table, T, per_row, C, RAGGED)
    t = tl.arange(0, C)
    d_below = tl.zeros((C, C), DOT)
    own = tl.zeros((C,), tl.float32)
    if HAS_DO:
        d_below, own = without_diagonal(load_rows(d_pairs, first, t, rows, h, H, t, C), C, DOT)
    d_entry, _, d_exit, through = state_products(
        v, d_o, v, states, d_states, slot, first, rows, h, kk, H, K, V, C, BV, DOT, False, HAS_DO, ASYNC
    )
    d_entry *= scale
    decay = load_whole(whole, slot, h, H, kk, K)
    high, low = channel_sums(g_cumsum, g_low, first, t, rows, h, H, kk, K, DOT)
    q_tile = load_rows(q, first, t, rows, h, H, kk, K)  # [C, BLOCK_K]
    k_tile = load_rows(k, first, t, rows, h, H, kk, K)  # [C, BLOCK_K]
    if ROBUST:
        high_end, low_end = channel_totals(g_cumsum, g_low, first, rows, h, H, kk, K, DOT)
        dq_tile, dk_tile, dg_tile = robust_pairs_backward(
            q_tile, k_tile, d_entry, d_exit, d_below, high, low, high_end, low_end,
            g_cumsum, g_low, first, rows, h, H, kk, K, C, DOT, HAS_DG,
        )  # fmt: skip
    else:
        dq_tile, dk_tile, dg_tile = mild_pairs_backward(
            q_tile, k_tile, d_entry, d_exit, d_below, high, decay, C, DOT, HAS_DG
        )
    store_rows(dq, dq_tile + own[:, None] * k_tile.to(tl.float32), first, t, rows, h, H, kk, K)
    store_rows(dk, dk_tile + own[:, None] * q_tile.to(tl.float32), first, t, rows, h, H, kk, K)
    if HAS_DG:
        if HAS_INITIAL or HAS_FINAL:
            begin, length = sequence_span(n, cu_seqlens, T, RAGGED)
            starts = first == begin
            ends = first + rows == begin + length
            if (starts & HAS_INITIAL) | (ends & HAS_FINAL):
                through = exact_products(
                    states, d_states, initial_state, d_final, slot, n, h, kk, starts, ends,
                    H, K, V, BV, HAS_INITIAL, HAS_FINAL,
                )  # fmt: skip
        store_rows(dg, dg_tile + (through * decay)[None, :], first, t, rows, h, H, kk, K)


@triton.jit(do_not_specialize=["T", "per_row"])
def gradient_kernel(
    q, k, v, g_cumsum, g_low, whole, states, d_o, d_states, d_pairs, initial_state, d_final, dq, dk, dg, scale,
    cu_seqlens, table, T, per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_K: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, RAGGED: tl.constexpr,
    HAS_DO: tl.constexpr, HAS_DG: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr,
    ASYNC: tl.constexpr,
):  # fmt: skip
    """dq, dk and, where HAS_DG, dg of BLOCK_K channels of a chunk, unless they are steep."""
    parts: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    part, slot, h, _, _, rows = block_program(parts, H, cu_seqlens, table, T, per_row, C, RAGGED)
    if rows <= 0:
        return
    kk = part * BLOCK_K + tl.arange(0, BLOCK_K)
    if mild(tl.min(load_whole(whole, slot, h, H, kk, K), 0), DOT):
        block_gradients(
            q, k, v, g_cumsum, g_low, whole, states, d_o, d_states, d_pairs, initial_state, d_final, dq, dk, dg, scale,
            slot, h, kk, cu_seqlens, table, T, per_row,
            H, K, V, C, BV, DOT, RAGGED, HAS_DO, HAS_DG, HAS_INITIAL, HAS_FINAL, False, ASYNC,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T", "per_row"])
def steep_gradient_kernel(
    q, k, v, g_cumsum, g_low, whole, states, d_o, d_states, d_pairs, initial_state, d_final, dq, dk, dg, scale,
    cu_seqlens, table, T, per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_K: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, RAGGED: tl.constexpr,
    HAS_DO: tl.constexpr, HAS_DG: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr,
    ASYNC: tl.constexpr,
):  # fmt: skip
    """The same of the steep ones among GROUP blocks of channels."""
    parts: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    groups: tl.constexpr = (H * parts + GROUP - 1) // GROUP
    slot = tl.program_id(0) // groups
    block = tl.program_id(0) % groups * GROUP
    _, _, rows = locate(slot, cu_seqlens, table, T, per_row, C, RAGGED)
    if rows <= 0:
        return
    if steep_blocks(whole, slot, block, H * parts, K, BLOCK_K, DOT):
        for at in range(block, tl.minimum(block + GROUP, H * parts)):
            kk = at % parts * BLOCK_K + tl.arange(0, BLOCK_K)
            if not mild(tl.min(load_whole(whole, slot, at // parts, H, kk, K), 0), DOT):
                block_gradients(
                    q, k, v, g_cumsum, g_low, whole, states, d_o, d_states, d_pairs, initial_state, d_final,
                    dq, dk, dg, scale, slot, at // parts, kk, cu_seqlens, table, T, per_row,
                    H, K, V, C, BV, DOT, RAGGED, HAS_DO, HAS_DG, HAS_INITIAL, HAS_FINAL, True, ASYNC,
                )  # fmt: skip
