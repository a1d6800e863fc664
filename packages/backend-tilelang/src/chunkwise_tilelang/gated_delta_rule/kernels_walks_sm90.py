"""The two walks over the chunks that the backward of the gated delta rule takes on Hopper, from lean residuals.

With the names of :mod:`.kernels_sm90` (``M' = M diag(beta)``, G the gate sums, S and S' the states of a chunk, P the
masked ``exp(G_t - G_s) q_t . k_s``), a leading d for gradients, C the last row of the chunk:

    replay      x = M' (v - exp(G) k S)                 S' = exp(G_C) S + sum_t exp(G_C - G_t) k_t x_t^T
    reverse     dx = scale P^T do + exp(G_C - G) k dS'  dr = M^T dx      dv = beta dr
                dS = exp(G_C) dS' + sum_t exp(G_t) (scale q_t do_t^T - beta_t k_t dr_t^T)

They keep everything transposed, V on the rows, as the forward does and for its reasons. One warpgroup has 64 columns of
V and their states; another makes chunks ready ahead of it: decays, P, rows behind a sequence's end; a warp loads. Who
stores what passes on is the kernels' matter: :mod:`.kernels_passes_sm90` and :mod:`.kernels_summaries_sm90`.
"""

from typing import Any, NamedTuple

import tilelang.language as T  # noqa: N812 - TileLang's parser knows it by this name

from chunkwise_tilelang.tiles.transposed import load_transposed, place, store_transposed

_LOG2E = 1.4426950408889634
_ROWS = T.GemmWarpPolicy.FullRow
_STEPS = 4  # of 16 tokens
CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # barriers stand where they are needed
    "tl.disable_safe_memory_legalize": True,  # every access is inside by its own condition
}


@T.macro
def _put(x, tile, turn, group, full, empty):
    """A state in 16 bit into the tile that the storing warp waits for."""
    T.barrier_wait(empty[group], (turn + 1) % 2)
    T.copy(x, tile)
    T.fence_proxy_async()
    T.barrier_arrive(full[group])


@T.macro
def _leave(place_of, V, K, s, outs):
    """An exit state: 64 columns of B, or of A in two bf16 parts."""
    segment, hv, first = place_of
    a, b = outs
    if first < V:
        for v, c in T.Parallel(64, K):
            b[segment, hv, c, first + v] = s[v, c]
    else:
        for v, c in T.Parallel(64, K):
            a[segment, hv, 0, c, first - V + v] = s[v, c]
        for v, c in T.Parallel(64, K):
            a[segment, hv, 1, c, first - V + v] = s[v, c] - T.cast(T.cast(s[v, c], "bfloat16"), "float32")


class Walks(NamedTuple):
    """What the roles of a block do on their way over its chunks: with states, for each direction, and for them."""

    replay: Any
    reverse: Any
    make_ready: Any
    bring: Any


