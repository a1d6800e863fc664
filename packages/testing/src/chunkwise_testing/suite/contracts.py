"""Contracts on values: what the values check names, and bounds that a caller promises."""
# ruff: noqa: S101

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor

import chunkwise
from chunkwise.ops import OPS
from chunkwise.protocol.contracts import Contract
from chunkwise_testing import fitting, sampling
from chunkwise_testing.sampling import PLANS, Call, gates_of, variant
from chunkwise_testing.study import Study, study_of
from chunkwise_testing.suite.base import Subject, Suite, assert_finite, small_case
from chunkwise_testing.suite.ragged import nan_padded
from chunkwise_testing.tolerance import half_ulp

BOUNDS = (-math.exp(-0.5), -5.0)
"""What callers promise: RWKV-7's decay, and a safe gate."""


def promised(op: str) -> list[Contract]:
    """The contracts that an option can narrow."""
    return [c for c in OPS[op].declaration.promises.contracts if c.lower_option is not None]


def pinned(call: Call, contract: Contract, bound: float, ulps: int = 0) -> Call:
    """The call with every value of a contract's argument at a promised bound, or some ulps beyond it."""
    values = torch.full_like(call.tensors[contract.name], bound)
    beyond = (values.double() - 2 * ulps * half_ulp(values)).to(values.dtype)
    return call.replaced({contract.name: beyond}, {str(contract.lower_option): bound})


def pinned_study(op: str, contract: Contract, bound: float, ulps: int, plan: str) -> Study:
    """The study of a pinned call; computed once in a process."""
    return _pinned_study(op, contract, bound, ulps, plan, fitting.active())


@functools.cache
def _pinned_study(op: str, contract: Contract, bound: float, ulps: int, plan: str, fitted: tuple[str, ...]) -> Study:
    return study_of(pinned(sampling.draw(OPS[op], small_case(op, "pinned"), PLANS[plan]), contract, bound, ulps))


class Contracts(Suite):
    """Values outside the contract are named where they are looked at."""

    def test_a_value_outside_is_named(self, default: Subject) -> None:
        """NaN in any argument, and a positive gate."""
        call = sampling.draw(OPS[default.op], small_case(default.op, "outside", 20), device=default.torch_device)
        floating = [name for name, t in call.tensors.items() if t.is_floating_point()]
        bad = [(name, math.nan) for name in floating] + [(name, 0.25) for name in gates_of(call.declaration)]
        for name, value in bad:
            changed = call.tensors[name].clone()
            changed[(-1,) * changed.dim()] = value
            with chunkwise.prefer(check_values=True), pytest.raises(ValueError, match=rf"{name}\[.* = {value:g}"):
                default.run(call.replaced({name: changed}))

    def test_padding_may_hold_anything(self, default: Subject) -> None:
        """The values check leaves rows past the last offset out."""
        case = variant(small_case(default.op, "checked-padding", 40), offsets=(0, 10, 30))
        call = sampling.draw(OPS[default.op], case, device=default.torch_device)
        with chunkwise.prefer(check_values=True):
            assert_finite(default.run(nan_padded(call)))


class Gates(Suite):
    """What a gate outside its contract may do, for the ops that have one."""

    concerns = "gates"

    def test_one_large_positive_gate(self, subject: Subject) -> None:
        """Outside the contract, so its chunk means nothing; but nothing crashes, and chunks before it are right."""
        for name in gates_of(OPS[subject.op].declaration):
            call = sampling.draw(OPS[subject.op], small_case(subject.op, "positive"), device=subject.torch_device)
            gates = call.tensors[name].clone()
            gates[:, 66] = 30.0
            gradients: dict[str, Tensor | None] = dict(sampling.draw_gradients(call))
            result = subject.run(call.replaced({name: gates}), sampling.default_needs(call), gradients)
            assert result.gradients.keys() == sampling.default_needs(call)
            before = subject.run(call).outputs["o"][:, :64]
            assert torch.allclose(result.outputs["o"][:, :64], before, rtol=1e-4, atol=1e-5)


class Promises(Suite):
    """Bounds that an option promises, for the ops that have such an option."""

    concerns = "promised bounds"

    def test_a_promised_bound_is_checked(self, default: Subject) -> None:
        """A gate beyond the promise is named; one ulp beyond, where rounding may have put it, is not."""
        for contract in promised(default.op):
            for plan in ("fp32", "bf16"):
                case = small_case(default.op, "promise", 20)
                call = sampling.draw(OPS[default.op], case, PLANS[plan], device=default.torch_device)
                for bound in BOUNDS:
                    with chunkwise.prefer(check_values=True):
                        default.run(pinned(call, contract, bound, ulps=1))
                        with pytest.raises(ValueError, match=rf"{contract.name}\[.* >= {bound:g}"):
                            default.run(pinned(call, contract, bound, ulps=4))

    @pytest.mark.parametrize("bound", BOUNDS, ids=lambda b: f"{b:.3g}")
    @pytest.mark.parametrize("plan", ["bf16", "fp16-mixed", "fp32"])
    def test_gates_at_the_promised_bound(self, every: Subject, bound: float, plan: str) -> None:
        """All of them, and one ulp beyond: right and finite, or refused with a reason."""
        for contract in promised(every.op):
            for ulps in (0, 1):
                study = pinned_study(every.op, contract, bound, ulps, plan)
                call, _ = study.on(every.torch_device)
                if refusals := every.refusals(call, study.needs):
                    assert all(refusals)
                    continue
                result = every.run_study(study)
                assert_finite(result)
                study.check(result)

    def test_a_promise_is_a_bound_below_zero(self, default: Subject) -> None:
        """Zero and above promise nothing that a gate could keep."""
        for contract in promised(default.op):
            call = sampling.draw(OPS[default.op], small_case(default.op, "no-promise", 20), device=default.torch_device)
            for bound in (0.0, 0.5):
                with pytest.raises(ValueError, match=f"{contract.lower_option} = {bound:g}"):
                    default.run(call.replaced(options={str(contract.lower_option): bound}))

    def test_a_promise_that_holds_changes_no_meaning(self, every: Subject) -> None:
        """The same gates with and without the promise: both within budget."""
        for contract in promised(every.op):
            study = pinned_study(every.op, contract, BOUNDS[0], 0, "fp32")
            with_promise, _ = study.on(every.torch_device)
            for given in (with_promise, with_promise.replaced(options={str(contract.lower_option): None})):
                if not every.refusals(given, study.needs):
                    every.check(study, given)
