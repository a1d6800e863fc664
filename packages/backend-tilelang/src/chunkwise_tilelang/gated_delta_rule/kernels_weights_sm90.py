"""The weights of the entry state in a chunk of the gated delta rule: what full residuals keep of it for any backward.

With the names of :mod:`.kernels`: ``w = M' exp(G) k`` ``[B, T, HV, K]``, so that ``x = M' v - w S``. The kernels here
take S through k and then through M', and read no w.
"""

from typing import Any

import tilelang.language as T  # noqa: N812 - TileLang's parser knows it by this name

from chunkwise_tilelang.tiles.sequences import chunk_rows

_ROWS = T.GemmWarpPolicy.FullRow


def weights(*, heads: int, value_heads: int, key_width: int, dtype: str, ragged: bool) -> Any:
    """w of every chunk and value head, from the solved chunks; rows of padding are left as they are.

    Args:
        heads, value_heads, key_width: H, HV and K.
        dtype: of the activations.
        ragged: whether the chunks are found by offsets.
    """
    H, HV, K, C = heads, value_heads, key_width, 64
    B, TT, offsets, slots = (T.dynamic(name) for name in ("B", "TT", "offsets", "slots"))

    @T.prim_func
    def gated_delta_rule_weights(
        k: T.Tensor((B, TT, H, K), dtype),
        solved: T.Tensor((slots, HV, C, C), dtype),
        decays: T.Tensor((slots, HV, 3, C), "float32"),
        cu_seqlens: T.Tensor((offsets,), "int32"),
        w: T.Tensor((B, TT, HV, K), dtype),
        steps: T.int32,
    ):
        with T.Kernel(slots * HV, threads=128) as block:
            slot = block // HV
            hv = block % HV
            h = hv // (HV // H)
            m_s = T.alloc_shared((C, C), dtype)
            k_s = T.alloc_shared((C, K), dtype)
            product = T.alloc_fragment((C, K), "float32")
            batch, first, rows = chunk_rows(slot, cu_seqlens, offsets - 1, steps, TT, C, ragged)
            if rows > 0:
                for t, r in T.Parallel(C, C):
                    m_s[t, r] = solved[slot, hv, t, r]
                for t, c in T.Parallel(C, K):
                    decayed = T.cast(k[batch, first + T.min(t, rows - 1), h, c], "float32") * decays[slot, hv, 0, t]
                    k_s[t, c] = T.Select(t < rows, decayed, 0.0)
                T.fence_proxy_async()
                T.sync_threads()
                T.gemm(m_s, k_s, product, clear_accum=True, policy=_ROWS)
                for t, c in T.Parallel(C, K):
                    if t < rows:
                        w[batch, first + t, hv, c] = product[t, c]

    return gated_delta_rule_weights
