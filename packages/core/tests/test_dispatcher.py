"""The dispatcher: which route a call takes, what overrides it, what a failure does to it."""

import contextlib
import os
import subprocess
import sys
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch

import chunkwise
from chunkwise import chunk_gated_delta_rule as gdn
from chunkwise import errors
from chunkwise.dispatcher import failure, policy
from chunkwise.dispatcher.cache import ROUTES, RouteCache
from chunkwise.dispatcher.registry import Backend, Finding, Need, Registry, registry
from chunkwise.verifier import rules
from chunkwise.verifier.evidence import Row
from chunkwise.verifier.facts import Facts
from chunkwise.verifier.refusal import DoesNotFit
from chunkwise_testing.fakes import installed

TORCH = "torch/gated_delta_rule/chunkwise"
FAST = "fake/gated_delta_rule/fast"


def in_a_new_process(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}
    )
    return done.returncode, done.stdout + done.stderr


# --- choice ----------------------------------------------------------------------------------------------------


def test_lowest_rank_wins(inputs, variant):
    with installed("fake", [variant(FAST, rank=1)]):
        assert chunkwise.explain(gdn, **inputs).implementations == (FAST,)
    assert chunkwise.explain(gdn, **inputs).implementations == (TORCH,)


def test_a_forward_without_backward_pairs_with_another_of_its_format(inputs, variant):
    inputs["q"].requires_grad_()
    with installed("fake", [variant(FAST, rank=1, backward=None)]):
        explanation = chunkwise.explain(gdn, **inputs)
        assert explanation.implementations == (FAST, TORCH)
        assert gdn(**inputs)[0].requires_grad


def test_a_forward_that_no_backward_fits_is_not_chosen_when_gradients_are_needed(inputs, variant):
    inputs["q"].requires_grad_()
    with installed("fake", [variant(FAST, rank=1, backward=None, residuals=())]):
        assert chunkwise.explain(gdn, **inputs).implementations == (TORCH,)
        with torch.no_grad():
            assert chunkwise.explain(gdn, **inputs).implementations == (FAST,)


def test_residual_format_follows_the_override(inputs):
    inputs["q"].requires_grad_()
    assert "gdn-wy64@2" in chunkwise.explain(gdn, **inputs).route
    with chunkwise.prefer(residuals="full"):
        assert "gdn-states64@1" in chunkwise.explain(gdn, **inputs).route
    with chunkwise.prefer(residuals="fat"), pytest.raises(errors.UnknownNameError, match=r"lean.*full"):
        gdn(**inputs)


def test_hard_refusals_are_all_listed(inputs, variant):
    refusing = variant(FAST, rank=1, requires=(rules.one_of("K", 64, 128), rules.dtype("q", "bf16")))
    with installed("fake", [refusing]):
        text = str(chunkwise.explain(gdn, **inputs))
        assert f"{FAST}  unsupported: K is 8, expected one of 64, 128" in text
        assert f"{FAST}  unsupported: q is fp32, expected bf16" in text
        assert f"route: {TORCH}" in text


def test_a_schedule_that_does_not_fit(inputs, variant):
    with installed("fake", [variant(FAST, rank=1, schedule=lambda facts: DoesNotFit(300_000, 101_376))]):
        assert "does not fit: needs 300000 bytes of shared memory, the device has 101376" in str(
            chunkwise.explain(gdn, **inputs)
        )


def test_an_exception_in_a_rule_is_a_bug_and_raises(inputs, variant):
    table = [variant(FAST, rank=1, requires=(rules.one_of("no such axis", 1),))]
    with installed("fake", table), pytest.raises(KeyError):
        gdn(**inputs)


def row(against):
    facts = {"sizes": {"T": 5}}
    return Row("small-grid", FAST, against, "H200", "9.0", 132, facts, 20.0, 10.0, {}, "2026-01-01", "0" * 7)


def slower(against):
    region = rules.Region(
        reads=frozenset({"T"}),
        inside=lambda f: f.size("T") < 100,
        enter=lambda f: f.with_size("T", 99),
        leave=lambda f: f.with_size("T", 100),
    )
    return rules.measured(row(against), region)


