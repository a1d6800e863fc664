"""Sums over segments of a chunk and the inverse of unit lower triangular matrices, batched."""

from __future__ import annotations

import torch
from torch import Tensor

_BASE = 8  # order of the diagonal blocks inverted by substitution


def ones_lower(rows: int, like: Tensor, diagonal: int = 0) -> Tensor:
    """`[rows, rows]` ones at and below `diagonal`, zeros above."""
    return torch.ones(rows, rows, dtype=like.dtype, device=like.device).tril_(diagonal)


def multiply_last(x: Tensor, matrix: Tensor) -> Tensor:
    """`x @ matrix` as one product over all leading axes of a contiguous `x`."""
    return (x.reshape(-1, x.shape[-1]) @ matrix).view(*x.shape[:-1], matrix.shape[-1])


def prefix_sums(g: Tensor) -> tuple[Tensor, Tensor]:
    """`sum_{j <= t} g_j` along the last axis, `[..., C]`, as the sum of two fp32 tensors `(high, low)`.

    `high` is the sum rounded to fp32, `low` what rounding took away.
    """
    wide = _widened(g)
    # A product with ones, as cumsum on CUDA is not the same twice along the innermost axis.
    return _in_two(multiply_last(wide, ones_lower(g.shape[-1], wide).mT), g.device)


def prefix_sums_of_rows(g: Tensor) -> tuple[Tensor, Tensor]:
    """The same along the last axis but one: `[..., C, K]`."""
    wide = _widened(g)
    return _in_two(ones_lower(g.shape[-2], wide) @ wide, g.device)


def _widened(g: Tensor) -> Tensor:
    """In fp64. Apple's GPUs have none; there are few gates, so their sums take the way over the host."""
    return g.to("cpu", torch.float64) if g.device.type == "mps" else g.double()


def _in_two(sums: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    high = sums.float()
    return high.to(device), (sums - high).float().to(device)


def segment_sums(high: Tensor, low: Tensor) -> Tensor:
    """`D[t, s] = sum_{s < j <= t} g_j` for `s <= t`: prefix sums `[..., C]` -> `[..., C, C]`; nothing of use above.

    Right to an ulp of D: the difference of prefix sums in fp32 alone would keep the rounding errors of both.
    """
    sums = high.unsqueeze(-1) - high.unsqueeze(-2)
    return sums.add_(low.unsqueeze(-1)).sub_(low.unsqueeze(-2))


def segment_sums_backward(grad: Tensor) -> Tensor:
    """`dg_j = sum_{t >= j} sum_{s < j} grad[t, s]`: the transpose of g -> D in `segment_sums`.

    Only what belongs to j is added; nothing is added and taken away again.
    """
    rows = grad.shape[-1]
    return multiply_last(grad, ones_lower(rows, grad, -1).mT).tril_().sum(-2)


def unit_lower_inverse(a: Tensor) -> Tensor:
    """`(I + tril(a, -1))^-1` for `[..., C, C]`, C at most 8 or 8 times a power of two.

    Forward substitution in blocks of 8, then blocks are merged in pairs: as stable as substitution throughout,
    unlike sums of powers of `a` when keys are nearly parallel. Only entries below the diagonal are read.
    """
    rows = a.shape[-1]
    size = min(rows, _BASE)
    flat = a.reshape(-1, rows, rows)
    inverse = torch.zeros_like(flat)
    diagonal_blocks(inverse, size).copy_(_substitute(diagonal_blocks(flat, size)))
    while size < rows:
        pair = diagonal_blocks(inverse, 2 * size)
        upper, lower = pair[..., :size, :size], pair[..., size:, size:]
        below = diagonal_blocks(flat, 2 * size)[..., size:, :size]
        pair[..., size:, :size] = (lower @ (below @ upper)).neg_()
        size *= 2
    return inverse.view_as(a)


def with_columns(matrix: Tensor, columns: int) -> Tensor:
    """Cut the last axis or fill it with zeros to `columns`."""
    return torch.nn.functional.pad(matrix, (0, columns - matrix.shape[-1]))


def diagonal_blocks(a: Tensor, size: int) -> Tensor:
    """`[batch, C, C]` -> view `[batch, C / size, size, size]` of the blocks on the diagonal."""
    blocks = a.shape[-1] // size
    tiles = a.view(a.shape[0], blocks, size, blocks, size)
    return tiles.diagonal(0, 1, 3).movedim(-1, 1)


def _substitute(a: Tensor) -> Tensor:
    """Row by row, with the batch innermost so that each step is one wide operation."""
    size = a.shape[-1]
    a = a.permute(2, 3, 0, 1).contiguous()  # [size, size, batch, blocks]
    x = torch.zeros_like(a)
    x.diagonal().fill_(1.0)
    for i in range(1, size):
        x[i, :i] = (a[i, :i, None] * x[:i, :i]).sum(0).neg_()
    return x.permute(2, 3, 0, 1)
