"""Axes: what a tensor's shape must be, read from its jaxtyping annotation, bound over all arguments."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from chunkwise import errors

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "int32",
    torch.int64: "int64",
}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}

ACTIVATION_DTYPES = ("bf16", "fp16", "fp32")
STATE_DTYPES = ("bf16", "fp16", "fp32", "fp64")
OFFSET_DTYPES = ("int32", "int64")


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype (``bf16``); torch's own name where this library has none."""
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(frozen=True)
class Axis:
    """One axis of an annotation: a name and a constant added to it (``N+1``)."""

    name: str
    plus: int = 0

    @classmethod
    def parse(cls, text: str) -> Axis:
        name, _, plus = text.partition("+")
        return cls(name, int(plus or 0))


@dataclass(frozen=True)
class TensorSpec:
    """A tensor argument: its axes, the dtypes it may have, whether it may be absent."""

    name: str
    axes_text: str
    axes: tuple[Axis, ...]
    dtypes: tuple[str, ...]
    optional: bool

    def size_of(self, sizes: Mapping[str, Any]) -> tuple[Any, ...]:
        """The shape that this tensor has for given axis sizes."""
        return tuple(sizes[axis.name] + axis.plus for axis in self.axes)


def tensor_spec(name: str, annotation: object, dtypes: tuple[str, ...] | None = None) -> TensorSpec | None:
    """Read a jaxtyping annotation (``Float[Tensor, "B T H K"]``, or that ``| None``); None if it is no tensor."""
    optional = False
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [a for a in typing.get_args(annotation) if a is not type(None)]
        optional = len(members) < len(typing.get_args(annotation))
        annotation = members[0] if len(members) == 1 else annotation
    axes_text = getattr(annotation, "dim_str", None)
    if axes_text is None:
        return None
    if dtypes is None:
        floating = "float32" in annotation.dtypes  # type: ignore[attr-defined]
        dtypes = ACTIVATION_DTYPES if floating else OFFSET_DTYPES
    return TensorSpec(name, axes_text, tuple(map(Axis.parse, axes_text.split())), dtypes, optional)


@dataclass(frozen=True)
class Divides:
    """A constraint between axes: ``multiple`` is a multiple of ``divisor``."""

    multiple: str
    divisor: str

    def check(self, op: str, sizes: Mapping[str, int]) -> None:
        """Raise where the sizes break the constraint."""
        if sizes[self.multiple] % sizes[self.divisor]:
            raise errors.not_divisible(op, self.multiple, sizes[self.multiple], self.divisor, sizes[self.divisor])


class Binder:
    """Binds axis names to sizes over the tensors of a call and remembers who fixed each."""

    def __init__(self, op: str) -> None:
        self.op = op
        self.sizes: dict[str, int] = {}
        self.fixed_by: dict[str, str] = {}

    def bind(self, spec: TensorSpec, shape: Sequence[int]) -> None:
        """Hold one tensor's shape against the axes bound so far."""
        if len(shape) != len(spec.axes):
            raise errors.wrong_rank(self.op, spec.name, shape, spec.axes_text)
        for axis, given in zip(spec.axes, shape, strict=True):
            self.fix(axis.name, given - axis.plus, spec.name)

    def fix(self, axis: str, size: int, source: str) -> None:
        """Fix an axis, or raise if ``source`` disagrees with who fixed it before."""
        if axis not in self.sizes:
            self.sizes[axis], self.fixed_by[axis] = size, source
        elif self.sizes[axis] != size:
            raise errors.axis_disagrees(self.op, source, axis, size, self.fixed_by[axis], self.sizes[axis])


SizeRule = Callable[[Mapping[str, Any]], Any]
