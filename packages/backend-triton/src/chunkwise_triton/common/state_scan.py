"""The scan of states over the chunks of a sequence, forward and backward.

One program carries BV columns of one state. With ``key_out = exp(G_C - G_t) k`` and ``query_in = exp(G) q``:

    forward    v_new = u - w S                        S' = exp(G_C) S + key_out^T v_new
    backward   d_v_new += key_out dS'                 dS = exp(G_C) dS' + scale query_in^T d_o - w^T d_v_new

for delta rules (DELTA). States that only forget and add have no w: v_new is v, and the backward carries dS alone. Not
GATED: nothing is forgotten, and no gate is read. DECAYED: each channel of the keys has a gate of its own, HV = H; k and
q come as key_out and scale query_in, and ``whole`` is ``exp(G_C)`` ``[slots, H, K]``. LOW_RANK: S' has one more term
``k_more^T v_more``. A chunk's rows do not depend on one another here, so where shared memory is small they are taken
ROWS at a time.
"""

import triton
import triton.language as tl

from chunkwise_triton.common.chunks import span
from chunkwise_triton.common.tiles import load_row, load_rows, load_state, load_vector, store_rows, store_state


@triton.jit
def _carry(
    s, begin, end, k, w, v_new, k_more, v_more, to_end, whole, states, first, length, slot, h, hv, kk, vv,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    ROWS: tl.constexpr, DOT: tl.constexpr, DELTA: tl.constexpr, GATED: tl.constexpr, DECAYED: tl.constexpr,
    LOW_RANK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The state behind the chunks from ``begin`` to ``end`` of a sequence; what :func:`scan_kernel` writes of them."""
    for chunk in tl.range(begin, end, num_stages=STAGES):
        rows = length - chunk * C
        at = first + chunk * C
        store_state(states, s, slot + chunk, hv, HV, K, V, kk, vv)
        entry = s.to(DOT)
        if DECAYED:
            s *= load_row(whole, (slot + chunk).to(tl.int64), hv, HV, kk, K)[:, None]
        elif GATED:
            s *= tl.load(whole + (slot + chunk).to(tl.int64) * HV + hv)
        for top in tl.static_range(0, C, ROWS):
            t = top + tl.arange(0, ROWS)
            if DELTA:
                w_tile = load_rows(w, at, t, rows, hv, HV, kk, K).to(DOT)  # [ROWS, BK]
                x = load_rows(v_new, at, t, rows, hv, HV, vv, V).to(tl.float32)  # [ROWS, BV] u
                x -= tl.dot(w_tile, entry, input_precision="tf32x3")
                store_rows(v_new, x, at, t, rows, hv, HV, vv, V)
            else:
                x = load_rows(v_new, at, t, rows, hv, HV, vv, V)  # [ROWS, BV]
            if GATED and not DECAYED:
                to_exit = load_vector(to_end, at, t, rows, hv, HV)
            k_tile = load_rows(k, at, t, rows, h, H, kk, K).to(DOT)  # [ROWS, BK]
            if GATED and not DECAYED:
                x = x.to(tl.float32) * to_exit[:, None]
            s += tl.dot(tl.trans(k_tile), x.to(DOT), input_precision="tf32x3")
            if LOW_RANK:
                x = load_rows(v_more, at, t, rows, hv, HV, vv, V).to(DOT)  # [ROWS, BV]
                k_tile = load_rows(k_more, at, t, rows, h, H, kk, K).to(DOT)  # [ROWS, BK]
                s += tl.dot(tl.trans(k_tile), x, input_precision="tf32x3")
    return s


@triton.jit(do_not_specialize=["T", "per_row"])
def scan_kernel(
    k, w, v_new, k_more, v_more, to_end, whole, states, entry_states, initial_state, final_state,
    cu_seqlens, first_slots, T, per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr, DOT: tl.constexpr, RAGGED: tl.constexpr,
    DELTA: tl.constexpr, GATED: tl.constexpr, DECAYED: tl.constexpr, LOW_RANK: tl.constexpr,
    ENTRY_CHUNKS: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Writes the entry states of all chunks and the state behind the last token; DELTA: turns u into v_new in place.
    ENTRY_CHUNKS, unless 0: also the fp32 state before every so many chunks of the sequence, at the place in its row of
    the batch that the lean formats give it."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    column = tl.program_id(0) % blocks
    hv = tl.program_id(0) // blocks % HV
    n = tl.program_id(0) // blocks // HV
    h = hv // (HV // H)
    first, length, slot = span(n, cu_seqlens, first_slots, T, per_row, C, RAGGED)
    kk = tl.arange(0, BK)
    vv = column * BV + tl.arange(0, BV)
    s = tl.zeros((BK, BV), tl.float32)
    if HAS_INITIAL:
        s = load_state(initial_state, n, hv, HV, K, V, kk, vv)  # [BK, BV] fp32
    chunks = (length + C - 1) // C
    if ENTRY_CHUNKS:
        # Inside the pipelined loop a store of fp32 states would cost all chunks registers and shared memory.
        for begin in tl.range(0, chunks, ENTRY_CHUNKS, num_stages=1):
            if begin > 0:
                if RAGGED:
                    place = (first + begin * C) // (ENTRY_CHUNKS * C) - 1
                else:  # first counts the rows of all the batch
                    place = n * ((T - 1) // (ENTRY_CHUNKS * C)) + begin // ENTRY_CHUNKS - 1
                store_state(entry_states, s, place, hv, HV, K, V, kk, vv)
            end = tl.minimum(begin + ENTRY_CHUNKS, chunks)
            s = _carry(
                s, begin, end, k, w, v_new, k_more, v_more, to_end, whole, states, first, length, slot, h, hv, kk, vv,
                H, HV, K, V, C, ROWS, DOT, DELTA, GATED, DECAYED, LOW_RANK, STAGES,
            )  # fmt: skip
    else:
        s = _carry(
            s, 0, chunks, k, w, v_new, k_more, v_more, to_end, whole, states, first, length, slot, h, hv, kk, vv,
            H, HV, K, V, C, ROWS, DOT, DELTA, GATED, DECAYED, LOW_RANK, STAGES,
        )  # fmt: skip
    if HAS_FINAL:
        store_state(final_state, s, n, hv, HV, K, V, kk, vv)


@triton.jit(do_not_specialize=["T", "per_row"])
def scan_backward_kernel(
    q, k, w, g_cumsum, to_end, whole, d_o, d_v_new, d_states, d_initial, d_final, scale,
    cu_seqlens, first_slots, T, per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr, DOT: tl.constexpr, RAGGED: tl.constexpr,
    DELTA: tl.constexpr, GATED: tl.constexpr, DECAYED: tl.constexpr, HAS_DO: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of every chunk's exit state and of the initial state; DELTA: completes d_v_new in place."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    column = tl.program_id(0) % blocks
    hv = tl.program_id(0) // blocks % HV
    n = tl.program_id(0) // blocks // HV
    h = hv // (HV // H)
    first, length, slot = span(n, cu_seqlens, first_slots, T, per_row, C, RAGGED)
    kk = tl.arange(0, BK)
    vv = column * BV + tl.arange(0, BV)
    ds = tl.zeros((BK, BV), tl.float32)
    if HAS_FINAL:
        ds = load_state(d_final, n, hv, HV, K, V, kk, vv)  # [BK, BV] fp32
    chunks = (length + C - 1) // C
    for step in tl.range(0, chunks, num_stages=STAGES):
        chunk = chunks - 1 - step
        rows = length - chunk * C
        at = first + chunk * C
        store_state(d_states, ds, slot + chunk, hv, HV, K, V, kk, vv)
        leaving = ds.to(DOT)
        if DECAYED:
            ds *= load_row(whole, (slot + chunk).to(tl.int64), hv, HV, kk, K)[:, None]
        elif GATED:
            ds *= tl.load(whole + (slot + chunk).to(tl.int64) * HV + hv)
        for begin in tl.static_range(0, C, ROWS):
            t = begin + tl.arange(0, ROWS)
            if DELTA:
                end = tl.full((ROWS,), 1.0, tl.float32)
                if GATED and not DECAYED:
                    end = load_vector(to_end, at, t, rows, hv, HV)
                k_tile = load_rows(k, at, t, rows, h, H, kk, K).to(DOT)  # [ROWS, BK]
                dx = tl.dot(k_tile, leaving, input_precision="tf32x3") * end[:, None]
                if HAS_DO:
                    dx += load_rows(d_v_new, at, t, rows, hv, HV, vv, V).to(tl.float32)  # [ROWS, BV]
                store_rows(d_v_new, dx, at, t, rows, hv, HV, vv, V)
                w_tile = load_rows(w, at, t, rows, hv, HV, kk, K).to(DOT)  # [ROWS, BK]
                ds -= tl.dot(tl.trans(w_tile), dx.to(DOT), input_precision="tf32x3")
            if HAS_DO:
                q_tile = load_rows(q, at, t, rows, h, H, kk, K)  # [ROWS, BK]
                start = tl.full((ROWS,), 1.0, tl.float32)
                if GATED and not DECAYED:
                    start = tl.exp(load_vector(g_cumsum, at, t, rows, hv, HV))
                start = (start * scale)[:, None]
                if DECAYED:
                    query_in = q_tile.to(DOT)
                    d = load_rows(d_o, at, t, rows, hv, HV, vv, V).to(DOT)  # [ROWS, BV]
                elif DELTA:
                    query_in = (q_tile.to(tl.float32) * start).to(DOT)
                    d = load_rows(d_o, at, t, rows, hv, HV, vv, V).to(DOT)  # [ROWS, BV]
                else:  # scales the narrower tile; the other one goes from memory to the product as it is
                    query_in = q_tile.to(DOT)
                    d = (load_rows(d_o, at, t, rows, hv, HV, vv, V).to(tl.float32) * start).to(DOT)  # [ROWS, BV]
                ds += tl.dot(tl.trans(query_in), d, input_precision="tf32x3")
    if HAS_INITIAL:
        store_state(d_initial, ds, n, hv, HV, K, V, kk, vv)
