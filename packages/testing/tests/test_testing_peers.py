"""Adapters of peers: found by name, imported when asked for, with a reason where they cannot."""

import importlib.machinery
import os
import sys
import types

import pytest

from chunkwise.ops import OPS
from chunkwise.verifier.device import CPU, FAKE_DEVICES
from chunkwise_testing.peers import PEERS, Adapter, Peer, PeerError, find
from chunkwise_testing.sampling import PLANS, variant
from chunkwise_testing.scorer.inputs import BOTH, FORWARD, facts_of_case
from chunkwise_testing.scorer.sides import theirs

OP = "chunk_gated_delta_rule"
BENCHMARK = OPS[OP].declaration.promises.benchmarks[0]


@pytest.fixture
def library(monkeypatch):
    """A module ``fake_peer`` that can be found and imported."""
    module = types.ModuleType("fake_peer")
    module.__spec__ = importlib.machinery.ModuleSpec("fake_peer", None)
    module.function = lambda **arguments: arguments
    monkeypatch.setitem(sys.modules, "fake_peer", module)
    return module


def peer(**changes):
    adapter = Adapter(OP, changes.pop("function", "fake_peer:function"), ("q", "k", "v", "g", "beta", "scale"))
    return Peer("fake-peer", "fake_peer", (adapter,), **changes)


def reason(name, case=BENCHMARK, plan="bf16-mixed", device="H200", mode=BOTH):
    loaded = types.SimpleNamespace(peer=PEERS[name], adapter=PEERS[name].adapters[0], function=None)
    return theirs(OPS[OP], loaded).unsupported(facts_of_case(OPS[OP], case, PLANS[plan], FAKE_DEVICES[device], mode))


def test_unknown_peers_are_named_with_the_known_ones():
    assert [p.name for p in find(["flash-qla", "fla-core", "flash-qla"], PEERS)] == ["flash-qla", "fla-core"]
    with pytest.raises(PeerError, match=r"flash-attn.*known peers: fla-core, flash-qla"):
        find(["flash-attn"], PEERS)


@pytest.mark.parametrize("name", ["fla-core", "flash-qla"])
def test_missing_peer_names_its_pip_package(monkeypatch, name):
    monkeypatch.setattr("chunkwise_testing.peers.adapter.probes.installed", lambda module: False)
    with pytest.raises(PeerError, match=f"module {PEERS[name].module} is not installed; pip install '{name}"):
        PEERS[name].load(OP)


def test_peers_are_not_imported_before_they_are_asked_for():
    assert not {"fla", "flash_qla"} & set(sys.modules)


def test_a_peer_is_loaded_with_its_environment(library, monkeypatch):
    monkeypatch.setenv("FAKE_KEPT", "the user's")
    monkeypatch.setenv("FAKE_SET", "")
    monkeypatch.delenv("FAKE_SET")
    times = iter([1.0, 3.5])
    made = peer(environment={"FAKE_SET": "1", "FAKE_KEPT": "ours"})
    assert made.adapter_for(OP).op == OP
    assert "FAKE_SET" not in os.environ
    loaded = made.load(OP, lambda: next(times))
    assert loaded.function is library.function
    assert loaded.import_s == pytest.approx(2.5)
    assert (os.environ.pop("FAKE_SET"), os.environ["FAKE_KEPT"]) == ("1", "the user's")
    assert str(made) == "of unknown version FAKE_SET=1 FAKE_KEPT=the user's"


def test_choices_of_fla_core_are_not_kept_on_disk(monkeypatch):
    monkeypatch.delenv("FLA_CACHE_RESULTS", raising=False)
    assert "FLA_CACHE_RESULTS=0" in str(PEERS["fla-core"])


def test_import_failures_keep_their_cause(library):
    with pytest.raises(PeerError, match="fake_peer:absent cannot be imported here: AttributeError"):
        peer(function="fake_peer:absent").load(OP)
    with pytest.raises(PeerError, match="asked for chunk_gla, but has an adapter for chunk_gated_delta_rule only"):
        peer().load("chunk_gla")


def test_benchmark_shapes_are_supported_on_hopper():
    for case in OPS[OP].declaration.promises.benchmarks:
        for mode in (FORWARD, BOTH):
            assert reason("fla-core", case, mode=mode) is None
            assert reason("flash-qla", case, mode=mode) is None


def test_what_a_peer_does_not_support_has_a_reason():
    assert "K = V = 128 only, not K = 64, V = 128" in reason("flash-qla", variant(BENCHMARK, sizes={"K": 64}))
    assert "not on A100 (sm80)" in reason("flash-qla", device="A100")
    assert "in bf16 or all in fp16" in reason("flash-qla", plan="fp32")
    assert reason("fla-core", device=CPU.name) == "it runs on GPUs only, not on CPU"
    ragged = variant(BENCHMARK, sizes={"T": 8}, offsets=(0, 8))
    assert reason("flash-qla", ragged) is None


def test_arguments_that_a_peer_lacks_are_a_reason():
    adapter = peer().adapters[0]
    defaults = {option.name: option.default for option in OPS[OP].declaration.options}
    case = variant(BENCHMARK, options={"output_final_state": True}, present=("initial_state",))
    facts = facts_of_case(OPS[OP], case, PLANS["bf16"], CPU, FORWARD)
    assert adapter.reason(facts, defaults) == "it has no initial_state, output_final_state"
    plain = facts_of_case(OPS[OP], BENCHMARK, PLANS["bf16"], CPU, FORWARD)
    assert adapter.reason(plain, defaults) is None
