"""The scan of states over the chunks of a sequence, forward and backward, for delta rules with a scalar decay.

One program carries BV columns of one state. With ``key_out = exp(G_C - G_t) k`` and ``query_in = exp(G) q``:

    forward    v_new = u - w S                        S' = exp(G_C) S + key_out^T v_new
    backward   d_v_new += key_out dS'                 dS = exp(G_C) dS' + scale query_in^T d_o - w^T d_v_new
"""

import triton
import triton.language as tl

from chunkwise_triton.common.chunks import span
from chunkwise_triton.common.pointers import rows_pointer, state_pointer


@triton.jit(do_not_specialize=["T", "per_row"])
def scan_kernel(
    k, w, v_new, to_end, whole, states, initial_state, final_state, cu_seqlens, first_slots, T, per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, RAGGED: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Turns u into v_new in place; writes the entry state of every chunk, and the state behind the last token."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    column = tl.program_id(0) % blocks
    hv = tl.program_id(0) // blocks % HV
    n = tl.program_id(0) // blocks // HV
    h = hv // (HV // H)
    first, length, slot = span(n, cu_seqlens, first_slots, T, per_row, C, RAGGED)
    t = tl.arange(0, C)
    kk = tl.arange(0, BK)
    vv = column * BV + tl.arange(0, BV)
    s_mask = (kk < K)[:, None] & (vv < V)[None, :]
    s = tl.zeros((BK, BV), tl.float32)
    if HAS_INITIAL:
        s = tl.load(state_pointer(initial_state, n, hv, HV, K, V, kk, vv), mask=s_mask, other=0.0)  # [BK, BV] fp32
    chunks = (length + C - 1) // C
    for chunk in tl.range(0, chunks, num_stages=STAGES):
        rows = length - chunk * C
        at = first + chunk * C
        live = t < rows
        row_mask = live[:, None] & (vv < V)[None, :]
        key_mask = live[:, None] & (kk < K)[None, :]
        tl.store(state_pointer(states, slot + chunk, hv, HV, K, V, kk, vv), s.to(states.dtype.element_ty), mask=s_mask)
        w_tile = tl.load(rows_pointer(w, at, t, hv, HV, K, kk), mask=key_mask, other=0.0).to(DOT)  # [C, BK]
        x_at = rows_pointer(v_new, at, t, hv, HV, V, vv)
        x = tl.load(x_at, mask=row_mask, other=0.0).to(tl.float32)  # [C, BV] u
        x -= tl.dot(w_tile, s.to(DOT), input_precision="tf32x3")
        tl.store(x_at, x.to(v_new.dtype.element_ty), mask=row_mask)
        end = tl.load(to_end + (at + t) * HV + hv, mask=live, other=0.0)
        decay = tl.load(whole + (slot + chunk).to(tl.int64) * HV + hv)
        k_tile = tl.load(rows_pointer(k, at, t, h, H, K, kk), mask=key_mask, other=0.0).to(DOT)  # [C, BK]
        s = s * decay + tl.dot(tl.trans(k_tile), (x * end[:, None]).to(DOT), input_precision="tf32x3")
    if HAS_FINAL:
        tl.store(state_pointer(final_state, n, hv, HV, K, V, kk, vv), s, mask=s_mask)


@triton.jit(do_not_specialize=["T", "per_row"])
def scan_backward_kernel(
    q, k, w, g_cumsum, to_end, whole, d_o, d_v_new, d_states, d_initial, d_final, scale,
    cu_seqlens, first_slots, T, per_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, RAGGED: tl.constexpr,
    HAS_DO: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Completes d_v_new in place, and writes the gradient of every chunk's exit state and of the initial state."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    column = tl.program_id(0) % blocks
    hv = tl.program_id(0) // blocks % HV
    n = tl.program_id(0) // blocks // HV
    h = hv // (HV // H)
    first, length, slot = span(n, cu_seqlens, first_slots, T, per_row, C, RAGGED)
    t = tl.arange(0, C)
    kk = tl.arange(0, BK)
    vv = column * BV + tl.arange(0, BV)
    s_mask = (kk < K)[:, None] & (vv < V)[None, :]
    ds = tl.zeros((BK, BV), tl.float32)
    if HAS_FINAL:
        ds = tl.load(state_pointer(d_final, n, hv, HV, K, V, kk, vv), mask=s_mask, other=0.0)  # [BK, BV] fp32
    chunks = (length + C - 1) // C
    for step in tl.range(0, chunks, num_stages=STAGES):
        chunk = chunks - 1 - step
        rows = length - chunk * C
        at = first + chunk * C
        live = t < rows
        row_mask = live[:, None] & (vv < V)[None, :]
        key_mask = live[:, None] & (kk < K)[None, :]
        tl.store(
            state_pointer(d_states, slot + chunk, hv, HV, K, V, kk, vv), ds.to(d_states.dtype.element_ty), mask=s_mask
        )
        end = tl.load(to_end + (at + t) * HV + hv, mask=live, other=0.0)
        decay = tl.load(whole + (slot + chunk).to(tl.int64) * HV + hv)
        k_tile = tl.load(rows_pointer(k, at, t, h, H, K, kk), mask=key_mask, other=0.0).to(DOT)  # [C, BK]
        dx = tl.dot(k_tile, ds.to(DOT), input_precision="tf32x3") * end[:, None]
        dx_at = rows_pointer(d_v_new, at, t, hv, HV, V, vv)
        if HAS_DO:
            dx += tl.load(dx_at, mask=row_mask, other=0.0).to(tl.float32)  # [C, BV]
        tl.store(dx_at, dx.to(d_v_new.dtype.element_ty), mask=row_mask)
        w_tile = tl.load(rows_pointer(w, at, t, hv, HV, K, kk), mask=key_mask, other=0.0).to(DOT)  # [C, BK]
        ds = ds * decay - tl.dot(tl.trans(w_tile), dx.to(DOT), input_precision="tf32x3")
        if HAS_DO:
            q_tile = tl.load(rows_pointer(q, at, t, h, H, K, kk), mask=key_mask, other=0.0).to(tl.float32)  # [C, BK]
            start = tl.exp(tl.load(g_cumsum + (at + t) * HV + hv, mask=live, other=0.0))
            query_in = (q_tile * (start * scale)[:, None]).to(DOT)
            d = tl.load(rows_pointer(d_o, at, t, hv, HV, V, vv), mask=row_mask, other=0.0).to(DOT)  # [C, BV]
            ds += tl.dot(tl.trans(query_in), d, input_precision="tf32x3")
    if HAS_INITIAL:
        tl.store(state_pointer(d_initial, n, hv, HV, K, V, kk, vv), ds, mask=s_mask)
