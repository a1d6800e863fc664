"""L2 normalisation of rows, ``y = x * rsqrt(sum(x^2) + 1e-6)``, and its gradient; in fp32 inside."""

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


def l2_normalise_backward(*, width: int, dtype: str) -> Any:
    """``dx = (dy - y (y . dy)) * rsqrt(sum(x^2) + 1e-6)`` of rows ``[rows, width]``, dy in fp32; 16 rows a block."""
    rows = T.dynamic("rows")

    @T.prim_func
    def l2_normalise_rows_backward(
        x: T.Tensor((rows, width), dtype), dy: T.Tensor((rows, width), "float32"), dx: T.Tensor((rows, width), dtype)
    ):
        T.annotate_pass_configs({"tl.enable_fast_math": True})
        with T.Kernel(T.ceildiv(rows, 16), threads=128) as block:
            values = T.alloc_fragment((16, width), "float32")
            grads = T.alloc_fragment((16, width), "float32")
            products = T.alloc_fragment((16, width), "float32")
            factors = T.alloc_fragment((16,), "float32")
            along = T.alloc_fragment((16,), "float32")
            most = T.alloc_fragment((16,), "float32")
            for i, j in T.Parallel(16, width):
                values[i, j] = T.if_then_else(block * 16 + i < rows, T.cast(x[block * 16 + i, j], "float32"), 0.0)
            for i, j in T.Parallel(16, width):
                grads[i, j] = T.if_then_else(block * 16 + i < rows, dy[block * 16 + i, j], 0.0)
            for i, j in T.Parallel(16, width):
                products[i, j] = values[i, j] * values[i, j]
            T.reduce_sum(products, factors, dim=1)
            for i, j in T.Parallel(16, width):
                products[i, j] = values[i, j] * grads[i, j]
            T.reduce_sum(products, along, dim=1)
            T.reduce_absmax(grads, most, dim=1)
            for i in T.Parallel(16):
                factors[i] = T.rsqrt(factors[i] + _EPS)
            for i, j in T.Parallel(16, width):
                if block * 16 + i < rows:
                    # Rows of padding have no gradient and may hold NaN.
                    dx[block * 16 + i, j] = T.Select(
                        most[i] > 0.0,
                        (grads[i, j] - values[i, j] * (factors[i] * factors[i] * along[i])) * factors[i],
                        0.0,
                    )

    return l2_normalise_rows_backward
