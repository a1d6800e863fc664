"""Attention with sinks: who sees whom, the sink's place in the denominator, keys that are never read."""
# ruff: noqa: S101

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from chunkwise.ops import OPS
from chunkwise.protocol.cases import Case
from chunkwise_testing import graph, sampling
from chunkwise_testing.oracle import Result, evaluate, same_bits
from chunkwise_testing.sampling import Call, variant
from chunkwise_testing.study import Sample, study_of
from chunkwise_testing.suite.base import Subject, Suite, assert_finite, assert_same_bits, heads, small_case

ROWS = ((1, 1), (1, 70), (3, 67), (64, 64), (65, 129), (129, 65), (70, 1))
WINDOWS: tuple[dict[str, Any], ...] = (
    {"causal": False},
    {},
    *({"window_size": window} for window in (1, 2, 16, 64, 65, 1000)),
)
INFINITY = float("inf")


def attention_case(op: str, name: str, queries: int, keys: int, **options: Any) -> Case:
    """A small case with so many rows of each kind."""
    return variant(small_case(op, name, queries), sizes={"S": keys}, options=options)


def with_sinks(call: Call, *values: float) -> Call:
    """The call with sinks that repeat these values."""
    sinks = call.tensors["sinks"]
    return call.replaced({"sinks": sinks.new_tensor(values).repeat(len(sinks))[: len(sinks)]})


def seen_counts(queries: int, keys: int, window: int | None) -> Tensor:
    """How many keys each query sees, `[T]`, counted one by one."""
    ends = [i + keys - queries for i in range(queries)]
    return torch.tensor([sum(1 for j in range(keys) if j <= p and j > p - (window or keys)) for p in ends])


