"""What the parity suites do not know of DPLR: chunk sizes, promises, what is kept for the backward, RWKV-7's names."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import chunkwise
from chunkwise import chunk_dplr_delta_rule, chunk_rwkv7, errors
from chunkwise.dispatcher import policy, select
from chunkwise.eager import implementations
from chunkwise.ops import OPS
from chunkwise.verifier.facts import Facts
from chunkwise.verifier.rules import centred_exponent_log2, centred_gates_fit
from chunkwise_testing.fakes import installed
from chunkwise_testing.rules import counterexample_problems

TORCH = "torch/dplr_delta_rule/chunkwise"
CENTRED = "fake/dplr_delta_rule/centred"


def inputs(tokens: int = 70) -> dict[str, Tensor]:
    torch.manual_seed(0)
    q, k, x = (torch.nn.functional.normalize(torch.randn(1, tokens, 3, 16), dim=-1) for _ in range(3))
    step, gates = torch.rand(1, tokens, 3, 1), -0.6 * torch.rand(1, tokens, 3, 16)
    return {"q": q, "k": k, "v": torch.randn(1, tokens, 3, 24), "a": -x, "b": step * x, "gk": gates}


def facts(**options: Any) -> Facts:
    tensors, values, _ = OPS["chunk_dplr_delta_rule"].declaration.bind(**inputs(4), **options)
    declaration = OPS["chunk_dplr_delta_rule"].declaration
    return select.request_of(declaration, tensors, values, frozenset({"q"}), policy.ACTIVE).facts


def route(**options: Any) -> str:
    given = inputs()
    given["q"].requires_grad_()
    return str(chunkwise.explain(chunk_dplr_delta_rule, **given, **options).route)


@pytest.mark.parametrize(
    ("options", "chunk_size", "bound"),
    [
        ({}, 16, None),
        ({"safe_gate": True}, 32, -5.0),
        ({"lower_bound": -math.exp(-0.5)}, 64, -math.exp(-0.5)),
        ({"lower_bound": -10.39}, 16, -10.39),
        ({"lower_bound": -1}, 64, -1),
        ({"safe_gate": True, "lower_bound": -0.5}, 64, -0.5),
        ({"safe_gate": True, "lower_bound": -8.0}, 32, -5.0),
        ({"safe_gate": True, "chunk_size": 64}, 64, -5.0),
        ({"chunk_size": 32}, 32, None),
    ],
)
def test_what_a_call_settles(options: dict[str, Any], chunk_size: int, bound: float | None) -> None:
    flags = facts(**options).flags
    assert (flags["chunk_size"], flags["lower_bound"]) == (chunk_size, bound)
    assert f"dplr-wy{chunk_size}@1" in route(**options)


@pytest.mark.parametrize(
    ("chunk_size", "bound", "fits"),
    [
        (16, -5.0, True),
        (32, -5.0, True),
        (64, -5.0, False),
        (64, -math.exp(-0.5), True),
        (16, -10.39, False),
        (16, -9.5, True),
        (32, None, False),
    ],
)
def test_where_centred_exponents_fit(chunk_size: int, bound: float | None, fits: bool) -> None:
    found = facts(chunk_size=chunk_size, lower_bound=bound).with_dtype("q", "bf16")
    assert centred_gates_fit().holds(found) == fits


@pytest.mark.parametrize(("chunk_size", "bound", "fits"), [(32, -5.0, False), (32, -4.3, True), (16, -5.0, True)])
def test_fp32_keeps_its_digits_in_fewer_exponents(chunk_size: int, bound: float, fits: bool) -> None:
    rule, found = centred_gates_fit(), facts(chunk_size=chunk_size, lower_bound=bound)
    assert found.dtype("q") == "fp32"
    assert rule.holds(found) == fits
    assert rule.holds(found.with_dtype("q", "bf16"))
    if not fits:
        assert rule.message(found) == (
            "lower_bound -5 in chunks of 32 reaches 2^123, beyond 2^108, where fp32 keeps its digits"
        )
    assert rule.holds(rule.satisfy(found))


def test_the_exponents_that_overflowed() -> None:
    assert 231 <= centred_exponent_log2(64, -5.0) <= 239


def centred() -> Any:
    return dataclasses.replace(
        implementations.DPLR_DELTA_RULE, name=CENTRED, rank=1, promises=(centred_gates_fit(),), residuals=()
    )


def test_the_promise_rule_has_its_counterexample() -> None:
    for chunk_size in (16, 32, 64):
        assert counterexample_problems(centred(), facts(chunk_size=chunk_size, lower_bound=-0.1)) == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "no lower_bound is promised"),
        ({"safe_gate": True, "chunk_size": 64}, "lower_bound -5 in chunks of 64 reaches 2^238, beyond 2^108"),
        ({"safe_gate": True}, "lower_bound -5 in chunks of 32 reaches 2^123, beyond 2^108, where fp32 keeps"),
        ({"lower_bound": -4}, None),
    ],
)
def test_explain_says_which_runs(options: dict[str, Any], reason: str | None) -> None:
    with installed("fake", [centred()]):
        explanation = chunkwise.explain(chunk_dplr_delta_rule, **inputs(), **options)
        assert explanation.implementations == ((CENTRED,) if reason is None else (TORCH,))
        assert reason is None or f"{CENTRED}  promise: {reason}" in str(explanation)


def test_disable_recompute_keeps_the_states() -> None:
    assert "dplr-states16@1" in route(disable_recompute=True)
    assert "dplr-states64@1" in route(disable_recompute=True, chunk_size=64)
    with chunkwise.prefer(residuals="lean"):
        assert "dplr-wy16@1" in route(disable_recompute=True)


def test_a_named_format_settles_the_chunk_size() -> None:
    with chunkwise.prefer(residuals="dplr-states32@1"):
        assert "dplr-states32@1" in route()
        assert facts().flags["chunk_size"] == 32
        with pytest.raises(ValueError, match=r"dplr-states32@1 are of chunks of 32, but chunk_size = 64"):
            route(chunk_size=64)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"chunk_size": 48}, ValueError, "chunk_size = 48, but one of 16, 32, 64 is expected"),
        ({"chunk_size": 0}, ValueError, "chunk_size = 0"),
        ({"chunk_size": 16.0}, TypeError, "chunk_size = 16.0"),
        ({"chunk_size": True}, TypeError, "chunk_size = True"),
        ({"lower_bound": 0.0}, ValueError, "lower_bound = 0, but a bound below 0 is expected"),
        ({"lower_bound": 5}, ValueError, "lower_bound = 5"),
        ({"safe_gate": 1}, TypeError, "safe_gate = 1"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        chunk_dplr_delta_rule(**inputs(), **options)


def test_chunk_sizes_agree() -> None:
    given = {name: x.requires_grad_() for name, x in inputs().items()}
    expected, _ = chunk_dplr_delta_rule.reference(**{name: x.double() for name, x in given.items()})
    exact = torch.autograd.grad(expected.square().sum(), list(given.values()))
    for chunk_size in (16, 32, 64):
        for keep in (False, True):
            o, _ = chunk_dplr_delta_rule(**given, chunk_size=chunk_size, disable_recompute=keep)
            torch.testing.assert_close(o.double(), expected, rtol=1e-4, atol=1e-5)
            for found, gradient in zip(torch.autograd.grad(o.square().sum(), list(given.values())), exact, strict=True):
                torch.testing.assert_close(found, gradient.float(), rtol=1e-3, atol=1e-4)


def test_a_graph_fixes_the_chunk_size_of_its_format() -> None:
    given = {name: x.requires_grad_() for name, x in inputs().items()}

    def function(chunk_size: int | None) -> Tensor:
        return chunk_dplr_delta_rule(**given, chunk_size=chunk_size, disable_recompute=True)[0].square().sum()

    eager = torch.autograd.grad(function(32), list(given.values()))
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for found, expected in zip(torch.autograd.grad(compiled(32), list(given.values())), eager, strict=True):
        assert torch.equal(found, expected)
    with chunkwise.prefer(residuals="dplr-states32@1"):
        loss = compiled(None)
    # The backward runs where nothing is preferred any more, on what the forward left.
    for found, expected in zip(torch.autograd.grad(loss, list(given.values())), eager, strict=True):
        assert torch.equal(found, expected)


# --- RWKV-7 ----------------------------------------------------------------------------------------------------------


def test_rwkv7_is_dplr_under_its_own_names() -> None:
    given = inputs()
    r, k, v, a, b, w = given.values()
    state = torch.randn(1, 3, 24, 16)
    options = {"initial_state": state, "output_final_state": True, "state_v_first": True}
    mine = chunk_rwkv7(r, w, k, v, a, b, **options)
    theirs = chunk_dplr_delta_rule(**given, scale=1.0, lower_bound=-math.exp(-0.5), **options)
    assert all(torch.equal(x, y) for x, y in zip(mine, theirs, strict=True))
    expected, _ = chunk_dplr_delta_rule.reference(**{n: x.double() for n, x in given.items()}, scale=1.0, **options)
    torch.testing.assert_close(mine[0].double(), expected, rtol=1e-4, atol=1e-5)


def test_rwkv7_has_the_options_of_dplr() -> None:
    own, other = (inspect.signature(f).parameters for f in (chunk_rwkv7, chunk_dplr_delta_rule))
    assert list(own)[:6] == ["r", "w", "k", "v", "a", "b"]
    assert list(own)[6:] == list(other)[6:]
    differing = {name for name in list(own)[6:] if own[name].default != other[name].default}
    assert differing == {"scale", "lower_bound"}
    assert own["lower_bound"].default == -math.exp(-0.5)
    assert all(own[name].kind == other[name].kind for name in list(own)[6:])


def test_rwkv7_promises_its_own_bound_and_none_promises_nothing() -> None:
    r, k, v, a, b, w = inputs().values()
    w = w.clone()
    w[0, 5, 1, 2] = -0.7
    with chunkwise.prefer(check_values=True):
        with pytest.raises(ValueError, match=r"gk\[0, 5, 1, 2\] = -0.7, but the contract is gk >= -0.606531"):
            chunk_rwkv7(r, w, k, v, a, b)
        chunk_rwkv7(r, w, k, v, a, b, lower_bound=None)
    with pytest.raises(errors.UnknownNameError, match="'nobody'"):
        chunk_rwkv7(r, w, k, v, a, b, backend="nobody")
