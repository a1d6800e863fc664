"""What a forward saves for a backward of another implementation: the shapes that are declared, and the states kept."""
# ruff: noqa: S101

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from chunkwise.autograd.residuals import ENTRY_CHUNKS, ResidualFormat
from chunkwise.ops import OPS
from chunkwise_testing import graph, sampling
from chunkwise_testing.oracle import Result
from chunkwise_testing.poison import poisoned_memory
from chunkwise_testing.sampling import Call, ragged_argument, variant
from chunkwise_testing.study import study_of
from chunkwise_testing.suite.base import (
    Subject,
    Suite,
    concerning,
    cut_rows,
    heads,
    small_case,
    state_in,
    state_out,
    widths,
)
from chunkwise_testing.suite.graphs import assert_compilations

SPAN = 64 * ENTRY_CHUNKS
"""Rows between two states that a format of chunks of 64 keeps."""
RAGGED = (100, SPAN, 0, SPAN + 1, 2 * SPAN + 4)
"""Lengths of sequences with no such state, no, no, one and two, which do not begin where a chunk of the row would."""


def format_of(subject: Subject) -> ResidualFormat:
    """The residual format that a subject saves."""
    formats = OPS[subject.op].declaration.promises.formats
    return next(f for f in formats if f.name == subject.pair.format)


def saved_by(subject: Subject, call: Call) -> dict[str, Tensor]:
    """The fields that the subject's forward saves of a call."""
    with subject.pair.forced():
        return graph.residuals(call, sampling.default_needs(call), format_of(subject))


def up_to_the_cuts(call: Call, bounds: list[tuple[int, int]]) -> tuple[Call, list[tuple[int, int]]]:
    """A ragged call of one sequence for each state that is kept, which ends before the row where that state stands.

    ``bounds`` are the first row and the end of each sequence, counted over the whole batch. Also returns, for each of
    the new sequences, the batch row and the place in it where its final state is kept.
    """
    first = ragged_argument(call.declaration)
    rows = sampling.call_sizes(call)[first.rows]
    cuts = [(n, start, row) for n, (start, end) in enumerate(bounds) for row in range(start + SPAN, end, SPAN)]
    state = state_in(call.declaration.name)
    packed = torch.cat([torch.arange(start, row) for _, start, row in cuts])
    tensors = {name: t for name, t in call.tensors.items() if name not in (first.name, state)}
    flat = {name: t.flatten(0, 1).unsqueeze(0) for name, t in tensors.items()}
    taken = cut_rows(call, flat, lambda _: packed)
    taken[state] = call.tensors[state][[n for n, _, _ in cuts]]
    lengths = torch.tensor([0, *(row - start for _, start, row in cuts)])
    taken[first.name] = lengths.cumsum(0).int()
    return Call(call.op, taken, call.options), [(row // rows, row % rows // SPAN - 1) for _, _, row in cuts]


class Residuals(Suite):
    """The tensors that a forward saves."""

    @classmethod
    def subjects(cls, formats: str = "all") -> list[Subject]:
        """One pair for each forward of the backend: a backward has no part in what is saved."""
        pairs = sorted(super().subjects(formats), key=lambda s: s.pair.forward != s.pair.backward)
        own = [s for s in pairs if s.pair.implementations[0].backend == cls.backend]
        by_forward = {(s.pair.forward, s.pair.format, s.device): s for s in reversed(own)}
        return sorted(by_forward.values(), key=str)

    @pytest.mark.parametrize("offsets", [None, (0, 0, 30, 66)], ids=["dense", "padded"])
    @pytest.mark.parametrize("tokens", [0, 70])
    def test_fake_tensors_agree(self, every: Subject, tokens: int, offsets: tuple[int, ...] | None) -> None:
        """Shapes and dtypes are known before anything is computed, also of no rows at all."""
        case = small_case(every.op, "saved", tokens, B=2)
        offsets = tuple(min(o, tokens) for o in offsets) if offsets else None
        case = variant(case, offsets=offsets) if offsets else case
        call = sampling.draw(OPS[every.op], case, device=every.torch_device)
        self._hold_against_fakes(every, call, saved_by(every, call))

    @concerning("entry states")
    @pytest.mark.parametrize("lengths", [None, RAGGED], ids=["dense", "ragged"])
    def test_entry_states(self, default: Subject, lengths: tuple[int, ...] | None) -> None:
        """The states before every 32nd chunk are those of the recurrence, each at its place; memory is poisoned."""
        tokens = 2 * SPAN + 1 if lengths is None else sum(lengths) + 3
        case = small_case(default.op, "entry-states", tokens, B=2, **heads(1, 2), **widths(16, 24))
        bounds = [(n * tokens, (n + 1) * tokens) for n in range(2)]
        if lengths is not None:
            offsets = (0, *torch.tensor(lengths).cumsum(0).tolist())
            case, bounds = variant(case, offsets=offsets), list(pairwise(offsets))
        call = sampling.draw(OPS[default.op], case)
        cut, places = up_to_the_cuts(call, bounds)
        on_device = call.mapped(lambda _, t: t.to(default.torch_device))
        with poisoned_memory():
            saved = saved_by(default, on_device)
        self._hold_against_fakes(default, on_device, saved)
        kept = torch.stack([saved["entry_states"][place] for place in places])
        study, name = study_of(cut, {}, frozenset()), state_out(default.op)
        expected = Result({name: study.expected.outputs[name]}, {})
        dataclasses.replace(study, expected=expected).check(Result({name: kept}, {}))

    @concerning("entry states")
    def test_lengths_around_a_cut_share_graphs(self, default: Subject) -> None:
        """No state kept, or one: a compilation of each, since torch takes 0, 1 and more for three kinds of a size."""
        case = small_case(default.op, "graph", **heads(1, 1), **widths(16, 24))
        lengths = (SPAN + 1, 70, SPAN)
        cases = [variant(case, sizes={"T": tokens}) for tokens in lengths]
        assert_compilations(default, [sampling.draw(OPS[default.op], c, device=default.torch_device) for c in cases], 2)

    def _hold_against_fakes(self, subject: Subject, call: Call, saved: dict[str, Tensor]) -> None:
        with FakeTensorMode() as mode:
            fakes = saved_by(subject, call.mapped(lambda _, t: mode.from_tensor(t)))
        assert {n: (t.shape, t.dtype) for n, t in fakes.items()} == {n: (t.shape, t.dtype) for n, t in saved.items()}