class Attention(Suite):
    """Windows, alignment, groups of heads, the sink's limits."""

    concerns = "sinks"

    @pytest.mark.parametrize("options", WINDOWS, ids=lambda o: "-".join(f"{n}{x}" for n, x in o.items()) or "causal")
    @pytest.mark.parametrize("rows", ROWS, ids=lambda r: f"t{r[0]}-s{r[1]}")
    def test_who_sees_whom(self, subject: Subject, rows: tuple[int, int], options: dict[str, Any]) -> None:
        """T and S apart in both directions, around a block's edge, with windows of every kind."""
        subject.check_sample(Sample(subject.op, attention_case(subject.op, "seen", *rows, **options)))

    @pytest.mark.parametrize("plan", ["bf16", "fp16"])
    @pytest.mark.parametrize("options", [{}, {"window_size": 128}], ids=["causal", "window"])
    def test_long_windows(self, subject: Subject, options: dict[str, Any], plan: str) -> None:
        """T = 250, whose row strides suit no bulk copy, and a window of two blocks; eight query heads a key head."""
        case = attention_case(subject.op, "long", 250, 331, **options)
        subject.check_sample(Sample(subject.op, variant(case, sizes=heads(2, 16)), plan))

    @pytest.mark.parametrize("window", [None, 20])
    def test_equal_logits(self, subject: Subject, window: int | None) -> None:
        """Logits 0, values 1: ``o = n / (n + e^sink)``, ``lse = log(n + e^sink)`` with n keys in sight."""
        case = attention_case(subject.op, "equal-logits", 70, 50, window_size=window)
        call = sampling.draw(OPS[subject.op], case, device=subject.torch_device)
        call = call.replaced({"q": torch.zeros_like(call.tensors["q"]), "v": torch.ones_like(call.tensors["v"])})
        call = with_sinks(call, -3.0, 0.0, 2.5)
        outputs = subject.run(call).outputs
        n = seen_counts(70, 50, window).double()[None, :, None]
        other = call.tensors["sinks"].cpu().double().exp()
        expected = {"o": (n / (n + other))[..., None].expand(outputs["o"].shape), "lse": (n + other).log().mT}
        for name, tensor in expected.items():
            torch.testing.assert_close(outputs[name].cpu().double(), tensor, rtol=2e-6, atol=2e-6)

    @pytest.mark.parametrize("plan", ["bf16-mixed", "fp32"])
    def test_large_sinks(self, subject: Subject, plan: str) -> None:
        """Sinks of +60, -60 and beyond: finite, within budget, dying away to nothing or to plain attention."""
        call = sampling.draw(OPS[subject.op], small_case(subject.op, "large-sinks"), sampling.PLANS[plan])
        study = study_of(with_sinks(call, 60.0, -60.0, 200.0))
        result = subject.run_study(study)
        assert_finite(result)
        study.check(result)

    def test_no_sink_is_plain_attention(self, subject: Subject) -> None:
        """A sink of -inf: what torch's own attention gives in fp64, its gradients too; the sink's are zero."""
        call = sampling.draw(OPS[subject.op], attention_case(subject.op, "no-sink", 70, 70))
        call = with_sinks(call, -INFINITY)
        gradients = sampling.draw_gradients(call, ["o"])
        result = subject.run(
            call.mapped(lambda _, t: t.to(subject.torch_device)),
            sampling.default_needs(call),
            {n: g.to(subject.torch_device) for n, g in gradients.items()},
        )
        plain = evaluate(
            call.mapped(lambda _, t: t.double()).without("sinks"),
            {"q", "k", "v"},
            {n: g.double() for n, g in gradients.items()},
            plain_attention,
        )
        assert not bool(result.gradients["sinks"].any())
        for name, tensor in plain.quantities().items():
            torch.testing.assert_close(result.quantities()[name].cpu().double(), tensor, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("sink", [1.5, -INFINITY])
    @pytest.mark.parametrize("keys", [0, 20])
    def test_a_query_that_sees_no_key(self, subject: Subject, keys: int, sink: float) -> None:
        """o = 0 and lse = sink; the gradient of lse reaches the sink alone, and nothing where the sink is -inf."""
        call = with_sinks(sampling.draw(OPS[subject.op], attention_case(subject.op, "blind", 90, keys)), sink)
        blind = 90 - keys
        gradients = sampling.draw_gradients(call)
        only_blind = {n: g.clone() for n, g in gradients.items()}
        only_blind["o"][:, blind:] = 0.0
        only_blind["lse"][..., blind:] = 0.0
        own, needs = call.mapped(lambda _, t: t.to(subject.torch_device)), sampling.default_needs(call)
        result = subject.run(own, needs, {n: g.to(subject.torch_device) for n, g in only_blind.items()})
        assert not bool(result.outputs["o"][:, :blind].any())
        assert bool((result.outputs["lse"][..., :blind] == sink).all())
        assert not any(bool(result.gradients[name].any()) for name in ("q", "k", "v"))
        expected = only_blind["lse"].sum((0, 2)) * (sink > -INFINITY)
        torch.testing.assert_close(result.gradients["sinks"].cpu(), expected, rtol=1e-5, atol=1e-5)
        everything = subject.run(own, needs, {n: g.to(subject.torch_device) for n, g in gradients.items()})
        assert_finite(Result({"o": everything.outputs["o"]}, everything.gradients))

    @pytest.mark.parametrize("plan", ["bf16", "fp32"])
    @pytest.mark.parametrize("rows", [(70, 200), (1, 150), (129, 300)], ids=lambda r: f"t{r[0]}-s{r[1]}")
    def test_keys_outside_every_window_hold_nan(self, subject: Subject, rows: tuple[int, int], plan: str) -> None:
        """Keys in front of the first query's window are in no product, forward or backward."""
        queries, keys = rows
        study = Sample(subject.op, attention_case(subject.op, "outside", *rows, window_size=37), plan).study()
        call, gradients = study.on(subject.torch_device)
        outside = keys - queries - 36
        poisoned = {name: call.tensors[name].clone() for name in ("k", "v")}
        for tensor in poisoned.values():
            tensor[:, :outside] = float("nan")
        result = subject.run(call.replaced(poisoned), study.needs, gradients)
        study.check(result)
        assert_finite(result)
        assert_same_bits(subject.run(call, study.needs, gradients), result)
        assert not any(bool(result.gradients[name][:, :outside].any()) for name in poisoned)

    def test_keys_of_other_sequences_hold_nan(self, subject: Subject) -> None:
        """A sequence without queries, and keys in front of a window, side by side with what is read."""
        case = variant(attention_case(subject.op, "apart", 40, 200, window_size=16), offsets=(0, 20, 20, 40))
        further = OPS[subject.op].declaration.promises.offsets[1].name
        case = dataclasses.replace(case, more_offsets={further: (0, 70, 130, 200)})
        study = Sample(subject.op, case).study()
        own, gradients = study.on(subject.torch_device)
        poisoned = {name: own.tensors[name].clone() for name in ("k", "v")}
        for tensor in poisoned.values():
            for unread in (slice(0, 35), slice(70, 130), slice(130, 165)):
                tensor[:, unread] = float("nan")
        result = subject.run(own.replaced(poisoned), study.needs, gradients)
        study.check(result)
        assert_finite(result)

    @pytest.mark.parametrize("cuts", [(1,), (2, 3), (63, 64, 65), (69,)], ids=str)
    @pytest.mark.parametrize("window", [None, 30])
    def test_queries_in_pieces(self, subject: Subject, window: int | None, cuts: Sequence[int]) -> None:
        """Queries cut anywhere, each piece with the keys up to its end (and in its window): one run's values."""
        study = Sample(subject.op, attention_case(subject.op, "pieces", 70, 90, window_size=window)).study()
        call, gradients = study.on(subject.torch_device)
        with subject.pair.forced():
            study.check(evaluate(call, study.needs, gradients, query_pieces(call, cuts, window)))

    def test_a_window_over_all_keys_is_none(self, subject: Subject) -> None:
        """The same bits."""
        study = Sample(subject.op, attention_case(subject.op, "wide-window", 70, 90)).study()
        call, gradients = study.on(subject.torch_device)
        wide = call.replaced(options={"window_size": 90})
        study.check(subject.run(wide, study.needs, gradients))
        study.check(subject.run(call, study.needs, gradients))

    def test_windows_in_a_graph(self, default: Subject) -> None:
        """A window that is an argument of a compiled function, static at first and varied then: bits as in eager."""
        call = sampling.draw(OPS[default.op], small_case(default.op, "windows"), device=default.torch_device)
        needs, gradients = sampling.default_needs(call), dict(sampling.draw_gradients(call))

        def function(window_size: int | None, tensors: dict[str, Tensor]) -> Any:
            return call.op(**tensors, window_size=window_size, return_lse=True)

        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend=graph.BACKEND)
        with default.pair.forced():
            for window in (9, 10, 33, None):
                own = call.replaced(options={"window_size": window})
                eager = evaluate(own, needs, gradients)
                traced = evaluate(own, needs, gradients, lambda window_size, return_lse, **t: compiled(window_size, t))
                assert_same_bits(eager, traced)

    def test_lse_only_where_asked_for(self, subject: Subject) -> None:
        """``o`` alone is no tuple, and has the same bits; its gradients too."""
        study = Sample(subject.op, small_case(subject.op, "bare"), loss=("o",)).study()
        call, gradients = study.on(subject.torch_device)
        bare = call.replaced(options={"return_lse": False})
        with subject.pair.forced():
            assert isinstance(call.op(**bare.tensors, **bare.options), Tensor)
        with_lse = subject.run(call, study.needs, gradients)
        without = subject.run(bare, study.needs, {"o": gradients["o"]})
        assert without.outputs.keys() == {"o"}
        assert same_bits(with_lse.outputs["o"], without.outputs["o"])
        assert_same_bits(Result({}, with_lse.gradients), Result({}, without.gradients))

    def test_outputs_do_not_share_memory_with_what_is_saved(self, subject: Subject) -> None:
        """lse may be changed in place before the backward; so may a clone of o, and changing o itself raises."""
        study = Sample(subject.op, small_case(subject.op, "in-place"), loss=("o",)).study()
        call, gradients = study.on(subject.torch_device)
        expected = subject.run(call, study.needs, gradients)
        leaves = {n: t.clone().requires_grad_(n in study.needs) for n, t in call.tensors.items()}
        with subject.pair.forced():
            o, lse = call.op(**leaves, **call.options)
            lse.detach().add_(1.0)
            torch.autograd.backward(o, gradients["o"])
            again, _ = call.op(**leaves, **call.options)
            again.mul_(2.0)
            with pytest.raises(RuntimeError, match="inplace operation"):
                torch.autograd.backward(again, gradients["o"])
        found = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        assert_same_bits(Result({}, found), Result({}, expected.gradients))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=["bf16", "fp16", "fp64"])
    def test_sinks_of_any_float_dtype(self, subject: Subject, dtype: torch.dtype) -> None:
        """Widened to fp32; their gradient comes back in their own dtype."""
        study = Sample(subject.op, small_case(subject.op, "sink-dtype")).study()
        call, gradients = study.on(subject.torch_device)
        sinks = call.tensors["sinks"].to(dtype)
        narrow = subject.run(call.replaced({"sinks": sinks}), study.needs, gradients)
        wide = subject.run(call.replaced({"sinks": sinks.float()}), study.needs, gradients)
        assert narrow.gradients["sinks"].dtype == dtype
        for name, tensor in wide.quantities().items():
            expected = tensor.to(dtype) if name == "d_sinks" else tensor
            assert same_bits(narrow.quantities()[name], expected), name

    @pytest.mark.parametrize(
        ("options", "kind", "message"),
        [
            ({"window_size": (127, 0)}, TypeError, "give window_size=128"),
            ({"window_size": (-1, 0)}, TypeError, "give window_size=None"),
            ({"window_size": [31, 31]}, TypeError, "give window_size=left + 1"),
            ({"window_size": 0}, ValueError, "at least 1"),
            ({"window_size": 8, "causal": False}, ValueError, "give causal=True"),
            ({"window_size": True}, TypeError, "int or None is expected"),
            ({"window_size": 8.0}, TypeError, "int or None is expected"),
        ],
        ids=["pair", "pair-without-end", "pair-both-ways", "zero", "not-causal", "bool", "float"],
    )
    def test_windows_that_are_refused(
        self, subject: Subject, options: dict[str, Any], kind: type[Exception], message: str
    ) -> None:
        """With what is expected in their place."""
        call = sampling.draw(OPS[subject.op], small_case(subject.op, "refused", 9), device=subject.torch_device)
        with pytest.raises(kind, match=re.escape(message)):
            subject.run(call.replaced(options=options))

    def test_offsets_of_one_side_are_refused(self, subject: Subject) -> None:
        """Queries and keys are cut together."""
        case = variant(small_case(subject.op, "one-side", 20), offsets=(0, 5, 20))
        call = sampling.draw(OPS[subject.op], case, device=subject.torch_device)
        names = [offsets.name for offsets in call.declaration.promises.offsets]
        for missing, given in (names, names[::-1]):
            with pytest.raises(ValueError, match=f"{given} was given without {missing}"):
                subject.run(call.without(missing))

    def test_values_check_lets_minus_infinity_pass(self, subject: Subject) -> None:
        """A sink of -inf means none; NaN and +inf are outside the contract."""
        import chunkwise

        call = sampling.draw(OPS[subject.op], small_case(subject.op, "checked", 9), device=subject.torch_device)
        with chunkwise.prefer(check_values=True):
            subject.run(with_sinks(call, -INFINITY, 0.0))
            for bad in (INFINITY, float("nan")):
                with pytest.raises(ValueError, match=r"sinks\[1\] = .*finite or -inf"):
                    subject.run(with_sinks(call, 0.0, bad))


def plain_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Causal attention of equally many queries and keys, and its log-sum-exp, from torch."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return o.transpose(1, 2), scores.masked_fill(future, -torch.inf).logsumexp(-1)


def query_pieces(call: Call, cuts: Sequence[int], window: int | None) -> Any:
    """A function like the op that runs the queries between the cuts apart, each with the keys that it may see."""
    rows, keys = call.tensors["q"].shape[1], call.tensors["k"].shape[1]

    def function(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, **options: Any) -> tuple[Tensor, ...]:
        pieces = []
        for start, end in pairwise((0, *cuts, rows)):
            last = end + keys - rows
            first = 0 if window is None else max(0, last - (end - start) - window + 1)
            piece = call.op(q[:, start:end], k[:, first:last], v[:, first:last], sinks, **options)
            pieces.append(piece)
        o, lse = zip(*pieces, strict=True)
        return torch.cat(o, 1), torch.cat(lse, 2)

    return function
