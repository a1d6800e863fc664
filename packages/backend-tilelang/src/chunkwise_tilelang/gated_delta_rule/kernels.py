"""Kernels of the gated delta rule that know one chunk: gate sums and the inverse.

Inside a chunk, with ``G_t`` the sum of the gates up to row t:

    A[t, s] = beta_t exp(G_t - G_s) k_t . k_s  (s < t)        M = (I + A)^-1

M is unit lower triangular. Its diagonal blocks of 16 rows are solved row by row in fp32; a pair of inverted blocks P, R
with the block L of A between them is inverted as ``[[P, 0], [-R L P, R]]``, twice. Those products split each fp32
operand into two bf16 parts and leave out low times low: what is lost is 2^-16 of an operand.
"""

from typing import Any

import tilelang.language as T  # noqa: N812 - TileLang's parser knows it by this name

from chunkwise_tilelang.tiles.sequences import chunk_rows

_LOG2E = 1.4426950408889634
_ROWS = T.GemmWarpPolicy.FullRow


@T.macro
def _gemm_split(a_high, a_low, b_high, b_low, result):
    """``result = a b`` of fp32 operands in two bf16 parts each."""
    T.gemm(a_high, b_high, result, clear_accum=True)
    T.gemm(a_high, b_low, result)
    T.gemm(a_low, b_high, result)


def _low(value: Any) -> Any:
    """What bf16 leaves of an fp32 value."""
    return value - T.cast(T.cast(value, "bfloat16"), "float32")