def test_slower_yields_to_the_rival_and_to_the_users_word(inputs, variant):
    with installed("fake", [variant(FAST, rank=1, slower=(slower(TORCH),))]):
        explanation = chunkwise.explain(gdn, **inputs)
        assert explanation.implementations == (TORCH,)
        assert "slower: a measured rival wins here: 20 us against 10 us" in str(explanation)
        assert chunkwise.explain(gdn, **inputs, backend=FAST).implementations == (FAST,)


def test_slower_than_a_rival_that_is_not_there_does_not_count(inputs, variant):
    with installed("fake", [variant(FAST, rank=1, slower=(slower("triton/gated_delta_rule/split"),))]):
        assert chunkwise.explain(gdn, **inputs).implementations == (FAST,)


# --- overrides -------------------------------------------------------------------------------------------------


def test_overrides_strongest_first(inputs, variant):
    slow = variant("fake/gated_delta_rule/slow", rank=9999)
    with installed("fake", [slow]):
        assert chunkwise.explain(gdn, **inputs).implementations == (TORCH,)
        with chunkwise.prefer("fake"):
            assert chunkwise.explain(gdn, **inputs).implementations == (slow.name,)
            assert chunkwise.explain(gdn, **inputs, backend="torch").implementations == (TORCH,)
            with chunkwise.prefer(TORCH):
                assert chunkwise.explain(gdn, **inputs).implementations == (TORCH,)
        assert chunkwise.explain(gdn, **inputs).implementations == (TORCH,)


def test_a_pair_can_be_named(inputs, variant):
    inputs["q"].requires_grad_()
    with installed("fake", [variant(FAST)]):
        pair = f"{FAST}+{TORCH}"
        assert chunkwise.explain(gdn, **inputs, backend=pair).implementations == (FAST, TORCH)


def test_an_unknown_name_lists_the_known_ones(inputs):
    with pytest.raises(errors.UnknownNameError, match=rf"backend= names 'tritn'.*torch.*{TORCH}"):
        gdn(**inputs, backend="tritn")
    with pytest.raises(errors.UnknownNameError, match="prefer names 'tritn'"), chunkwise.prefer("tritn"):
        pass


def test_a_forced_backend_that_cannot_run_the_call_raises_every_reason(inputs, variant):
    refusing = variant(FAST, rank=1, requires=(rules.one_of("K", 64), rules.size_multiple_of("V", 16)))
    with installed("fake", [refusing]), pytest.raises(chunkwise.NoImplementationError) as caught:
        gdn(**inputs, backend="fake")
    assert "K is 8, expected one of 64" in str(caught.value)
    assert "V is 12, expected a multiple of 16" in str(caught.value)
    assert "backend= chose fake" in str(caught.value)


def test_a_backend_that_lacks_something_says_what(inputs, variant):
    need = Need("a toaster", lambda: Finding(False, "found a kettle", "buy one"))
    with installed("fake", [variant(FAST, rank=1)], needs=[need]):
        explanation = chunkwise.explain(gdn, **inputs)
        assert explanation.implementations == (TORCH,)
        assert "lacks a toaster: found a kettle; buy one" in str(explanation)
        with pytest.raises(chunkwise.NoImplementationError, match="a toaster"):
            gdn(**inputs, backend="fake")


_CALL = (
    "import torch, chunkwise; a, b = torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1); "
    "print(chunkwise.explain(chunkwise.chunk_gated_delta_rule, a, a, a, b, b)); "
    "chunkwise.chunk_gated_delta_rule(a, a, a, b + float(__import__('os').environ.get('GATE', '0')), b)"
)


def test_environment_backend():
    code, output = in_a_new_process(_CALL, CHUNKWISE_BACKEND="torch")
    assert code == 0
    assert "forced: CHUNKWISE_BACKEND torch" in output
    code, output = in_a_new_process(_CALL, CHUNKWISE_BACKEND="tritn")
    assert code != 0
    assert "CHUNKWISE_BACKEND names 'tritn'" in output and "known backends:" in output


