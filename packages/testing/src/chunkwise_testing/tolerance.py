"""The accuracy measure: an error is held against the loss that the dtypes alone make unavoidable.

For an output, and for each of its parts (one head of one chunk of 64 rows)::

    error = |x - ref|_part / (|ref|_part + 1e-3 rms(ref) sqrt(n_part))
    loss  = the same of (ref rounded to the output's dtype) - ref, plus, for each input, of what the fp64 result
            changes when that input moves by half an ulp of its dtype

The signs of the moves are random; what they change is the root mean square over a few draws. The gradients of the
outputs count as inputs: they are the backward's.

The budget is ``multiple * loss``, the multiple declared with the op. A part's loss counts as no less than that of the
whole output, since a part of few numbers may be rounded exactly by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from chunkwise_testing.sampling import HEAD_AXES

CHUNK = 64
_FLOOR = 1e-3


@dataclass(frozen=True)
class Measure:
    """How far one output or gradient is from the oracle.

    Args:
        name: of the output, or ``d_`` and the input.
        error, loss: of the worst part.
        over_budget: error over budget of the worst part; at most 1 is accepted.
        relative_l2: of the whole, for comparison with figures published elsewhere.
    """

    name: str
    error: float
    loss: float
    over_budget: float
    relative_l2: float

    @property
    def ok(self) -> bool:
        """Whether it is within budget; a NaN is not."""
        return self.over_budget <= 1.0

    def __str__(self) -> str:
        return (
            f"{self.name}: error {self.error:.3g}, loss {self.loss:.3g}, {self.over_budget:.3g} of the budget, "
            f"relative L2 {self.relative_l2:.3g}"
        )


@dataclass(frozen=True, eq=False)
class Parts:
    """How a tensor is cut into parts: its axes, and the block that each row belongs to (None: no row axis)."""

    axes: Sequence[str]
    blocks: Tensor | None
    row_axis: str = "T"

    def norms(self, x: Tensor) -> Tensor:
        """The L2 norm of each part, flattened."""
        return self._sums(x.square()).sqrt().flatten()

    def counts(self, x: Tensor) -> Tensor:
        """The number of elements of each part, flattened."""
        return self._sums(torch.ones_like(x)).flatten()

    def _sums(self, x: Tensor) -> Tensor:
        kept = (*HEAD_AXES, "B", "N", self.row_axis)
        folded = [i for i, axis in enumerate(self.axes) if axis not in kept]
        if folded:
            x = x.sum(folded)
        if self.blocks is None or self.row_axis not in self.axes or x.numel() == 0:
            return x
        axis = [a for a in self.axes if a in kept].index(self.row_axis)
        shape = [*x.shape]
        shape[axis] = int(self.blocks.max()) + 1
        return x.new_zeros(shape).index_add_(axis, self.blocks, x)


def row_blocks(rows: int, offsets: Sequence[int] | None) -> Tensor:
    """The block of each row: chunks of 64 from the first row of each sequence, rows of padding in one of their own."""
    if offsets is None:
        return torch.arange(rows) // CHUNK
    blocks = torch.zeros(rows, dtype=torch.long)
    count = 0
    for start, end in pairwise(offsets):
        blocks[start:end] = count + torch.arange(end - start) // CHUNK
        count += -(-(end - start) // CHUNK)
    blocks[offsets[-1] :] = count
    return blocks


def half_ulp(x: Tensor) -> Tensor:
    """Half the spacing of ``x``'s dtype at each value, in fp64; an fp64 tensor counts as fp32, which states become."""
    info = torch.finfo(torch.float32 if x.dtype == torch.float64 else x.dtype)
    _, exponent = torch.frexp(x.double())
    spacing = torch.ldexp(torch.full_like(x, info.eps, dtype=torch.float64), exponent - 1)
    return 0.5 * spacing.clamp(min=info.smallest_normal * info.eps)


def moved(x: Tensor, seed: int) -> Tensor:
    """``x`` in fp64, every value half an ulp up or down."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, x.shape, generator=generator).double() * 2 - 1
    return x.double() + signs * half_ulp(x)


def measure(
    name: str, actual: Tensor, reference: Tensor, changes: Sequence[Tensor], *, parts: Parts, multiple: float
) -> Measure:
    """Hold a result against the fp64 reference.

    Args:
        name: for the report.
        actual: the result, in its own dtype.
        reference: the fp64 result.
        changes: for each input, what the reference changes when it moves by half an ulp, ``[draws, ...]``.
        parts: how to cut the tensor.
        multiple: the budget, in units of the loss.
    """
    if actual.shape != reference.shape:
        raise AssertionError(f"{name}: shape {list(actual.shape)}, expected {list(reference.shape)}")
    rounding = reference.to(actual.dtype).double() - reference
    difference = actual.detach().cpu().double() - reference
    rms = float(reference.square().mean().sqrt()) if reference.numel() else 0.0
    scale = parts.norms(reference) + _FLOOR * rms * parts.counts(reference).sqrt()
    error = _over(parts.norms(difference), scale)
    loss = _over(sum((_typical(c, parts.norms) for c in changes), parts.norms(rounding)), scale)
    whole_scale = (1.0 + _FLOOR) * reference.norm()
    whole = _over(sum((_typical(c, torch.linalg.vector_norm) for c in changes), rounding.norm()), whole_scale)
    ratio = _over(error, multiple * torch.maximum(loss, whole))
    if not ratio.numel():
        return Measure(name, 0.0, 0.0, 0.0, 0.0)
    worst = int(ratio.argmax())
    relative = float(_over(difference.norm(), reference.norm()))
    return Measure(name, float(error[worst]), float(loss[worst]), float(ratio[worst]), relative)


def _typical(draws: Tensor, norm: Callable[[Tensor], Tensor]) -> Tensor:
    """The root mean square of a norm over the draws of the signs, ``[draws, ...]``."""
    return torch.stack([norm(draw) for draw in draws]).square().mean(0).sqrt()


def _over(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient; 0 where both are 0, and infinite where the numerator is not a number."""
    quotient = torch.where(numerator == 0, torch.zeros_like(numerator), numerator / denominator)
    return torch.where(quotient.isnan(), torch.full_like(quotient, torch.inf), quotient)
