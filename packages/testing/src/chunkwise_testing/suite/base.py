"""What the classes of the suite share: subjects, parametrisation and the small cases that they start from."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import pytest
import torch
from torch import Tensor

from chunkwise.ops import OPS
from chunkwise.protocol.cases import Case
from chunkwise_testing import sampling
from chunkwise_testing.oracle import Result
from chunkwise_testing.routes import BUILT_IN, Pair, devices_of, facts_of, pairs_of
from chunkwise_testing.sampling import Call, variant
from chunkwise_testing.study import Sample, Study
from chunkwise_testing.tolerance import Measure

Test = TypeVar("Test", bound=Callable[..., Any])


@dataclass(frozen=True)
class Subject:
    """What is under test: a pair of implementations on a kind of device."""

    pair: Pair
    device: str

    def __str__(self) -> str:
        return f"{self.pair.op}-{self.pair}-{self.device}"

    @property
    def op(self) -> str:
        """The op's name."""
        return self.pair.op

    @property
    def torch_device(self) -> str:
        """Where the tensors are: Triton's interpreter works on the CPU's."""
        return "cuda" if self.device == "cuda" else "cpu"

    def refusals(self, call: Call, needs: Collection[str]) -> list[str]:
        """Why the pair cannot run a call; empty where it can."""
        with self.pair.forced():
            return self.pair.refusals(facts_of(call, needs))

    def run(
        self, call: Call, needs: Collection[str] = (), gradients: Mapping[str, Tensor | None] | None = None
    ) -> Result:
        """Run a call, which must be on the subject's device."""
        return self.pair.run(call, needs, gradients)

    def run_study(self, study: Study, call: Call | None = None) -> Result:
        """Run a study's call, or an equal one that is laid out otherwise, forward and backward."""
        own, gradients = study.on(self.torch_device)
        return self.run(call or own, study.needs, gradients)

    def check(self, study: Study, call: Call | None = None) -> list[Measure]:
        """The same, held against the oracle."""
        return study.check(self.run_study(study, call))

    def check_sample(self, sample: Sample) -> list[Measure]:
        """Draw, run, hold against the oracle."""
        return self.check(sample.study())


def mark_of(device: str) -> tuple[pytest.MarkDecorator, ...]:
    """The marker of tests that need a device which not every machine has."""
    marks = {"cuda": pytest.mark.gpu, "interpreter": pytest.mark.interpreter}
    return (marks[device],) if device in marks else ()


def subjects_of(backend: str, ops: Collection[str] | None, formats: str = "all") -> list[Subject]:
    """Every subject that a backend answers for, sorted by name.

    ``formats`` is ``all``, ``one chunk size`` (those of the op's first format's) or ``default`` (that one alone).
    """
    found = []
    for op in OPS:
        if ops is not None and op not in ops:
            continue
        declared = OPS[op].declaration.promises.formats
        allowed = {
            "all": declared,
            "one chunk size": [f for f in declared if f.chunk_size == declared[0].chunk_size],
            "default": declared[:1],
        }[formats]
        names = {f.name for f in allowed}
        for pair in pairs_of(op, backend):
            if pair.format in names:
                found += [Subject(pair, device) for device in devices_of(pair)]
    return sorted(found, key=str)


_FORMATS = {"every": "all", "subject": "one chunk size", "default": "default", "on_gpu": "default"}
"""The arguments of tests that take a subject, and the formats that they range over."""