def test_environment_check():
    assert in_a_new_process(_CALL, GATE="0.5")[0] == 0
    code, output = in_a_new_process(_CALL, GATE="0.5", CHUNKWISE_CHECK="values")
    assert code != 0 and "the contract is g <= 0" in output
    code, output = in_a_new_process(_CALL, CHUNKWISE_CHECK="everything")
    assert code != 0 and "CHUNKWISE_CHECK = 'everything' is not known" in output


def test_environment_log():
    assert f"{TORCH} (forward)" in in_a_new_process(_CALL.replace("print", "str"), CHUNKWISE_LOG="routes")[1]
    assert TORCH not in in_a_new_process(_CALL.replace("print", "str"))[1]


# --- the registry ------------------------------------------------------------------------------------------------


class _Entry:
    def __init__(self, name, load):
        self.name, self.load = name, load


def _raise(error):
    raise error


def test_a_backend_that_fails_to_load_is_kept_and_quoted_and_others_go_on():
    broken = _Entry("broken", lambda: _raise(ImportError("libfoo.so.1 is missing")))
    good = _Entry("good", lambda: Backend("good", "chunkwise", ">=0"))
    found = Registry([broken, good])
    assert list(found.loaded) == ["good"]
    assert str(found.failures["broken"]) == "failed to load: ImportError: libfoo.so.1 is missing"


def test_a_backend_for_another_core_is_refused():
    found = Registry([_Entry("old", lambda: Backend("old", "chunkwise", ">=7,<8"))])
    assert "it was built for chunkwise >=7,<8" in str(found.failures["old"])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"op": "chunk_nothing"}, "unknown op chunk_nothing"),
        ({"residuals": ("gdn-wy64@9",)}, "unknown residual formats: ['gdn-wy64@9']"),
        ({"requires": (rules.one_of("K", 64), rules.one_of("K", 64))}, "two rules of one name"),
        ({"name": "other/x/y"}, "must be called fake/..."),
    ],
)
def test_a_backend_loads_all_or_nothing(variant, changes, problem):
    good, bad = variant(FAST), variant(**{"name": "fake/gated_delta_rule/bad", **changes})
    with pytest.raises(errors.BackendBug) as caught, installed("fake", [good, bad]):
        pass
    assert problem in str(caught.value)
    assert "fake" not in registry().loaded


def test_importing_core_imports_no_backend_and_starts_no_cuda():
    code = (
        "import sys, chunkwise, torch; "
        "bad = [m for m in sys.modules if m.split('.')[0] in ('triton', 'tilelang', 'chunkwise_triton')]; "
        "print(bad, torch.cuda.is_initialized(), [m for m in sys.modules if m.startswith('chunkwise.')])"
    )
    assert in_a_new_process(code)[1].split("\n")[0] == "[] False []"


# --- cache -------------------------------------------------------------------------------------------------------


def test_one_shape_with_other_strides_is_another_key(inputs):
    ROUTES.clear()
    gdn(**inputs)
    assert len(ROUTES) == 1
    gdn(**inputs)
    assert len(ROUTES) == 1
    inputs["q"] = inputs["q"].transpose(1, 2).contiguous().transpose(1, 2)
    gdn(**inputs)
    assert len(ROUTES) == 2


def test_the_cache_is_bounded():
    cache = RouteCache(limit=8)
    for i in range(100):
        cache.put(i, None)
        assert len(cache) <= 8
        assert i in cache


def test_several_threads_make_the_first_call_at_once(inputs):
    ROUTES.clear()
    expected, found, barrier = gdn(**inputs)[0], [], threading.Barrier(8)
    ROUTES.clear()

    def work():
        barrier.wait()
        found.append(gdn(**inputs)[0])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(torch.equal(o, expected) for o in found)


# --- failures ------------------------------------------------------------------------------------------------------


def failing(error):
    def run(*arguments):
        raise error

    return run


def fails_to_compile(variant, **changes):
    return variant(FAST, rank=1, **changes)


