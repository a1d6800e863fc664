"""L2 normalisation of rows, ``y = x * rsqrt(sum(x^2) + 1e-6)``, in fp32 inside."""

from typing import Any

import tilelang.language as T  # noqa: N812 - TileLang's parser knows it by this name

_EPS = 1e-6


def l2_normalise(*, width: int, dtype: str) -> Any:
    """y of the rows of x ``[rows, width]``; 16 rows a block."""
    rows = T.dynamic("rows")

    @T.prim_func
    def l2_normalise_rows(x: T.Tensor((rows, width), dtype), y: T.Tensor((rows, width), dtype)):
        T.annotate_pass_configs({"tl.enable_fast_math": True})
        with T.Kernel(T.ceildiv(rows, 16), threads=128) as block:
            values = T.alloc_fragment((16, width), "float32")
            squares = T.alloc_fragment((16, width), "float32")
            sums = T.alloc_fragment((16,), "float32")
            for i, j in T.Parallel(16, width):
                values[i, j] = T.if_then_else(block * 16 + i < rows, T.cast(x[block * 16 + i, j], "float32"), 0.0)
            for i, j in T.Parallel(16, width):
                squares[i, j] = values[i, j] * values[i, j]
            T.reduce_sum(squares, sums, dim=1)
            for i, j in T.Parallel(16, width):
                if block * 16 + i < rows:
                    y[block * 16 + i, j] = values[i, j] * T.rsqrt(sums[i] + _EPS)

    return l2_normalise_rows
