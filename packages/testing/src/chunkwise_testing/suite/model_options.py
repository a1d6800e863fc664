"""The model options of the gated delta rule, against their formulas applied by hand."""
# ruff: noqa: S101

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from chunkwise.ops import OPS
from chunkwise_testing import sampling
from chunkwise_testing.oracle import evaluate, same_bits
from chunkwise_testing.sampling import Call, variant
from chunkwise_testing.study import study_of
from chunkwise_testing.suite.base import Subject, Suite, assert_finite, small_case, state_out
from chunkwise_testing.suite.ragged import assert_zero_padding, nan_padded

MODEL = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


def model_call(op: str, offsets: tuple[int, ...] | None = None, **options: Any) -> Call:
    """A call with raw gates, step logits, A_log and dt_bias."""
    case = small_case(op, "model")
    case = variant(case, offsets=offsets, draw={"g": "normal", "beta": "normal"}, options={**MODEL, **options})
    call = sampling.draw(OPS[op], case)
    heads = case.sizes["HV"]
    return call.replaced({"A_log": torch.linspace(-1.0, 1.5, heads), "dt_bias": torch.linspace(-2.0, 0.5, heads)})


class ModelOptions(Suite):
    """``use_gate_in_kernel``, ``use_beta_sigmoid_in_kernel``, ``allow_neg_eigval``, ``use_qk_l2norm_in_kernel``."""

    ops = ("chunk_gated_delta_rule",)

    @pytest.mark.parametrize("negative", [False, True], ids=["sigmoid", "neg-eigval"])
    def test_equal_formulas_by_hand(self, subject: Subject, negative: bool) -> None:
        """The options and the formulas give the same bits, with the gradients of A_log and dt_bias."""
        call = model_call(subject.op, allow_neg_eigval=negative).mapped(lambda _, t: t.to(subject.torch_device))
        gradients: dict[str, Tensor | None] = dict(sampling.draw_gradients(call))
        needs = sampling.default_needs(call) | {"A_log", "dt_bias"}

        def by_hand(**arguments: Any) -> Any:
            gate = -arguments.pop("A_log").exp() * functional.softplus(arguments.pop("g") + arguments.pop("dt_bias"))
            beta = arguments.pop("beta").float().sigmoid() * (2.0 if negative else 1.0)
            rest = {n: x for n, x in arguments.items() if n not in (*MODEL, "allow_neg_eigval")}
            return call.op(**rest, g=gate, beta=beta)

        with subject.pair.forced():
            expected = evaluate(call, needs, gradients, by_hand)
            actual = evaluate(call, needs, gradients)
        assert actual.gradients.keys() == needs
        for name, tensor in expected.quantities().items():
            assert torch.allclose(actual.quantities()[name], tensor, rtol=1e-5, atol=1e-6), name
        assert all(same_bits(actual.outputs[n], x) for n, x in expected.outputs.items())

    @pytest.mark.parametrize("offsets", [None, (0, 5, 5, 60)], ids=["dense", "padded"])
    def test_within_budget(self, subject: Subject, offsets: tuple[int, ...] | None) -> None:
        """Against the oracle, the parameters' gradients included."""
        call = model_call(subject.op, offsets)
        study = study_of(call, needs=sampling.default_needs(call) | {"A_log", "dt_bias"})
        subject.check(study)

    def test_padding_does_not_reach_the_parameters(self, subject: Subject) -> None:
        """NaN in rows of padding leaks neither into A_log and dt_bias nor into any other gradient."""
        call = model_call(subject.op, (0, 30, 60), use_qk_l2norm_in_kernel=True)
        study = study_of(call, needs=sampling.default_needs(call) | {"A_log", "dt_bias"})
        own, gradients = study.on(subject.torch_device)
        spec: Mapping[str, Any] = own.spec
        model = own.without("A_log", "dt_bias")
        poisoned = nan_padded(model).replaced({n: own.tensors[n] for n in own.tensors if n not in spec})
        result = subject.run(poisoned, study.needs, gradients)
        assert_finite(result)
        study.check(result)
        rows = {n: g for n, g in result.gradients.items() if n in spec}
        assert_zero_padding(model, type(result)(result.outputs, rows))

    def test_normalisation_of_zero_rows(self, subject: Subject) -> None:
        """A key of zeros is normalised to zeros, with finite gradients."""
        case = variant(small_case(subject.op, "zero-keys"), options={"use_qk_l2norm_in_kernel": True})
        call = sampling.draw(OPS[subject.op], case)
        k, q = call.tensors["k"].clone(), call.tensors["q"].clone()
        k[:, 3], q[:, 5:7] = 0.0, 0.0
        study = study_of(call.replaced({"k": k, "q": q}))
        result = subject.run_study(study)
        assert_finite(result)
        study.restricted(study.needs - {"q", "k"}).check(result)

    def test_scale_of_keys_does_not_matter(self, subject: Subject) -> None:
        """Normalised inside, q and k of any length give the same output."""
        case = variant(small_case(subject.op, "lengths"), options={"use_qk_l2norm_in_kernel": True})
        call = sampling.draw(OPS[subject.op], case)
        study = study_of(call.replaced({"q": call.tensors["q"] * 30.0, "k": call.tensors["k"] * 0.1}))
        subject.check(study)
        assert state_out(subject.op) in study.expected.outputs

    def test_options_that_mean_nothing_are_refused(self, subject: Subject) -> None:
        """A_log without the gate option, the gate option without A_log, neg eigenvalues without the sigmoid."""
        call = model_call(subject.op).mapped(lambda _, t: t.to(subject.torch_device))
        for odd in (
            call.replaced(options={"use_gate_in_kernel": False}),
            call.without("A_log"),
            call.replaced(options={"use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": True}),
        ):
            with pytest.raises(ValueError, match="give both or none"):
                subject.run(odd)
