"""The kernel of the gated delta rule that knows one chunk: gate sums and the inverse.

Inside a chunk, with ``G_t`` the sum of the gates up to row t:

    A[t, s] = beta_t exp(G_t - G_s) k_t . k_s  (s < t)        M = (I + A)^-1

M is unit lower triangular. Its diagonal blocks of 16 rows are solved row by row in fp32. With the inverted blocks P and
R and the block L of A between them, M is ``[[P, 0], [-R L P, R]]``, once for blocks of 16 rows and once for blocks of
32: products of fp16 operands with fp32 sums.
"""

from typing import Any

import tilelang.language as T  # noqa: N812 - TileLang's parser knows it by this name

from chunkwise_tilelang.tiles.sequences import chunk_rows
from chunkwise_tilelang.tiles.transposed import place
from chunkwise_tilelang.tiles.warp_products import PADDED, WARP_TILE, as_left_operand, load_tile, multiply_add

_LOG2E = 1.4426950408889634
_ROWS = T.GemmWarpPolicy.FullRow


def solve(
    *, heads: int, value_heads: int, key_width: int, dtype: str, g_dtype: str, beta_dtype: str, ragged: bool
) -> Any:
    """M of every chunk and head, times ``diag(beta)`` for the forward, and the decays.

    Args:
        heads, value_heads, key_width: H, HV and K.
        dtype, g_dtype, beta_dtype: of the activations, the gates and beta.
        ragged: whether the chunks are found by offsets.
    """
    H, HV, K, C, HALF, TILE = heads, value_heads, key_width, 64, 32, WARP_TILE
    P = 2 if (HV // H) % 2 == 0 else 1  # value heads of one key head that a block takes together
    B, TT, B1, T1, offsets, slots = (T.dynamic(name) for name in ("B", "TT", "B1", "T1", "offsets", "slots"))

    @T.macro
    def load_gates(hv, batch, first, rows, g, beta, sums, betas):
        """A warp: the gates and betas of a head, two rows a lane; rows behind the chunk add 0."""
        for e in T.unroll(2):
            row = T.get_thread_binding() % 32 * 2 + e
            near = first + T.min(row, rows - 1)  # loads without branches fly together
            sums[e] = T.Select(row < rows, T.cast(g[batch, near, hv], "float32"), 0.0)
            betas[e] = T.Select(row < rows, T.cast(beta[batch, near, hv], "float32"), 0.0)

    @T.macro
    def sum_gates(place_of, batch, first, rows, sums, betas, g_s, beta_s, decays, g_cumsum, keep):
        """A warp: sums of the gates of a head and what they give."""
        slot, p, hv = place_of
        lane = T.get_thread_binding() % 32
        before = T.alloc_var("float32")
        sums[1] += sums[0]
        for e in T.unroll(5):
            before = T.shfl_up(sums[1], 1 << e)
            sums[1] += T.Select(lane >= (1 << e), before, 0.0)
        before = T.shfl_up(sums[1], 1)
        sums[0] += T.Select(lane > 0, before, 0.0)
        before = T.shfl_sync(sums[1], 31) * _LOG2E
        for e in T.unroll(2):
            row = 2 * lane + e
            log2 = sums[e] * _LOG2E
            g_s[p, row] = log2
            beta_s[p, row] = betas[e]
            decays[slot, hv, 0, row] = T.exp2(log2)
            decays[slot, hv, 1, row] = T.Select(row < rows, T.exp2(before - log2), 0.0)
            decays[slot, hv, 2, row] = log2
            if keep != 0 and row < rows:
                g_cumsum[batch, first + row, hv] = sums[e]

    @T.macro
    def clear_above(place_of, batch, first, rows, solved, inverse, keep):
        """Zeros above the diagonal's blocks."""
        slot, hv = place_of
        for i in T.unroll(4):
            row = T.get_thread_binding() // 8 + 16 * i
            column = T.get_thread_binding() % 8 * 8
            if column >= (i + 1) * TILE:
                for e in T.vectorized(8):
                    solved[slot, hv, row, column + e] = 0
                if keep != 0 and row < rows:
                    for e in T.vectorized(8):
                        inverse[batch, first + row, hv, column + e] = 0

    @T.macro
    def put(place_of, batch, first, rows, tile, beta_s, solved, inverse, keep):
        """A [16, 16] product with its sign turned, to row and column of a head's M."""
        slot, p, hv, at_row, at_column = place_of
        lane = T.get_thread_binding() % 32
        for j, i in T.grid(2, 2):
            row = at_row + lane // 4 + 8 * i
            column = at_column + 8 * j + lane % 4 * 2
            for e in T.vectorized(2):
                solved[slot, hv, row, column + e] = -tile[4 * j + 2 * i + e] * beta_s[p, column + e]
            if keep != 0 and row < rows:
                for e in T.vectorized(2):
                    inverse[batch, first + row, hv, column + e] = -tile[4 * j + 2 * i + e]

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
        T.annotate_pass_configs(
            {
                "tl.enable_fast_math": True,
                "tl.disable_safe_memory_legalize": True,
                "tl.disable_thread_storage_sync": True,
            }
        )
        with T.Kernel(slots * (HV // P), threads=128) as block:
            T.annotate_min_blocks_per_sm(7)  # latency bounds the kernel: warps hide it, and 72 registers suffice
            slot = block // (HV // P)
            first_head = block % (HV // P) * P
            h = first_head // (HV // H)
            k_s = T.alloc_shared((C, K), dtype)
            g_s = T.alloc_shared((P, C), "float32")  # base 2
            beta_s = T.alloc_shared((P, C), "float32")
            columns = T.alloc_shared((P, 4, TILE, TILE + 4), "float32")  # of A's blocks on the diagonal
            below = T.alloc_shared((P * 2, TILE, TILE + PADDED), "float16")  # A between blocks of 16 rows
            across = T.alloc_shared((P, HALF, HALF + PADDED), "float16")  # A between the halves
            x_s = T.alloc_shared((P, C, HALF + PADDED), "float16")  # M inside of each half
            left = T.alloc_fragment((C, HALF), "float32")
            right = T.alloc_fragment((C, HALF), "float32")
            own, between, near = (T.alloc_local((TILE,), "float32") for _ in range(3))
            left_gates, own_gates = (T.alloc_local((8,), "float32") for _ in range(2))
            row_gates, row_betas = (T.alloc_local((2,), "float32") for _ in range(2))
            at = T.alloc_var("int32")
            x = T.alloc_local((TILE,), "float32")
            operand = T.alloc_local((16,), "float16")
            other = T.alloc_local((16,), "float16")
            product = T.alloc_local((16,), "float32")
            batch, first, rows = chunk_rows(slot, cu_seqlens, offsets - 1, steps, TT, C, ragged)
            if rows > 0:
                tx = T.get_thread_binding()
                warp, lane = tx // 32, tx % 32
                if warp < P:
                    load_gates(first_head + warp, batch, first, rows, g, beta, row_gates, row_betas)
                for t, c in T.Parallel(C, K):
                    k_s[t, c] = T.Select(t < rows, k[batch, first + T.min(t, rows - 1), h, c], T.cast(0, dtype))
                if warp < P:
                    here = (slot, warp, first_head + warp)
                    sum_gates(here, batch, first, rows, row_gates, row_betas, g_s, beta_s, decays, g_cumsum, keep)
                for p in T.unroll(P):
                    clear_above((slot, first_head + p), batch, first, rows, solved, inverse, keep)
                T.fence_proxy_async()
                T.sync_threads()
                T.gemm(k_s, k_s[0:HALF, :], left, transpose_B=True, clear_accum=True, policy=_ROWS)
                T.gemm(k_s, k_s[HALF:C, :], right, transpose_B=True, clear_accum=True, policy=_ROWS)
                # What is written from here on lies where k did, and the inverses of blocks where columns did: TileLang
                # gives one place to tiles that are not needed together, and looks after no barrier here.
                T.sync_threads()
                for t, r in T.Parallel(C, HALF):
                    at = place(t, r)
                    between[at] = left[t, r]
                for t, r in T.Parallel(C, HALF):
                    at = place(t, r)
                    own[at] = T.Select(warp < 2, left[t, r], right[t, r])
                for p in T.unroll(P):
                    for i in T.unroll(2):
                        row_gates[i] = g_s[p, warp * 16 + lane // 4 + 8 * i]
                        row_betas[i] = beta_s[p, warp * 16 + lane // 4 + 8 * i]
                    for j, e in T.grid(4, 2):
                        left_gates[2 * j + e] = g_s[p, 8 * j + lane % 4 * 2 + e]
                        own_gates[2 * j + e] = g_s[p, warp // 2 * HALF + 8 * j + lane % 4 * 2 + e]
                    for j, i, e in T.grid(4, 2, 2):
                        is_below = warp % 2 * 16 + lane // 4 + 8 * i > 8 * j + lane % 4 * 2 + e
                        value = row_betas[i] * T.exp2(row_gates[i] - own_gates[2 * j + e]) * own[4 * j + 2 * i + e]
                        near[4 * j + 2 * i + e] = T.Select(is_below, value, 0.0)
                    for j, i, e in T.grid(2, 2, 2):
                        columns[p, warp, 8 * j + lane % 4 * 2 + e, lane // 4 + 8 * i] = T.Select(
                            warp % 2 == 1, near[8 + 4 * j + 2 * i + e], near[4 * j + 2 * i + e]
                        )
                    if warp % 2 == 1:
                        for j, i in T.grid(2, 2):
                            for e in T.vectorized(2):
                                below[2 * p + warp // 2, lane // 4 + 8 * i, 8 * j + lane % 4 * 2 + e] = near[
                                    4 * j + 2 * i + e
                                ]
                    if warp >= 2:
                        for j, i, e in T.grid(4, 2, 2):
                            near[4 * j + 2 * i + e] = (
                                row_betas[i] * T.exp2(row_gates[i] - left_gates[2 * j + e]) * between[4 * j + 2 * i + e]
                            )
                        for j, i in T.grid(4, 2):
                            for e in T.vectorized(2):
                                across[p, warp % 2 * 16 + lane // 4 + 8 * i, 8 * j + lane % 4 * 2 + e] = near[
                                    4 * j + 2 * i + e
                                ]
                T.sync_threads()
                mine = tx // 64
                hv = first_head + mine
                if mine < P:  # a thread has a column of its block of sixteen rows
                    part, column = tx % 64 // TILE, tx % TILE
                    for i in T.unroll(TILE):
                        x[i] = T.Select(i == column, 1.0, 0.0)
                    for m in T.unroll(TILE):
                        for i in T.unroll(TILE):
                            if i > m:
                                x[i] -= columns[mine, part, m, i] * x[m]
                T.sync_threads()
                if mine < P:
                    for i in T.unroll(TILE):
                        row = tx % 64 // TILE * TILE + i
                        x_s[mine, row, tx % HALF] = x[i]
                        solved[slot, hv, row, tx % 64] = x[i] * beta_s[mine, tx % 64]
                        if keep != 0 and row < rows:
                            inverse[batch, first + row, hv, tx % 64] = x[i]
                T.sync_threads()
                half = warp % 2
                if mine < P:  # a warp has a half: -R L P between its blocks of 16 rows
                    T.clear(product)
                    load_tile(x_s, (mine,), half * HALF + TILE, TILE, operand, 0, False)
                    load_tile(below, (2 * mine + half,), 0, 0, other, 0, True)
                    multiply_add(operand, 0, other, 0, product, 0)
                    as_left_operand(product, 0, operand, 0)
                    load_tile(x_s, (mine,), half * HALF, 0, other, 0, True)
                    T.clear(product)
                    multiply_add(operand, 0, other, 0, product, 0)
                    for j, i in T.grid(2, 2):
                        for e in T.vectorized(2):
                            x_s[mine, half * HALF + TILE + lane // 4 + 8 * i, 8 * j + lane % 4 * 2 + e] = -product[
                                4 * j + 2 * i + e
                            ]
                    where = (slot, mine, hv, half * HALF + TILE, half * HALF)
                    put(where, batch, first, rows, product, beta_s, solved, inverse, keep)
                T.sync_threads()
                if mine < P:  # a warp has 16 of the rows between the halves
                    T.clear(product)
                    for step in T.unroll(2):
                        if step <= half:  # R is zero above its blocks of 16 rows
                            load_tile(x_s, (mine,), HALF + half * TILE, step * TILE, operand, 0, False)
                            for j in T.unroll(2):
                                load_tile(across, (mine,), step * TILE, j * TILE, other, 0, True)
                                multiply_add(operand, 0, other, 0, product, 8 * j)
                    for j in T.unroll(2):
                        as_left_operand(product, 8 * j, operand, 8 * j)
                    T.clear(product)
                    for j, step in T.grid(2, 2):
                        if step >= j:  # and so is P
                            load_tile(x_s, (mine,), step * TILE, j * TILE, other, 0, True)
                            multiply_add(operand, 8 * step, other, 0, product, 8 * j)
                    for j in T.unroll(2):
                        for e in T.unroll(8):
                            x[e] = product[8 * j + e]
                        where = (slot, mine, hv, HALF + half * TILE, j * TILE)
                        put(where, batch, first, rows, x, beta_s, solved, inverse, keep)

    return gated_delta_rule_solve
