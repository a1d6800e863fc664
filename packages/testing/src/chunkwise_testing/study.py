"""Studies: a drawn call with its fp64 result and the loss of each quantity, kept for the tests that share it."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chunkwise.ops import OPS
from chunkwise.protocol.axes import dtype_name
from chunkwise.protocol.cases import Case
from chunkwise_testing import fitting, sampling
from chunkwise_testing.oracle import Result, oracle_of_many
from chunkwise_testing.sampling import PLANS, Call, row_axis_of
from chunkwise_testing.tolerance import Measure, Parts, measure, moved, row_blocks

DRAWS = 4
"""How many times the signs are drawn for each input, since in a part of few numbers one draw may change nothing."""


@dataclass(frozen=True, eq=False)
class Study:
    """A call on the CPU, the gradients of its outputs, and all that is needed to hold results against the oracle.

    Args:
        call: the drawn call.
        needs: the inputs whose gradient is asked for.
        gradients: of the outputs; None for those that the loss does not use.
        expected: the fp64 result.
        changes: for each quantity and each input, what it changes when that input moves, ``[draws, ...]``.
    """

    call: Call
    needs: frozenset[str]
    gradients: Mapping[str, Tensor | None]
    expected: Result
    changes: Mapping[str, Sequence[Tensor]]

    def on(self, device: str) -> tuple[Call, dict[str, Tensor | None]]:
        """The call and the output gradients on a device."""
        hosts = {o.host for o in self.call.declaration.promises.offsets}
        call = self.call.mapped(lambda name, t: t if name in hosts else t.to(device))
        return call, {n: None if g is None else g.to(device) for n, g in self.gradients.items()}

    def restricted(self, needs: Collection[str]) -> Study:
        """The same study where only some of the gradients are asked for."""
        kept = {name: g for name, g in self.expected.gradients.items() if name in needs}
        return dataclasses.replace(self, needs=frozenset(needs), expected=Result(self.expected.outputs, kept))

    def measures(self, result: Result) -> list[Measure]:
        """Hold every output and gradient of a result against the oracle; a missing one raises AssertionError."""
        expected, actual = self.expected.quantities(), result.quantities()
        if missing := expected.keys() - actual.keys():
            raise AssertionError(f"not returned: {', '.join(sorted(missing))}")
        return [
            measure(
                *(name, actual[name], expected[name], self.changes[name]),
                parts=self._parts(name),
                multiple=self._multiple(name, actual[name].dtype),
            )
            for name in sorted(expected)
        ]

    def _multiple(self, quantity: str, dtype: torch.dtype) -> float:
        """The budget of the activations' dtype; that of fp32 for an fp32 quantity that no 16-bit number reaches.

        Such a one is ``exp(g_1 + ... + g_T) dS``: its loss is that of fp32 gates, whatever the activations are.
        """
        budget = self.call.declaration.promises.budget
        given = [t for t in (*self.call.tensors.values(), *self.gradients.values()) if t is not None]
        inputs = [t for t in given if t.is_floating_point()]
        reached = any(
            t.dtype != torch.float32 and bool(change.any())
            for t, change in zip(inputs, self.changes[quantity], strict=True)
        )
        activations = self.call.tensors[self.call.declaration.tensors[0].name]
        fp32 = dtype == torch.float32 and not reached
        return budget.multiple("fp32" if fp32 else dtype_name(activations.dtype))

    def check(self, result: Result) -> list[Measure]:
        """The measures, where all are within budget; else AssertionError with those that are not."""
        measures = self.measures(result)
        if failed := [m for m in measures if not m.ok]:
            raise AssertionError("over budget:\n  " + "\n  ".join(map(str, failed)))
        return measures

    def _parts(self, quantity: str) -> Parts:
        declaration = self.call.declaration
        outputs = {o.name: o.axes_text.split() for o in declaration.promises.outputs}
        name = quantity.removeprefix("d_")
        spec = self.call.spec.get(name)
        axes = outputs[quantity] if quantity in outputs else [a.name for a in spec.axes] if spec else ["HV"]
        offsets = row_axis_of(declaration, axes)
        if offsets is None:
            return Parts(axes, None)
        given = self.call.tensors.get(offsets.name)
        tensor = self.expected.quantities()[quantity]
        blocks = row_blocks(tensor.shape[axes.index(offsets.rows)], None if given is None else given.tolist())
        return Parts(axes, blocks, offsets.rows)


def study_of(
    call: Call, gradients: Mapping[str, Tensor | None] | None = None, needs: frozenset[str] | None = None
) -> Study:
    """Run the oracle for a call, and once more for each input moved by half an ulp.

    The gradients of the outputs are inputs as well: of the backward.
    """
    wanted = sampling.default_needs(call) if needs is None else needs
    given = sampling.draw_gradients(call) if gradients is None else gradients
    variants = [(call, given), *_moved_inputs(call, given)]
    expected, *others = oracle_of_many([c for c, _ in variants], wanted, [g for _, g in variants])
    changes = {
        name: [
            torch.stack([o.quantities()[name] - reference for o in others[i : i + DRAWS]])
            for i in range(0, len(others), DRAWS)
        ]
        for name, reference in expected.quantities().items()
    }
    return Study(call, wanted, given, expected, changes)


def _moved_inputs(
    call: Call, gradients: Mapping[str, Tensor | None]
) -> Iterator[tuple[Call, Mapping[str, Tensor | None]]]:
    """For each input, and then each output gradient: the call with it moved, once for each draw of the signs."""
    for name, tensor in call.tensors.items():
        if tensor.is_floating_point():
            for seed in range(DRAWS):
                yield call.replaced({name: moved(tensor, zlib.crc32(name.encode()) + seed)}), gradients
    for name, gradient in gradients.items():
        if gradient is not None:
            for seed in range(DRAWS):
                yield call, {**gradients, name: moved(gradient, zlib.crc32(name.encode()) + seed)}


@dataclass(frozen=True, eq=False)
class Sample:
    """What determines a study: the op, the case, the dtypes, the outputs that the loss uses (None: all)."""

    op: str
    case: Case
    plan: str = "fp32"
    loss: tuple[str, ...] | None = None
    seed: int = 0

    def study(self) -> Study:
        """The study of this sample; computed once in a process."""
        return _study(_Key(self))


class _Key:
    """Hashes a sample by what it says, since its mappings have no hash."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.text = repr((sample, fitting.active()))

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.text == other.text


@functools.lru_cache(maxsize=256)
def _study(key: _Key) -> Study:
    sample = key.sample
    op: Any = OPS[sample.op]
    call = sampling.draw(op, sample.case, PLANS[sample.plan], seed=sample.seed)
    gradients: dict[str, Tensor | None] = dict(sampling.draw_gradients(call))
    if sample.loss is not None:
        gradients = {name: g if name in sample.loss else None for name, g in gradients.items()}
    return study_of(call, gradients)
