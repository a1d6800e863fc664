"""The passes of the backward on Hopper: both walks of :mod:`.kernels_walks_sm90`, and what each chunk needs later kept.

They leave S, dS' ``[slots, HV, V, K]`` and x, dr ``[slots, HV, C, V]`` in the activations' dtype, the rows behind a
sequence's end zero, and dv; the rest of the gradients is the matter of :mod:`.kernels_gradients_sm90`. A launch takes
all chunks, or a band of those of a dense call: :mod:`.bands_backward`.
"""

from typing import Any

import tilelang.language as T  # noqa: N812 - TileLang's parser knows it by this name
from tilelang.layout import make_swizzled_layout

from chunkwise_tilelang.gated_delta_rule.kernels_walks_sm90 import CONFIGS, walks
from chunkwise_tilelang.tiles.sequences import entry_of, segment_rows, sequence_rows, walked


def passes(
    *, heads: int, value_heads: int, key_width: int, value_width: int, groups: int, stages: int,
    registers: tuple[int, int, int], dtype: str, beta_dtype: str, ragged: bool, segmented: bool,
) -> Any:  # fmt: skip
    """S, dS', x and dr of every chunk, dv, and the gradient of the initial state. Half of the blocks go backwards, or
    all of them where ``directions`` is 1, which then leave dS', dr, dv and the gradient of the initial state alone.

    A block has a whole sequence, or a segment of one, whose entry state and whose exit state's gradient then stand in
    ``initial`` and ``d_final``, or a band of that. Where ``cuts`` is not 0 the band begins at one of the states that
    the forward left, and ``initial`` has those, so many a row of the batch. Where ``carries`` is not 0 the gradient of
    the band's entry state is left by place in ``d_initial``, which may be ``d_final``, since a thread writes what it
    read. A place without chunks in a band passes on what it was given.

    Args:
        heads, value_heads, key_width, value_width: H, HV, K, and V, a multiple of the columns of a block.
        groups: warpgroups of 64 columns of V in a block.
        stages: chunks that are loaded ahead, two at least.
        registers: of a thread that has states, that makes a chunk ready, and that loads or stores.
        dtype, beta_dtype: of the activations and of beta.
        ragged: whether the sequences are found by offsets.
        segmented: whether blocks have segments.
    """
    H, HV, K, V, C, S, G = heads, value_heads, key_width, value_width, 64, stages, groups
    blocks = V // (64 * G)
    consumers = 128 * G
    with_states, with_pairs, with_copies = registers
    replay, reverse, make_ready, bring = walks(
        key_width=K, value_width=V, groups=G, stages=S, dtype=dtype, beta_dtype=beta_dtype, kept=True
    )
    B, TT, N0, N1, N2 = (T.dynamic(name) for name in ("B", "TT", "N0", "N1", "N2"))
    offsets, slots = (T.dynamic(name) for name in ("offsets", "slots"))

    @T.macro
    def store(group, tiles, turns, place_of, slot, states, x, rings):
        hv, first = place_of
        s_tile, x_tile = tiles
        s_full, s_empty, x_full, x_empty = rings
        for i in T.unroll(turns, unroll_factor=1):
            T.barrier_wait(s_full[group], i % 2)
            T.tma_copy(s_tile, states[slot + i, hv, first : first + 64, :])
            T.tma_store_wait()
            T.barrier_arrive(s_empty[group])
            T.barrier_wait(x_full[group], i % 2)
            T.tma_copy(x_tile, x[slot + i, hv, :, first : first + 64])
            T.tma_store_wait()
            T.barrier_arrive(x_empty[group])

    @T.macro
    def store_reversed(group, tiles, turns, place_of, slot, where, d_states, dr, dv, rings):
        hv, first = place_of
        batch, start, length = where
        s_tile, r_tile, dv_tile = tiles
        lane = T.get_thread_binding() % 32
        s_full, s_empty, r_full, r_empty = rings
        for i in T.unroll(turns, unroll_factor=1):
            chunk = turns - 1 - i
            left = start + chunk * C
            T.barrier_wait(s_full[group], i % 2)
            T.tma_copy(s_tile, d_states[slot + chunk, hv, first : first + 64, :])
            T.tma_store_wait()
            T.barrier_arrive(s_empty[group])
            T.barrier_wait(r_full[group], i % 2)
            T.tma_copy(r_tile, dr[slot + chunk, hv, :, first : first + 64])
            if left + C <= start + length:
                T.tma_copy(dv_tile, dv[batch, left : left + C, hv, first : first + 64])
            else:
                # One line after the other: all at once take registers that every chunk would have to do without.
                for m in T.unroll(C // 4, unroll_factor=1):
                    t = m * 4 + lane // 8
                    if left + t < start + length:
                        for e in T.vectorized(8):
                            dv[batch, left + t, hv, first + lane % 8 * 8 + e] = dv_tile[t, lane % 8 * 8 + e]
            T.tma_store_wait()
            T.barrier_arrive(r_empty[group])

    @T.prim_func
    def gated_delta_rule_passes(
        q: T.Tensor((B, TT, H, K), dtype),
        k: T.Tensor((B, TT, H, K), dtype),
        v: T.Tensor((B, TT, HV, V), dtype),
        inverse: T.Tensor((B, TT, HV, C), dtype),
        g_cumsum: T.Tensor((B, TT, HV), "float32"),
        beta: T.Tensor((B, TT, HV), beta_dtype),
        d_o: T.Tensor((B, TT, HV, V), dtype),
        cu_seqlens: T.Tensor((offsets,), "int32"),
        initial: T.Tensor((N0, HV, K, V), "float32"),
        d_final: T.Tensor((N1, HV, K, V), "float32"),
        d_initial: T.Tensor((N2, HV, K, V), "float32"),
        states: T.Tensor((slots, HV, V, K), dtype),
        d_states: T.Tensor((slots, HV, V, K), dtype),
        x: T.Tensor((slots, HV, C, V), dtype),
        dr: T.Tensor((slots, HV, C, V), dtype),
        dv: T.Tensor((B, TT, HV, V), dtype),
        N: T.int32,
        steps: T.int32,
        chunks: T.int32,
        width: T.int32,
        band_first: T.int32,
        band_count: T.int32,
        band_at: T.int32,
        cuts: T.int32,
        scale: T.float32,
        has_initial: T.int32,
        has_final: T.int32,
        has_d_initial: T.int32,
        carries: T.int32,
        directions: T.int32,
    ):
        T.annotate_pass_configs(CONFIGS)
        # The blocks that go backwards take longer: they come first.
        with T.Kernel(N * HV * blocks, directions, threads=consumers + 256) as (block, direction):
            backwards = direction == 0
            n = block // blocks // HV
            hv = block // blocks % HV
            first = block % blocks * (64 * G)
            h = hv // (HV // H)
            k_s = T.alloc_shared((S, C, K), dtype)
            q_s = T.alloc_shared((S, C, K), dtype)
            rows_s = T.alloc_shared((S, G, C, 64), dtype)  # v or do
            m_s = T.alloc_shared((S, C, C), dtype)
            p_s = T.alloc_shared((2, C, C), dtype)
            d_s = T.alloc_shared((S, 6, C), "float32")
            s_0 = T.alloc_shared((64, K), dtype)
            s_1 = T.alloc_shared((64, K), dtype)
            r_0 = T.alloc_shared((C, 64), dtype)
            r_1 = T.alloc_shared((C, 64), dtype)
            dv_0 = T.alloc_shared((C, 64), dtype)
            dv_1 = T.alloc_shared((C, 64), dtype)
            swizzled = (rows_s, s_0, s_1, r_0, r_1, dv_0, dv_1)
            T.annotate_layout({tile: make_swizzled_layout(tile) for tile in swizzled})

            raw = T.alloc_barrier(arrive_count=[32] * S)
            empty = T.alloc_barrier(arrive_count=[consumers] * S)
            ready = T.alloc_barrier(arrive_count=[128] * S)
            free = T.alloc_barrier(arrive_count=[consumers] * 2)
            known = T.alloc_barrier(arrive_count=[128] * 2)
            s_full = T.alloc_barrier(arrive_count=[128] * G)
            s_empty = T.alloc_barrier(arrive_count=[32] * G)
            r_full = T.alloc_barrier(arrive_count=[128] * G)
            r_empty = T.alloc_barrier(arrive_count=[32] * G)

            batch, start, length, slot, entry, leaving, leaves = (T.alloc_var("int32") for _ in range(7))
            entry = n
            if segmented:
                of, begin, count, chunk, _ = segment_rows(n, cu_seqlens, offsets - 1, steps, TT, C, chunks, ragged)
                _, opening, _, _ = sequence_rows(of, cu_seqlens, TT, C, ragged)
                batch = 0 if ragged else of
                start = begin
                length = count
                slot = chunk
                leaving = of if ragged else T.Select(carries != 0, n, of)
                leaves = T.Select(begin == opening, has_d_initial, 0)
            else:
                row, begin, count, chunk = sequence_rows(n, cu_seqlens, TT, C, ragged)
                batch = row
                start = begin
                length = count
                slot = chunk
                leaving = n
                leaves = has_d_initial
            if not ragged:
                row_of_band, rows_of_band, slot_of_band = walked(
                    n, start, length, C, width, (band_first, band_count, band_at)
                )
                start = row_of_band
                length = rows_of_band
                slot = slot_of_band
                entry_of_band = entry_of(n, batch, start, C, cuts)
                entry = entry_of_band
                leaves = T.Select(carries != 0, 1, leaves)
            turns = T.ceildiv(length, C)
            ends = (d_final, d_initial)
            flags = (has_final, leaves)
            stores = (s_full, s_empty, r_full, r_empty)
            for_replay = (ready, empty, *stores)
            for_reverse = (ready, empty, free, *stores)

            tx = T.get_thread_binding()
            if tx < 128:
                T.set_max_nreg(with_states, 1)
                if backwards:
                    reverse(
                        0, (n, leaving, hv, first), turns, ends, flags, k_s, q_s, rows_s, m_s, p_s, d_s,
                        (s_0, r_0, dv_0), for_reverse,
                    )  # fmt: skip
                else:
                    replay(
                        0, (n if ragged else entry, hv, first), turns, initial, has_initial, k_s, rows_s, m_s, d_s,
                        (s_0, r_0), for_replay,
                    )  # fmt: skip
            elif tx < consumers:
                T.set_max_nreg(with_states, 1)
                if backwards:
                    reverse(
                        G - 1, (n, leaving, hv, first + 64), turns, ends, flags, k_s, q_s, rows_s, m_s, p_s, d_s,
                        (s_1, r_1, dv_1), for_reverse,
                    )  # fmt: skip
                else:
                    replay(
                        G - 1, (n if ragged else entry, hv, first + 64), turns, initial, has_initial, k_s, rows_s, m_s,
                        d_s, (s_1, r_1), for_replay,
                    )  # fmt: skip
            elif tx < consumers + 128:
                T.set_max_nreg(with_pairs, 0)
                make_ready(
                    backwards, (hv, batch, start, length), turns, scale, g_cumsum, beta,
                    k_s, q_s, rows_s, m_s, p_s, d_s, (raw, ready, empty, free, known),
                )  # fmt: skip
            else:
                T.set_max_nreg(with_copies, 0)
                place_of = (h, hv, batch, start, first)
                if tx < consumers + 160:
                    bring(backwards, turns, place_of, (q, k, v, inverse, d_o), k_s, q_s, rows_s, m_s, raw, empty)
                elif tx < consumers + 192:
                    if backwards:
                        store_reversed(
                            0, (s_0, r_0, dv_0), turns, (hv, first), slot, (batch, start, length), d_states, dr, dv,
                            stores,
                        )  # fmt: skip
                    else:
                        store(0, (s_0, r_0), turns, (hv, first), slot, states, x, stores)
                elif G == 2:
                    if tx < consumers + 224:
                        if backwards:
                            store_reversed(
                                G - 1, (s_1, r_1, dv_1), turns, (hv, first + 64), slot, (batch, start, length),
                                d_states, dr, dv, stores,
                            )  # fmt: skip
                        else:
                            store(G - 1, (s_1, r_1), turns, (hv, first + 64), slot, states, x, stores)

    return gated_delta_rule_passes
