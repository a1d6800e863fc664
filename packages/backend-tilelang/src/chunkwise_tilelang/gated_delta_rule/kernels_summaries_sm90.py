"""The summaries of segments that the backward takes, on Hopper: the walks of its passes, with nothing of a chunk kept.

From exit to entry of a segment the gradient of a state goes through ``dS -> A^T dS + C``, with the A of
:mod:`.kernels_split_sm90` and C the entry gradient that an exit gradient of zero has.
"""

from typing import Any

import tilelang.language as T  # noqa: N812 - TileLang's parser knows it by this name
from tilelang.layout import make_swizzled_layout

from chunkwise_tilelang.gated_delta_rule.kernels_walks_sm90 import CONFIGS, walks
from chunkwise_tilelang.tiles.sequences import segment_rows, sequence_rows


def summarise_passes(
    *, heads: int, value_heads: int, key_width: int, value_width: int, stages: int, registers: tuple[int, int, int],
    dtype: str, beta_dtype: str, ragged: bool,
) -> Any:  # fmt: skip
    """A, B and C of the segments of sequences that have more than one: A of all, B but of the last, C but of the first.

    A block has 64 columns of C, B or A of one head of a segment. A is kept as two bf16 parts.

    Args:
        heads, value_heads, key_width, value_width: H, HV, K and V.
        stages: chunks that are loaded ahead, two at least.
        registers: of a thread that has states, that makes a chunk ready, and that loads.
        dtype, beta_dtype: of the activations and of beta.
        ragged: whether the sequences are found by offsets.
    """
    H, HV, K, V, C, S = heads, value_heads, key_width, value_width, 64, stages
    with_states, with_pairs, with_copies = registers
    replay, reverse, make_ready, bring = walks(
        key_width=K, value_width=V, groups=1, stages=S, dtype=dtype, beta_dtype=beta_dtype, kept=False
    )
    B, TT, offsets, segments = (T.dynamic(name) for name in ("B", "TT", "offsets", "segments"))

    @T.prim_func
    def gated_delta_rule_summarise_passes(
        q: T.Tensor((B, TT, H, K), dtype),
        k: T.Tensor((B, TT, H, K), dtype),
        v: T.Tensor((B, TT, HV, V), dtype),
        inverse: T.Tensor((B, TT, HV, C), dtype),
        g_cumsum: T.Tensor((B, TT, HV), "float32"),
        beta: T.Tensor((B, TT, HV), beta_dtype),
        d_o: T.Tensor((B, TT, HV, V), dtype),
        cu_seqlens: T.Tensor((offsets,), "int32"),
        a: T.Tensor((segments, HV, 2, K, K), "bfloat16"),
        b: T.Tensor((segments, HV, K, V), "float32"),
        c: T.Tensor((segments, HV, K, V), "float32"),
        steps: T.int32,
        chunks: T.int32,
        scale: T.float32,
    ):
        T.annotate_pass_configs(CONFIGS)
        # The blocks that go backwards take longer: they come first.
        with T.Kernel(segments * HV, (2 * V + K) // 64, threads=384) as (block, column):
            backwards = column < V // 64
            segment = block // HV
            hv = block % HV
            h = hv // (HV // H)
            k_s = T.alloc_shared((S, C, K), dtype)
            q_s = T.alloc_shared((S, C, K), dtype)
            rows_s = T.alloc_shared((S, 1, C, 64), dtype)  # v or do; zeros where the columns are those of A
            m_s = T.alloc_shared((S, C, C), dtype)
            p_s = T.alloc_shared((2, C, C), dtype)
            d_s = T.alloc_shared((S, 6, C), "float32")
            T.annotate_layout({rows_s: make_swizzled_layout(rows_s)})

            raw = T.alloc_barrier(arrive_count=[32] * S)
            empty = T.alloc_barrier(arrive_count=[128] * S)
            ready = T.alloc_barrier(arrive_count=[128] * S)
            free = T.alloc_barrier(arrive_count=[128] * 2)
            known = T.alloc_barrier(arrive_count=[128] * 2)

            first, turns = (T.alloc_var("int32") for _ in range(2))
            first = T.Select(backwards, column, column - V // 64) * 64
            n, start, length, _, last = segment_rows(segment, cu_seqlens, offsets - 1, steps, TT, C, chunks, ragged)
            _, opening, _, _ = sequence_rows(n, cu_seqlens, TT, C, ragged)
            batch = 0 if ragged else n
            # C leads into the sequence before the first segment, B out of it behind the last one.
            unused = T.Select(
                backwards, start == opening, T.Select(first < V, last == 1, T.And(start == opening, last == 1))
            )
            turns = T.Select(T.Or(last == -1, unused), 0, T.ceildiv(length, C))
            stores = (0, 0, 0, 0)

            tx = T.get_thread_binding()
            if tx < 128:
                T.set_max_nreg(with_states, 1)
                if backwards:
                    reverse(
                        0, (0, segment, hv, first), turns, (0, c), (0, turns), k_s, q_s, rows_s, m_s, p_s, d_s, (),
                        (ready, empty, free, *stores),
                    )  # fmt: skip
                else:
                    replay(0, (segment, hv, first), turns, 0, 0, k_s, rows_s, m_s, d_s, (a, b), (ready, empty, *stores))
            elif tx < 256:
                T.set_max_nreg(with_pairs, 0)
                make_ready(
                    backwards, (hv, batch, start, length), turns, scale, g_cumsum, beta,
                    k_s, q_s, rows_s, m_s, p_s, d_s, (raw, ready, empty, free, known),
                )  # fmt: skip
            else:
                T.set_max_nreg(with_copies, 0)
                place_of = (h, hv, batch, start, first)
                if tx < 288:  # behind the columns of V it brings zeros
                    bring(backwards, turns, place_of, (q, k, v, inverse, d_o), k_s, q_s, rows_s, m_s, raw, empty)

    return gated_delta_rule_summarise_passes
