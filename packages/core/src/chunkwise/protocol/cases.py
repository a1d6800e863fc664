"""Cases: the sizes, options and draws that an op's declaration names for parity tests and benchmarks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """One call of an op, described without tensors.

    Args:
        name: unique within the op.
        sizes: axis name to size.
        offsets: ``cu_seqlens`` of a ragged call, or None.
        options: option name to value, where it is not the default.
        draw: argument name to the name of the distribution that it is drawn from; normal where none is named.
        present: optional tensors that the call passes.
    """

    name: str
    sizes: Mapping[str, int]
    offsets: tuple[int, ...] | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    draw: Mapping[str, str] = field(default_factory=dict)
    present: tuple[str, ...] = ()


def drawn(cases: Iterable[Case], draw: Mapping[str, str]) -> tuple[Case, ...]:
    """The same cases with an op's usual distributions, where a case names no other."""
    return tuple(dataclasses.replace(case, draw={**draw, **case.draw}) for case in cases)


@dataclass(frozen=True)
class Budget:
    """How far an output or gradient may be from the fp64 recurrence, as a multiple of the unavoidable loss.

    Args:
        half: for bf16 and fp16 activations. What rounding the inputs loses is far more than what fp32 sums lose.
        full: for fp32 activations, where the two are alike: a chunkwise form adds terms of a whole chunk that nearly
            cancel, and the loss counts the rounding of the inputs alone.
    """

    half: float
    full: float

    def multiple(self, dtype: str) -> float:
        """The multiple for the dtype of the activations."""
        return self.full if dtype == "fp32" else self.half


@dataclass(frozen=True)
class Cost:
    """Work that a call cannot avoid: floating-point operations and bytes through device memory."""

    flops: float
    bytes: float
