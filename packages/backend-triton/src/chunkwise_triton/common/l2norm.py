"""L2 normalisation of rows, ``y = x * rsqrt(sum(x^2) + 1e-6)``, and its gradient."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from chunkwise_triton.common.launch import launch

_EPS = tl.constexpr(1e-6)
_ROWS = 16


def l2_normalise(x: Tensor) -> Tensor:
    """Normalise the last axis of a contiguous tensor; fp32 inside, the result in x's dtype."""
    y = torch.empty_like(x)
    width, rows = x.shape[-1], x.numel() // x.shape[-1]
    constants = {"WIDTH": width, "ROWS": _ROWS, "BLOCK": triton.next_power_of_2(width)}
    launch(_forward_kernel, triton.cdiv(rows, _ROWS), (x, y, rows), constants)
    return y


def l2_normalise_backward(x: Tensor, dy: Tensor) -> Tensor:
    """The gradient with respect to the raw x, in x's dtype."""
    dx = torch.empty_like(x)
    width, rows = x.shape[-1], x.numel() // x.shape[-1]
    constants = {"WIDTH": width, "ROWS": _ROWS, "BLOCK": triton.next_power_of_2(width)}
    launch(_backward_kernel, triton.cdiv(rows, _ROWS), (x, dy, dx, rows), constants)
    return dx


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(x, y, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
    at = row[:, None] * WIDTH + column[None, :]
    tile = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    factor = tl.rsqrt(tl.sum(tile * tile, 1) + _EPS)
    tl.store(y + at, (tile * factor[:, None]).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(x, dy, dx, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
    at = row[:, None] * WIDTH + column[None, :]
    tile = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    grad = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    factor = tl.rsqrt(tl.sum(tile * tile, 1) + _EPS)[:, None]
    y = tile * factor
    result = (grad - y * tl.sum(y * grad, 1)[:, None]) * factor
    # Rows of padding have no gradient and may hold NaN.
    result = tl.where(tl.max(tl.abs(grad), 1)[:, None] > 0.0, result, 0.0)
    tl.store(dx + at, result.to(dx.dtype.element_ty), mask=mask)