def walks(
    *, key_width: int, value_width: int, groups: int, stages: int, dtype: str, beta_dtype: str, kept: bool
) -> Walks:
    """The macros of both directions; the arguments are those of the passes.

    Where nothing of a chunk is ``kept`` the walk is one of a summary: replay starts with zero, or with columns of the
    identity behind the columns of V, and leaves B or A; reverse leaves what it ends with.
    """
    K, V, C, S, G = key_width, value_width, 64, stages, groups

    @T.macro
    def replay(group, place_of, turns, initial, has_initial, k_s, v_s, m_s, d_s, outs, rings):
        n, hv, first = place_of
        ready, empty, s_full, s_empty, x_full, x_empty = rings
        s = T.alloc_fragment((64, K), "float32")
        s_operand = T.alloc_fragment((64, K), dtype)
        taken = T.alloc_fragment((64, C), "float32")
        rest = T.alloc_fragment((64, C), dtype)
        x = T.alloc_fragment((64, C), "float32")
        x_decayed = T.alloc_fragment((64, C), dtype)
        from_start = T.alloc_fragment((C,), "float32")
        step_size = T.alloc_fragment((C,), "float32")
        to_end = T.alloc_fragment((C,), "float32")
        v_registers = T.alloc_local((32,), dtype)
        x_registers = T.alloc_local((32,), dtype)
        at = T.alloc_var("int32")
        if not kept:
            for v, c in T.Parallel(64, K):
                s[v, c] = T.Select(c == first - V + v, 1.0, 0.0)
        elif has_initial != 0:
            for v, c in T.Parallel(64, K):
                s[v, c] = initial[n, hv, c, first + v]
        else:
            T.clear(s)
        T.copy(s, s_operand)
        # A sequence without rows multiplies what lies in shared memory, and uses none of it.
        if turns > 0:
            T.barrier_wait(ready[0], 0)
            if kept:
                _put(s_operand, outs[0], 0, group, s_full, s_empty)
        T.wgmma_gemm(s_operand, k_s[0, :, :], taken, transpose_B=True, clear_accum=True, policy=_ROWS)
        for step in T.unroll(_STEPS):
            load_transposed(v_s, (0, group), v_registers, step)
        for t in T.Parallel(C):
            from_start[t] = d_s[0, 0, t]
        for t in T.Parallel(C):
            step_size[t] = d_s[0, 2, t]
        T.wait_wgmma(0)
        for i in T.serial(turns):
            stage = i % S
            for v, t in T.Parallel(64, C):
                at = place(v, t)
                taken[v, t] = step_size[t] * (v_registers[at] - from_start[t] * taken[v, t])
            T.copy(taken, rest)
            T.wgmma_gemm(rest, m_s[stage, :, :], x, transpose_B=True, clear_accum=True, policy=_ROWS)
            for t in T.Parallel(C):
                to_end[t] = d_s[stage, 1, t]
            for v, c in T.Parallel(64, K):
                s[v, c] *= d_s[stage, 0, C - 1]
            T.wait_wgmma(0)
            for v, t in T.Parallel(64, C):
                x_decayed[v, t] = x[v, t] * to_end[t]
            if kept:
                for v, t in T.Parallel(64, C):
                    at = place(v, t)
                    x_registers[at] = x[v, t]
            T.wgmma_gemm(x_decayed, k_s[stage, :, :], s, policy=_ROWS)
            if kept:
                T.barrier_wait(x_empty[group], (i + 1) % 2)
                for step in T.unroll(_STEPS):
                    store_transposed(x_registers, outs[1], step)
                T.fence_proxy_async()
                T.barrier_arrive(x_full[group])
            T.wait_wgmma(0)
            T.barrier_arrive(empty[stage])
            T.copy(s, s_operand)
            following = (i + 1) % S
            # Behind the last chunk the product reads a stage that nobody writes any more, and is not used.
            if i + 1 < turns:
                T.barrier_wait(ready[following], (i + 1) // S % 2)
            T.wgmma_gemm(s_operand, k_s[following, :, :], taken, transpose_B=True, clear_accum=True, policy=_ROWS)
            for step in T.unroll(_STEPS):
                load_transposed(v_s, (following, group), v_registers, step)
            for t in T.Parallel(C):
                from_start[t] = d_s[following, 0, t]
            for t in T.Parallel(C):
                step_size[t] = d_s[following, 2, t]
            if kept:
                if i + 1 < turns:
                    _put(s_operand, outs[0], i + 1, group, s_full, s_empty)
            T.wait_wgmma(0)
        if not kept:
            if turns > 0:
                _leave((n, hv, first), V, K, s, outs)

    @T.macro
    def ready_for_replay(place_of, turns, g_cumsum, beta, k_s, v_s, m_s, d_s, rings):
        hv, batch, start, length = place_of
        raw, ready, empty = rings
        lane = T.get_thread_binding() % 128
        total, last = (T.alloc_var("float32") for _ in range(2))
        step_size = T.alloc_var(beta_dtype)
        near = T.alloc_var("int32")
        # Read a chunk ahead, and used where the next one begins: the states wait for what is made ready here.
        if turns > 0:
            if lane < C:
                near = T.min(C, length) - 1
                total = g_cumsum[batch, start + T.min(lane, near), hv]
                last = g_cumsum[batch, start + near, hv]
                step_size = beta[batch, start + T.min(lane, near), hv]
        for i in T.unroll(turns, unroll_factor=1):
            stage = i % S
            rows = T.min(length - i * C, C)
            T.barrier_wait(empty[stage], (i // S + 1) % 2)
            if lane < C:
                d_s[stage, 0, lane] = T.exp2(total * _LOG2E)
                d_s[stage, 1, lane] = T.Select(lane < rows, T.exp2((last - total) * _LOG2E), 0.0)
                d_s[stage, 2, lane] = T.Select(lane < rows, T.cast(step_size, "float32"), 0.0)
                if i + 1 < turns:
                    near = T.min((i + 2) * C, length) - 1
                    total = g_cumsum[batch, start + T.min((i + 1) * C + lane, near), hv]
                    last = g_cumsum[batch, start + near, hv]
                    step_size = beta[batch, start + T.min((i + 1) * C + lane, near), hv]
            T.barrier_wait(raw[stage], i // S % 2)
            if rows < C:  # other sequences' rows, or padding that may hold anything
                for t, c in T.Parallel(C, K):
                    if t >= rows:
                        k_s[stage, t, c] = 0
                for t, c in T.Parallel(C, C):
                    if t >= rows:
                        m_s[stage, t, c] = 0
                for group, t, v in T.Parallel(G, C, 64):
                    if t >= rows:
                        v_s[stage, group, t, v] = 0
            T.fence_proxy_async()
            T.barrier_arrive(ready[stage])

    @T.macro
    def reverse(group, place_of, turns, ends, flags, k_s, q_s, do_s, m_s, p_s, d_s, outs, rings):
        n, leaving, hv, first = place_of
        d_final, d_initial = ends
        has_final, has_initial = flags
        ready, empty, free, s_full, s_empty, r_full, r_empty = rings
        ds = T.alloc_fragment((64, K), "float32")
        ds_operand = T.alloc_fragment((64, K), dtype)
        by_state = T.alloc_fragment((64, C), "float32")
        dx = T.alloc_fragment((64, C), "float32")
        dx_operand = T.alloc_fragment((64, C), dtype)
        dx_rest = T.alloc_fragment((64, C), dtype)
        dr = T.alloc_fragment((64, C), "float32")
        dr_operand = T.alloc_fragment((64, C), dtype)
        do_operand = T.alloc_fragment((64, C), dtype)
        do_scaled = T.alloc_fragment((64, C), dtype)
        to_end = T.alloc_fragment((C,), "float32")
        by_query = T.alloc_fragment((C,), "float32")
        by_key = T.alloc_fragment((C,), "float32")
        do_registers = T.alloc_local((32,), dtype)
        dr_registers = T.alloc_local((32,), dtype)
        dv_registers = T.alloc_local((32,), dtype)
        at = T.alloc_var("int32")
        if has_final != 0:
            for v, c in T.Parallel(64, K):
                ds[v, c] = d_final[n, hv, c, first + v]
        else:
            T.clear(ds)
        T.copy(ds, ds_operand)
        # A sequence without rows multiplies what lies in shared memory, and uses none of it.
        if turns > 0:
            T.barrier_wait(ready[0], 0)
            if kept:
                _put(ds_operand, outs[0], 0, group, s_full, s_empty)
        T.wgmma_gemm(ds_operand, k_s[0, :, :], by_state, transpose_B=True, clear_accum=True, policy=_ROWS)
        for step in T.unroll(_STEPS):
            load_transposed(do_s, (0, group), do_registers, step)
        for v, t in T.Parallel(64, C):
            at = place(v, t)
            do_operand[v, t] = do_registers[at]
        T.wgmma_gemm(do_operand, p_s[0, :, :], dx, clear_accum=True, policy=_ROWS)
        for t in T.Parallel(C):
            to_end[t] = d_s[0, 1, t]
        T.wait_wgmma(0)
        for i in T.serial(turns):
            stage, pair = i % S, i % 2
            for v, t in T.Parallel(64, C):
                dx[v, t] += to_end[t] * by_state[v, t]
            T.copy(dx, dx_operand)
            T.wgmma_gemm(dx_operand, m_s[stage, :, :], dr, clear_accum=True, policy=_ROWS)
            # In two parts: dr goes into dbeta, and nothing there makes up for what it lacks.
            for v, t in T.Parallel(64, C):
                dx_rest[v, t] = dx[v, t] - T.cast(dx_operand[v, t], "float32")
            T.wgmma_gemm(dx_rest, m_s[stage, :, :], dr, policy=_ROWS)
            for t in T.Parallel(C):
                by_query[t] = d_s[stage, 0, t]
            for v, t in T.Parallel(64, C):
                at = place(v, t)
                do_scaled[v, t] = do_registers[at] * by_query[t]
            for v, c in T.Parallel(64, K):
                ds[v, c] *= d_s[stage, 4, C - 1]
            T.wgmma_gemm(do_scaled, q_s[stage, :, :], ds, policy=_ROWS)
            for t in T.Parallel(C):
                by_key[t] = d_s[stage, 2, t]
            T.wait_wgmma(1)
            for v, t in T.Parallel(64, C):
                dr_operand[v, t] = dr[v, t] * by_key[t]
            if kept:
                for v, t in T.Parallel(64, C):
                    at = place(v, t)
                    dr_registers[at] = dr[v, t]
                    dv_registers[at] = dr[v, t] * d_s[stage, 5, t]
            T.wgmma_gemm(dr_operand, k_s[stage, :, :], ds, policy=_ROWS)
            if kept:
                T.barrier_wait(r_empty[group], (i + 1) % 2)
                for step in T.unroll(_STEPS):
                    store_transposed(dr_registers, outs[1], step)
                for step in T.unroll(_STEPS):
                    store_transposed(dv_registers, outs[2], step)
                T.fence_proxy_async()
                T.barrier_arrive(r_full[group])
            T.wait_wgmma(0)
            T.barrier_arrive(empty[stage])
            T.barrier_arrive(free[pair])
            T.copy(ds, ds_operand)
            following = (i + 1) % S
            # Behind the first chunk the products read a stage that nobody writes any more, and are not used.
            if i + 1 < turns:
                T.barrier_wait(ready[1 - pair], (i + 1) // 2 % 2)
            T.wgmma_gemm(ds_operand, k_s[following, :, :], by_state, transpose_B=True, clear_accum=True, policy=_ROWS)
            for step in T.unroll(_STEPS):
                load_transposed(do_s, (following, group), do_registers, step)
            for v, t in T.Parallel(64, C):
                at = place(v, t)
                do_operand[v, t] = do_registers[at]
            T.wgmma_gemm(do_operand, p_s[1 - pair, :, :], dx, clear_accum=True, policy=_ROWS)
            for t in T.Parallel(C):
                to_end[t] = d_s[following, 1, t]
            if kept:
                if i + 1 < turns:
                    _put(ds_operand, outs[0], i + 1, group, s_full, s_empty)
            T.wait_wgmma(0)
        if has_initial != 0:
            for v, c in T.Parallel(64, K):
                d_initial[leaving, hv, c, first + v] = ds[v, c]

    @T.macro
    def ready_for_reverse(place_of, turns, scale, g_cumsum, beta, k_s, q_s, do_s, m_s, p_s, d_s, rings):
        hv, batch, start, length = place_of
        raw, ready, empty, free, known = rings
        scores = T.alloc_fragment((C, C), "float32")
        operand = T.alloc_fragment((C, C), dtype)
        lane = T.get_thread_binding() % 128
        total, last, decay = (T.alloc_var("float32") for _ in range(3))
        step_size = T.alloc_var(beta_dtype)
        if turns > 0:
            if lane < C:
                near = start + T.min((turns - 1) * C + lane, length - 1)
                total = g_cumsum[batch, near, hv]
                last = g_cumsum[batch, start + length - 1, hv]
                step_size = beta[batch, near, hv]
        for i in T.unroll(turns, unroll_factor=1):
            stage, pair = i % S, i % 2
            left = (turns - 1 - i) * C
            rows = T.min(length - left, C)
            T.barrier_wait(empty[stage], (i // S + 1) % 2)
            if lane < C:
                decay = T.exp2(total * _LOG2E)
                d_s[stage, 0, lane] = decay * scale
                d_s[stage, 1, lane] = T.Select(lane < rows, T.exp2((last - total) * _LOG2E), 0.0)
                d_s[stage, 2, lane] = T.Select(lane < rows, -decay * T.cast(step_size, "float32"), 0.0)
                d_s[stage, 3, lane] = total * _LOG2E
                d_s[stage, 4, lane] = decay
                d_s[stage, 5, lane] = T.cast(step_size, "float32")
                if i + 1 < turns:  # no chunk but the first one taken here can be short
                    total = g_cumsum[batch, start + left - C + lane, hv]
                    last = g_cumsum[batch, start + left - 1, hv]
                    step_size = beta[batch, start + left - C + lane, hv]
            T.barrier_arrive(known[0])
            T.barrier_wait(known[0], i % 2)
            T.barrier_wait(free[pair], (i // 2 + 1) % 2)
            T.barrier_wait(raw[stage], i // S % 2)
            if rows < C:  # other sequences' rows, or padding that may hold anything
                for t, c in T.Parallel(C, K):
                    if t >= rows:
                        k_s[stage, t, c] = 0
                        q_s[stage, t, c] = 0
                for t, c in T.Parallel(C, C):
                    if t >= rows:
                        m_s[stage, t, c] = 0
                for group, t, v in T.Parallel(G, C, 64):
                    if t >= rows:
                        do_s[stage, group, t, v] = 0
                T.fence_proxy_async()
                T.barrier_arrive(known[1])
                T.barrier_wait(known[1], 0)
            T.wgmma_gemm(q_s[stage, :, :], k_s[stage, :, :], scores, transpose_B=True, clear_accum=True, policy=_ROWS)
            T.wait_wgmma(0)
            for t, r in T.Parallel(C, C):
                scores[t, r] *= scale * T.exp2(d_s[stage, 3, t] - d_s[stage, 3, r])
            for t, r in T.Parallel(C, C):
                operand[t, r] = T.Select(t >= r, scores[t, r], 0.0)
            T.copy(operand, p_s[pair, :, :])
            T.fence_proxy_async()
            T.barrier_arrive(ready[pair])

    @T.macro
    def load(turns, place_of, k, m, k_s, m_s, raw, empty, backwards, q, q_s, rows, rows_s):
        h, hv, batch, start, first = place_of
        for i in T.unroll(turns, unroll_factor=1):
            stage = i % S
            left = start + (turns - 1 - i if backwards else i) * C
            T.barrier_wait(empty[stage], (i // S + 1) % 2)
            T.tma_copy(k[batch, left : left + C, h, 0:K], k_s[stage, :, :], barrier=raw[stage])
            if backwards:
                T.tma_copy(q[batch, left : left + C, h, 0:K], q_s[stage, :, :], barrier=raw[stage])
            for group in T.unroll(G):
                T.tma_copy(
                    rows[batch, left : left + C, hv, first + group * 64 : first + group * 64 + 64],
                    rows_s[stage, group, :, :],
                    barrier=raw[stage],
                )
            T.tma_copy(m[batch, left : left + C, hv, 0:C], m_s[stage, :, :], barrier=raw[stage])
            T.barrier_arrive(raw[stage])

    @T.macro
    def make_ready(backwards, place_of, turns, scale, g_cumsum, beta, k_s, q_s, rows_s, m_s, p_s, d_s, rings):
        raw, ready, empty, _, _ = rings
        if backwards:
            ready_for_reverse(place_of, turns, scale, g_cumsum, beta, k_s, q_s, rows_s, m_s, p_s, d_s, rings)
        else:
            ready_for_replay(place_of, turns, g_cumsum, beta, k_s, rows_s, m_s, d_s, (raw, ready, empty))

    @T.macro
    def bring(backwards, turns, place_of, tensors, k_s, q_s, rows_s, m_s, raw, empty):
        q, k, v, m, d_o = tensors
        if backwards:
            load(turns, place_of, k, m, k_s, m_s, raw, empty, True, q, q_s, d_o, rows_s)
        else:
            load(turns, place_of, k, m, k_s, m_s, raw, empty, False, q, q_s, v, rows_s)

    return Walks(replay, reverse, make_ready, bring)
