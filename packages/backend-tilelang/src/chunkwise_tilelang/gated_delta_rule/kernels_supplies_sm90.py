"""What the threads do that compute no products of :mod:`.kernels_gradients_sm90`: load, make ready, add up.

One warp brings what a chunk needs, by TMA; another writes its decays and clears the rows behind its end; two find
``dr . v`` and, at the ends of a sequence, ``<S, dS'>``. The tiles and the barriers are those of the kernel.
"""

from typing import Any, NamedTuple

import tilelang.language as T  # noqa: N812 - TileLang's parser knows it by this name

from chunkwise_tilelang.gated_delta_rule.schedules_backward import value_block
from chunkwise_tilelang.tiles.sequences import band_slots, chunk_ends, chunk_rows, first_and_end, owner_of

_LOG2E = 1.4426950408889634


class Supplies(NamedTuple):
    """Which chunk a unit of work is, and the roles of the threads that compute no products."""

    find: Any
    load: Any
    make_ready: Any
    add_up: Any


def supplies(
    *, heads: int, value_heads: int, key_width: int, value_width: int, rows: Any, dtype: str, ragged: bool, full: bool
) -> Supplies:
    """The macros of the kernel; the arguments are its own, but for ``rows``, which is T as the kernel has it."""
    H, HV, K, V, C, TT = heads, value_heads, key_width, value_width, 64, rows
    R = HV // H  # value heads of a key head
    KH = K // 2
    VB = value_block(V)  # columns of V that are taken at a time
    NB, NP = V // VB, VB // 64  # blocks of columns; tiles of a block
    ITEMS = R * NB  # of a chunk of a key head

    @T.macro
    def find(unit, where):
        """Slot of a unit's chunk among all, and where its states are kept; its head and its rows."""
        cu_seqlens, sequences, steps, band = where
        slot, kept_slot = (T.alloc_var("int32") for _ in range(2))
        slot = unit // H
        kept_slot = slot
        if not ragged:
            of_all, of_kept = band_slots(unit // H, TT, C, *band)
            slot = of_all
            kept_slot = of_kept
        batch, first, rows = chunk_rows(slot, cu_seqlens, sequences, steps, TT, C, ragged)
        return slot, kept_slot, unit % H, batch, first, rows

    @T.macro
    def state_slot(slot, where, first_slots):
        """The slot of a chunk among the states of full residuals."""
        cu_seqlens, sequences, steps, _ = where
        found = T.alloc_var("int32")
        found = slot
        if ragged:
            n = owner_of(slot, cu_seqlens, sequences, steps, TT, C)
            found = first_slots[n] + slot - (first_and_end(cu_seqlens, n, TT)[0] // C + n)
        return found

    @T.macro
    def load(units, origin, stride, where, tensors, tiles, rings):
        q, k, v, x, dr, d_o, states, d_states, first_slots = tensors
        qk_s, v_s, s_s, ds_s, x_s, rows_s = tiles
        raw_qk, empty_qk, raw_rows, empty_rows, full_s, empty_s, full_ds, empty_ds, full_v, empty_v = rings
        for i in T.serial(units):
            slot, kept_slot, h, batch, first, _ = find(origin + i * stride, where)
            entry = state_slot(slot, where, first_slots) if full else kept_slot
            for j in T.serial(ITEMS):
                hv = h * R + j // NB
                left = j % NB * VB
                item = i * ITEMS + j
                p = item % 2
                T.barrier_wait(empty_rows[p], (item // 2 + 1) % 2)
                for n in T.unroll(NP):
                    at = left + n * 64
                    if full:
                        T.tma_copy(x[batch, first : first + C, hv, at : at + 64], x_s[p, n, :, :], barrier=raw_rows[p])
                    else:
                        T.tma_copy(x[kept_slot, hv, 0:C, at : at + 64], x_s[p, n, :, :], barrier=raw_rows[p])
                    T.tma_copy(dr[kept_slot, hv, 0:C, at : at + 64], rows_s[1, p, n, :, :], barrier=raw_rows[p])
                    T.tma_copy(
                        d_o[batch, first : first + C, hv, at : at + 64], rows_s[0, p, n, :, :], barrier=raw_rows[p]
                    )
                T.barrier_arrive(raw_rows[p])
                T.barrier_wait(empty_s[0], (item + 1) % 2)
                for half in T.unroll(2):
                    for n in T.unroll(NP):
                        if full:
                            T.tma_copy(
                                states[entry, hv, half * KH : half * KH + KH, left + n * 64 : left + n * 64 + 64],
                                s_s[half, n, :, :], barrier=full_s[0],
                            )  # fmt: skip
                        else:
                            T.tma_copy(
                                states[kept_slot, hv, left + n * 64 : left + n * 64 + 64, half * KH : half * KH + KH],
                                s_s[half, n, :, :], barrier=full_s[0],
                            )  # fmt: skip
                T.barrier_arrive(full_s[0])
                T.barrier_wait(empty_ds[0], (item + 1) % 2)
                for half in T.unroll(2):
                    for n in T.unroll(NP):
                        T.tma_copy(
                            d_states[kept_slot, hv, left + n * 64 : left + n * 64 + 64, half * KH : half * KH + KH],
                            ds_s[half, n, :, :], barrier=full_ds[0],
                        )  # fmt: skip
                T.barrier_arrive(full_ds[0])
                # q and k of the chunk before are needed to its end: what comes above does not wait for that.
                if j == 0:
                    T.barrier_wait(empty_qk[0], (i + 1) % 2)
                    for half in T.unroll(2):
                        T.tma_copy(
                            q[batch, first : first + C, h, half * KH : half * KH + KH], qk_s[0, half, :, :],
                            barrier=raw_qk[0],
                        )  # fmt: skip
                        T.tma_copy(
                            k[batch, first : first + C, h, half * KH : half * KH + KH], qk_s[1, half, :, :],
                            barrier=raw_qk[0],
                        )  # fmt: skip
                    T.barrier_arrive(raw_qk[0])
                T.barrier_wait(empty_v[0], (item + 1) % 2)
                for n in T.unroll(NP):
                    T.tma_copy(
                        v[batch, first : first + C, hv, left + n * 64 : left + n * 64 + 64], v_s[n, :, :],
                        barrier=full_v[0],
                    )  # fmt: skip
                T.barrier_arrive(full_v[0])

    @T.macro
    def make_ready(units, origin, stride, where, tensors, tiles, rings):
        g_cumsum, beta = tensors
        qk_s, rows_s, x_s, vec_s = tiles
        raw_qk, ready_qk, raw_rows, ready_rows = rings
        total = T.alloc_var("float32")
        last = T.alloc_var("float32")
        lane = T.get_thread_binding() % 32
        for i in T.serial(units):
            _, _, h, batch, first, rows = find(origin + i * stride, where)
            end = T.min(T.max(first + rows - 1, 0), TT - 1)
            for j in T.serial(ITEMS):
                hv = h * R + j // NB
                item = i * ITEMS + j
                p = item % 2
                T.barrier_wait(raw_rows[p], item // 2 % 2)
                last = g_cumsum[batch, end, hv] * _LOG2E
                for part in T.unroll(2):
                    t = part * 32 + lane
                    near = T.max(T.min(first + t, end), 0)
                    total = g_cumsum[batch, near, hv] * _LOG2E
                    vec_s[p, 0, t] = total
                    vec_s[p, 1, t] = T.exp2(total)
                    vec_s[p, 2, t] = T.Select(t < rows, T.exp2(last - total), 0.0)
                    vec_s[p, 3, t] = T.Select(t < rows, T.cast(beta[batch, near, hv], "float32"), 0.0)
                if ragged:
                    if rows < C:  # other sequences' rows, or padding that may hold anything
                        for m in T.unroll((C - rows) * VB // 32, unroll_factor=1):
                            at = m * 32 + lane
                            rows_s[0, p, at % NP, rows + at // VB, at % VB // NP] = 0
                            if full:
                                x_s[p, at % NP, rows + at // VB, at % VB // NP] = 0
                        T.fence_proxy_async()
                T.barrier_arrive(ready_rows[p])
                if j == 0:
                    T.barrier_wait(raw_qk[0], i % 2)
                    if ragged:
                        if rows < C:
                            for m in T.unroll((C - rows) * KH // 32, unroll_factor=1):
                                at = m * 32 + lane
                                for kind, half in T.grid(2, 2):
                                    qk_s[kind, half, rows + at // KH, at % KH] = 0
                            T.fence_proxy_async()
                    T.barrier_arrive(ready_qk[0])

    @T.macro
    def add_up(units, origin, stride, where, ends, tiles, rings):
        cu_seqlens, sequences, steps, _ = where
        initial, d_final, has_initial, has_final = ends
        s_s, ds_s, rows_s, v_s, vec_s, sums_s = tiles
        ready_rows, empty_rows, full_s, empty_s, full_ds, empty_ds, full_v, empty_v, summed = rings
        dr_eight = T.alloc_local((8,), dtype)
        v_eight = T.alloc_local((8,), dtype)
        exact = T.alloc_local((16,), "float32")
        total = T.alloc_var("float32")
        lane = T.get_thread_binding() % 64
        part = lane % 4 * 8
        for i in T.serial(units):
            slot, _, h, _, _, _ = find(origin + i * stride, where)
            n, opens, closes = chunk_ends(slot, cu_seqlens, sequences, steps, TT, C, ragged)
            for j in T.serial(ITEMS):
                hv = h * R + j // NB
                left = j % NB * VB
                item = i * ITEMS + j
                p = item % 2
                T.barrier_wait(full_s[0], item % 2)
                T.barrier_wait(full_ds[0], item % 2)
                total = 0.0
                if opens * has_initial + closes * has_final != 0:
                    for m in T.unroll(NP * K // 8, unroll_factor=1):
                        tile = m % NP
                        c = m // NP * 8
                        for e in T.unroll(8):
                            if opens * has_initial != 0:
                                exact[e] = initial[n, hv, c + e, left + tile * 64 + lane]
                            elif full:
                                exact[e] = s_s[c // KH, tile, c % KH + e, lane]
                            else:
                                exact[e] = s_s[c // KH, tile, lane, c % KH + e]
                        for e in T.unroll(8):
                            if closes * has_final != 0:
                                exact[8 + e] = d_final[n, hv, c + e, left + tile * 64 + lane]
                            else:
                                exact[8 + e] = ds_s[c // KH, tile, lane, c % KH + e]
                        for e in T.unroll(8):
                            total += exact[e] * exact[8 + e]
                T.barrier_arrive(empty_s[0])
                T.barrier_arrive(empty_ds[0])
                T.barrier_wait(ready_rows[p], item // 2 % 2)
                total *= vec_s[p, 1, C - 1]
                for e in T.unroll(5):
                    total += T.shfl_xor(total, 1 << e)
                if lane % 32 == 0:
                    sums_s[p, 1, lane // 32] = total
                T.barrier_wait(full_v[0], item % 2)
                for m in T.unroll(C // 16, unroll_factor=1):
                    t = m * 16 + lane // 4
                    total = 0.0
                    for n, u in T.grid(NP, 2):
                        for e in T.vectorized(8):
                            dr_eight[e] = rows_s[1, p, n, t, u * 32 + part + e]
                        for e in T.vectorized(8):
                            v_eight[e] = v_s[n, t, u * 32 + part + e]
                        for e in T.unroll(8):
                            total += T.cast(dr_eight[e], "float32") * T.cast(v_eight[e], "float32")
                    total += T.shfl_xor(total, 1)
                    total += T.shfl_xor(total, 2)
                    if part == 0:
                        sums_s[p, 0, t] = total
                T.barrier_arrive(empty_v[0])
                T.barrier_arrive(empty_rows[p])
                T.barrier_arrive(summed[p])

    return Supplies(find, load, make_ready, add_up)
