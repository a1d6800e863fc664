"""Heads, widths, gates, steps and dtypes at the edges of what an op allows."""
# ruff: noqa: S101

from __future__ import annotations

import dataclasses

import pytest
import torch

from chunkwise.ops import OPS
from chunkwise_testing import sampling
from chunkwise_testing.sampling import PLANS, variant
from chunkwise_testing.study import Sample, study_of
from chunkwise_testing.suite.base import (
    Subject,
    Suite,
    as_drawn,
    assert_finite,
    concerning,
    heads,
    output_axes,
    small_case,
    stateless,
    widths,
)

HEADS = ((1, 1), (1, 5), (3, 3), (3, 6), (2, 8))
WIDTHS = (
    (16, 16),
    (16, 256),
    (60, 80),
    (80, 60),
    (96, 100),
    (100, 96),
    (128, 128),
    (64, 192),
    (192, 64),
    (256, 16),
    (256, 256),
)
GATES = ("gate", "strong", "mixed", "zero")


class Shapes(Suite):
    """Every size and value that an op allows runs right, or is refused with a reason."""

    @pytest.mark.parametrize("counts", HEADS, ids=lambda h: f"h{h[0]}-hv{h[1]}")
    def test_unlike_heads(self, subject: Subject, counts: tuple[int, int]) -> None:
        """One head, groups of several, as many of one as of the other."""
        case = small_case(subject.op, "heads", 67, **heads(*counts))
        subject.check_sample(Sample(subject.op, case))

    @as_drawn
    @pytest.mark.parametrize("kv", WIDTHS, ids=lambda w: f"k{w[0]}-v{w[1]}")
    @pytest.mark.parametrize("plan", ["bf16", "fp32"])
    def test_widths(self, subject: Subject, kv: tuple[int, int], plan: str) -> None:
        """Supported and right, or refused; never run and wrong."""
        case = small_case(subject.op, "widths", 67, **heads(1, 2), **widths(*kv))
        study = Sample(subject.op, case, plan).study()
        call, _ = study.on(subject.torch_device)
        if refusals := subject.refusals(call, study.needs):
            assert all(refusals)
            return
        subject.check(study)

    @concerning("gates")
    @pytest.mark.parametrize("gates", GATES)
    @pytest.mark.parametrize("plan", ["bf16-mixed", "fp16-mixed", "fp32"])
    def test_gates(self, every: Subject, gates: str, plan: str) -> None:
        """Strong decay, none at all (0 and -0.0), with states and over several chunks."""
        bounded = sampling.gates_of(OPS[every.op].declaration)
        case = variant(small_case(every.op, f"gates-{gates}", 130), draw=dict.fromkeys(bounded, gates))
        study = Sample(every.op, case, plan).study()
        result = every.run_study(study)
        assert_finite(result)
        study.check(result)

    @concerning("gates")
    @pytest.mark.parametrize("gates", ["strong", "zero"])
    def test_first_gate_without_state(self, subject: Subject, gates: str) -> None:
        """Without an initial state the first token's gate decays nothing: its gradient is like zero."""
        bounded = sampling.gates_of(OPS[subject.op].declaration)
        case = stateless(variant(small_case(subject.op, f"first-{gates}"), draw=dict.fromkeys(bounded, gates)))
        study = Sample(subject.op, case).study()
        result = subject.run_study(study)
        study.check(result)
        for name in bounded:
            gradient = result.gradients[name].abs()
            assert float(gradient[:, 0].max()) <= 1e-5 * float(gradient.max())

    @pytest.mark.parametrize("keys", ["parallel", "unit"])
    @pytest.mark.parametrize("plan", ["bf16-mixed", "fp16-mixed", "fp32"])
    def test_parallel_keys(self, subject: Subject, keys: str, plan: str) -> None:
        """Keys that are nearly parallel, steps near one: the triangular inverse is hard."""
        erased = {"a": "erase-parallel", "b": "write-parallel"} if keys == "parallel" else {}
        wanted = {"k": keys, "beta": "near-one", **erased}
        draw = {n: strategy for n, strategy in wanted.items() if n in OPS[subject.op].declaration.tensor_names}
        case = variant(small_case(subject.op, f"keys-{keys}", 128, **heads(5, 5)), draw=draw)
        subject.check_sample(Sample(subject.op, case, plan))

    def test_fp16_near_its_largest_value(self, subject: Subject) -> None:
        """Values up to 3e4: products with them pass 65,504 although no result does."""
        case = variant(small_case(subject.op, "large", 20), draw={"v": "large"}, options={"scale": 1.0})
        call = sampling.draw(OPS[subject.op], case, PLANS["fp16-mixed"])
        study = study_of(call, {n: 0.01 * g for n, g in sampling.draw_gradients(call).items()})
        expected = study.expected.quantities()
        assert float(expected["o"].abs().max()) > 5e3
        fp16 = {n for n, t in call.tensors.items() if t.dtype == torch.float16}
        assert all(float(x.abs().max()) < 65_504 for n, x in expected.items() if n.removeprefix("d_") in {"o", *fp16})
        result = subject.run_study(study)
        study.check(result)

    @pytest.mark.parametrize("scale", [1.0, 0.03, -2.0])
    def test_scale(self, subject: Subject, scale: float) -> None:
        """Another scale than the default one; a negative one is one as well."""
        # Two implementations round scores of 20 apart by 2^-20, and nothing makes up for it in P. Moving the inputs by
        # half an ulp, which moves a forward and its backward alike, says nothing of that loss.
        draw = {"q": "unit", "k": "unit"} if len(set(subject.pair.implementations)) > 1 else {}
        case = variant(small_case(subject.op, f"scale{scale}"), options={"scale": scale}, draw=draw)
        subject.check_sample(Sample(subject.op, case))

    @pytest.mark.parametrize("plan", sorted(PLANS))
    def test_dtypes_of_results(self, subject: Subject, plan: str) -> None:
        """Outputs as declared, gradients in the dtype and shape of their inputs."""
        study = Sample(subject.op, small_case(subject.op, "dtypes", 33), plan).study()
        call, _ = study.on(subject.torch_device)
        result = subject.run_study(study)
        for name, gradient in result.gradients.items():
            assert (gradient.dtype, gradient.shape) == (call.tensors[name].dtype, call.tensors[name].shape)
        for output in sampling.asked_outputs(call):
            dtype = call.tensors[output.dtype].dtype if output.dtype in call.tensors else None
            assert dtype is None or result.outputs[output.name].dtype == dtype

    @pytest.mark.parametrize("narrow", ["q", "k", "v", "a", "b", "g", "gk", "beta", "sinks"])
    def test_one_argument_of_another_dtype(self, subject: Subject, narrow: str) -> None:
        """One fp32 argument among bf16 ones: right, or refused."""
        if narrow not in OPS[subject.op].declaration.tensor_names:
            return
        case = small_case(subject.op, "one-dtype", 40)
        base = Sample(subject.op, case, "bf16").study()
        call = base.call.replaced({narrow: base.call.tensors[narrow].float()})
        study = study_of(call)
        own, _ = study.on(subject.torch_device)
        if not subject.refusals(own, study.needs):
            subject.check(study)

    def test_heads_do_not_mix(self, subject: Subject) -> None:
        """A loss on one value head reaches the inputs of that head's group alone."""
        case = dataclasses.replace(small_case(subject.op, "heads-apart", 66))
        study = Sample(subject.op, case).study()
        call, gradients = study.on(subject.torch_device)
        for name, gradient in gradients.items():
            if gradient is not None:
                axes = output_axes(call, name)
                head = next(i for i, axis in enumerate(axes) if axis in sampling.HEAD_AXES)
                gradients[name] = gradient.clone()
                gradients[name].narrow(head, 1, gradient.shape[head] - 1).zero_()  # type: ignore[union-attr]
        for name, gradient in subject.run(call, study.needs, gradients).gradients.items():
            axes = [axis.name for axis in call.spec[name].axes]
            head = next(i for i, axis in enumerate(axes) if axis in sampling.HEAD_AXES)
            assert bool(gradient.narrow(head, 0, 1).any()), name
            assert not bool(gradient.narrow(head, 1, gradient.shape[head] - 1).any()), name
