"""torch.compile, recompilation, opcheck, activation checkpointing, CUDA graphs."""
# ruff: noqa: S101

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from chunkwise.ops import OPS
from chunkwise_testing import graph, sampling
from chunkwise_testing.oracle import evaluate, same_bits
from chunkwise_testing.sampling import Call, variant
from chunkwise_testing.suite.base import OnlyKernels, Subject, Suite, assert_same_bits, small_case, stateless

LENGTHS = (129, 128, 64, 65, 17)  # the first is no width: the tracer takes equal sizes for one


def drawn(subject: Subject, tokens: int, offsets: tuple[int, ...] | None = None, *, states: bool = True) -> Call:
    """A small call on the subject's device, with numbers among its options."""
    case = variant(small_case(subject.op, "graph", tokens), options={"scale": 0.37})
    case = case if states else stateless(case)
    case = variant(case, offsets=offsets) if offsets else case
    return sampling.draw(OPS[subject.op], case, device=subject.torch_device)


def assert_compilations(subject: Subject, calls: Sequence[Call], count: int) -> None:
    """With ``dynamic=True`` the calls compile so often in all, and give the bits that they give in eager mode."""
    needs = sampling.default_needs(calls[0])
    with subject.pair.forced():
        compiled = graph.Compiled(calls[0], dynamic=True)
        for call in calls:
            gradients = dict(sampling.draw_gradients(call))
            assert_same_bits(evaluate(call, needs, gradients), compiled.run(call, needs, gradients))
    assert compiled.compilations == count


class Graphs(Suite):
    """Compiled calls equal eager ones bit for bit, and lengths do not recompile."""

    @pytest.mark.parametrize("offsets", [None, (0, 3, 3, 20)], ids=["dense", "ragged"])
    def test_opcheck(self, subject: Subject, offsets: tuple[int, ...] | None) -> None:
        """Schema, fake, autograd registration and tracing of the nodes with residuals."""
        call = drawn(subject, 20, offsets)
        with subject.pair.forced():
            found = graph.opcheck(call, sampling.default_needs(call), subject.pair.format)
        assert set(found.values()) == {"SUCCESS"}

    def test_opcheck_without_gradients(self, default: Subject) -> None:
        """The node without residuals."""
        call = drawn(default, 20, states=False)
        with default.pair.forced():
            found = graph.opcheck(call, (), None)
        assert set(found.values()) == {"SUCCESS"}

    @pytest.mark.parametrize("offsets", [None, (0, 0, 30, 66)], ids=["dense", "padded"])
    def test_whole_graph_equals_eager(self, subject: Subject, offsets: tuple[int, ...] | None) -> None:
        """``fullgraph=True``: outputs and gradients have the same bits."""
        call = drawn(subject, 70, offsets)
        needs, gradients = sampling.default_needs(call), dict(sampling.draw_gradients(call))
        eager = subject.run(call, needs, gradients)
        with subject.pair.forced():
            compiled = graph.Compiled(call)
            assert_same_bits(eager, compiled.run(call, needs, gradients))
            assert compiled.compilations == 1
            without = compiled.run(call)
        assert all(same_bits(x, eager.outputs[n]) for n, x in without.outputs.items())

    def test_gradient_subset_in_a_graph(self, default: Subject) -> None:
        """Some inputs require no gradient, the output has no state."""
        call = drawn(default, 40, states=False)
        needs, gradients = frozenset({"v"}), dict(sampling.draw_gradients(call))
        eager = default.run(call, needs, gradients)
        with default.pair.forced():
            assert_same_bits(eager, graph.Compiled(call).run(call, needs, gradients))

    def test_lengths_share_one_graph(self, default: Subject) -> None:
        """Dense calls of several lengths: one compilation, the same bits as eager."""
        assert_compilations(default, [drawn(default, tokens) for tokens in LENGTHS], 1)

    def test_lengths_by_default(self, default: Subject) -> None:
        """Without ``dynamic=True`` the second length makes the graph dynamic, and no later one compiles."""
        calls = [drawn(default, tokens) for tokens in LENGTHS]
        needs = sampling.default_needs(calls[0])
        with default.pair.forced():
            compiled = graph.Compiled(calls[0])
            for call in calls[:2]:
                compiled.run(call, needs, dict(sampling.draw_gradients(call)))
            with graph.recompilation_is_an_error():
                for call in calls[2:]:
                    compiled.run(call, needs, dict(sampling.draw_gradients(call)))
        assert compiled.compilations == 2

    def test_ragged_lengths_share_one_graph(self, default: Subject) -> None:
        """T and N vary between ragged calls: one compilation, the same bits as eager."""
        # The first call has no size equal to a number of heads: the tracer takes equal sizes for one.
        layouts = ((0, 20, 20, 60, 70), (0, 0, 65), (0, 1, 2, 3, 9, 128), (0, 40, 41, 90))
        assert_compilations(default, [drawn(default, offsets[-1] + 2, offsets) for offsets in layouts], 1)

    def test_offset_dtypes_in_a_graph(self, default: Subject) -> None:
        """int64 offsets compile as int32 ones do."""
        call = drawn(default, 40, (0, 10, 40))
        wide = call.mapped(lambda _, t: t if t.is_floating_point() else t.long())
        needs, gradients = sampling.default_needs(call), dict(sampling.draw_gradients(call))
        with default.pair.forced():
            assert_same_bits(evaluate(call, needs, gradients), graph.Compiled(wide).run(wide, needs, gradients))

    @pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
    def test_checkpointing(self, subject: Subject, reentrant: bool) -> None:
        """Recomputing the forward in the backward changes no bit."""
        call = drawn(subject, 70)
        needs, gradients = sampling.default_needs(call), dict(sampling.draw_gradients(call))
        eager = subject.run(call, needs, gradients)
        function = graph.checkpointed(call, reentrant=reentrant)
        # Reentrant checkpointing knows .backward() only.
        leaves = {n: t.detach().clone().requires_grad_(n in needs) for n, t in call.tensors.items()}
        with subject.pair.forced():
            outputs = function(**leaves)
            torch.autograd.backward(list(outputs), [gradients[n] for n in eager.outputs])
        assert all(same_bits(x.detach(), eager.outputs[n]) for n, x in zip(eager.outputs, outputs, strict=True))
        found: dict[str, Tensor | None] = {n: leaves[n].grad for n in needs}
        for name, gradient in found.items():
            assert gradient is not None
            assert same_bits(gradient, eager.gradients[name]), name


class CudaGraphs(OnlyKernels):
    """Capture and replay."""

    def test_cuda_graph_replay(self, on_gpu: Subject) -> None:
        """A captured forward replays with offsets refilled in place."""
        call = drawn(on_gpu, 128, (0, 40, 100, 128))
        with on_gpu.pair.forced(), torch.no_grad():
            recorded, outputs = graph.captured(call)
            refilled = variant(small_case(on_gpu.op, "refilled", 128), offsets=(0, 64, 65, 120))
            for name, offsets in sampling.offsets_of(call.declaration, refilled).items():
                call.tensors[name].copy_(torch.tensor(offsets))
            recorded.replay()
            torch.cuda.synchronize()
            fresh = call.op(**call.tensors, **call.options)
        for replayed, expected in zip(outputs, fresh, strict=True):
            assert replayed is not None
            assert torch.equal(replayed, expected)