def solve(
    *, heads: int, value_heads: int, key_width: int, dtype: str, g_dtype: str, beta_dtype: str, ragged: bool
) -> Any:
    """M of every chunk and head, times ``diag(beta)`` for the forward, and the decays.

    Args:
        heads, value_heads, key_width: H, HV and K.
        dtype, g_dtype, beta_dtype: of the activations, the gates and beta.
        ragged: whether the chunks are found by offsets.
    """
    H, HV, K, C, HALF, SIXTEENTH = heads, value_heads, key_width, 64, 32, 16
    P = 2 if (HV // H) % 2 == 0 else 1  # value heads of one key head that a block takes together
    B, TT, B1, T1, offsets, slots = (T.dynamic(name) for name in ("B", "TT", "B1", "T1", "offsets", "slots"))

    @T.macro
    def merge_sixteenths(pair, columns, l_high, l_low, x_high, x_low, y_high, y_low):
        """One warp: the block under the diagonal of an inverted half."""
        y = T.alloc_fragment((SIXTEENTH, SIXTEENTH), "float32")
        for i, j in T.Parallel(SIXTEENTH, SIXTEENTH):
            l_high[pair, i, j] = columns[pair, j, SIXTEENTH + i]
            l_low[pair, i, j] = _low(columns[pair, j, SIXTEENTH + i])
        top, bottom = slice(0, SIXTEENTH), slice(SIXTEENTH, HALF)
        _gemm_split(l_high[pair, :, :], l_low[pair, :, :], x_high[pair, top, top], x_low[pair, top, top], y)
        for i, j in T.Parallel(SIXTEENTH, SIXTEENTH):
            y_high[pair, i, j] = y[i, j]
            y_low[pair, i, j] = _low(y[i, j])
        _gemm_split(x_high[pair, bottom, bottom], x_low[pair, bottom, bottom], y_high[pair, :, :], y_low[pair, :, :], y)
        for i, j in T.Parallel(SIXTEENTH, SIXTEENTH):
            x_high[pair, SIXTEENTH + i, j] = -y[i, j]
            x_low[pair, SIXTEENTH + i, j] = -_low(y[i, j])
            x_high[pair, i, SIXTEENTH + j] = 0
            x_low[pair, i, SIXTEENTH + j] = 0

    @T.prim_func
    def gated_delta_rule_solve(
        k: T.Tensor((B, TT, H, K), dtype),
        g: T.Tensor((B, TT, HV), g_dtype),
        beta: T.Tensor((B, TT, HV), beta_dtype),
        cu_seqlens: T.Tensor((offsets,), "int32"),
        solved: T.Tensor((slots, HV, C, C), dtype),
        decays: T.Tensor((slots, HV, 3, C), "float32"),
        inverse: T.Tensor((B1, T1, HV, C), dtype),
        g_cumsum: T.Tensor((B1, T1, HV), "float32"),
        steps: T.int32,
        keep: T.int32,
    ):
        # Every access below is inside by its own condition.
        T.annotate_pass_configs({"tl.enable_fast_math": True, "tl.disable_safe_memory_legalize": True})
        with T.Kernel(slots * (HV // P), threads=128) as block:
            slot = block // (HV // P)
            first_head = block % (HV // P) * P
            h = first_head // (HV // H)
            k_s = T.alloc_shared((C, K), dtype)
            g_s = T.alloc_shared((P, C), "float32")  # base 2
            beta_s = T.alloc_shared((P, C), "float32")
            from_middle = T.alloc_shared((P, C), "float32")
            columns = T.alloc_shared((P * 2, HALF, HALF + 4), "float32")
            l_high, l_low, y_high, y_low = (T.alloc_shared((P * 2, SIXTEENTH, SIXTEENTH), "bfloat16") for _ in range(4))
            x_high, x_low = (T.alloc_shared((P * 2, HALF, HALF), "bfloat16") for _ in range(2))
            a_high, a_low, z_high, z_low = (T.alloc_shared((P, HALF, HALF), "bfloat16") for _ in range(4))
            left = T.alloc_fragment((C, HALF), "float32")
            right = T.alloc_fragment((C, HALF), "float32")
            z = T.alloc_fragment((HALF, HALF), "float32")
            x = T.alloc_local((SIXTEENTH,), "float32")
            total = T.alloc_var("float32")
            total_log2 = T.alloc_var("float32")
            weight = T.alloc_var("float32")
            batch, first, rows = chunk_rows(slot, cu_seqlens, offsets - 1, steps, TT, C, ragged)
            if rows > 0:
                tx = T.get_thread_binding()
                mine, row = tx // C, tx % C
                hv = first_head + mine
                # Rows behind the chunk read its last one and become zero: loads without branches fly together.
                if tx < C * P:
                    near = first + T.min(row, rows - 1)
                    total = T.Select(row < rows, T.cast(g[batch, near, hv], "float32"), 0.0)
                    weight = T.Select(row < rows, T.cast(beta[batch, near, hv], "float32"), 0.0)
                for t, c in T.Parallel(C, K):
                    k_s[t, c] = T.Select(t < rows, k[batch, first + T.min(t, rows - 1), h, c], T.cast(0, dtype))
                if tx < C * P:
                    for e in T.unroll(5):
                        above = T.shfl_up(total, 1 << e)
                        total += T.Select(tx % 32 >= (1 << e), above, 0.0)
                    g_s[mine, row] = total
                    beta_s[mine, row] = weight
                T.sync_threads()
                if tx < C * P:
                    if row >= 32:
                        total += g_s[mine, 31]
                T.sync_threads()
                if tx < C * P:
                    total_log2 = total * _LOG2E
                    g_s[mine, row] = total_log2
                T.gemm(k_s, k_s[0:HALF, :], left, transpose_B=True, clear_accum=True, policy=_ROWS)
                T.gemm(k_s, k_s[HALF:C, :], right, transpose_B=True, clear_accum=True, policy=_ROWS)
                T.sync_threads()
                if tx < C * P:
                    decays[slot, hv, 0, row] = T.exp2(total_log2)
                    decays[slot, hv, 1, row] = T.Select(row < rows, T.exp2(g_s[mine, C - 1] - total_log2), 0.0)
                    decays[slot, hv, 2, row] = total_log2
                    if keep != 0 and row < rows:
                        g_cumsum[batch, first + row, hv] = total
                    # A decay across the middle is a product of two, each at most 1.
                    from_middle[mine, row] = T.exp2(
                        T.Select(row < HALF, g_s[mine, HALF - 1] - total_log2, total_log2 - g_s[mine, HALF - 1])
                    )
                T.sync_threads()
                for p in T.unroll(P):
                    if tx < 64:  # the warps of the upper half's rows
                        for t, r in T.Parallel(C, HALF):
                            if t < HALF:
                                decay = T.exp2(g_s[p, t] - g_s[p, r])
                                columns[2 * p, r, t] = T.Select(t > r, beta_s[p, t] * decay * left[t, r], 0.0)
                    else:
                        for t, r in T.Parallel(C, HALF):
                            if t >= HALF:
                                decay = T.exp2(g_s[p, t] - g_s[p, HALF + r])
                                columns[2 * p + 1, r, t - HALF] = T.Select(
                                    t > HALF + r, beta_s[p, t] * decay * right[t, r], 0.0
                                )
                        for t, r in T.Parallel(C, HALF):
                            if t >= HALF:
                                across = beta_s[p, t] * from_middle[p, t] * (from_middle[p, r] * left[t, r])
                                a_high[p, t - HALF, r] = across
                                a_low[p, t - HALF, r] = _low(across)
                T.sync_threads()
                if tx < C * P:  # a thread has a column of its block of sixteen rows
                    part, column = row // SIXTEENTH, row % SIXTEENTH
                    corner = part % 2 * SIXTEENTH
                    for i in T.unroll(SIXTEENTH):
                        x[i] = T.Select(i == column, 1.0, 0.0)
                    for m in T.unroll(SIXTEENTH):
                        for i in T.unroll(SIXTEENTH):
                            if i > m:
                                x[i] -= columns[mine * 2 + part // 2, corner + m, corner + i] * x[m]
                    for i in T.unroll(SIXTEENTH):
                        x_high[mine * 2 + part // 2, part % 2 * SIXTEENTH + i, row % HALF] = x[i]
                        x_low[mine * 2 + part // 2, part % 2 * SIXTEENTH + i, row % HALF] = _low(x[i])
                T.sync_threads()
                if tx < 32:
                    merge_sixteenths(0, columns, l_high, l_low, x_high, x_low, y_high, y_low)
                elif tx < 64:
                    merge_sixteenths(1, columns, l_high, l_low, x_high, x_low, y_high, y_low)
                elif P == 2:
                    if tx < 96:
                        merge_sixteenths(2 * P - 2, columns, l_high, l_low, x_high, x_low, y_high, y_low)
                    else:
                        merge_sixteenths(2 * P - 1, columns, l_high, l_low, x_high, x_low, y_high, y_low)
                T.sync_threads()
                for p in T.unroll(P):
                    _gemm_split(a_high[p, :, :], a_low[p, :, :], x_high[2 * p, :, :], x_low[2 * p, :, :], z)
                    for i, j in T.Parallel(HALF, HALF):
                        z_high[p, i, j] = z[i, j]
                        z_low[p, i, j] = _low(z[i, j])
                T.sync_threads()
                for p in T.unroll(P):
                    _gemm_split(x_high[2 * p + 1, :, :], x_low[2 * p + 1, :, :], z_high[p, :, :], z_low[p, :, :], z)
                    T.sync_threads()
                    for i, j in T.Parallel(HALF, HALF):
                        z_high[p, i, j] = -z[i, j]
                        z_low[p, i, j] = -_low(z[i, j])
                T.sync_threads()
                for p in T.unroll(P):
                    hv_p = first_head + p
                    for i, j in T.Parallel(HALF, HALF):
                        m = T.cast(x_high[2 * p, i, j], "float32") + T.cast(x_low[2 * p, i, j], "float32")
                        solved[slot, hv_p, i, j] = T.Select(i < rows, m * beta_s[p, j], 0.0)
                        if keep != 0:
                            if i < rows:
                                inverse[batch, first + i, hv_p, j] = m
                    for i, j in T.Parallel(HALF, HALF):
                        m = T.cast(z_high[p, i, j], "float32") + T.cast(z_low[p, i, j], "float32")
                        solved[slot, hv_p, HALF + i, j] = T.Select(HALF + i < rows, m * beta_s[p, j], 0.0)
                        if keep != 0:
                            if HALF + i < rows:
                                inverse[batch, first + HALF + i, hv_p, j] = m
                    for i, j in T.Parallel(HALF, HALF):
                        m = T.cast(x_high[2 * p + 1, i, j], "float32") + T.cast(x_low[2 * p + 1, i, j], "float32")
                        solved[slot, hv_p, HALF + i, HALF + j] = T.Select(HALF + i < rows, m * beta_s[p, HALF + j], 0.0)
                        if keep != 0:
                            if HALF + i < rows:
                                inverse[batch, first + HALF + i, hv_p, HALF + j] = m
                    for i, j in T.Parallel(HALF, HALF):
                        solved[slot, hv_p, i, HALF + j] = 0
                        if keep != 0:
                            if i < rows:
                                inverse[batch, first + i, hv_p, HALF + j] = 0

    return gated_delta_rule_solve
