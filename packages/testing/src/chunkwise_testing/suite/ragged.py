"""Any length, and ragged sequences: empty ones, padding, many of them, bad offsets."""
# ruff: noqa: S101

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from chunkwise.ops import OPS
from chunkwise_testing import sampling
from chunkwise_testing.oracle import Result, evaluate, same_bits
from chunkwise_testing.sampling import PLANS, Call, ragged_argument, variant
from chunkwise_testing.study import Sample, study_of
from chunkwise_testing.suite.base import (
    Subject,
    Suite,
    assert_finite,
    assert_same_bits,
    row_axis,
    rows_between,
    small_case,
    state_in,
    state_out,
    stateless,
)

OFFSETS = ((0, 0, 64), (0, 64, 64), (0, 0), (0, 1, 2, 3), (0, 63, 64, 65, 192), (0, 0, 0, 0), (0, 5, 5, 6, 70, 70))
LENGTHS = (1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129)


def one_by_one(call: Call) -> Callable[..., Any]:
    """A function like the op that runs each sequence of a ragged call alone, without offsets."""
    offsets = ragged_argument(call.declaration)
    name = state_in(call.declaration.name)
    bounds = call.tensors[offsets.name].tolist()

    def function(**arguments: Any) -> tuple[Any, ...]:
        tensors = {n: arguments.pop(n) for n in list(call.tensors)}
        tensors.pop(offsets.name)
        states = tensors.pop(name)
        pieces = []
        for n, (start, end) in enumerate(pairwise(bounds)):
            pieces.append(call.op(**rows_between(call, tensors, start, end), **{name: states[n : n + 1]}, **arguments))
        *outputs, finals = zip(*pieces, strict=True)
        return (*(torch.cat(parts, 1) for parts in outputs), torch.cat(finals))

    return function


def nan_padded(call: Call, live: int) -> Call:
    """The call with NaN in every row from ``live`` on."""

    def fill(name: str, tensor: Tensor) -> Tensor:
        axis = row_axis(call, name)
        if axis is None or not tensor.is_floating_point():
            return tensor
        tensor = tensor.clone()
        tensor.narrow(axis, live, tensor.shape[axis] - live).fill_(float("nan"))
        return tensor

    return call.mapped(fill)


