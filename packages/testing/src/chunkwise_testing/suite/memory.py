"""Strides, poison, repeatability: what must not depend on where tensors lie and what lies around them."""
# ruff: noqa: S101

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from chunkwise.ops import OPS
from chunkwise_testing import sampling
from chunkwise_testing.oracle import same_bits
from chunkwise_testing.poison import GuardedAllocations, guard_inputs, poisoned_memory
from chunkwise_testing.sampling import PLANS, Call, variant
from chunkwise_testing.study import Sample, study_of
from chunkwise_testing.suite.base import (
    OnlyKernels,
    Subject,
    Suite,
    assert_finite,
    assert_same_bits,
    concerning,
    heads,
    row_axis,
    small_case,
    state_in,
    stateless,
    widths,
)


def fused(call: Call) -> Call:
    """The tensors of like rows as slices of one wide tensor, as a fused projection gives them."""
    names = [n for n, t in call.tensors.items() if row_axis(call, n) == 1 and t.is_floating_point()]
    parts = [call.tensors[n].flatten(2) for n in names]
    alike: dict[tuple[torch.dtype, int], list[int]] = {}
    for i, part in enumerate(parts):
        alike.setdefault((part.dtype, part.shape[1]), []).append(i)
    sliced: dict[str, Tensor] = {}
    for members in alike.values():
        pieces = torch.cat([parts[i] for i in members], 2).split([parts[i].shape[2] for i in members], 2)
        for i, piece in zip(members, pieces, strict=True):
            sliced[names[i]] = piece.unflatten(2, call.tensors[names[i]].shape[2:])
    return call.replaced(sliced)


def heads_first(call: Call) -> Call:
    """Rows and heads stored the other way round; states with their last two axes so."""

    def turn(name: str, tensor: Tensor) -> Tensor:
        if row_axis(call, name) == 1 and tensor.dim() >= 3:
            return tensor.transpose(1, 2).contiguous().transpose(1, 2)
        if name in call.declaration.promises.states:
            return tensor.mT.contiguous().mT
        return tensor

    return call.mapped(turn)


def every_other(call: Call) -> Call:
    """Each tensor as every other element of one twice as wide."""
    return call.mapped(lambda _, t: torch.stack([t, torch.full_like(t, 7)], -1)[..., 0])


LAYOUTS = {"every-other": every_other, "fused": fused, "heads-first": heads_first}


