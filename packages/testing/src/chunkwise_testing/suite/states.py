"""States: splitting a sequence, absent states and gradients, layouts and dtypes."""
# ruff: noqa: S101

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from chunkwise.ops import OPS
from chunkwise_testing import sampling
from chunkwise_testing.oracle import evaluate, same_bits
from chunkwise_testing.sampling import Call, variant
from chunkwise_testing.study import Sample, Study, study_of
from chunkwise_testing.suite.base import (
    Subject,
    Suite,
    rows_between,
    small_case,
    state_in,
    state_out,
)

TOKENS = 130
CUTS = (1, 2, 63, 64, 65, TOKENS - 2, TOKENS - 1)


def in_pieces(call: Call, cuts: Sequence[int], rows: int) -> Callable[..., Any]:
    """A function like the op that runs the pieces between the cuts one after another and carries the state."""
    name = state_in(call.declaration.name)

    def function(**arguments: Any) -> tuple[Any, ...]:
        tensors = {n: arguments.pop(n) for n in list(call.tensors)}
        state = tensors.pop(name, None)
        pieces: list[list[Tensor]] = []
        for start, end in pairwise((0, *cuts, rows)):
            *outputs, state = call.op(**rows_between(call, tensors, start, end), **{name: state}, **arguments)
            pieces.append(outputs)
        return (*(torch.cat(parts, 1) for parts in zip(*pieces, strict=True)), state)

    return function


def check_pieces(subject: Subject, study: Study, cuts: Sequence[int], rows: int) -> None:
    """Hold a run in pieces against the oracle of one run."""
    call, gradients = study.on(subject.torch_device)
    with subject.pair.forced():
        study.check(evaluate(call, study.needs, gradients, in_pieces(call, cuts, rows)))