@pytest.mark.parametrize("where", ["forward", "compile"])
def test_a_compile_failure_quarantines_warns_once_and_the_next_runs(inputs, variant, where):
    broken = failing(errors.CompileFailure("ptxas said no"))
    expected = gdn(**inputs)[0]
    with installed("fake", [variant(FAST, rank=1, **{where: "fake_fake:broken"})], functions={"broken": broken}):
        with pytest.warns(RuntimeWarning, match=f"{FAST} failed to compile.*ptxas said no"):
            assert torch.equal(gdn(**inputs)[0], expected)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(gdn(**inputs)[0], expected)
            assert torch.equal(gdn(**{**inputs, "scale": 0.5})[0] * 0 + expected, expected)
        assert "quarantined, it failed to compile in this process: CompileFailure: ptxas said no" in str(
            chunkwise.explain(gdn, **inputs)
        )


def test_the_backward_is_compiled_before_the_forward_runs(inputs, variant):
    asked = []
    hook = {"record": lambda schedule, facts, parts: asked.append((parts, facts.residuals))}
    with installed("fake", [variant(FAST, rank=1, compile="fake_fake:record")], functions=hook):
        gdn(**inputs)
        inputs["q"].requires_grad_()
        gdn(**inputs)
        with chunkwise.prefer(residuals="full"):
            gdn(**inputs)
    both = ("forward", "backward")
    assert asked == [(("forward",), None), (both, "gdn-wy64@2"), (both, "gdn-states64@1")]


def test_a_forced_implementation_that_fails_to_compile_raises(inputs, variant):
    broken = failing(errors.CompileFailure("ptxas said no"))
    table = [variant(FAST, rank=1, forward="fake_fake:broken")]
    with installed("fake", table, functions={"broken": broken}), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(errors.CompileFailure):
            gdn(**inputs, backend="fake")


def test_any_other_error_raises_and_quarantines_nothing(inputs, variant):
    broken = failing(RuntimeError("an illegal memory access was encountered"))
    table = [variant(FAST, rank=1, forward="fake_fake:broken")]
    with installed("fake", table, functions={"broken": broken}):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="illegal memory access"):
                gdn(**inputs)


def test_a_compile_failure_in_a_backward_raises(inputs, variant):
    inputs["q"].requires_grad_()
    broken = failing(errors.CompileFailure("ptxas said no"))
    table = [variant(FAST, rank=1, backward="fake_fake:broken")]
    with installed("fake", table, functions={"broken": broken}), pytest.raises(errors.CompileFailure):
        gdn(**inputs)[0].sum().backward()


def test_a_compile_failure_in_a_graph_raises(inputs, variant):
    broken = failing(errors.CompileFailure("ptxas said no"))
    table = [variant(FAST, rank=1, forward="fake_fake:broken")]
    with installed("fake", table, functions={"broken": broken}), pytest.raises(errors.CompileFailure):
        torch.compile(gdn, backend="aot_eager", fullgraph=True)(**inputs)


def test_wrong_sets_of_gradients_and_residuals_are_backend_bugs(inputs, variant):
    inputs["q"].requires_grad_()
    functions = {"forward": lambda *a: ((inputs["v"].clone(), None), {}), "backward": lambda *a: {"k": inputs["k"]}}
    table = [variant(FAST, rank=1, forward="fake_fake:forward")]
    with installed("fake", table, functions=functions), pytest.raises(errors.BackendBug, match="g_cumsum, inverse"):
        gdn(**inputs)
    table = [variant(FAST, rank=1, backward="fake_fake:backward")]
    with installed("fake", table, functions=functions), pytest.raises(errors.BackendBug, match="exactly q were"):
        gdn(**inputs)[0].sum().backward()


def test_kernels_are_compiled_for_the_device_of_the_tensors(monkeypatch):
    """Not for the current one: with two GPUs of different kinds it would be another architecture."""
    current, seen = [0], []

    @contextlib.contextmanager
    def device(index):
        before, current[0] = current[0], index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(failure, "compile_kernels", lambda *work: seen.append(current[0]))
    monkeypatch.setattr(failure, "_compiles", lambda route: [(None, None, ("forward",))])
    for index in (1, None):
        assert failure.prepare(SimpleNamespace(device_index=index, forced=False, format=None), Facts("op"))
    assert seen == [1, 0]
    assert current == [0]


def test_policies_are_interned():
    with chunkwise.prefer("torch"):
        first = policy.ACTIVE
    with chunkwise.prefer("torch"):
        assert policy.ACTIVE is first
