"""The oracle: an op's reference in fp64 with plain autograd, and the function that runs any candidate likewise."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chunkwise_testing.sampling import (
    HEAD_AXES,
    Call,
    asked_outputs,
    call_sizes,
    output_spec,
    ragged_argument,
    row_axis_of,
)


@dataclass(frozen=True, eq=False)
class Result:
    """What a call returned: the outputs that it asked for, and the gradients of its inputs, by name."""

    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]

    def quantities(self) -> dict[str, Tensor]:
        """Outputs by name, gradients as ``d_name``."""
        return {**self.outputs, **{f"d_{name}": g for name, g in self.gradients.items()}}

    def equal(self, other: Result) -> bool:
        """Whether both hold the same bits."""
        mine, others = self.quantities(), other.quantities()
        return mine.keys() == others.keys() and all(same_bits(mine[name], others[name]) for name in mine)

    def differing(self, other: Result) -> list[str]:
        """The quantities that differ in a bit, or that only one side has."""
        mine, others = self.quantities(), other.quantities()
        both = mine.keys() & others.keys()
        return sorted((mine.keys() ^ others.keys()) | {n for n in both if not same_bits(mine[n], others[n])})


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtypes, shapes and values; NaN equals NaN, and 0 equals -0."""
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def evaluate(
    call: Call,
    needs: Collection[str] = (),
    gradients: Mapping[str, Tensor | None] | None = None,
    function: Callable[..., Any] | None = None,
) -> Result:
    """Run a call (or another function with its arguments) and, for the given output gradients, its backward.

    The tensors of the call keep their storage and strides. A gradient that does not come back is left out.
    """
    leaves = {name: t.detach().requires_grad_(name in needs) for name, t in call.tensors.items()}
    returned = (function or call.op)(**leaves, **call.options)
    returned = returned if isinstance(returned, tuple) else (returned,)
    promises = call.declaration.promises
    names = [output.name for output in (asked_outputs(call) if promises.bare else promises.outputs)]
    outputs = {name: x for name, x in zip(names, returned, strict=True) if x is not None}
    wanted = [name for name in leaves if name in needs]
    used = [(outputs[n], g) for n, g in (gradients or {}).items() if g is not None and outputs[n].requires_grad]
    found: Sequence[Tensor | None] = [None] * len(wanted)
    if used and wanted:
        found = torch.autograd.grad(
            [o for o, _ in used], [leaves[n] for n in wanted], [g for _, g in used], allow_unused=True
        )
    return Result(
        {name: x.detach() for name, x in outputs.items()},
        {name: g.detach() for name, g in zip(wanted, found, strict=True) if g is not None},
    )


def oracle(call: Call, needs: Collection[str] = (), gradients: Mapping[str, Tensor | None] | None = None) -> Result:
    """The fp64 result of a call on the CPU. Gradients that nothing flows into are zeros."""
    return oracle_of_many([call], needs, [gradients or {}])[0]


