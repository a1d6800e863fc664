"""The gradients of a chunk on Hopper, once its states and their gradients are known: dq, dk, dg and dbeta.

With the names of :mod:`.kernels_walks_sm90`, for one value head of a key head (rows t, s of the chunk, ``s <= t``):

    dP = scale exp(G_t - G_s) do x^T         B = -beta_t exp(G_t - G_s) dr x^T  (s < t)
    dq += exp(G) scale do S^T + dP k         dk += exp(G_C - G) x dS'^T - exp(G) beta dr S^T + dP^T q + (B + B^T) k

    dbeta_t = dr_t . v_t - e_t - sum_{s<t} exp(G_t - G_s) (dr x^T)_ts (k k^T)_ts        e_t = exp(G_t) k_t . (S dr_t)

and for the gates, with ``F = dP * (q k^T) + B * (k k^T)`` and what comes through the states row by row:

    dg_j = exp(G_C) <S, dS'> + sum_{t >= j} (sum_{s < j} F_ts + q_t . dq'_t - beta_t e_t) + sum_{t < j} k_t . dk'_t

where dq' and dk' are what S and dS' give to q and k. Nothing is added there that is taken away again, so that gates
under strong decay keep their digits: the sum over s is a product with a triangle of ones, of F in two bf16 parts.
(dbeta is also ``dr_t . x_t / beta_t``, which needs no v; but x has passed through M and is rounded: it is less exact.)

S and x come from the passes, or from the forward where it kept them (full residuals): then S as ``[K, V]``, and x in
rows. A launch takes all chunks, or a band of those of a dense call (:mod:`.bands_backward`); a block walks over chunks
of key heads. Two warpgroups have half of the columns of dq and dk each, and add up the value heads; of F, one has the
part by do and q, the other the part by dr and k. They run the same instructions (a block is 128 threads by 3 groups, so
that TileLang's layouts see one of them): as two copies these were more than the instruction cache of a multiprocessor
holds, and what the misses took from a cache behind it slowed the passes on other multiprocessors as well. The warps of
:mod:`.kernels_supplies_sm90` load, make chunks ready, and find ``dr . v`` and, at the ends of a sequence, ``<S, dS'>``:
of the call's own states there, which are fp32, since a sequence of few tokens has little more in its dg.
"""

from typing import Any

import tilelang.language as T  # noqa: N812 - TileLang's parser knows it by this name

from chunkwise_tilelang.gated_delta_rule.kernels_supplies_sm90 import supplies
from chunkwise_tilelang.gated_delta_rule.schedules_backward import value_block
from chunkwise_tilelang.tiles.sequences import chunk_ends
from chunkwise_tilelang.tiles.transposed import place

_ROWS = T.GemmWarpPolicy.FullRow
_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # barriers stand where they are needed
    "tl.disable_safe_memory_legalize": True,  # every access is inside by its own condition
}