class Suite:
    """Base of the suite's classes.

    A test takes ``every`` (every pair in every residual format), ``subject`` (in those of the op's first chunk size),
    ``default`` (in the op's default format) or ``on_gpu`` (that, on a GPU alone). A class's ``concerns``, or
    :func:`concerning` on a test, says which ops it is about.
    """

    backend: ClassVar[str] = ""
    ops: ClassVar[tuple[str, ...] | None] = None
    concerns: ClassVar[str] = "any op"

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrise over subjects."""
        for name in _FORMATS.keys() & set(metafunc.fixturenames):
            subjects = self._taken(metafunc.function, name)
            metafunc.parametrize(name, [pytest.param(s, id=str(s), marks=mark_of(s.device)) for s in subjects])

    @classmethod
    def _taken(cls, test: Callable[..., Any], argument: str) -> list[Subject]:
        """The subjects that a test takes as one of its arguments."""
        concerns = getattr(test, "concerns", "any op")
        subjects = [s for s in cls.subjects(_FORMATS[argument]) if _is(concerns, s.op)]
        return [s for s in subjects if s.device == "cuda"] if argument == "on_gpu" else subjects

    @classmethod
    def idle(cls) -> list[str]:
        """The tests that have no subject among what the backend has."""
        tests = [(n, f) for n, f in inspect.getmembers(cls, inspect.isfunction) if n.startswith("test")]
        taken = {name: _FORMATS.keys() & inspect.signature(test).parameters.keys() for name, test in tests}
        return [name for name, test in tests if not all(cls._taken(test, argument) for argument in taken[name])]

    @classmethod
    def subjects(cls, formats: str = "all") -> list[Subject]:
        """What the class tests, over ``formats`` as :func:`subjects_of` has them."""
        return [s for s in subjects_of(cls.backend, cls.ops, formats) if _is(cls.concerns, s.op)]

    @classmethod
    def applies(cls) -> bool:
        """Whether the backend has anything that this class can test."""
        return bool(cls.subjects())


class OnlyKernels(Suite):
    """Base of classes about kernels on a GPU.

    The built-in backend has no part in them: it reads offsets on the host, and the last bits of torch's products change
    with the batch.
    """

    @classmethod
    def subjects(cls, formats: str = "all") -> list[Subject]:
        """Pairs without the built-in backend, on a GPU."""
        subjects = super().subjects(formats)
        built_in = [s for s in subjects if BUILT_IN in (i.backend for i in s.pair.implementations)]
        return [s for s in subjects if s.device == "cuda" and s not in built_in]


def concerning(what: str) -> Callable[[Test], Test]:
    """Mark a test that concerns the ops with ``states``, ``gates``, ``promised bounds``, ``sinks`` or ``entry states``
    (in their default format) alone."""

    def mark(test: Test) -> Test:
        test.concerns = what  # type: ignore[attr-defined]
        return test

    return mark


def as_drawn(test: Test) -> Test:
    """Mark a test that holds refusals itself: its cases are not fitted to what its subject accepts."""
    test.fitted = False  # type: ignore[attr-defined]
    return test


def _is(kind: str, op: str) -> bool:
    declaration = OPS[op].declaration
    kinds = {
        "any op": True,
        "states": bool(declaration.promises.states),
        "gates": bool(sampling.gates_of(declaration)),
        "promised bounds": any(c.lower_option is not None for c in declaration.promises.contracts),
        "sinks": "sinks" in declaration.tensor_names,
        "entry states": "entry_states" in declaration.promises.formats[0].field_names,
    }
    return kinds[kind]


def heads(few: int, many: int) -> dict[str, int]:
    """Sizes of the head axes of any op: of those that count queries' and keys' heads, and of the more numerous."""
    return {"H": few, "HV": many, "HK": few, "HQ": many}


def widths(k: int, v: int) -> dict[str, int]:
    """Sizes of the width axes of any op; one width for all is that of the keys."""
    return {"K": k, "V": v, "D": k}


def small_case(op: str, name: str, tokens: int = 70, **sizes: int) -> Case:
    """A case of one row with every output, states in too, with unlike heads and K != V; gates as in the first case.

    Further row axes have lengths of their own (:func:`chunkwise_testing.sampling.all_sizes`).
    """
    promises = OPS[op].declaration.promises
    tensors = OPS[op].declaration.tensor_names
    first = promises.cases[0]
    further = {offsets.rows for offsets in promises.offsets[1:]}
    first = dataclasses.replace(first, sizes={n: size for n, size in first.sizes.items() if n not in further})
    return variant(
        first,
        name,
        sizes={"B": 1, "T": tokens, **sizes},
        present=(*first.present, *(s for s in promises.states if s in tensors and s not in first.present)),
        options={o.when: True for o in promises.outputs if o.when is not None},
    )


def stateless(case: Case) -> Case:
    """The same case without states in and out."""
    states = {name for op in OPS.values() for name in op.declaration.promises.states}
    present = tuple(name for name in case.present if name not in states)
    return dataclasses.replace(case, name=f"{case.name}-stateless", present=present, options={})


def state_in(op: str) -> str:
    """The tensor argument that is a state."""
    declaration = OPS[op].declaration
    return next(s for s in declaration.promises.states if s in declaration.tensor_names)


def state_out(op: str) -> str:
    """The output that is a state."""
    promises = OPS[op].declaration.promises
    outputs = [o.name for o in promises.outputs]
    return next(s for s in promises.states if s in outputs)


def row_axis(call: Call, name: str) -> int | None:
    """The position of the row axis of a tensor argument."""
    axes = [axis.name for axis in call.spec[name].axes]
    offsets = sampling.row_axis_of(call.declaration, axes)
    return axes.index(offsets.rows) if offsets else None


def rows_between(call: Call, tensors: Mapping[str, Tensor], start: int, end: int) -> dict[str, Tensor]:
    """The tensors with only some of their rows; those without a row axis as they are."""
    return cut_rows(call, tensors, lambda _: slice(start, end))


def cut_rows(call: Call, tensors: Mapping[str, Tensor], rows: Callable[[str], slice | Tensor]) -> dict[str, Tensor]:
    """The tensors with some of their rows: for each offsets argument, by name, a slice or an index of its rows."""
    cut = {}
    for name, tensor in tensors.items():
        axes = [axis.name for axis in call.spec[name].axes]
        offsets = sampling.row_axis_of(call.declaration, axes)
        cut[name] = tensor
        if offsets is not None:
            cut[name] = tensor[(slice(None),) * axes.index(offsets.rows) + (rows(offsets.name),)]
    return cut


def output_axes(call: Call, name: str) -> list[str]:
    """The axes of an output."""
    return next(o.axes_text.split() for o in call.declaration.promises.outputs if o.name == name)


def assert_same_bits(a: Result, b: Result) -> None:
    """Fail, naming the quantities that differ."""
    assert not (differing := a.differing(b)), f"not the same bits: {', '.join(differing)}"  # noqa: S101


def assert_finite(result: Result) -> None:
    """Fail, naming the quantities that are not finite."""
    bad = [n for n, x in result.quantities().items() if not bool(torch.isfinite(x).all())]
    assert not bad, f"not finite: {', '.join(bad)}"  # noqa: S101