def oracle_of_many(
    calls: Sequence[Call], needs: Collection[str], gradients: Sequence[Mapping[str, Tensor | None]]
) -> list[Result]:
    """The fp64 results of calls that differ in the values of their tensors only, computed side by side.

    ``gradients`` holds those of the outputs for each call.

    Rows of padding are cut off first: the reference promises nothing for what they hold.
    """
    live = [_trimmed(_widened(call)) for call in calls]
    grads = [
        {n: _rows(calls[0], n, g.cpu().double()) for n, g in given.items() if g is not None} for given in gradients
    ]
    together = max(1, _ELEMENTS_AT_ONCE // max(1, _graph_elements(live[0])))
    if any(t.is_floating_point() and _head_axis(live[0], name) is None for name, t in live[0].tensors.items()):
        together = 1
    results = []
    for start in range(0, len(live), together):
        group, group_grads = live[start : start + together], grads[start : start + together]
        joined, joined_grads = _stacked(group, group_grads) if together > 1 else (group[0], group_grads[0])
        found = evaluate(joined, needs, joined_grads, joined.op.reference)
        results += _unstacked(found, group[0], len(group)) if together > 1 else [found]
    return [_completed(call, needs, result) for call, result in zip(calls, results, strict=True)]


_ELEMENTS_AT_ONCE = 10_000_000
"""Bounds the memory of calls that are computed side by side, since autograd keeps a state for every token; four times
as many take half as long again, the states of a step being beyond what a core's cache holds."""
_SCORES = 8
"""How many times autograd keeps what attention computes for each pair of a query and a key."""


def _graph_elements(call: Call) -> int:
    sizes, promises = call_sizes(call), call.declaration.promises
    specs = (*call.declaration.tensors, *map(output_spec, promises.outputs))
    state = next((s for s in specs if s.name in promises.states), None)
    if state is not None:
        rows = sizes[ragged_argument(call.declaration).rows]
        return rows * math.prod(sizes[a.name] for a in state.axes if a.name != "N")
    pairs = {axis for offsets in promises.offsets for axis in (offsets.batch, offsets.rows)}
    heads = max(size for axis, size in sizes.items() if axis in HEAD_AXES)
    return _SCORES * heads * math.prod(sizes[axis] for axis in pairs)


def padded_rows(call: Call, name: str) -> tuple[int, int, int]:
    """Of an argument's or output's rows: their axis, those in use, and all; equal where nothing is padding.

    Zeros where it has no row axis.
    """
    axes = _axes(call, name)
    offsets = row_axis_of(call.declaration, axes)
    if offsets is None:
        return 0, 0, 0
    rows = call_sizes(call)[offsets.rows]
    given = call.tensors.get(offsets.name)
    return axes.index(offsets.rows), (rows if given is None else int(given[-1])), rows


def _axes(call: Call, name: str) -> list[str]:
    if name in call.spec:
        return [axis.name for axis in call.spec[name].axes]
    for output in call.declaration.promises.outputs:
        if output.name == name:
            return output.axes_text.split()
    return []


def _widened(call: Call) -> Call:
    return call.mapped(lambda _, t: t.detach().cpu().double() if t.is_floating_point() else t.cpu())


def _rows(call: Call, name: str, tensor: Tensor) -> Tensor:
    axis, live, rows = padded_rows(call, name)
    return tensor if live == rows else tensor.narrow(axis, 0, live)


def _trimmed(call: Call) -> Call:
    return call.mapped(lambda name, t: _rows(call, name, t))


def _head_axis(call: Call, name: str) -> int | None:
    """The axis of heads, along which copies of a tensor are laid side by side: no head knows of another."""
    return next((i for i, axis in enumerate(_axes(call, name)) if axis in HEAD_AXES), None)


def _stacked(calls: Sequence[Call], grads: Sequence[Mapping[str, Tensor]]) -> tuple[Call, dict[str, Tensor]]:
    first = calls[0]

    def joined(name: str, parts: Sequence[Tensor]) -> Tensor:
        axis = _head_axis(first, name)
        return parts[0] if axis is None else torch.cat(list(parts), axis)

    tensors = {name: joined(name, [c.tensors[name] for c in calls]) for name in first.tensors}
    return Call(first.op, tensors, first.options), {n: joined(n, [g[n] for g in grads]) for n in grads[0]}


def _unstacked(result: Result, like: Call, count: int) -> list[Result]:
    def split(name: str, tensor: Tensor) -> Sequence[Tensor]:
        axis = _head_axis(like, name) or 0
        return torch.split(tensor, tensor.shape[axis] // count, axis)

    outputs = {name: split(name, t) for name, t in result.outputs.items()}
    gradients = {name: split(name, t) for name, t in result.gradients.items()}
    return [
        Result({n: parts[i] for n, parts in outputs.items()}, {n: parts[i] for n, parts in gradients.items()})
        for i in range(count)
    ]


def _completed(call: Call, needs: Collection[str], result: Result) -> Result:
    """The result with zeros in rows of padding and for gradients that nothing flows into."""

    def grown(name: str, tensor: Tensor) -> Tensor:
        axis, live, rows = padded_rows(call, name)
        if live == rows:
            return tensor
        shape = [*tensor.shape[:axis], rows - live, *tensor.shape[axis + 1 :]]
        return torch.cat([tensor, tensor.new_zeros(shape)], axis)

    gradients = {n: grown(n, g) for n, g in result.gradients.items()}
    for name in needs:
        if name not in gradients:
            gradients[name] = torch.zeros(call.tensors[name].shape, dtype=torch.float64)
    return Result({n: grown(n, t) for n, t in result.outputs.items()}, gradients)