class Memory(Suite):
    """Strides, guarded and poisoned memory, the same bits twice."""

    @pytest.mark.parametrize("plan", ["bf16-mixed", "fp32"])
    @pytest.mark.parametrize("layout", sorted(LAYOUTS))
    def test_strides(self, subject: Subject, layout: str, plan: str) -> None:
        """Slices of a fused projection, transposed heads and states."""
        study = Sample(subject.op, small_case(subject.op, "strides"), plan).study()
        call, _ = study.on(subject.torch_device)
        subject.check(study, LAYOUTS[layout](call))

    def test_strides_in_succession(self, subject: Subject) -> None:
        """One shape with different strides, then the first again: keys differ, values agree."""
        study = Sample(subject.op, small_case(subject.op, "strides")).study()
        call, _ = study.on(subject.torch_device)
        for laid_out in (call, fused(call), heads_first(call), every_other(call), call):
            subject.check(study, laid_out)

    @pytest.mark.parametrize("offsets", [None, (0, 30, 30, 70)], ids=["dense", "ragged"])
    def test_ragged_strides(self, subject: Subject, offsets: tuple[int, ...] | None) -> None:
        """The same with offsets."""
        case = small_case(subject.op, "ragged-strides")
        study = Sample(subject.op, variant(case, offsets=offsets) if offsets else case).study()
        call, _ = study.on(subject.torch_device)
        subject.check(study, fused(call))

    def test_expanded_gradient(self, subject: Subject) -> None:
        """``o.sum().backward()``: a gradient of stride 0."""
        call = sampling.draw(OPS[subject.op], small_case(subject.op, "expanded"))
        ones = {n: torch.ones((), dtype=g.dtype).expand(g.shape) for n, g in sampling.draw_gradients(call).items()}
        study = study_of(call, ones)
        own, _ = study.on(subject.torch_device)
        on_device = {
            n: torch.ones((), dtype=g.dtype, device=subject.torch_device).expand(g.shape) for n, g in ones.items()
        }
        study.check(subject.run(own, study.needs, on_device))

    def test_sliced_gradient(self, subject: Subject) -> None:
        """A gradient cut out of a wider tensor, and a transposed one for the state."""
        study = Sample(subject.op, small_case(subject.op, "sliced")).study()
        call, gradients = study.on(subject.torch_device)
        for name, gradient in gradients.items():
            if gradient is not None and name in call.declaration.promises.states:
                gradients[name] = gradient.mT.contiguous().mT
            elif gradient is not None:
                gradients[name] = torch.cat([torch.full_like(gradient, 3.0), gradient], -1)[..., gradient.shape[-1] :]
        study.check(subject.run(call, study.needs, gradients))

    @pytest.mark.parametrize("plan", ["bf16", "fp32"])
    @pytest.mark.parametrize("offsets", [None, (0, 0, 33, 34, 98)], ids=["dense", "padded"])
    @pytest.mark.parametrize("packed", [False, True], ids=["interleaved", "packed"])
    def test_poison(self, subject: Subject, plan: str, offsets: tuple[int, ...] | None, packed: bool) -> None:
        """Fresh memory and the storage around inputs are NaN: same bits, nothing but outputs written."""
        case = small_case(subject.op, "poison", 101)
        study = Sample(subject.op, variant(case, offsets=offsets) if offsets else case, plan).study()
        call, gradients = study.on(subject.torch_device)
        plain = subject.run(call, study.needs, gradients)
        guarded, written = guard_inputs(call, packed=packed)
        with poisoned_memory(), GuardedAllocations() as allocations:
            result = subject.run(guarded, study.needs, gradients)
        assert_finite(result)
        assert_same_bits(plain, result)
        assert written() == []
        assert allocations.overrun() == 0

    def test_inputs_are_not_written(self, subject: Subject) -> None:
        """No argument and no incoming gradient is changed in place."""
        study = Sample(subject.op, small_case(subject.op, "read-only")).study()
        call, gradients = study.on(subject.torch_device)
        before = {**call.tensors, **{f"d_{n}": g for n, g in gradients.items() if g is not None}}
        copies = {n: t.clone() for n, t in before.items()}
        subject.run(call, study.needs, gradients)
        assert all(same_bits(t, copies[n]) for n, t in before.items())

    @pytest.mark.parametrize("plan", sorted(PLANS))
    def test_same_bits_twice(self, subject: Subject, plan: str) -> None:
        """Two runs agree in every bit, unless an implementation declares itself atomic."""
        case = variant(small_case(subject.op, "twice", 130), offsets=(0, 60, 130))
        study = Sample(subject.op, case, plan).study()
        call, gradients = study.on(subject.torch_device)
        first, second = (subject.run(call, study.needs, gradients) for _ in range(2))
        if subject.pair.atomic:
            study.check(second)
        else:
            assert_same_bits(first, second)

    def test_modes_do_not_change_bits(self, subject: Subject) -> None:
        """Autocast does not reach inside; ``no_grad`` and ``inference_mode`` compute the same."""
        study = Sample(subject.op, small_case(subject.op, "modes")).study()
        call, gradients = study.on(subject.torch_device)
        plain = subject.run(call, study.needs, gradients)
        with torch.autocast(subject.torch_device, dtype=torch.bfloat16):
            assert_same_bits(plain, subject.run(call, study.needs, gradients))
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                outputs = subject.run(call).outputs
            assert all(same_bits(x, plain.outputs[n]) for n, x in outputs.items())
        with torch.inference_mode():
            inside = call.mapped(lambda _, t: t.clone())
            outputs = subject.run(inside).outputs
        assert all(same_bits(x, plain.outputs[n]) for n, x in outputs.items())

    def test_fp32_products_stay_fp32(self, subject: Subject) -> None:
        """``torch.set_float32_matmul_precision("medium")`` licenses nothing here."""
        study = Sample(subject.op, small_case(subject.op, "precision")).study()
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium")
        try:
            subject.check(study)
        finally:
            torch.set_float32_matmul_precision(before)

    @concerning("states")
    def test_state_of_another_layout_and_dtype(self, subject: Subject) -> None:
        """A transposed bf16 state: its gradient has its dtype and shape."""
        study = Sample(subject.op, small_case(subject.op, "odd-state")).study()
        name = state_in(subject.op)
        rounded = study.call.tensors[name].bfloat16()
        other = study_of(study.call.replaced({name: rounded}))
        call, _ = other.on(subject.torch_device)
        subject.check(other, call.replaced({name: call.tensors[name].mT.contiguous().mT}))


