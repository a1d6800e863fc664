"""Any length, and ragged sequences: empty ones, padding, many of them, bad offsets."""
# ruff: noqa: S101

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from chunkwise.ops import OPS
from chunkwise_testing import sampling
from chunkwise_testing.oracle import Result, evaluate, padded_rows, same_bits
from chunkwise_testing.sampling import PLANS, Call, ragged_argument, variant
from chunkwise_testing.study import Sample, study_of
from chunkwise_testing.suite.base import (
    Subject,
    Suite,
    assert_finite,
    assert_same_bits,
    cut_rows,
    heads,
    output_axes,
    row_axis,
    small_case,
    state_in,
    state_out,
    stateless,
    widths,
)

OFFSETS = ((0, 0, 64), (0, 64, 64), (0, 0), (0, 1, 2, 3), (0, 63, 64, 65, 192), (0, 0, 0, 0), (0, 5, 5, 6, 70, 70))
LENGTHS = (1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129)


def one_by_one(call: Call) -> Callable[..., Any]:
    """A function like the op that runs each sequence of a ragged call alone, without offsets."""
    names = [offsets.name for offsets in call.declaration.promises.offsets]
    bounds = {name: list(pairwise(call.tensors[name].tolist())) for name in names}
    states = set(call.declaration.promises.states)

    def function(**arguments: Any) -> tuple[Any, ...]:
        tensors = {n: arguments.pop(n) for n in call.tensors}
        rest = {n: t for n, t in tensors.items() if n not in names}
        pieces = []
        for n in range(len(bounds[names[0]])):
            own = cut_rows(call, rest, lambda name, n=n: slice(*bounds[name][n]))  # type: ignore[misc]
            pieces.append(call.op(**{m: t[n : n + 1] if m in states else t for m, t in own.items()}, **arguments))
        outputs = zip(sampling.asked_outputs(call), zip(*pieces, strict=True), strict=True)
        return tuple(torch.cat(parts, joined_axis(call, output.name)) for output, parts in outputs)

    return function


def joined_axis(call: Call, output: str) -> int:
    """Where the parts of an output that sequences give are joined: at its rows, or at the sequences of a state."""
    axes = output_axes(call, output)
    offsets = sampling.row_axis_of(call.declaration, axes)
    return axes.index(offsets.rows if offsets else ragged_argument(call.declaration).sequences)


def with_nan_padding(call: Call, name: str, tensor: Tensor) -> Tensor:
    """An argument, or the gradient of an output, with NaN in rows of padding."""
    axis, live, rows = padded_rows(call, name)
    if live == rows:
        return tensor
    tensor = tensor.clone()
    tensor.narrow(axis, live, rows - live).fill_(float("nan"))
    return tensor


def nan_padded(call: Call) -> Call:
    """The call with NaN in every row of padding."""
    return call.mapped(lambda name, t: with_nan_padding(call, name, t) if t.is_floating_point() else t)


def assert_zero_padding(call: Call, result: Result) -> None:
    """Fail unless outputs and gradients are zero in every row of padding."""
    outputs = [o.name for o in call.declaration.promises.outputs]
    for quantity, tensor in result.quantities().items():
        axis, live, rows = padded_rows(call, quantity if quantity in outputs else quantity.removeprefix("d_"))
        if live < rows:
            tail = tensor.narrow(axis, live, rows - live)
            assert not bool(tail.any()), f"{quantity} is not zero in rows of padding"


