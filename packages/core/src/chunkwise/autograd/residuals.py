"""Residual formats: what a forward saves for a backward, so that any pair that shares a format fits together."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chunkwise.protocol.axes import Axis

POLICIES = ("lean", "full")
"""What a format is for; see :class:`ResidualFormat`."""


ENTRY_CHUNKS = 32
"""Chunks between two of the states that a lean format keeps of a sequence: a backward can replay the chunks from there
on, and a state for so many chunks is a small part of what the format keeps."""


class Residuals(NamedTuple):
    """The tensors that a forward saved, by field name (or output name), and the format that they follow."""

    format: str
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class ResidualField:
    """One tensor of a format: its axes, and its dtype or the argument whose dtype it takes."""

    name: str
    axes_text: str
    dtype: str
    meaning: str

    def size_of(self, sizes: Mapping[str, Any]) -> tuple[Any, ...]:
        """The shape for given axis sizes."""
        return tuple(sizes[axis.name] + axis.plus for axis in map(Axis.parse, self.axes_text.split()))


@dataclass(frozen=True, eq=False)
class ResidualFormat:
    """A named, versioned set of residuals.

    Args:
        name: ``gdn-wy64@2``; the version grows when a field is added or changes its axes, dtype, log base or chunk.
        policy: ``lean`` (the op's default: the backward recomputes what is cheap) or ``full``.
        chunk_size: rows of a chunk, which the fields' axis ``C`` takes; None where nothing is cut into chunks.
        fields: the tensors, in the order in which they are saved.
        sizes: adds the sizes that only this format has (chunk slots) to the call's axis sizes.
        outputs: outputs that the backward reads as well, always returned; core keeps them beside the fields, so that a
            forward does not copy them.
    """

    name: str
    policy: str
    chunk_size: int | None
    fields: tuple[ResidualField, ...]
    sizes: Callable[[Mapping[str, Any], bool], Mapping[str, Any]]
    outputs: tuple[str, ...] = ()

    def all_sizes(self, sizes: Mapping[str, Any], ragged: bool) -> Mapping[str, Any]:
        """The call's axis sizes, C, and the sizes of this format's own axes."""
        return {**sizes, "C": self.chunk_size, **self.sizes({**sizes, "C": self.chunk_size}, ragged)}

    @cached_property
    def field_names(self) -> tuple[str, ...]:
        """The names of the fields, in order."""
        return tuple(field.name for field in self.fields)

    @cached_property
    def saved_names(self) -> tuple[str, ...]:
        """What a backward gets by name: the fields, then the outputs that it reads as well."""
        return (*self.field_names, *self.outputs)

    @cached_property
    def pick(self) -> Callable[[Mapping[str, Tensor]], tuple[Tensor, ...]]:
        """Takes the fields, in order, out of what a forward returned by name; KeyError where one is missing."""
        if len(self.field_names) == 1:  # itemgetter would return the tensor itself
            (name,) = self.field_names
            return lambda tensors: (tensors[name],)
        return operator.itemgetter(*self.field_names)


def chunk_slots(sizes: Mapping[str, Any], ragged: bool) -> Mapping[str, Any]:
    """Slots for one entry a chunk, bounded by shapes alone: B * ceil(T / C) dense, ceil(T / C) + N ragged."""
    chunks = (sizes["T"] + sizes["C"] - 1) // sizes["C"]
    return {"slots": chunks + sizes["N"] if ragged else sizes["B"] * chunks}


def entry_slots(sizes: Mapping[str, Any], ragged: bool) -> Mapping[str, Any]:
    """Slots in a batch row for the states before every ENTRY_CHUNKS-th chunk of its sequences, dense and ragged alike.

    Such a state, before row r of the batch row, stands at ``r // (ENTRY_CHUNKS * C) - 1``. No two claim one slot: those
    of a sequence are ENTRY_CHUNKS chunks apart, and the first of the next sequence is further from them.
    """
    return {"entries": torch.sym_max(sizes["T"] - 1, 0) // (ENTRY_CHUNKS * sizes["C"])}


def entry_states(head_axes: str) -> ResidualField:
    """The field whose slots :func:`entry_slots` counts, for the axes of one state."""
    return ResidualField(
        "entry_states",
        f"B entries {head_axes}",
        "fp32",
        f"the state before chunk {ENTRY_CHUNKS}, {2 * ENTRY_CHUNKS}, ... of each sequence; of row r at r // "
        f"({ENTRY_CHUNKS} C) - 1; slots of no such row hold anything",
    )
