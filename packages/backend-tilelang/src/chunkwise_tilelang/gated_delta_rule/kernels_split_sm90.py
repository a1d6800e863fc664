"""Long sequences over more multiprocessors than there are states, on Hopper: segments and their summaries.

From entry to exit of a segment a state goes through a map that is affine, ``S -> A S + B``, with A ``[K, K]``, B
``[K, V]``. B is the exit state that an entry state of zero has, and a column of A the one that a column of the identity
has where v is zero. So one kernel carries both through all segments side by side, as the fused forward does but without
q and o; a second one goes through the segments of a sequence and leaves the entry state of each.
"""

from typing import Any

import tilelang.language as T  # noqa: N812 - TileLang's parser knows it by this name
from tilelang.layout import make_swizzled_layout

from chunkwise_tilelang.tiles.sequences import segment_rows, segments_of
from chunkwise_tilelang.tiles.transposed import load_transposed, place

_ROWS = T.GemmWarpPolicy.FullRow
_STEPS = 4  # of 16 tokens


def summarise(
    *, heads: int, value_heads: int, key_width: int, value_width: int, groups: int, stages: int,
    registers: tuple[int, int], dtype: str, ragged: bool,
) -> Any:  # fmt: skip
    """A and B of every segment that another one follows, from the solved chunks; such segments have whole chunks.

    A warpgroup has 64 columns of one head's states: of B, and behind its last one of A. A is kept as two bf16 parts.

    Args:
        heads, value_heads, key_width, value_width: H, HV, K and V.
        groups: such warpgroups of a block, one or two.
        stages: chunks that are loaded ahead.
        registers: of a thread that has states, and of one that loads, where there are two groups.
        dtype: of the activations.
        ragged: whether the sequences are found by offsets.
    """
    H, HV, K, V, C, S, G = heads, value_heads, key_width, value_width, 64, stages, groups
    blocks = -(-(V + K) // (64 * G))
    B, TT, offsets, slots, segments = (T.dynamic(name) for name in ("B", "TT", "offsets", "slots", "segments"))

    @T.macro
    def carry(group, place_of, turns, ends, a, b, k_s, v_s, m_s, d_s, raw, empty):
        segment, hv, first = place_of
        s = T.alloc_fragment((64, K), "float32")
        s_operand = T.alloc_fragment((64, K), dtype)
        taken = T.alloc_fragment((64, C), "float32")
        rest = T.alloc_fragment((64, C), dtype)
        x = T.alloc_fragment((64, C), "float32")
        x_decayed = T.alloc_fragment((64, C), dtype)
        to_end = T.alloc_fragment((C,), "float32")
        from_start = T.alloc_fragment((C,), "float32")
        v_registers = T.alloc_local((32,), dtype)
        at = T.alloc_var("int32")
        for v, c in T.Parallel(64, K):
            s[v, c] = T.Select(c == first - V + v, 1.0, 0.0)
        for i in T.serial(turns):
            stage = i % S
            T.barrier_wait(raw[stage], i // S % 2)
            T.copy(s, s_operand)
            T.wgmma_gemm(s_operand, k_s[stage, :, :], taken, transpose_B=True, clear_accum=True, policy=_ROWS)
            for step in T.unroll(_STEPS):
                load_transposed(v_s, (stage, group), v_registers, step)
            for t in T.Parallel(C):
                from_start[t] = d_s[stage, 0, t]
            for t in T.Parallel(C):
                to_end[t] = d_s[stage, 1, t]
            T.wait_wgmma(0)
            # Before that wait ptxas would run every wgmma by itself (C7518).
            for v, c in T.Parallel(64, K):
                s[v, c] *= d_s[stage, 0, C - 1]
            for v, t in T.Parallel(64, C):
                at = place(v, t)
                # Where the columns are those of A nobody has loaded v.
                taken[v, t] = T.Select(first < V, T.cast(v_registers[at], "float32"), 0.0) - from_start[t] * taken[v, t]
            T.copy(taken, rest)
            T.wgmma_gemm(rest, m_s[stage, :, :], x, transpose_B=True, clear_accum=True, policy=_ROWS)
            T.wait_wgmma(0)
            for v, t in T.Parallel(64, C):
                x_decayed[v, t] = x[v, t] * to_end[t]
            T.wgmma_gemm(x_decayed, k_s[stage, :, :], s, policy=_ROWS)
            T.wait_wgmma(0)
            T.barrier_arrive(empty[stage])
        if ends == 0 and first < V:
            for v, c in T.Parallel(64, K):
                b[segment, hv, c, first + v] = s[v, c]
        if ends == 0 and first >= V and first < V + K:
            for v, c in T.Parallel(64, K):
                a[segment, hv, 0, c, first - V + v] = s[v, c]
            for v, c in T.Parallel(64, K):
                a[segment, hv, 1, c, first - V + v] = s[v, c] - T.cast(T.cast(s[v, c], "bfloat16"), "float32")

    @T.prim_func
    def gated_delta_rule_summarise(
        k: T.Tensor((B, TT, H, K), dtype),
        v: T.Tensor((B, TT, HV, V), dtype),
        solved: T.Tensor((slots, HV, C, C), dtype),
        decays: T.Tensor((slots, HV, 3, C), "float32"),
        cu_seqlens: T.Tensor((offsets,), "int32"),
        a: T.Tensor((segments, HV, 2, K, K), "bfloat16"),
        b: T.Tensor((segments, HV, K, V), "float32"),
        steps: T.int32,
        chunks: T.int32,
    ):
        T.annotate_pass_configs({"tl.enable_fast_math": True, "tl.disable_thread_storage_sync": True})
        with T.Kernel(segments * HV * blocks, threads=128 * G + 128) as block:
            segment = block // blocks // HV
            hv = block // blocks % HV
            first = block % blocks * (64 * G)
            h = hv // (HV // H)
            k_s = T.alloc_shared((S, C, K), dtype)
            v_s = T.alloc_shared((S, G, C, 64), dtype)
            m_s = T.alloc_shared((S, C, C), dtype)
            d_s = T.alloc_shared((S, 2, C), "float32")
            T.annotate_layout({v_s: make_swizzled_layout(v_s)})
            raw = T.alloc_barrier(arrive_count=[32] * S)
            empty = T.alloc_barrier(arrive_count=[128 * G] * S)
            n, start, length, slot, ends = segment_rows(segment, cu_seqlens, offsets - 1, steps, TT, C, chunks, ragged)
            turns = T.Select(ends == 0, length // C, 0)
            tx = T.get_thread_binding()
            if tx < 128:
                if G == 2:
                    T.set_max_nreg(registers[0], 1)
                carry(0, (segment, hv, first), turns, ends, a, b, k_s, v_s, m_s, d_s, raw, empty)
            elif tx < 128 * G:
                T.set_max_nreg(registers[0], 1)
                carry(G - 1, (segment, hv, first + 64), turns, ends, a, b, k_s, v_s, m_s, d_s, raw, empty)
            else:
                if G == 2:
                    T.set_max_nreg(registers[1], 0)
                batch = 0 if ragged else n
                if tx < 128 * G + 32:
                    for i in T.unroll(turns, unroll_factor=1):
                        stage = i % S
                        left = start + i * C
                        T.barrier_wait(empty[stage], (i // S + 1) % 2)
                        T.tma_copy(k[batch, left : left + C, h, 0:K], k_s[stage, :, :], barrier=raw[stage])
                        T.tma_copy(decays[slot + i, hv, 0:2, 0:C], d_s[stage, :, :], barrier=raw[stage])
                        for group in T.unroll(G):
                            if first + group * 64 < V:
                                T.tma_copy(
                                    v[batch, left : left + C, hv, first + group * 64 : first + group * 64 + 64],
                                    v_s[stage, group, :, :],
                                    barrier=raw[stage],
                                )
                        T.tma_copy(solved[slot + i, hv, 0:C, 0:C], m_s[stage, :, :], barrier=raw[stage])
                        T.barrier_arrive(raw[stage])

    return gated_delta_rule_summarise


def compose(*, value_heads: int, key_width: int, value_width: int, directions: int, ragged: bool) -> Any:
    """The entry states of all segments, from their summaries; a block has 64 columns of V of one head of a sequence.

    Backwards it is the gradients of their exit states, ``dS -> A^T dS + C``. States are kept transposed, as in the
    fused forward, and multiplied in two bf16 parts; low times low is left out.

    Args:
        value_heads, key_width, value_width: HV, K and V.
        directions: 1, or 2 for both; the second one has its own b and entries.
        ragged: whether the sequences are found by offsets.
    """
    HV, K, V, C, S, D = value_heads, key_width, value_width, 64, 2, directions
    blocks = V // 64
    N0, N1, offsets, segments = (T.dynamic(name) for name in ("N0", "N1", "offsets", "segments"))

    @T.macro
    def carry(place_of, count, has_initial, initial, b, entries, a_s, full, empty, backwards):
        n, slot, hv, first = place_of
        s = T.alloc_fragment((64, K), "float32")
        high = T.alloc_fragment((64, K), "bfloat16")
        low = T.alloc_fragment((64, K), "bfloat16")
        mapped = T.alloc_fragment((64, K), "float32")
        added = T.alloc_fragment((64, K), "float32")
        if has_initial != 0:
            for v, c in T.Parallel(64, K):
                s[v, c] = initial[n, hv, c, first + v]
        else:
            T.clear(s)
        for i in T.serial(count - 1):
            here = slot + (count - 1 - i if backwards else i)
            for v, c in T.Parallel(64, K):
                entries[int(backwards), here, hv, c, first + v] = s[v, c]
            T.copy(s, high)
            for v, c in T.Parallel(64, K):
                low[v, c] = s[v, c] - T.cast(high[v, c], "float32")
            for v, c in T.Parallel(64, K):  # arrives behind the products
                added[v, c] = b[int(backwards), here, hv, c, first + v]
            T.barrier_wait(full[i % S], i // S % 2)
            T.wgmma_gemm(high, a_s[i % S, 0, :, :], mapped, transpose_B=not backwards, clear_accum=True, policy=_ROWS)
            T.wgmma_gemm(high, a_s[i % S, 1, :, :], mapped, transpose_B=not backwards, policy=_ROWS)
            T.wgmma_gemm(low, a_s[i % S, 0, :, :], mapped, transpose_B=not backwards, policy=_ROWS)
            T.wait_wgmma(0)
            for v, c in T.Parallel(64, K):
                s[v, c] = mapped[v, c] + added[v, c]
            T.barrier_arrive(empty[i % S])
        for v, c in T.Parallel(64, K):
            entries[int(backwards), slot + (0 if backwards else count - 1), hv, c, first + v] = s[v, c]

    @T.prim_func
    def gated_delta_rule_compose(
        a: T.Tensor((segments, HV, 2, K, K), "bfloat16"),
        b: T.Tensor((D, segments, HV, K, V), "float32"),
        cu_seqlens: T.Tensor((offsets,), "int32"),
        initial: T.Tensor((N0, HV, K, V), "float32"),
        d_final: T.Tensor((N1, HV, K, V), "float32"),
        entries: T.Tensor((D, segments, HV, K, V), "float32"),
        N: T.int32,
        rows: T.int32,
        chunks: T.int32,
        has_initial: T.int32,
        has_final: T.int32,
    ):
        T.annotate_pass_configs({"tl.enable_fast_math": True, "tl.disable_thread_storage_sync": True})
        with T.Kernel(N * HV * blocks, D, threads=160) as (block, direction):
            n = block // blocks // HV
            hv = block // blocks % HV
            first = block % blocks * 64
            a_s = T.alloc_shared((S, 2, K, K), "bfloat16")
            full = T.alloc_barrier(arrive_count=[32] * S)
            empty = T.alloc_barrier(arrive_count=[128] * S)
            slot, count = segments_of(n, cu_seqlens, rows, C, chunks, ragged)
            place_of = (n, slot, hv, first)
            if T.get_thread_binding() < 128:
                if direction == 0:
                    carry(place_of, count, has_initial, initial, b, entries, a_s, full, empty, False)
                elif D == 2:
                    carry(place_of, count, has_final, d_final, b, entries, a_s, full, empty, True)
            else:
                for i in T.unroll(count - 1, unroll_factor=1):
                    here = slot + T.Select(direction == 0, i, count - 1 - i)
                    T.barrier_wait(empty[i % S], (i // S + 1) % 2)
                    for part in T.unroll(2):
                        T.tma_copy(a[here, hv, part, 0:K, 0:K], a_s[i % S, part, :, :], barrier=full[i % S])
                    T.barrier_arrive(full[i % S])

    return gated_delta_rule_compose