class Ragged(Suite):
    """Lengths, offsets, padding."""

    @pytest.mark.parametrize("tokens", LENGTHS)
    def test_any_length(self, every: Subject, tokens: int) -> None:
        """One token, less than a chunk, around its multiples; states in and out."""
        every.check_sample(Sample(every.op, small_case(every.op, "length", tokens), "bf16"))
        every.check_sample(Sample(every.op, small_case(every.op, "length", tokens), "fp32"))

    def test_tail_of_a_long_sequence(self, subject: Subject) -> None:
        """T = 1000: a tail of 40 rows behind fifteen chunks, with a final state and its gradient."""
        case = small_case(subject.op, "long", 1000, **heads(1, 2), **widths(16, 24))
        subject.check_sample(Sample(subject.op, case, "fp32"))

    @pytest.mark.parametrize("offsets", OFFSETS, ids=lambda o: "_".join(map(str, o)))
    @pytest.mark.parametrize("plan", ["bf16", "fp32"])
    def test_offsets(self, subject: Subject, offsets: tuple[int, ...], plan: str) -> None:
        """Empty sequences anywhere, sequences of one token, nothing but empty ones."""
        case = variant(small_case(subject.op, "offsets", offsets[-1]), offsets=offsets)
        study = Sample(subject.op, case, plan).study()
        result = subject.run_study(study)
        study.check(result)
        if study.call.declaration.promises.states:
            self._check_empty(subject, study.call, result, dict(study.gradients), offsets)

    def test_short_sequences_of_wide_states(self, every: Subject) -> None:
        """A gate that multiplies little but the call's own fp32 states, which a 16-bit copy of them would spoil."""
        offsets = (0, 1, 2, 66)
        case = variant(small_case(every.op, "wide", offsets[-1], **widths(64, 128)), offsets=offsets)
        every.check_sample(Sample(every.op, case, "bf16"))

    def _check_empty(
        self, subject: Subject, call: Call, result: Result, gradients: dict[str, Any], offsets: tuple[int, ...]
    ) -> None:
        """An empty sequence hands its state through, and the gradient back, bit for bit."""
        given_state, final = call.tensors[state_in(subject.op)], result.outputs[state_out(subject.op)].cpu()
        back, incoming = result.gradients[state_in(subject.op)].cpu(), gradients[state_out(subject.op)]
        for n, (start, end) in enumerate(pairwise(offsets)):
            if start == end:
                assert same_bits(final[n], given_state[n].float())
                assert same_bits(back[n], incoming[n].to(back.dtype))

    @pytest.mark.parametrize("offsets", [(0,), (0, 0), (0, 0, 0)], ids=["none", "one", "two"])
    def test_no_rows_without_states(self, subject: Subject, offsets: tuple[int, ...]) -> None:
        """T = 0, no sequence at all or empty ones, no initial state: final states, if any, are zeros."""
        case = variant(small_case(subject.op, "no-rows", 0), offsets=offsets, present=())
        study = Sample(subject.op, case).study()
        result = subject.run_study(study)
        study.check(result)
        states = set(study.call.declaration.promises.states) & result.outputs.keys()
        assert all(result.outputs[name].shape[0] == len(offsets) - 1 for name in states)

    def test_dense_without_rows(self, subject: Subject) -> None:
        """T = 0 without offsets."""
        subject.check_sample(Sample(subject.op, small_case(subject.op, "dense-no-rows", 0, B=2)))

    def test_each_sequence_alone(self, subject: Subject) -> None:
        """A ragged call equals one call for each of its sequences."""
        case = variant(small_case(subject.op, "alone", 150), offsets=(0, 70, 70, 71, 135, 150))
        study = Sample(subject.op, case).study()
        call, gradients = study.on(subject.torch_device)
        with subject.pair.forced():
            alone = evaluate(call, study.needs, gradients, one_by_one(call))
        study.check(alone)
        study.check(subject.run(call, study.needs, gradients))

    def test_dense_rows_equal_ragged_sequences(self, subject: Subject) -> None:
        """[B, T] and the same rows packed into [1, B * T] with offsets."""
        study = Sample(subject.op, small_case(subject.op, "packed", 45, B=3)).study()
        call, gradients = study.on(subject.torch_device)
        sizes = sampling.call_sizes(call)

        def packed(name: str, tensor: Tensor) -> Tensor:
            """Rows of the batch, one behind another: ``[3, ..., T, ...]`` to ``[1, ..., 3 T, ...]``."""
            axis, _, rows = padded_rows(call, name)
            return torch.cat(list(tensor.split(1)), axis) if rows else tensor

        def unpacked(name: str, tensor: Tensor) -> Tensor:
            axis, _, rows = padded_rows(call, name)
            return torch.cat(tensor.split(rows, axis)) if rows else tensor

        offsets = {
            o.name: torch.arange(4, dtype=torch.int32, device=subject.torch_device) * sizes[o.rows]
            for o in call.declaration.promises.offsets
        }
        flat = {n: None if g is None else packed(n, g) for n, g in gradients.items()}
        result = subject.run(call.mapped(packed).replaced(offsets), study.needs, flat)
        parts = ({n: unpacked(n, t) for n, t in part.items()} for part in (result.outputs, result.gradients))
        study.check(Result(*parts))

    @pytest.mark.parametrize("plan", ["bf16", "fp32"])
    def test_padding_holds_nan(self, subject: Subject, plan: str) -> None:
        """Rows past the last offset hold NaN: zeros in outputs and gradients, and nothing leaks."""
        case = variant(small_case(subject.op, "nan-padding", 192), offsets=(0, 100, 160))
        study = Sample(subject.op, case, plan).study()
        call, gradients = study.on(subject.torch_device)
        for name, gradient in gradients.items():
            gradients[name] = None if gradient is None else with_nan_padding(call, name, gradient)
        result = subject.run(nan_padded(call), study.needs, gradients)
        study.check(result)
        assert_finite(result)
        assert_zero_padding(call, result)

    def test_all_rows_are_padding(self, subject: Subject) -> None:
        """Offsets that cover no row of many: NaN everywhere, zeros come out."""
        case = variant(small_case(subject.op, "all-padding", 66), offsets=(0, 0))
        study = Sample(subject.op, case).study()
        call, gradients = study.on(subject.torch_device)
        result = subject.run(nan_padded(call), study.needs, gradients)
        study.check(result)
        assert_zero_padding(call, result)

    def test_many_sequences(self, default: Subject) -> None:
        """100,000 sequences of no, one or two tokens: no launch grid ends before them."""
        sequences = 100_000
        lengths = torch.arange(sequences) % 3
        offsets = (0, *lengths.cumsum(0).tolist())
        case = stateless(small_case(default.op, "many", offsets[-1], **heads(1, 1), **widths(16, 16)))
        case = variant(case, offsets=offsets)
        call = sampling.draw(OPS[default.op], case, device=default.torch_device)
        gradients: dict[str, Tensor | None] = dict(sampling.draw_gradients(call))
        needs = sampling.default_needs(call)
        result = default.run(call, needs, gradients)
        chosen = torch.tensor([1, 2, 3, 4999, 5000, 65_534, 65_535, 65_536, 65_537, sequences - 2, sequences - 1])
        rows, counts = {}, {}
        for name, bounds in sampling.offsets_of(call.declaration, case).items():
            rows[name] = torch.cat([torch.arange(bounds[n], bounds[n + 1]) for n in chosen.tolist()])
            kept = torch.tensor(bounds).diff()[chosen]
            counts[name] = torch.cat([torch.zeros(1, dtype=torch.long), kept.cumsum(0)])
        few = Call(call.op, cut_rows(call, call.tensors, rows.__getitem__), call.options)
        few = few.replaced(counts).mapped(lambda _, t: t.cpu())
        queries = rows[ragged_argument(call.declaration).name]
        study = study_of(few, {n: None if g is None else g[:, queries].cpu() for n, g in gradients.items()})
        by_row = {n for n in needs if row_axis(call, n) is not None}
        study.restricted(by_row).check(
            Result(
                {n: t[:, queries] for n, t in result.outputs.items()},
                cut_rows(call, {n: t for n, t in result.gradients.items() if n in by_row}, rows.__getitem__),
            )
        )

    @pytest.mark.parametrize(
        ("offsets", "named"),
        [((0, 30, 20, 70), "[2] = 20"), ((1, 70), "[0] = 1"), ((0, 78), "[1] = 78"), ((0, -1, 70), "[1] = -1")],
        ids=["decreasing", "not-from-0", "past-T", "negative"],
    )
    def test_bad_offsets_are_named(self, subject: Subject, offsets: tuple[int, ...], named: str) -> None:
        """ValueError that names the entry: by the host copy, and by the values check."""
        case = variant(small_case(subject.op, "bad-offsets", 70), present=())
        good = sampling.draw(OPS[subject.op], variant(case, offsets=(0,) * len(offsets)), device=subject.torch_device)
        import chunkwise

        bad = torch.tensor(offsets, dtype=torch.int32)
        for argument in good.declaration.promises.offsets:
            message = f"{argument.name}.*{re.escape(named)}"
            with pytest.raises(ValueError, match=message):
                subject.run(good.replaced({argument.name: bad.to(subject.torch_device), argument.host: bad}))
            with chunkwise.prefer(check_values=True), pytest.raises(ValueError, match=message):
                subject.run(good.replaced({argument.name: bad.to(subject.torch_device)}))

    def test_offsets_need_one_row(self, subject: Subject) -> None:
        """B = 2 with offsets is refused."""
        call = sampling.draw(OPS[subject.op], stateless(small_case(subject.op, "two-rows", 20, B=2)))
        offsets = torch.tensor([0, 20, 40], dtype=torch.int32)
        ragged = call.replaced({argument.name: offsets for argument in call.declaration.promises.offsets})
        on_device = ragged.mapped(lambda _, t: t.to(subject.torch_device))
        with pytest.raises(ValueError, match="B = 2"):
            subject.run(on_device)

    def test_kinds_of_offsets_agree(self, subject: Subject) -> None:
        """int32, int64, non-contiguous, with and without a host copy: the same bits."""
        case = variant(small_case(subject.op, "offset-kinds", 70), offsets=(0, 3, 3, 70))
        study = Sample(subject.op, case).study()
        call, gradients = study.on(subject.torch_device)
        first = subject.run(call, study.needs, gradients)
        kinds: tuple[tuple[Any, Any], ...] = (
            (Tensor.long, None),
            (Tensor.int, Tensor.cpu),
            (Tensor.long, lambda t: t.cpu().long()),
            (Tensor.long, Tensor.cpu),
            (lambda t: torch.stack([t, t * 0 - 7], 1)[:, 0], None),
        )
        for offsets, host in kinds:
            other = call
            for argument in call.declaration.promises.offsets:
                given = call.tensors[argument.name]
                other = other.replaced({argument.name: offsets(given)})
                other = other if host is None else other.replaced({argument.host: host(given)})
            assert_same_bits(first, subject.run(other, study.needs, gradients))

    def test_grid_axes_beyond_65535(self, on_gpu: Subject) -> None:
        """2,050 sequences of 16 tokens with 32 value heads."""
        offsets = tuple(range(0, 2050 * 16 + 1, 16))
        case = stateless(small_case(on_gpu.op, "grid", offsets[-1], **heads(32, 32), **widths(32, 32)))
        call = sampling.draw(OPS[on_gpu.op], variant(case, offsets=offsets), PLANS["bf16"], device="cuda")
        assert_finite(on_gpu.run(call, sampling.default_needs(call), dict(sampling.draw_gradients(call))))
