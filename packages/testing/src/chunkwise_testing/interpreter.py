"""Triton's interpreter brought nearer to a GPU, so that what is tested there is tested on the CPU too.

Triton's interpreter holds bf16 as the integers of the same bits. It multiplies those in ``tl.dot``, takes an integer's
or a boolean's value for bits when it is cast, and cuts fp32 off where a GPU rounds it to the nearest. :func:`mend`
replaces these two operations; arithmetic on bf16 tensors without ``tl.dot`` stays as it is.

It multiplies fp32 as fp32 where a GPU, asked for tf32x3, multiplies two parts of each operand, of eleven digits and
exponents down to -126, and cuts off what its sums lose; and its exponentials are right to the last digit where a GPU's
lose those that ``x log2(e)`` loses. :func:`round_like_a_gpu` does so too. What an H200 lost in tests, it loses as well.

Imports triton, whose kernels are interpreted where ``TRITON_INTERPRET=1`` was set before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

_SIZE = 16
_LOG2E = 1.4426950408889634
_TOGETHER = 8
"""Columns of tf32 that a tensor core multiplies at once."""
_DIGITS_OF_FP32 = ~((1 << 29) - 1)
"""Of the bits of an fp64 number."""
_NEAREST = (1.00390625, 1.01171875, -1.998046875, 3e38, 1e-40, -0.0, float("inf"), float("nan"))
"""Ties to even below and above, a carry into the exponent, the ends of the range."""


def mend() -> bool:
    """Mend the interpreter of this process if it needs it; whether it computes bf16 right now.

    Leaves Triton alone where it is right already, where mending does not make it right, and where it does not
    interpret; in the last two cases the result is False.
    """
    if not isinstance(_dot_and_casts, InterpretedFunction):
        return False
    if bf16_is_right():
        return True
    before = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl
    InterpreterBuilder.create_dot = _mended_dot(before[0])
    InterpreterBuilder.cast_impl = _mended_cast(before[1])
    if not bf16_is_right():
        InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = before
        return False
    return True


def round_like_a_gpu() -> None:
    """Let the interpreter of this process round fp32 as a GPU does in products in tf32x3 and in exponentials."""
    dot, exp = InterpreterBuilder.create_dot, InterpreterBuilder.create_exp
    if not hasattr(dot, "exact"):
        InterpreterBuilder.create_dot = _rounding_dot(dot)
        InterpreterBuilder.create_exp = _rounding_exp(exp)


def bf16_is_right() -> bool:
    """Whether the interpreter computes a small product of bf16, and casts to it, as a GPU does: bit by bit."""
    x = (torch.arange(_SIZE * _SIZE).view(_SIZE, _SIZE) % 7 - 3).to(torch.bfloat16)
    y = x.T.contiguous() - 1
    wide = torch.tensor(_NEAREST).repeat(_SIZE * _SIZE // len(_NEAREST)).view(_SIZE, _SIZE)
    dot, casts = torch.empty(_SIZE, _SIZE), torch.empty(3, _SIZE, _SIZE, dtype=torch.bfloat16)
    _dot_and_casts[(1,)](x, y, wide, dot, casts, C=_SIZE)
    t = torch.arange(_SIZE)
    below = t[:, None] - t[None, :]
    expected = torch.stack([below, below >= 0, wide]).to(torch.bfloat16)  # small integers are exact in bf16
    return torch.equal(dot, x.float() @ y.float() + below) and torch.allclose(
        casts, expected, rtol=0, atol=0, equal_nan=True
    )


@triton.jit  # type: ignore[untyped-decorator]
def _dot_and_casts(x, y, wide, dot, casts, C: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    t = tl.arange(0, C)
    at = t[:, None] * C + t[None, :]
    below = t[:, None] - t[None, :]
    tl.store(dot + at, tl.dot(tl.load(x + at), tl.load(y + at), below.to(tl.bfloat16).to(tl.float32)))
    tl.store(casts + at, below.to(tl.bfloat16))
    tl.store(casts + C * C + at, (below >= 0).to(tl.bfloat16))
    tl.store(casts + 2 * C * C + at, tl.load(wide + at).to(tl.bfloat16))


def _mended_dot(dot: Callable[..., Any]) -> Callable[..., Any]:
    def create_dot(builder: Any, a: Any, b: Any, *others: Any) -> Any:
        return dot(builder, _widened(a), _widened(b), *others)

    return create_dot


def _rounding_exp(exp: Callable[..., Any]) -> Callable[..., Any]:
    def create_exp(builder: Any, x: Any) -> Any:
        if x.dtype.scalar != tl.float32:
            return exp(builder, x)
        with np.errstate(over="ignore"):
            return TensorHandle(np.exp2(x.data * np.float32(_LOG2E)), x.dtype.scalar)

    return create_exp


def _rounding_dot(dot: Callable[..., Any]) -> Callable[..., Any]:
    def create_dot(builder: Any, a: Any, b: Any, d: Any, precision: Any, *others: Any) -> Any:
        if a.dtype.scalar != tl.float32 or "TF32x3" not in str(precision):
            return dot(builder, a, b, d, precision, *others)
        with np.errstate(invalid="ignore", over="ignore"):  # of what is infinite, the lower part is no number
            (a_high, a_low), (b_high, b_low) = _parts(a.data), _parts(b.data)
            low = _summed(_summed(np.zeros(d.data.shape), a_low, b_high), a_high, b_low)
            high = _summed(np.where(np.isnan(low), 0.0, low), a_high, b_high)
            return TensorHandle(high.astype(np.float32) + d.data, d.dtype.scalar)

    create_dot.exact = dot  # type: ignore[attr-defined]
    return create_dot


def _summed(total: Any, a: Any, b: Any) -> Any:
    """``total + a @ b`` in fp64, eight columns of a at a time; after each of them digits behind fp32's are cut off."""
    for first in range(0, a.shape[-1], _TOGETHER):
        these = slice(first, first + _TOGETHER)
        total = total + a[..., these] @ b[..., these, :]
        total = (total.view(np.int64) & _DIGITS_OF_FP32).view(np.float64)
    return total


def _parts(x: Any) -> tuple[Any, Any]:
    high = _tf32(x)
    return high.astype(np.float64), _tf32(x - high).astype(np.float64)


def _tf32(x: Any) -> Any:
    """The nearest number of tf32, away from zero of two as near; below 2^-126 its spacing stays 2^-136."""
    nearest = ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(x), nearest, x)


def _mended_cast(cast: Callable[..., Any]) -> Callable[..., Any]:
    def cast_impl(builder: Any, source: Any, target: Any) -> Any:
        of_source, of_target = source.dtype.scalar, target.scalar
        if of_source == of_target or tl.bfloat16 not in (of_source, of_target):
            return cast(builder, source, target)
        if of_source == tl.bfloat16:
            return cast(builder, _widened(source), target)
        return TensorHandle(_rounded(source.data.astype(np.float32)), tl.bfloat16)  # by way of fp32, as on a GPU

    return cast_impl


def _widened(handle: Any) -> Any:
    """The same numbers as fp32, where they are bf16."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _rounded(wide: Any) -> Any:
    """The bits of the nearest bf16, of two as near the even one."""
    bits = wide.view(np.uint32)
    nearest = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16  # a carry goes into the exponent, at its end to infinity
    return np.where(np.isnan(wide), 0x7FC0, nearest).astype(np.uint16)