def gradients(
    *, heads: int, value_heads: int, key_width: int, value_width: int, registers: tuple[int, int],
    dtype: str, grad_dtype: str, g_dtype: str, beta_dtype: str, ragged: bool, full: bool,
) -> Any:  # fmt: skip
    """dq, dk ``[B, T, H, K]``, dg and dbeta; rows of padding are left as they are.

    Args:
        heads, value_heads, key_width, value_width: H, HV, K, V.
        registers: of a thread that computes, and of one that loads.
        dtype, grad_dtype, g_dtype, beta_dtype: of the activations; of dq and dk; of g and dg; of beta and dbeta.
        ragged: whether the chunks are found by offsets.
        full: whether S and x are those of full residuals; the states of a ragged sequence then begin with the slot that
            stands in ``first_slots``.
    """
    H, HV, K, V, C = heads, value_heads, key_width, value_width, 64
    R = HV // H  # value heads of a key head
    KH = K // 2
    VB = value_block(V)  # columns of V that are taken at a time
    NB, NP = V // VB, VB // 64  # blocks of columns; tiles of a block
    ITEMS = R * NB  # of a chunk of a key head
    STAGED = K == VB == 128 and grad_dtype == dtype  # dq and dk leave through tiles of do and dr
    with_products, with_copies = registers
    B, TT, N0, N1, offsets, slots = (T.dynamic(name) for name in ("B", "TT", "N0", "N1", "offsets", "slots"))
    firsts, state_slots = (T.dynamic(name) for name in ("firsts", "state_slots"))
    x_shape = (B, TT, HV, V) if full else (slots, HV, C, V)
    states_shape = (state_slots, HV, K, V) if full else (slots, HV, V, K)

    find, load, make_ready, add_up = supplies(
        heads=heads, value_heads=value_heads, key_width=key_width, value_width=value_width, rows=TT, dtype=dtype,
        ragged=ragged, full=full,
    )  # fmt: skip

    @T.macro
    def through_states(half, s_s, ds_s, exact, lane):
        """This thread's part of <S, dS'>; none where it is found exactly by other warps."""
        s_eight = T.alloc_local((8,), dtype)
        ds_eight = T.alloc_local((8,), dtype)
        through = T.alloc_var("float32")
        at = T.alloc_var("int32")
        through = 0.0
        if exact == 0:
            for m in T.unroll(VB * KH // 1024, unroll_factor=2):
                at = m * 128 + lane
                n, row = at // (KH // 8) // 64, at // (KH // 8) % 64
                if full:
                    for e in T.unroll(8):
                        s_eight[e] = s_s[half, n, at % (KH // 8) * 8 + e, row]
                else:
                    for e in T.vectorized(8):
                        s_eight[e] = s_s[half, n, row, at % (KH // 8) * 8 + e]
                for e in T.vectorized(8):
                    ds_eight[e] = ds_s[half, n, row, at % (KH // 8) * 8 + e]
                for e in T.unroll(8):
                    through += T.cast(s_eight[e], "float32") * T.cast(ds_eight[e], "float32")
        return through

    @T.macro
    def pairs(half, p, tiles, scale, step_size, scores, d_scores, f, by_pairs):
        """F of this half in f, from the products of rows there; adds to the gradient of the scores."""
        qk_s, vec_s = tiles
        weight = T.alloc_fragment((C,), "float32")
        for t in T.Parallel(C):
            weight[t] = T.Select(half == 0, scale, -step_size[t])
        # Computed for each value head: registers are what this kernel runs out of.
        T.wgmma_gemm(qk_s[half, 0, :, :], qk_s[1, 0, :, :], scores, transpose_B=True, clear_accum=True, policy=_ROWS)
        T.wgmma_gemm(qk_s[half, 1, :, :], qk_s[1, 1, :, :], scores, transpose_B=True, policy=_ROWS)
        T.wait_wgmma(0)
        for t, r in T.Parallel(C, C):
            f[t, r] *= T.exp2(vec_s[p, 0, t] - vec_s[p, 0, r])
        for t, r in T.Parallel(C, C):
            f[t, r] = T.Select(t >= r + half, f[t, r], 0.0)
        for t, r in T.Parallel(C, C):
            scores[t, r] *= f[t, r]
            d_scores[t, r] += weight[t] * f[t, r]
        T.reduce_sum(scores, by_pairs, dim=1)
        for t, r in T.Parallel(C, C):
            f[t, r] = weight[t] * scores[t, r]

    @T.macro
    def down_the_rows(half, p, f, through_rows, step_size, through, ones_s, dg_s, lane):
        """Each warp's sums of dg over its rows: t >= j before and t < j behind them."""
        by_query, by_error, by_exit = through_rows
        f_high = T.alloc_fragment((C, C), "bfloat16")
        f_low = T.alloc_fragment((C, C), "bfloat16")
        f_registers = T.alloc_local((32,), "float32")
        sums = T.alloc_local((16,), "float32")
        everywhere = T.alloc_var("float32")
        at = T.alloc_var("int32")
        for t, r in T.Parallel(C, C):
            f_high[t, r] = f[t, r]
        for t, r in T.Parallel(C, C):
            f_low[t, r] = f[t, r] - T.cast(f_high[t, r], "float32")
        T.wgmma_gemm(f_high, ones_s, f, clear_accum=True, policy=_ROWS)
        T.wgmma_gemm(f_low, ones_s, f, policy=_ROWS)
        T.wait_wgmma(0)
        for t, r in T.Parallel(C, C):
            f[t, r] = T.Select(t >= r, f[t, r] + by_query[t] - step_size[t] * by_error[t], by_exit[t])
        for t, r in T.Parallel(C, C):
            at = place(t, r)
            f_registers[at] = f[t, r]
        everywhere = through + T.shfl_xor(through, 1)
        everywhere += T.shfl_xor(everywhere, 2)
        for n in T.unroll(16):
            sums[n] = f_registers[n // 2 * 4 + n % 2] + f_registers[n // 2 * 4 + 2 + n % 2] + everywhere
        for n in T.unroll(16):
            sums[n] += T.shfl_xor(sums[n], 4)
            sums[n] += T.shfl_xor(sums[n], 8)
            sums[n] += T.shfl_xor(sums[n], 16)
        if lane % 32 < 4:
            for n in T.unroll(16):
                dg_s[p, half * 4 + lane // 32, n // 2 * 8 + lane % 4 * 2 + n % 2] = sums[n]

    @T.macro
    def add_pairs(half, pairs_s, at, qk_s, dq, dk):
        """What the gradients of the scores give to q and k, once for all value heads."""
        T.wgmma_gemm(pairs_s[at, 0, :, :], qk_s[1, half, :, :], dq, policy=_ROWS)
        T.wgmma_gemm(pairs_s[at, 0, :, :], qk_s[0, half, :, :], dk, transpose_A=True, policy=_ROWS)
        T.wgmma_gemm(pairs_s[at, 1, :, :], qk_s[1, half, :, :], dk, policy=_ROWS)
        T.wgmma_gemm(pairs_s[at, 1, :, :], qk_s[1, half, :, :], dk, transpose_A=True, policy=_ROWS)
        T.wait_wgmma(0)

    @T.macro
    def leave_from(half, last, tiles, outs, place_of, rows, lane):
        """dq and dk to memory, by lines of a tile."""
        c = lane % 8 * 8
        dq_out, dk_out = outs
        batch, first, h = place_of
        for m in T.unroll(4):
            t = m * 16 + lane // 8
            if t < rows:
                for e in T.vectorized(8):
                    dq_out[batch, first + t, h, half * KH + c + e] = tiles[0, last, half, t, c + e]
                for e in T.vectorized(8):
                    dk_out[batch, first + t, h, half * KH + c + e] = tiles[1, last, half, t, c + e]

    @T.macro
    def leave(half, gradients_of, outs, place_of, rows):
        """dq and dk to memory, from registers."""
        dq, dk = gradients_of
        dq_out, dk_out = outs
        batch, first, h = place_of
        for t, c in T.Parallel(C, KH):
            if t < rows:
                dq_out[batch, first + t, h, half * KH + c] = dq[t, c]
        for t, c in T.Parallel(C, KH):
            if t < rows:
                dk_out[batch, first + t, h, half * KH + c] = dk[t, c]

    @T.macro
    def products(half, units, origin, stride, where, flags, tensors, scale, tiles, rings):
        cu_seqlens, sequences, steps, _ = where
        dq_out, dk_out, dg_out, dbeta_out = tensors
        has_initial, has_final = flags
        qk_s, s_s, ds_s, x_s, rows_s, pairs_s, ones_s, vec_s, dg_s, db_s, sums_s = tiles
        ready_qk, empty_qk, ready_rows, empty_rows, full_s, empty_s, full_ds, empty_ds, summed, both, staged = rings
        dq = T.alloc_fragment((C, KH), "float32")
        dk = T.alloc_fragment((C, KH), "float32")
        one = T.alloc_fragment((C, KH), "float32")
        two = T.alloc_fragment((C, KH), "float32")
        scores = T.alloc_fragment((C, C), "float32")
        d_scores = T.alloc_fragment((C, C), "float32")
        f = T.alloc_fragment((C, C), "float32")
        from_start = T.alloc_fragment((C,), "float32")
        to_end = T.alloc_fragment((C,), "float32")
        step_size = T.alloc_fragment((C,), "float32")
        by_query = T.alloc_fragment((C,), "float32")
        by_error = T.alloc_fragment((C,), "float32")
        by_exit = T.alloc_fragment((C,), "float32")
        by_pairs = T.alloc_fragment((C,), "float32")
        through = T.alloc_var("float32")
        dg_sum = T.alloc_var("float32")
        dbeta_sum = T.alloc_var("float32")
        dg_sum = 0.0
        dbeta_sum = 0.0
        lane = T.get_thread_binding()
        for i in T.serial(units):
            slot, _, h, batch, first, rows = find(origin + i * stride, where)
            _, opens, closes = chunk_ends(slot, cu_seqlens, sequences, steps, TT, C, ragged)
            T.clear(dq)
            T.clear(dk)
            T.clear(d_scores)
            T.barrier_wait(ready_qk[0], i % 2)
            for j in T.serial(ITEMS):
                hv = h * R + j // NB
                block = j % NB
                item = i * ITEMS + j
                p = item % 2
                T.barrier_wait(ready_rows[p], item // 2 % 2)
                T.barrier_wait(full_s[0], item % 2)
                for n in range(NP):
                    T.wgmma_gemm(
                        rows_s[0, p, n, :, :], s_s[half, n, :, :], one,
                        transpose_B=full, clear_accum=n == 0, policy=_ROWS,
                    )  # fmt: skip
                for n in range(NP):
                    T.wgmma_gemm(
                        rows_s[1, p, n, :, :], s_s[half, n, :, :], two,
                        transpose_B=full, clear_accum=n == 0, policy=_ROWS,
                    )  # fmt: skip
                for t in T.Parallel(C):
                    from_start[t] = vec_s[p, 1, t]
                for t in T.Parallel(C):
                    to_end[t] = vec_s[p, 2, t]
                for t in T.Parallel(C):
                    step_size[t] = vec_s[p, 3, t]
                T.wait_wgmma(0)
                for t, c in T.Parallel(C, KH):
                    one[t, c] *= scale * from_start[t]
                    dq[t, c] += one[t, c]
                    one[t, c] *= qk_s[0, half, t, c]
                T.reduce_sum(one, by_query, dim=1)
                for t, c in T.Parallel(C, KH):
                    two[t, c] *= from_start[t]
                    dk[t, c] -= step_size[t] * two[t, c]
                    two[t, c] *= qk_s[1, half, t, c]
                T.reduce_sum(two, by_error, dim=1)
                T.barrier_wait(full_ds[0], item % 2)
                for n in range(NP):
                    T.wgmma_gemm(x_s[p, n, :, :], ds_s[half, n, :, :], one, clear_accum=n == 0, policy=_ROWS)
                for n in range(NP):
                    T.wgmma_gemm(
                        rows_s[half, p, n, :, :], x_s[p, n, :, :], f, transpose_B=True, clear_accum=n == 0, policy=_ROWS
                    )
                through = through_states(half, s_s, ds_s, opens * has_initial + closes * has_final, lane)
                through *= vec_s[p, 1, C - 1]
                T.wait_wgmma(0)
                T.barrier_arrive(empty_s[0])
                T.barrier_arrive(empty_ds[0])
                for t, c in T.Parallel(C, KH):
                    one[t, c] *= to_end[t]
                    dk[t, c] += one[t, c]
                    one[t, c] *= qk_s[1, half, t, c]
                T.reduce_sum(one, by_exit, dim=1)
                pairs(half, p, (qk_s, vec_s), scale, step_size, scores, d_scores, f, by_pairs)
                down_the_rows(half, p, f, (by_query, by_error, by_exit), step_size, through, ones_s, dg_s, lane)
                for t in T.Parallel(C):
                    db_s[p, half, t] = by_error[t] + T.Select(half == 1, by_pairs[t], 0.0)
                if NP == 1 or j < ITEMS - 1:
                    T.barrier_arrive(empty_rows[p])
                T.barrier_arrive(both[0])
                T.barrier_wait(both[0], item % 2)
                T.barrier_wait(summed[p], item // 2 % 2)
                if lane < C:
                    if half == 0:
                        dg_sum = T.Select(block == 0, 0.0, dg_sum)
                        for part in T.unroll(8):
                            dg_sum += dg_s[p, part, lane]
                        dg_sum += sums_s[p, 1, 0] + sums_s[p, 1, 1]
                        if block == NB - 1 and lane < rows:
                            dg_out[batch, first + lane, hv] = dg_sum
                    else:
                        dbeta_sum = T.Select(block == 0, 0.0, dbeta_sum)
                        dbeta_sum += sums_s[p, 0, lane] - (db_s[p, 0, lane] + db_s[p, 1, lane])
                        if block == NB - 1 and lane < rows:
                            dbeta_out[batch, first + lane, hv] = dbeta_sum
            # With two tiles a block, those of the last value head are free: all have waited for each other.
            last = (i * ITEMS + ITEMS - 1) % 2
            T.copy(d_scores, pairs_s[last if NP == 2 else 0, half, :, :])
            T.fence_proxy_async()
            T.barrier_arrive(both[1])
            T.barrier_wait(both[1], i % 2)
            add_pairs(half, pairs_s, last if NP == 2 else 0, qk_s, dq, dk)
            T.barrier_arrive(empty_qk[0])
            if STAGED:
                T.copy(dq, rows_s[0, last, half, :, :])
                T.copy(dk, rows_s[1, last, half, :, :])
                T.barrier_arrive(staged[half])
                T.barrier_wait(staged[half], i % 2)
                leave_from(half, last, rows_s, (dq_out, dk_out), (batch, first, h), rows, lane)
                T.fence_proxy_async()
            else:
                leave(half, (dq, dk), (dq_out, dk_out), (batch, first, h), rows)
            if NP == 2:
                T.barrier_arrive(empty_rows[last])

    @T.prim_func
    def gated_delta_rule_gradients(
        q: T.Tensor((B, TT, H, K), dtype),
        k: T.Tensor((B, TT, H, K), dtype),
        v: T.Tensor((B, TT, HV, V), dtype),
        g_cumsum: T.Tensor((B, TT, HV), "float32"),
        beta: T.Tensor((B, TT, HV), beta_dtype),
        d_o: T.Tensor((B, TT, HV, V), dtype),
        cu_seqlens: T.Tensor((offsets,), "int32"),
        initial: T.Tensor((N0, HV, K, V), "float32"),
        d_final: T.Tensor((N1, HV, K, V), "float32"),
        states: T.Tensor(states_shape, dtype),
        d_states: T.Tensor((slots, HV, V, K), dtype),
        x: T.Tensor(x_shape, dtype),
        dr: T.Tensor((slots, HV, C, V), dtype),
        first_slots: T.Tensor((firsts,), "int32"),
        dq: T.Tensor((B, TT, H, K), grad_dtype),
        dk: T.Tensor((B, TT, H, K), grad_dtype),
        dg: T.Tensor((B, TT, HV), g_dtype),
        dbeta: T.Tensor((B, TT, HV), beta_dtype),
        scale: T.float32,
        steps: T.int32,
        blocks: T.int32,
        chunks: T.int32,
        width: T.int32,
        band_first: T.int32,
        band_count: T.int32,
        band_at: T.int32,
        band_size: T.int32,
        has_initial: T.int32,
        has_final: T.int32,
    ):
        T.annotate_pass_configs(_CONFIGS)
        with T.Kernel(blocks, threads=(128, 3)) as block:
            qk_s = T.alloc_shared((2, 2, C, KH), dtype)
            v_s = T.alloc_shared((NP, C, 64), dtype)
            s_s = T.alloc_shared((2, NP, KH, 64) if full else (2, NP, 64, KH), dtype)
            ds_s = T.alloc_shared((2, NP, 64, KH), dtype)
            x_s = T.alloc_shared((2, NP, C, 64), dtype)
            rows_s = T.alloc_shared((2, 2, NP, C, 64), dtype)  # do and dr
            pairs_s = x_s if NP == 2 else T.alloc_shared((1, 2, C, C), dtype)
            ones_s = T.alloc_shared((C, C), "bfloat16")
            vec_s = T.alloc_shared((2, 4, C), "float32")
            dg_s = T.alloc_shared((2, 8, C), "float32")
            db_s = T.alloc_shared((2, 2, C), "float32")
            sums_s = T.alloc_shared((2, 2, C), "float32")

            raw_qk = T.alloc_barrier(arrive_count=[32])
            ready_qk = T.alloc_barrier(arrive_count=[32])
            empty_qk = T.alloc_barrier(arrive_count=[256])
            raw_rows = T.alloc_barrier(arrive_count=[32] * 2)
            ready_rows = T.alloc_barrier(arrive_count=[32] * 2)
            empty_rows = T.alloc_barrier(arrive_count=[320] * 2)
            full_s = T.alloc_barrier(arrive_count=[32])
            empty_s = T.alloc_barrier(arrive_count=[320])
            full_ds = T.alloc_barrier(arrive_count=[32])
            empty_ds = T.alloc_barrier(arrive_count=[320])
            full_v = T.alloc_barrier(arrive_count=[32])
            empty_v = T.alloc_barrier(arrive_count=[64])
            summed = T.alloc_barrier(arrive_count=[64] * 2)
            both = T.alloc_barrier(arrive_count=[256] * 2)
            staged = T.alloc_barrier(arrive_count=[128] * 2)

            band = (chunks, width, (band_first, band_count, band_at, band_size))
            taken = slots if ragged else B * band_size
            units = T.max(T.ceildiv(taken * H - block, blocks), 0)
            where = (cu_seqlens, offsets - 1, steps, band)
            tx, group = T.get_thread_bindings()[:2]
            if group == 0:
                for s, j in T.Parallel(C, C):
                    ones_s[s, j] = T.Select(s < j, T.cast(1, "bfloat16"), T.cast(0, "bfloat16"))
                T.fence_proxy_async()
            T.sync_threads()
            tensors = (dq, dk, dg, dbeta)
            tiles = (qk_s, s_s, ds_s, x_s, rows_s, pairs_s, ones_s, vec_s, dg_s, db_s, sums_s)
            states_rings = (full_s, empty_s, full_ds, empty_ds)
            rings = (ready_qk, empty_qk, ready_rows, empty_rows, *states_rings, summed, both, staged)
            if group < 2:
                T.set_max_nreg(with_products, 1)
                products(group, units, block, blocks, where, (has_initial, has_final), tensors, scale, tiles, rings)
            else:
                T.set_max_nreg(with_copies, 0)
                if tx < 32:
                    load(
                        units, block, blocks, where, (q, k, v, x, dr, d_o, states, d_states, first_slots),
                        (qk_s, v_s, s_s, ds_s, x_s, rows_s),
                        (raw_qk, empty_qk, raw_rows, empty_rows, *states_rings, full_v, empty_v),
                    )  # fmt: skip
                elif tx < 64:
                    make_ready(
                        units, block, blocks, where, (g_cumsum, beta), (qk_s, rows_s, x_s, vec_s),
                        (raw_qk, ready_qk, raw_rows, ready_rows),
                    )  # fmt: skip
                else:
                    add_up(
                        units, block, blocks, where, (initial, d_final, has_initial, has_final),
                        (s_s, ds_s, rows_s, v_s, vec_s, sums_s),
                        (ready_rows, empty_rows, *states_rings, full_v, empty_v, summed),
                    )  # fmt: skip

    return gated_delta_rule_gradients