class LargeCalls(OnlyKernels):
    """Offsets of elements that no 32-bit integer holds."""

    @pytest.mark.alone
    def test_offsets_beyond_31_bits(self, on_gpu: Subject) -> None:
        """B = 16, T = 17,477, H = 64, K or V = 128: more than 2^31 elements; compared with its halves run apart.

        Halves run twice: the same bits. Those of the whole too, unless an implementation does not promise it: then by
        no more than rounding, while an address that wraps reads a value that has nothing to do with it.
        """
        # Not both at once: with all their gradients DPLR's tensors would take more than a GPU of 141 GB has.
        promises = OPS[on_gpu.op].declaration.promises
        one = {offsets.rows: 1 for offsets in promises.offsets}  # row of every kind, to be repeated with noise
        both = {"K", "V"} <= set(promises.static_axes)
        for sizes in (widths(128, 16), widths(16, 128)) if both else (widths(128, 128),):
            self._compare_halves(on_gpu, {**one, **heads(64, 64), **sizes})

    @staticmethod
    def _compare_halves(on_gpu: Subject, sizes: dict[str, int]) -> None:
        one = sampling.draw(OPS[on_gpu.op], stateless(small_case(on_gpu.op, "wide", 1, **sizes)), PLANS["bf16"])

        def grown(name: str, tensor: Tensor) -> Tensor:
            """Rows that differ, so that an address which wraps reads another value."""
            if row_axis(one, name) is None:
                return tensor.to("cuda")
            shape = (16, 17_477, *tensor.shape[2:])
            noise = torch.rand(shape, device="cuda", dtype=tensor.dtype)
            return noise.add_(0.5).mul_(tensor.to("cuda")) if tensor.dim() == 4 else -noise.mul_(0.1)

        call = one.mapped(grown)
        call = call.replaced({"beta": -call.tensors["beta"]}) if "beta" in call.tensors else call
        needs = sampling.default_needs(call)
        gradients = {name: torch.randn_like(x) for name, x in on_gpu.run(call).outputs.items()}
        whole = on_gpu.run(call, needs, gradients).quantities()
        for half in (slice(0, 8), slice(8, 16)):
            own = call.mapped(lambda n, t, s=half: t if row_axis(one, n) is None else t[s])  # type: ignore[misc]
            own_gradients = {name: g[half] for name, g in gradients.items()}
            part, again = (on_gpu.run(own, needs, own_gradients).quantities() for _ in range(2))
            unlike = {n: unequal(x, again[n]) for n, x in part.items()}
            assert on_gpu.pair.atomic or not any(unlike.values()), f"rows from {half.start} on, run again: {unlike}"
            apart = unequal if on_gpu.pair.batch_invariant else far_apart
            wrong = {n: apart(x[half], part[n]) for n, x in whole.items() if x.shape[0] == 16}
            assert not any(wrong.values()), f"rows from {half.start} on: {wrong}"


def unequal(x: Tensor, y: Tensor) -> int:
    """How many elements differ, or are NaN."""
    return int((x != y).sum())


def far_apart(xs: Tensor, ys: Tensor) -> int:
    """How many elements differ by more than a 32nd of the largest of their row of the batch, or are NaN."""
    pairs = zip(xs, ys, strict=True)
    return sum(int(((x - y).abs() <= y.abs().max() / 32).logical_not().sum()) for x, y in pairs)
