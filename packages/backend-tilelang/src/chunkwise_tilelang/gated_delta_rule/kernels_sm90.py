"""The fused forward of the gated delta rule on Hopper: states on the chip, outputs in the same pass.

A block has the states of one head, or of half of its V columns, over a whole sequence. Per chunk, with ``M' = M
diag(beta)`` from :mod:`.kernels`, G the gate sums, S the entry state and P the masked ``exp(G_t - G_s) q_t . k_s``:

    x = M' (v - exp(G) k S)      o = scale (exp(G) q S + P x)      S' = exp(G_C) S + sum_t exp(G_C - G_t) k_t x_t^T

Everything is kept transposed, V on the rows. Then the state, what is taken off v, and x are left operands of wgmma,
which it reads from registers: from state to state nothing goes through shared memory. One warpgroup has 64 columns
of V; ``groups`` of them share the chunk's tiles. A further warpgroup computes P, one chunk ahead, and clears rows
behind the end of a sequence; the last loads by TMA and stores o, and what full residuals keep: S and x of every chunk.

Barriers, each with its own ring: raw (a chunk has arrived), ready (P is there, the chunk can be used), empty (the
stage can be loaded again), free (P can be overwritten), o_full and o_empty (the output tile, and so for S and x).
"""

from typing import Any

import tilelang.language as T  # noqa: N812 - TileLang's parser knows it by this name
from tilelang.layout import make_swizzled_layout

from chunkwise.autograd.residuals import ENTRY_CHUNKS
from chunkwise_tilelang.tiles.sequences import cut_behind, segment_rows, sequence_rows
from chunkwise_tilelang.tiles.transposed import load_transposed, place, store_transposed

_ROWS = T.GemmWarpPolicy.FullRow
_STEPS = 4  # of 16 tokens


@T.macro
def _put(out, scale, registers, tile, turn, group, full, empty):
    """The outputs of a chunk into the tile that the storing warp waits for."""
    at = T.alloc_var("int32")
    for v, t in T.Parallel(64, 64):
        at = place(v, t)
        registers[at] = out[v, t] * scale
    T.barrier_wait(empty[group], (turn + 1) % 2)
    for step in T.unroll(_STEPS):
        store_transposed(registers, tile, step)
    T.fence_proxy_async()
    T.barrier_arrive(full[group])