def assert_zero_padding(call: Call, result: Result, live: int) -> None:
    """Fail unless outputs and gradients are zero in every row from ``live`` on."""
    outputs = {o.name: o.axes_text.split() for o in call.declaration.promises.outputs}
    rows = ragged_argument(call.declaration).rows
    for quantity, tensor in result.quantities().items():
        name = quantity.removeprefix("d_")
        axes = outputs.get(quantity) or [axis.name for axis in call.spec[name].axes]
        if rows in axes:
            axis = axes.index(rows)
            tail = tensor.narrow(axis, live, tensor.shape[axis] - live)
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
        subject.check_sample(Sample(subject.op, small_case(subject.op, "long", 1000, K=16, V=24), "fp32"))

    @pytest.mark.parametrize("offsets", OFFSETS, ids=lambda o: "_".join(map(str, o)))
    @pytest.mark.parametrize("plan", ["bf16", "fp32"])
    def test_offsets(self, subject: Subject, offsets: tuple[int, ...], plan: str) -> None:
        """Empty sequences anywhere, sequences of one token, nothing but empty ones."""
        case = variant(small_case(subject.op, "offsets", offsets[-1]), offsets=offsets)
        study = Sample(subject.op, case, plan).study()
        result = subject.run_study(study)
        study.check(result)
        self._check_empty(subject, study.call, result, dict(study.gradients), offsets)

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
        """T = 0, no sequence at all or empty ones, no initial state: final states are zeros."""
        case = variant(small_case(subject.op, "no-rows", 0), offsets=offsets, present=())
        study = Sample(subject.op, case).study()
        result = subject.run_study(study)
        study.check(result)
        assert result.outputs[state_out(subject.op)].shape[0] == len(offsets) - 1

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
        offsets = ragged_argument(call.declaration)

        def packed(name: str, tensor: Tensor) -> Tensor:
            return tensor if row_axis(call, name) is None else tensor.flatten(0, 1).unsqueeze(0)

        ragged = call.mapped(packed).replaced(
            {offsets.name: torch.tensor([0, 45, 90, 135], device=subject.torch_device)}
        )
        out = state_out(subject.op)
        flat = {n: g if g is None or n == out else g.flatten(0, 1).unsqueeze(0) for n, g in gradients.items()}
        result = subject.run(ragged, study.needs, flat)

        def unpacked(tensors: Any) -> dict[str, Tensor]:
            return {n: t.view(3, 45, *t.shape[2:]) if t.shape[:2] == (1, 135) else t for n, t in tensors.items()}

        study.check(Result(unpacked(result.outputs), unpacked(result.gradients)))

    @pytest.mark.parametrize("plan", ["bf16", "fp32"])
    def test_padding_holds_nan(self, subject: Subject, plan: str) -> None:
        """Rows past the last offset hold NaN: zeros in outputs and gradients, and nothing leaks."""
        case = variant(small_case(subject.op, "nan-padding", 192), offsets=(0, 100, 160))
        study = Sample(subject.op, case, plan).study()
        call, gradients = study.on(subject.torch_device)
        poisoned = nan_padded(call, 160)
        for name, gradient in gradients.items():
            if gradient is not None and name != state_out(subject.op):
                gradients[name] = gradient.clone()
                gradients[name][:, 160:] = float("nan")  # type: ignore[index]
        result = subject.run(poisoned, study.needs, gradients)
        study.check(result)
        assert_finite(result)
        assert_zero_padding(call, result, 160)

    def test_all_rows_are_padding(self, subject: Subject) -> None:
        """Offsets that cover no row of many: NaN everywhere, zeros come out."""
        case = variant(small_case(subject.op, "all-padding", 66), offsets=(0, 0))
        study = Sample(subject.op, case).study()
        call, gradients = study.on(subject.torch_device)
        result = subject.run(nan_padded(call, 0), study.needs, gradients)
        study.check(result)
        assert_zero_padding(call, result, 0)

    def test_many_sequences(self, default: Subject) -> None:
        """100,000 sequences of no, one or two tokens: no launch grid ends before them."""
        sequences = 100_000
        lengths = torch.arange(sequences) % 3
        offsets = (0, *lengths.cumsum(0).tolist())
        case = stateless(small_case(default.op, "many", offsets[-1], H=1, HV=1, K=16, V=16))
        call = sampling.draw(OPS[default.op], variant(case, offsets=offsets), device=default.torch_device)
        gradients: dict[str, Tensor | None] = dict(sampling.draw_gradients(call))
        needs = sampling.default_needs(call)
        result = default.run(call, needs, gradients)
        chosen = torch.tensor([1, 2, 3, 4999, 5000, 65_534, 65_535, 65_536, 65_537, sequences - 2, sequences - 1])
        rows = torch.cat([torch.arange(offsets[n], offsets[n + 1]) for n in chosen.tolist()]).to(default.torch_device)
        few = call.mapped(lambda n, t: t if row_axis(call, n) is None else t.index_select(1, rows))
        counts = torch.cat([torch.zeros(1, dtype=torch.long), lengths[chosen].cumsum(0)])
        few = few.replaced({ragged_argument(call.declaration).name: counts}).mapped(lambda _, t: t.cpu())
        few_gradients = {n: None if g is None else g.index_select(1, rows).cpu() for n, g in gradients.items()}
        study_of(few, few_gradients).check(
            Result(
                {n: t.index_select(1, rows) for n, t in result.outputs.items()},
                {n: t.index_select(1, rows) for n, t in result.gradients.items()},
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
        argument = ragged_argument(good.declaration)
        bad = torch.tensor(offsets, dtype=torch.int32)
        with pytest.raises(ValueError, match=f"{argument.name}.*{named}".replace("[", r"\[").replace("]", r"\]")):
            subject.run(good.replaced({argument.name: bad.to(subject.torch_device), argument.host: bad}))
        import chunkwise

        with chunkwise.prefer(check_values=True), pytest.raises(ValueError, match=argument.name):
            subject.run(good.replaced({argument.name: bad.to(subject.torch_device)}))

    def test_offsets_need_one_row(self, subject: Subject) -> None:
        """B = 2 with offsets is refused."""
        call = sampling.draw(OPS[subject.op], stateless(small_case(subject.op, "two-rows", 20, B=2)))
        offsets = torch.tensor([0, 20, 40], dtype=torch.int32)
        ragged = call.replaced({ragged_argument(call.declaration).name: offsets})
        on_device = ragged.mapped(lambda _, t: t.to(subject.torch_device))
        with pytest.raises(ValueError, match="B = 2"):
            subject.run(on_device)

    def test_kinds_of_offsets_agree(self, subject: Subject) -> None:
        """int32, int64, non-contiguous, with and without a host copy: the same bits."""
        case = variant(small_case(subject.op, "offset-kinds", 70), offsets=(0, 3, 3, 70))
        study = Sample(subject.op, case).study()
        call, gradients = study.on(subject.torch_device)
        argument = ragged_argument(call.declaration)
        given = call.tensors[argument.name]
        spread = torch.stack([given, given * 0 - 7], 1)[:, 0]
        first = subject.run(call, study.needs, gradients)
        for offsets, host in (
            (given.long(), None),
            (given, given.cpu()),
            (given.long(), given.cpu().long()),
            (given.long(), given.cpu()),
            (spread, None),
        ):
            other = call.replaced({argument.name: offsets, **({} if host is None else {argument.host: host})})
            assert_same_bits(first, subject.run(other, study.needs, gradients))

    def test_grid_axes_beyond_65535(self, on_gpu: Subject) -> None:
        """2,050 sequences of 16 tokens with 32 value heads."""
        offsets = tuple(range(0, 2050 * 16 + 1, 16))
        case = stateless(small_case(on_gpu.op, "grid", offsets[-1], H=32, HV=32, K=32, V=32))
        call = sampling.draw(OPS[on_gpu.op], variant(case, offsets=offsets), PLANS["bf16"], device="cuda")
        assert_finite(on_gpu.run(call, sampling.default_needs(call), dict(sampling.draw_gradients(call))))
