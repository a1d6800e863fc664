"""Which gradients are asked for, and how often."""
# ruff: noqa: S101

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor

from chunkwise import errors
from chunkwise.ops import OPS
from chunkwise_testing import sampling
from chunkwise_testing.oracle import same_bits
from chunkwise_testing.sampling import Call, variant
from chunkwise_testing.study import Sample
from chunkwise_testing.suite.base import Subject, Suite, concerning, small_case, state_in


def subsets(names: frozenset[str]) -> list[frozenset[str]]:
    """Each alone, all, all but one, none."""
    singles = [frozenset({name}) for name in sorted(names)]
    return [*singles, names, *(names - single for single in singles), frozenset()]


class Gradients(Suite):
    """Subsets of inputs that require a gradient, repeated and impossible differentiation."""

    @pytest.mark.parametrize("offsets", [None, (0, 20, 20, 70)], ids=["dense", "ragged"])
    def test_subsets(self, subject: Subject, offsets: tuple[int, ...] | None) -> None:
        """Exactly the gradients that are asked for, each right."""
        case = small_case(subject.op, "subsets")
        study = Sample(subject.op, variant(case, offsets=offsets) if offsets else case).study()
        call, gradients = study.on(subject.torch_device)
        for needs in subsets(study.needs):
            result = subject.run(call, needs, gradients)
            assert result.gradients.keys() == needs
            study.restricted(needs).check(result)

    def test_public_backward(self, subject: Subject) -> None:
        """``.backward()`` fills ``.grad`` of the leaves that require it, and no other."""
        study = Sample(subject.op, small_case(subject.op, "backward")).study()
        call, gradients = study.on(subject.torch_device)
        for needs in subsets(study.needs):
            leaves = {n: t.detach().clone().requires_grad_(n in needs) for n, t in call.tensors.items()}
            with subject.pair.forced():
                outputs = call.op(**leaves, **call.options)
            roots = [(o, g) for o, g in zip(outputs, gradients.values(), strict=True) if o.requires_grad]
            assert bool(roots) == bool(needs)
            if roots:
                torch.autograd.backward([o for o, _ in roots], [g for _, g in roots])
            assert {n for n, leaf in leaves.items() if leaf.grad is not None} == needs

    def test_gradients_accumulate(self, subject: Subject) -> None:
        """One input given for two gets the sum; a retained graph gives the same gradient again."""
        case = small_case(subject.op, "accumulate")
        study = Sample(subject.op, case).study()
        call, gradients = study.on(subject.torch_device)
        named = [n for n in call.declaration.promises.differentiable if n in call.tensors]
        same = ((a, b) for a, b in combinations(named, 2) if call.spec[a].axes == call.spec[b].axes)
        one, other = next(same)
        leaf = call.tensors[other].clone().requires_grad_()
        with subject.pair.forced():
            outputs = call.op(**{**call.tensors, one: leaf, other: leaf}, **call.options)
            roots, grads = list(outputs), list(gradients.values())
            first = torch.autograd.grad(roots, leaf, grads, retain_graph=True)[0]
            second = torch.autograd.grad(roots, leaf, grads)[0]
        assert subject.pair.atomic or same_bits(first, second)
        both = subject.run(call.replaced({one: call.tensors[other]}), {one, other}, gradients).gradients
        assert torch.allclose(first, both[one] + both[other], rtol=1e-5, atol=1e-6)

    def test_double_backward_raises(self, subject: Subject) -> None:
        """A second differentiation is an error, never silent zeros."""
        call = sampling.draw(OPS[subject.op], small_case(subject.op, "double", 12), device=subject.torch_device)
        leaves = {n: t.requires_grad_(t.is_floating_point()) for n, t in call.tensors.items()}
        with subject.pair.forced():
            output = call.op(**leaves, **call.options)[0]
            gradient = torch.autograd.grad(output.sum(), leaves["v"], create_graph=True)[0]
            with pytest.raises(errors.UnsupportedTransformError, match="gradient of a gradient"):
                gradient.square().sum().backward()

    def test_transforms_raise(self, subject: Subject) -> None:
        """``torch.func`` has no rule for a fused op: a clear error."""
        call = sampling.draw(OPS[subject.op], small_case(subject.op, "vmap", 12), device=subject.torch_device)
        names = list(call.tensors)

        def function(*tensors: Tensor) -> Tensor:
            output: Tensor = call.op(**dict(zip(names, tensors, strict=True)), **call.options)[0]
            return output

        stacked = [call.tensors[n].unsqueeze(0) for n in names]
        with subject.pair.forced(), pytest.raises(errors.UnsupportedTransformError, match="vmap"):
            torch.vmap(function)(*stacked)

    @concerning("states")
    def test_state_carried_across_steps(self, subject: Subject) -> None:
        """Truncated training: a detached state is a leaf of its own, and gets no gradient."""
        call: Call = sampling.draw(OPS[subject.op], small_case(subject.op, "detached"), device=subject.torch_device)
        name = state_in(subject.op)
        with subject.pair.forced():
            leaves = {n: t.clone().requires_grad_(n != name) for n, t in call.tensors.items()}
            output, final = call.op(**leaves, **call.options)
            second, _ = call.op(**{**leaves, name: final.detach()}, **call.options)
            (output.sum() + second.sum()).backward()
        assert leaves[name].grad is None
        assert all(leaf.grad is not None for n, leaf in leaves.items() if n != name)