def fused(
    *, heads: int, value_heads: int, key_width: int, value_width: int, groups: int, stages: int,
    registers: tuple[int, int, int], dtype: str, ragged: bool, segmented: bool, kept: bool,
) -> Any:  # fmt: skip
    """o and the final states, from the solved chunks.

    A block has a whole sequence, or a segment of one, whose entry state then stands in ``initial``. The states at the
    cuts of a sequence are left in ``entries``, which has ``cuts`` slots for each row of the batch, or none.

    Where they are ``kept``, by blocks of one group, x is left in ``v_new`` and the entry state of every chunk in
    ``states``; those of a ragged sequence from the slot on that stands in ``first_slots``.

    Args:
        heads, value_heads, key_width, value_width: H, HV, K, and V, a multiple of the columns of a block.
        groups: warpgroups of 64 columns of V in a block.
        stages: chunks that are loaded ahead.
        registers: of a thread that has states, that computes P, and that loads or stores.
        dtype: of the activations.
        ragged: whether the sequences are found by offsets.
        segmented: whether blocks have segments.
        kept: whether S and x of every chunk are kept.
    """
    H, HV, K, V, C, S, G = heads, value_heads, key_width, value_width, 64, stages, groups
    if kept and G > 1:
        raise ValueError("a block of two groups has no shared memory for what is kept")
    blocks = V // (64 * G)
    consumers = 128 * G
    with_states, with_pairs, with_copies = registers
    overlapped = G == 1  # o of a chunk is stored behind the next chunk's first product; two groups lack the registers
    B, TT, N0, N1, N2 = (T.dynamic(name) for name in ("B", "TT", "N0", "N1", "N2"))
    offsets, slots, firsts, state_slots = (T.dynamic(name) for name in ("offsets", "slots", "firsts", "state_slots"))

    @T.macro
    def keep_state(s, registers, tile, turn, full, empty):
        """The entry state of a chunk into the tile that the storing warp waits for, K on its rows."""
        at = T.alloc_var("int32")
        for v, c in T.Parallel(64, K):
            at = place(v, c)
            registers[at] = s[v, c]
        T.barrier_wait(empty[0], (turn + 1) % 2)
        for step in T.unroll(K // 16):
            store_transposed(registers, tile, step)
        T.fence_proxy_async()
        T.barrier_arrive(full[0])

    @T.macro
    def consume(group, tile, place_of, turns, scale, states, flags, k_s, q_s, v_s, m_s, p_s, d_s, rings):
        entry, leaving, hv, first, batch, start, cu_seqlens, cuts = place_of
        initial, final, entries = states
        has_initial, has_final = flags
        ready, empty, free, o_full, o_empty, s_tile, x_tile, s_full, s_empty, x_full, x_empty = rings
        s = T.alloc_fragment((64, K), "float32")
        s_operand = T.alloc_fragment((64, K), dtype)
        taken = T.alloc_fragment((64, C), "float32")
        rest = T.alloc_fragment((64, C), dtype)
        x = T.alloc_fragment((64, C), "float32")
        x_operand = T.alloc_fragment((64, C), dtype)
        x_decayed = T.alloc_fragment((64, C), dtype)
        out = T.alloc_fragment((64, C), "float32")
        to_end = T.alloc_fragment((C,), "float32")
        from_start = T.alloc_fragment((C,), "float32")
        v_registers = T.alloc_local((32,), dtype)
        o_registers = T.alloc_local((32,), dtype)
        s_registers = T.alloc_local((K // 2,), dtype)
        at = T.alloc_var("int32")
        cut = T.alloc_var("int32")
        slot = T.alloc_var("int32")
        # Not before the warps part: those that copy have no registers for it.
        opening = sequence_rows(leaving, cu_seqlens, TT, C, ragged)[1] if segmented else start
        next_cut, next_slot = cut_behind((start - opening) // C, batch, start, C, cuts)
        cut = next_cut
        slot = next_slot
        if has_initial != 0:
            for v, c in T.Parallel(64, K):
                s[v, c] = initial[entry, hv, c, first + v]
        else:
            T.clear(s)
        T.copy(s, s_operand)
        # A sequence without rows multiplies what lies in shared memory, and uses none of it.
        if turns > 0:
            T.barrier_wait(ready[0], 0)
        T.wgmma_gemm(s_operand, k_s[0, :, :], taken, transpose_B=True, clear_accum=True, policy=_ROWS)
        for step in T.unroll(_STEPS):
            load_transposed(v_s, (0, group), v_registers, step)
        for t in T.Parallel(C):
            from_start[t] = d_s[0, 0, t]
        T.wait_wgmma(0)
        for i in T.serial(turns):
            stage, pair = i % S, i % 2
            if i == cut:
                for v, c in T.Parallel(64, K):
                    entries[slot, hv, c, first + v] = s[v, c]
                cut += ENTRY_CHUNKS
                slot += 1
            if kept:
                keep_state(s_operand, s_registers, s_tile, i, s_full, s_empty)
            for v, t in T.Parallel(64, C):
                at = place(v, t)
                taken[v, t] = v_registers[at] - from_start[t] * taken[v, t]
            T.copy(taken, rest)
            T.wgmma_gemm(rest, m_s[stage, :, :], x, transpose_B=True, clear_accum=True, policy=_ROWS)
            T.wgmma_gemm(s_operand, q_s[stage, :, :], out, transpose_B=True, clear_accum=True, policy=_ROWS)
            for t in T.Parallel(C):
                to_end[t] = d_s[stage, 1, t]
            for v, c in T.Parallel(64, K):
                s[v, c] *= d_s[stage, 0, C - 1]
            T.wait_wgmma(1)
            for v, t in T.Parallel(64, C):
                x_decayed[v, t] = x[v, t] * to_end[t]
            T.wgmma_gemm(x_decayed, k_s[stage, :, :], s, policy=_ROWS)
            T.copy(x, x_operand)
            if kept:
                _put(x, 1.0, o_registers, x_tile, i, 0, x_full, x_empty)
            T.wait_wgmma(1)
            for v, t in T.Parallel(64, C):
                out[v, t] *= from_start[t]
            T.wgmma_gemm(x_operand, p_s[pair, :, :], out, transpose_B=True, policy=_ROWS)
            if overlapped:
                T.wait_wgmma(1)
            else:
                T.wait_wgmma(0)
                T.barrier_arrive(empty[stage])
                T.barrier_arrive(free[pair])
                _put(out, scale, o_registers, tile, i, group, o_full, o_empty)
            T.copy(s, s_operand)
            following = (i + 1) % S
            # Behind the last chunk the products below read a stage that nobody writes any more, and are not used.
            if i + 1 < turns:
                T.barrier_wait(ready[1 - pair], (i + 1) // 2 % 2)
            T.wgmma_gemm(s_operand, k_s[following, :, :], taken, transpose_B=True, clear_accum=True, policy=_ROWS)
            if overlapped:
                T.wait_wgmma(1)
                T.barrier_arrive(empty[stage])
                T.barrier_arrive(free[pair])
                _put(out, scale, o_registers, tile, i, group, o_full, o_empty)
            for step in T.unroll(_STEPS):
                load_transposed(v_s, (following, group), v_registers, step)
            for t in T.Parallel(C):
                from_start[t] = d_s[following, 0, t]
            T.wait_wgmma(0)
        if has_final != 0:
            for v, c in T.Parallel(64, K):
                final[leaving, hv, c, first + v] = s[v, c]

    @T.macro
    def compute_pairs(turns, length, k_s, q_s, v_s, p_s, d_s, raw, ready, free):
        scores = T.alloc_fragment((C, C), "float32")
        operand = T.alloc_fragment((C, C), dtype)
        for i in T.unroll(turns, unroll_factor=1):
            stage, pair = i % S, i % 2
            rows = length - i * C
            T.barrier_wait(free[pair], (i // 2 + 1) % 2)
            T.barrier_wait(raw[stage], i // S % 2)
            if rows < C:  # other sequences' rows, or padding that may hold anything
                for t, c in T.Parallel(C, K):
                    if t >= rows:
                        k_s[stage, t, c] = 0
                for group, t, v in T.Parallel(G, C, 64):
                    if t >= rows:
                        v_s[stage, group, t, v] = 0
            T.wgmma_gemm(q_s[stage, :, :], k_s[stage, :, :], scores, transpose_B=True, clear_accum=True, policy=_ROWS)
            T.wait_wgmma(0)
            for t, r in T.Parallel(C, C):
                scores[t, r] *= T.exp2(d_s[stage, 2, t] - d_s[stage, 2, r])
            for t, r in T.Parallel(C, C):
                operand[t, r] = T.Select(t >= r, scores[t, r], 0.0)
            T.copy(operand, p_s[pair, :, :])
            T.fence_proxy_async()
            T.barrier_arrive(ready[pair])

    @T.macro
    def store(group, tile, place_of, turns, batch, start, length, o, o_full, o_empty):
        hv, first = place_of
        for i in T.unroll(turns, unroll_factor=1):
            left = start + i * C
            T.barrier_wait(o_full[group], i % 2)
            if left + C <= start + length:
                T.tma_copy(tile, o[batch, left : left + C, hv, first : first + 64])
                T.tma_store_wait()
            else:
                for t, v in T.Parallel(C, 64):
                    if left + t < start + length:
                        o[batch, left + t, hv, first + v] = tile[t, v]
            T.barrier_arrive(o_empty[group])

    @T.macro
    def store_states(tile, place_of, turns, where, states, full, empty):
        hv, first = place_of
        n, start, slot, cu_seqlens, first_slots = where
        at = T.alloc_var("int32")
        at = slot
        if ragged:
            opening = sequence_rows(n, cu_seqlens, TT, C, ragged)[1]
            at = first_slots[n] + (start - opening) // C
        for i in T.unroll(turns, unroll_factor=1):
            T.barrier_wait(full[0], i % 2)
            T.tma_copy(tile, states[at + i, hv, 0:K, first : first + 64])
            T.tma_store_wait()
            T.barrier_arrive(empty[0])

    @T.prim_func
    def gated_delta_rule_fused(
        q: T.Tensor((B, TT, H, K), dtype),
        k: T.Tensor((B, TT, H, K), dtype),
        v: T.Tensor((B, TT, HV, V), dtype),
        solved: T.Tensor((slots, HV, C, C), dtype),
        decays: T.Tensor((slots, HV, 3, C), "float32"),
        cu_seqlens: T.Tensor((offsets,), "int32"),
        initial: T.Tensor((N0, HV, K, V), "float32"),
        o: T.Tensor((B, TT, HV, V), dtype),
        final: T.Tensor((N1, HV, K, V), "float32"),
        entries: T.Tensor((N2, HV, K, V), "float32"),
        v_new: T.Tensor((B, TT, HV, V), dtype),
        states: T.Tensor((state_slots, HV, K, V), dtype),
        first_slots: T.Tensor((firsts,), "int32"),
        N: T.int32,
        steps: T.int32,
        chunks: T.int32,
        cuts: T.int32,
        scale: T.float32,
        has_initial: T.int32,
        has_final: T.int32,
    ):
        T.annotate_pass_configs({"tl.enable_fast_math": True, "tl.disable_thread_storage_sync": True})
        with T.Kernel(N * HV * blocks, threads=consumers + 256) as block:
            n = block // blocks // HV
            hv = block // blocks % HV
            first = block % blocks * (64 * G)
            h = hv // (HV // H)
            k_s = T.alloc_shared((S, C, K), dtype)
            q_s = T.alloc_shared((S, C, K), dtype)
            v_s = T.alloc_shared((S, G, C, 64), dtype)
            m_s = T.alloc_shared((S, C, C), dtype)
            p_s = T.alloc_shared((2, C, C), dtype)
            d_s = T.alloc_shared((S, 3, C), "float32")
            o_0 = T.alloc_shared((C, 64), dtype)
            o_1 = T.alloc_shared((C, 64), dtype)
            s_tile = T.alloc_shared((K, 64), dtype) if kept else o_0
            x_tile = T.alloc_shared((C, 64), dtype) if kept else o_0
            T.annotate_layout({tile: make_swizzled_layout(tile) for tile in (v_s, o_0, o_1, s_tile, x_tile)})

            raw = T.alloc_barrier(arrive_count=[32] * S)
            empty = T.alloc_barrier(arrive_count=[consumers] * S)
            ready = T.alloc_barrier(arrive_count=[128] * 2)
            free = T.alloc_barrier(arrive_count=[consumers] * 2)
            o_full = T.alloc_barrier(arrive_count=[128] * G)
            o_empty = T.alloc_barrier(arrive_count=[32] * G)
            s_full = T.alloc_barrier(arrive_count=[128]) if kept else o_full
            s_empty = T.alloc_barrier(arrive_count=[32]) if kept else o_empty
            x_full = T.alloc_barrier(arrive_count=[128]) if kept else o_full
            x_empty = T.alloc_barrier(arrive_count=[32]) if kept else o_empty

            batch, start, length, slot, leaving, leaves = (T.alloc_var("int32") for _ in range(6))
            if segmented:
                of, begin, count, chunk, last = segment_rows(n, cu_seqlens, offsets - 1, steps, TT, C, chunks, ragged)
                batch = 0 if ragged else of
                start = begin
                length = count
                slot = chunk
                leaving = of
                leaves = T.Select(last == 1, has_final, 0)
            else:
                row, begin, count, chunk = sequence_rows(n, cu_seqlens, TT, C, ragged)
                batch = row
                start = begin
                length = count
                slot = chunk
                leaving = n
                leaves = has_final
            turns = T.ceildiv(length, C)
            ends = (initial, final, entries)
            flags = (has_initial, leaves)
            where = (batch, start, cu_seqlens, cuts)
            rings = (ready, empty, free, o_full, o_empty, s_tile, x_tile, s_full, s_empty, x_full, x_empty)

            tx = T.get_thread_binding()
            if tx < 128:
                T.set_max_nreg(with_states, 1)
                consume(
                    0, o_0, (n, leaving, hv, first, *where), turns, scale, ends, flags, k_s, q_s, v_s, m_s, p_s, d_s,
                    rings,
                )  # fmt: skip
            elif tx < consumers:
                T.set_max_nreg(with_states, 1)
                consume(
                    G - 1, o_1, (n, leaving, hv, first + 64, *where), turns, scale, ends, flags, k_s, q_s, v_s, m_s,
                    p_s, d_s, rings,
                )  # fmt: skip
            elif tx < consumers + 128:
                T.set_max_nreg(with_pairs, 0)
                compute_pairs(turns, length, k_s, q_s, v_s, p_s, d_s, raw, ready, free)
            else:
                T.set_max_nreg(with_copies, 0)
                if tx < consumers + 160:
                    for i in T.unroll(turns, unroll_factor=1):
                        stage = i % S
                        left = start + i * C
                        T.barrier_wait(empty[stage], (i // S + 1) % 2)
                        T.tma_copy(k[batch, left : left + C, h, 0:K], k_s[stage, :, :], barrier=raw[stage])
                        T.tma_copy(q[batch, left : left + C, h, 0:K], q_s[stage, :, :], barrier=raw[stage])
                        T.tma_copy(decays[slot + i, hv, 0:3, 0:C], d_s[stage, :, :], barrier=raw[stage])
                        for group in T.unroll(G):
                            T.tma_copy(
                                v[batch, left : left + C, hv, first + group * 64 : first + group * 64 + 64],
                                v_s[stage, group, :, :],
                                barrier=raw[stage],
                            )
                        T.tma_copy(solved[slot + i, hv, 0:C, 0:C], m_s[stage, :, :], barrier=raw[stage])
                        T.barrier_arrive(raw[stage])
                elif tx < consumers + 192:
                    store(0, o_0, (hv, first), turns, batch, start, length, o, o_full, o_empty)
                elif G == 2:
                    if tx < consumers + 224:
                        store(G - 1, o_1, (hv, first + 64), turns, batch, start, length, o, o_full, o_empty)
                elif kept:
                    if tx < consumers + 224:
                        store(0, x_tile, (hv, first), turns, batch, start, length, v_new, x_full, x_empty)
                    else:
                        store_states(
                            s_tile, (hv, first), turns, (leaving, start, slot, cu_seqlens, first_slots), states,
                            s_full, s_empty,
                        )  # fmt: skip

    return gated_delta_rule_fused