class States(Suite):
    """Splitting, absent states, absent gradients, state layouts and dtypes."""

    concerns = "states"

    @pytest.mark.parametrize("cut", CUTS)
    @pytest.mark.parametrize("plan", ["bf16", "fp32"])
    def test_split_equals_one_run(self, subject: Subject, cut: int, plan: str) -> None:
        """Running [0, t) and carrying the state into [t, T): outputs, state and all gradients."""
        study = Sample(subject.op, small_case(subject.op, "split", TOKENS), plan).study()
        check_pieces(subject, study, [cut], TOKENS)

    def test_split_anywhere(self, every: Subject) -> None:
        """The same for random cuts, several at a time."""
        study = Sample(every.op, small_case(every.op, "split", TOKENS), "fp32").study()

        @settings(
            max_examples=8, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(st.sets(st.integers(1, TOKENS - 1), min_size=1, max_size=5))
        def check(cuts: set[int]) -> None:
            check_pieces(every, study, sorted(cuts), TOKENS)

        check()

    def test_token_by_token(self, subject: Subject) -> None:
        """Pieces of one token throughout, as a decoding loop runs them."""
        study = Sample(subject.op, small_case(subject.op, "steps", 9), "fp32").study()
        check_pieces(subject, study, range(1, 9), 9)

    def test_no_initial_state_equals_zeros(self, subject: Subject) -> None:
        """None and zeros are the same state, and zeros have a gradient."""
        name = state_in(subject.op)
        full = Sample(subject.op, small_case(subject.op, "zero-state"), "fp32").study()
        zeros = full.call.replaced({name: torch.zeros_like(full.call.tensors[name])})
        with_zeros = study_of(zeros)
        subject.check(with_zeros)
        without = with_zeros.restricted(with_zeros.needs - {name})
        call, _ = without.on(subject.torch_device)
        subject.check(without, call.without(name))

    @pytest.mark.parametrize("plan", ["bf16", "fp32"])
    def test_loss_on_output_only(self, subject: Subject, plan: str) -> None:
        """No gradient on the final state: the gradient of the initial state is written all the same."""
        case = small_case(subject.op, "loss-o")
        outputs = tuple(o.name for o in OPS[subject.op].declaration.promises.outputs if o.name != state_out(subject.op))
        study = Sample(subject.op, case, plan, loss=outputs).study()
        result = subject.run_study(study)
        study.check(result)
        assert bool(result.gradients[state_in(subject.op)].abs().sum() > 0)

    @pytest.mark.parametrize("plan", ["bf16", "fp32"])
    def test_loss_on_final_state_only(self, subject: Subject, plan: str) -> None:
        """No gradient on the output."""
        study = Sample(subject.op, small_case(subject.op, "loss-state"), plan, loss=(state_out(subject.op),)).study()
        subject.check(study)

    def test_absent_gradient_equals_zero_gradient(self, subject: Subject) -> None:
        """For each output: no gradient on it, and a gradient of zeros, both within budget of the oracle."""
        for output in OPS[subject.op].declaration.promises.outputs:
            case = small_case(subject.op, "absent-gradient")
            others = tuple(o.name for o in OPS[subject.op].declaration.promises.outputs if o is not output)
            study = Sample(subject.op, case, loss=others).study()
            call, gradients = study.on(subject.torch_device)
            zeros = torch.zeros_like(sampling.draw_gradients(call)[output.name])
            study.check(subject.run(call, study.needs, gradients))
            study.check(subject.run(call, study.needs, {**gradients, output.name: zeros}))

    def test_final_state_only_where_asked_for(self, subject: Subject) -> None:
        """None otherwise, and the output is the same."""
        study = Sample(subject.op, small_case(subject.op, "asked")).study()
        call, _ = study.on(subject.torch_device)
        whens = {o.when: False for o in call.declaration.promises.outputs if o.when is not None}
        with_state, without = subject.run(call), subject.run(call.replaced(options=whens))
        assert state_out(subject.op) not in without.outputs
        assert all(same_bits(x, with_state.outputs[name]) for name, x in without.outputs.items())

    @pytest.mark.parametrize("tokens", [0, 1, 70])
    def test_final_state_is_fresh(self, subject: Subject, tokens: int) -> None:
        """It is fp32 and never aliases the initial state, not even of an empty sequence."""
        call = sampling.draw(OPS[subject.op], small_case(subject.op, "fresh", tokens), device=subject.torch_device)
        given_state = call.tensors[state_in(subject.op)]
        for needs in (frozenset[str](), sampling.default_needs(call)):
            final = subject.run(call, needs).outputs[state_out(subject.op)]
            assert final.dtype == torch.float32
            before = final.clone()
            given_state.add_(1.0)
            assert torch.equal(final, before)

    def test_layouts_agree(self, subject: Subject) -> None:
        """V-first states are the K-first ones transposed, gradients included, bit for bit."""
        study = Sample(subject.op, small_case(subject.op, "layouts")).study()
        call, gradients = study.on(subject.torch_device)
        name, out = state_in(subject.op), state_out(subject.op)
        turned = call.replaced({name: call.tensors[name].mT.contiguous()}, {"state_v_first": True})
        state_gradient = gradients[out]
        assert state_gradient is not None
        k_first = subject.run(call, study.needs, gradients)
        v_first = subject.run(turned, study.needs, {**gradients, out: state_gradient.mT.contiguous()})
        for quantity, tensor in k_first.quantities().items():
            other = v_first.quantities()[quantity]
            assert same_bits(tensor, other.mT if quantity in (out, f"d_{name}") else other), quantity

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=["bf16", "fp16", "fp64"])
    def test_initial_state_of_any_float_dtype(self, subject: Subject, dtype: torch.dtype) -> None:
        """Widened to fp32; its gradient comes back in its own dtype."""
        study = Sample(subject.op, small_case(subject.op, "state-dtype")).study()
        call, gradients = study.on(subject.torch_device)
        name = state_in(subject.op)
        given_state = call.tensors[name].to(dtype)
        narrow = subject.run(call.replaced({name: given_state}), study.needs, gradients)
        wide = subject.run(call.replaced({name: given_state.float()}), study.needs, gradients)
        assert narrow.gradients[name].dtype == dtype
        assert all(same_bits(x, narrow.outputs[n]) for n, x in wide.outputs.items())
        for other, gradient in wide.gradients.items():
            expected = gradient.to(dtype) if other == name else gradient
            assert same_bits(narrow.gradients[other], expected), other

    def test_ragged_states_in_v_first_layout(self, subject: Subject) -> None:
        """Layouts and ragged sequences together, an empty one among them."""
        case = small_case(subject.op, "ragged-v-first", 40)
        case = variant(case, offsets=(0, 17, 17, 40), options={"state_v_first": True})
        subject.check_sample(Sample(subject.op, case))
