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
        more_offsets: argument name to offsets, where a ragged call has others than its first.
        options: option name to value, where it is not the default.
        draw: argument name to the name of the distribution that it is drawn from; normal where none is named.
        present: optional tensors that the call passes.
    """

    name: str
    sizes: Mapping[str, int]
    offsets: tuple[int, ...] | None = None
    more_offsets: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
    draw: Mapping[str, str] = field(default_factory=dict)
    present: tuple[str, ...] = ()


def drawn(cases: Iterable[Case], draw: Mapping[str, str]) -> tuple[Case, ...]:
    """The same cases with an op's usual distributions, where a case names no other."""
    return tuple(dataclasses.replace(case, draw={**draw, **case.draw}) for case in cases)


def sizes_of(b: int, t: int, heads: int, widths: tuple[int, int]) -> dict[str, int]:
    """Axis sizes of an op whose value heads are its key heads."""
    return {"B": b, "T": t, "H": heads, "K": widths[0], "V": widths[1]}


def recurrent_cases(*present: str) -> tuple[Case, ...]:
    """Lengths, offsets and state layouts that every recurrence is held against.

    ``present`` names the optional tensors that each of them passes.
    """
    with_state = (*present, "initial_state")
    final = {"output_final_state": True}
    return (
        Case("dense", sizes_of(2, 130, 3, (24, 40)), present=present),
        Case("one-token", sizes_of(2, 1, 3, (16, 24)), present=present),
        Case("short", sizes_of(1, 37, 3, (24, 16)), present=with_state),
        Case("tail", sizes_of(1, 200, 3, (16, 24)), present=with_state, options=final),
        Case(
            "ragged",
            sizes_of(1, 192, 3, (16, 24)),
            offsets=(0, 0, 63, 64, 65, 65, 192),
            present=with_state,
            options=final,
        ),
        Case(
            "padded",
            sizes_of(1, 192, 3, (24, 16)),
            offsets=(0, 100, 160),
            present=with_state,
            options={**final, "state_v_first": True},
        ),
    )


@dataclass(frozen=True)
class Budget:
    """How far an output or gradient may be from the fp64 recurrence, as a multiple of the unavoidable loss.

    Args:
        half: for bf16 and fp16 activations. What rounding the inputs loses is far more than what fp32 sums lose.
        full: for fp32 activations, where the two are alike: a chunkwise form adds terms of a whole chunk that nearly
            cancel, and the loss counts the rounding of the inputs alone. It also holds for fp32 outputs and gradients
            that no 16-bit number reaches, whatever the activations are.
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
