"""The command ``chunkwise bench``: whole runs on the CPU, and what it refuses."""

import dataclasses
import importlib.machinery
import itertools
import json
import os
import subprocess
import sys
import types

import pytest
import torch

from chunkwise import cli as core_cli
from chunkwise.dispatcher import failure
from chunkwise.eager import gated_delta_rule as eager
from chunkwise.eager.implementations import GATED_DELTA_RULE
from chunkwise.ops import OPS
from chunkwise.verifier.device import CPU, device_facts
from chunkwise.verifier.rules import one_of
from chunkwise_testing import commands, peers
from chunkwise_testing.fakes import installed
from chunkwise_testing.peers import Adapter, Peer
from chunkwise_testing.sampling import PLANS
from chunkwise_testing.scorer import cli, provenance
from chunkwise_testing.scorer.floors import Rates, measure_rates
from chunkwise_testing.scorer.gate import Gate, RefusedError, Timed
from chunkwise_testing.scorer.graphs import captured
from chunkwise_testing.scorer.inputs import BOTH, FORWARD, MODES, shapes_of
from chunkwise_testing.scorer.instruments import KernelTime, of_cpu, of_cuda
from chunkwise_testing.scorer.results import BEST, Score
from chunkwise_testing.scorer.score import NO_BACKWARD_COST, Request, Scorer

OP = "chunk_gated_delta_rule"
DECLARATION = OPS[OP].declaration
PLAN = PLANS["bf16-mixed"]
NAME = "other/gated_delta_rule/chunkwise"
SHAPE = ("--shapes", "h2-hv8-1x2048", "--tokens", "16", "--device", "cpu")


EVERY_SAMPLE = Gate._samples


@pytest.fixture(autouse=True)
def two_cases(monkeypatch):
    """The gate looks at two small cases; that it looks at all of them has a test of its own."""
    monkeypatch.setattr(Gate, "_samples", lambda self, timed: itertools.islice(EVERY_SAMPLE(self, timed), 1, 3))


@pytest.fixture
def all_cases(monkeypatch, two_cases):
    """The gate as it is."""
    monkeypatch.setattr(Gate, "_samples", EVERY_SAMPLE)


def entry(name=NAME, **changes):
    functions = {"forward": "fake_other:forward", "backward": "fake_other:backward"}
    return dataclasses.replace(GATED_DELTA_RULE, name=name, rank=1, **{**functions, **changes})


def other(forward=eager.forward, backward=eager.backward, table=None):
    """An installed backend ``other`` that the dispatcher prefers."""
    return installed("other", table or [entry()], functions={"forward": forward, "backward": backward})


def wrong_forward(schedule, inputs, save):
    (o, state), saved = eager.forward(schedule, inputs, save)
    return (o * 1.1, state), saved


def wrong_backward(schedule, inputs, residuals, grads, needs):
    found = eager.backward(schedule, inputs, residuals, grads, needs)
    return {name: -g if name == "beta" else g for name, g in found.items()}


def exactly_ours(**arguments):
    return OPS[OP](**arguments, backend="torch")


@pytest.fixture
def peer(monkeypatch):
    """A function that makes a peer known and importable."""

    def add(name, function, unsupported=lambda facts: None):
        module = types.ModuleType(name.replace("-", "_"))
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        module.function = function
        monkeypatch.setitem(sys.modules, module.__name__, module)
        adapter = Adapter(OP, f"{module.__name__}:function", ("q", "k", "v", "g", "beta"), unsupported)
        made = Peer(name, module.__name__, (adapter,))
        monkeypatch.setitem(peers.PEERS, name, made)
        return made

    return add


def scorer(route=None, patterns=("h2-hv8-1x2048",), modes=MODES, others=(), instruments=None):
    request = Request(
        op=OPS[OP],
        cases=shapes_of(DECLARATION, patterns, 16),
        plan=PLAN,
        device="cpu",
        facts=CPU,
        route=route,
        peers=others,
        modes=modes,
        calls=2,
    )
    return Scorer(request, instruments or of_cpu(), lambda: Rates(1e9, 1e9, "made up"))


# --- whole runs ----------------------------------------------------------------------------------------------------


def test_from_the_command_line_to_json(capsys, tmp_path):
    file = tmp_path / "score.json"
    arguments = ["bench", OP, *SHAPE, "--tokens", "64", "--route", "torch", "--calls", "2", "--json", str(file)]
    assert core_cli.main(arguments) == 0
    printed = capsys.readouterr()
    assert "first call of chunkwise" in printed.err
    score = Score.from_json(file.read_text(encoding="utf-8"))
    assert [(row.mode, row.timing, row.ours.reason) for row in score.rows] == [
        (FORWARD, "clock", None),
        (FORWARD, "graph", "not available on cpu"),
        (BOTH, "clock", None),
        (BOTH, "graph", "not available on cpu"),
    ]
    for row in score.rows:
        assert row.shape == "h2-hv8-1x2048@T64"
        assert row.route.startswith("torch/gated_delta_rule/chunkwise")
        assert row.timing == "graph" or (row.ours.ms > 0 and len(row.ours.repeats_ms) == 3)
        assert (row.floor_ms is None) == (row.mode == BOTH)
        assert row.floor_reason == (NO_BACKWARD_COST if row.mode == BOTH else None)
        assert row.ours.reason is None or row.ours.reason in printed.out
    assert {a.quantity for a in score.accuracy} == {"o", "d_q", "d_k", "d_v", "d_g", "d_beta"}
    assert all(a.against == "fp64" and a.relative_l2 < 1e-2 for a in score.accuracy)
    assert len(score.parity) == 4
    assert score.environment["torch"] == torch.__version__
    assert f"{score.rows[0].ours.ms:.4f}" in printed.out


def test_peers_are_timed_compared_and_summed_up(peer):
    def slow(**arguments):
        for _ in range(3):
            exactly_ours(**arguments)
        return exactly_ours(**arguments)

    def wrong(**arguments):
        return tuple(x if x is None else x * 1.5 for x in exactly_ours(**arguments))

    others = [peer("slow-peer", slow), peer("wrong-peer", wrong)]
    score = scorer(others=others, modes=[FORWARD]).run({})
    assert score.peers == ["slow-peer", "wrong-peer"]
    found = {s.peer: s for s in score.summaries() if s.timing == "clock"}
    assert found["slow-peer"].geomean > 1.5
    assert found.keys() == {"slow-peer", "wrong-peer", BEST}
    ours = {(a.side, a.quantity): a.relative_l2 for a in score.accuracy if a.against == "chunkwise"}
    assert ours["slow-peer", "o"] == 0.0
    assert ours["wrong-peer", "o"] == pytest.approx(0.5, rel=0.02)
    fp64 = {a.side: a.relative_l2 for a in score.accuracy if a.against == "fp64"}
    assert fp64["wrong-peer"] > 0.4 > fp64["slow-peer"]
    assert {o.side for o in score.once if o.what == "import"} == {"slow-peer", "wrong-peer"}
    calls = {o.side: o.value for o in score.once if o.what == "first call"}
    assert all(value > 0 for value in calls.values()) and len(calls) == 3


@pytest.mark.parametrize(("wanted", "sides"), [("all", ["chunkwise", "same"]), ("ours", ["chunkwise"]), ("none", [])])
def test_whose_accuracy_is_shown(peer, wanted, sides):
    run = scorer(others=[peer("same", exactly_ours)], modes=[FORWARD])
    run.request = dataclasses.replace(run.request, accuracy=wanted)
    found = run.run({}).accuracy
    assert sorted({a.side for a in found}) == sides
    assert any(a.against == "chunkwise" for a in found) == (wanted == "all")


def test_what_a_peer_cannot_do_is_in_its_rows(peer):
    def breaks(**arguments):
        if arguments["q"].requires_grad:
            raise RuntimeError("no backward here\nand more of it")
        return exactly_ours(**arguments)

    others = [peer("narrow", exactly_ours, lambda facts: f"K is {facts.size('K')}"), peer("breaks", breaks)]
    score = scorer(others=others).run({})
    rows = {(row.mode, f.side): f for row in score.rows if row.timing == "clock" for f in row.figures}
    assert rows[FORWARD, "narrow"].reason == rows[BOTH, "narrow"].reason == "K is 128"
    assert rows[FORWARD, "breaks"].ms is not None
    assert rows[BOTH, "breaks"].reason == "RuntimeError: no backward here"
    assert rows[BOTH, "chunkwise"].ms is not None
    assert score.complete
    assert [(s.rows, s.left_out) for s in score.summaries() if s.peer == "breaks" and s.timing == "clock"] == [
        (1, 0),
        (0, 1),
    ]


def test_graphs_and_peaks_come_from_the_instruments():
    class Again:
        def __init__(self, run, pool):
            self.run, self.outputs = run, run()

        def replay(self):
            for kept, new in zip(self.outputs, self.run(), strict=False):
                kept.copy_(new)

    instruments = dataclasses.replace(of_cpu(), capture=Again, peak_bytes=lambda run: 5 * len(run()))
    score = scorer(instruments=instruments).run({})
    assert all(row.ours.ms is not None for row in score.rows)
    assert [row.timing for row in score.rows] == ["clock", "graph"] * 2
    assert [o.value for o in score.once if o.what == "peak memory"] == [5.0, 30.0]  # o; o and five gradients


def test_kernels_of_every_side_are_listed_behind_its_times(peer):
    order = []

    def kernels(run):
        order.append("kernels")
        return [KernelTime("scan", 30.0, 1.0), KernelTime("solve", 10.0, 2.0 * len(run()))]

    def breaks(**arguments):
        if arguments["q"].requires_grad:
            raise RuntimeError("no backward here")
        return exactly_ours(**arguments)

    one = scorer(others=[peer("breaks", breaks)], instruments=dataclasses.replace(of_cpu(), kernels=kernels))
    one.request = dataclasses.replace(one.request, kernels=True)
    one.keep = lambda so_far: order.append(len(so_far.rows))
    score = one.run({})
    found = [(k.side, k.mode, k.name, k.us, k.launches, k.reason) for k in score.kernels]
    assert found == [
        ("chunkwise", FORWARD, "scan", 30.0, 1.0, None),
        ("chunkwise", FORWARD, "solve", 10.0, 2.0, None),
        ("breaks", FORWARD, "scan", 30.0, 1.0, None),
        ("breaks", FORWARD, "solve", 10.0, 2.0, None),
        ("chunkwise", BOTH, "scan", 30.0, 1.0, None),
        ("chunkwise", BOTH, "solve", 10.0, 12.0, None),
        ("breaks", BOTH, "", 0.0, 0.0, "RuntimeError: no backward here"),
    ]
    assert {k.shape for k in score.kernels} == {"h2-hv8-1x2048@T16"}
    assert order == [4, *["kernels"] * 3, 4]
    assert Score.from_json(score.to_json()).kernels == score.kernels
    assert scorer().run({}).kernels == ()


def test_why_there_are_no_kernels(capsys):
    assert core_cli.main(["bench", OP, *SHAPE, "--calls", "2", "--modes", "forward", "--kernels"]) == 0
    printed = capsys.readouterr().out
    (line,) = [text.split() for text in printed.split("Kernels, us a call\n")[1].splitlines()[1:2]]
    assert line[1:3] == ["forward", "chunkwise"]
    assert f"{line[3]} not measured on cpu" in printed


def test_first_calls_come_before_anything_else():
    order = []

    def forward(*given):
        order.append("call")
        return eager.forward(*given)

    one = scorer()
    with other(forward):
        one.progress = order.append
        score = one.run({})
    assert order[:3] == ["first call of chunkwise, forward", "call", "first call of chunkwise, forward+backward"]
    assert order.index(f"parity of {NAME} (forward)") == 4
    assert sum(str(line).startswith("parity") for line in order) == len(MODES)
    assert {row.route.split(",")[0].split(" ")[0] for row in score.rows} == {NAME}


def test_a_score_is_kept_shape_by_shape():
    kept = []
    one = scorer(patterns=("h2-hv8-1x2048", "h2-hv8-4x8192"), modes=[FORWARD])
    one.keep = kept.append
    score = one.run({})
    assert [[row.shape for row in so_far.rows] for so_far in kept] == [
        ["h2-hv8-1x2048@T16"] * 2,
        ["h2-hv8-1x2048@T16"] * 2 + ["h2-hv8-4x8192@T16"] * 2,
    ]
    assert kept[-1] == score
    assert Score.from_json(kept[0].to_json()).rows == kept[0].rows


def test_a_peer_is_imported_when_ours_has_run(peer):
    order = []

    def forward(*given):
        order.append("ours")
        return eager.forward(*given)

    late = peer("late", exactly_ours)
    with other(forward):
        one = scorer(others=[late], modes=[FORWARD])
        one.progress = order.append
        object.__setattr__(late, "load", lambda op: order.append("import") or Peer.load(late, op))
        one.run({})
    assert order[:4] == ["first call of chunkwise, forward", "ours", "import", "first call of late, forward"]


def test_failing_rows_of_ours_make_exit_code_1(capsys):
    def forward(schedule, inputs, save):
        if save and inputs.q.shape[-1] == 128:
            raise RuntimeError("out of luck")
        return eager.forward(schedule, inputs, save)

    with other(forward):
        assert core_cli.main(["bench", OP, *SHAPE, "--calls", "2"]) == 1
    assert "out of luck" in capsys.readouterr().out


# --- the gate ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forward", "backward", "quantity"),
    [(wrong_forward, eager.backward, "o: error"), (eager.forward, wrong_backward, "d_beta: error")],
)
def test_red_parity_is_refused(capsys, tmp_path, forward, backward, quantity):
    file = tmp_path / "score.json"
    with other(forward, backward):
        assert core_cli.main(["bench", OP, *SHAPE, "--json", str(file)]) == 2
        printed = capsys.readouterr()
        assert f"parity is red for {NAME}" in printed.err and quantity in printed.err
        assert printed.out == "" and not file.exists()
        assert core_cli.main(["bench", OP, *SHAPE, "--route", "torch", "--calls", "2", "--modes", "forward"]) == 0


def test_only_what_is_timed_must_be_right():
    with other(eager.forward, wrong_backward):
        assert scorer(modes=[FORWARD]).run({}).complete
        with pytest.raises(RefusedError, match="parity is red"):
            scorer().run({})


def test_a_forward_that_raises_is_red():
    def forward(schedule, inputs, save):
        raise RuntimeError("no such kernel")

    with other(forward), pytest.raises(RefusedError, match="no such kernel"):
        scorer(modes=[FORWARD]).run({})


def test_every_declared_case_and_one_as_wide_as_the_shape_is_checked(all_cases):
    gate = Gate("bf16-mixed", "cpu", shapes_of(DECLARATION, ["h2-hv8-1x2048"], 16))
    pair = Timed(OP, GATED_DELTA_RULE.name, GATED_DELTA_RULE.name, "gdn-wy64@2")
    samples = list(gate._samples(pair))
    assert [s.case.name for s in samples] == [*(c.name for c in DECLARATION.promises.cases), "h2-hv8-1x2048@T16"]
    assert {s.plan for s in samples} == {"bf16-mixed"}


def test_a_route_that_refuses_every_case_is_refused():
    wanted = r"it refuses every case;[^:]*\n  one-token: refused: .* K is 16"
    with other(table=[entry(requires=(one_of("K", 128),))]), pytest.raises(RefusedError, match=wanted):
        scorer(modes=[FORWARD]).run({})


def test_a_case_as_wide_as_the_shape_opens_the_gate(all_cases):
    table = [entry(requires=(one_of("K", 128),))]
    with other(table=table):
        score = scorer(modes=[FORWARD]).run({})
    assert [c.case for c in score.parity if c.over_budget is not None] == ["B1-T16-H2-HV8-K128-V128"]
    assert sum(c.reason is not None for c in score.parity) == len(DECLARATION.promises.cases)


def test_a_shape_without_a_route_is_refused_with_reasons():
    table = [entry(requires=(one_of("K", 64),))]
    with other(table=table), pytest.raises(RefusedError, match="nothing can run this shape"):
        scorer("other").run({})


def test_a_route_that_changes_while_it_is_timed_is_refused(monkeypatch):
    one = scorer(modes=[FORWARD])
    with other():
        kept = one._peaks

        def peaks(*given):
            with pytest.warns(RuntimeWarning, match="boom"):
                failure.quarantine(NAME, RuntimeError("boom"))
            kept(*given)

        monkeypatch.setattr(one, "_peaks", peaks)
        try:
            with pytest.raises(RefusedError, match=f"the route changed from {NAME}"):
                one.run({})
        finally:
            failure.release_all()


# --- on a GPU --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_cuda_instruments_measure_what_is_known():
    tools = of_cuda()
    x = torch.ones(1 << 24, device="cuda")  # 64 MiB
    assert tools.peak_bytes(lambda: x + 1.0) == 64 << 20
    spans = [(tools.timer.mark(), (x + 1.0, tools.timer.mark())[1]) for _ in range(3)]
    assert all(0.0 < ms < 1e3 for ms in tools.timer.read_ms(spans))
    assert tools.cache_bytes > 0 and tools.free_bytes() > 0
    rates = measure_rates("cuda", tools.timer)
    assert 1e10 < rates.copy_bytes_per_s < 1e14 and 1e12 < rates.matmul_flops < 1e17


@pytest.mark.gpu
def test_cuda_kernels_are_those_of_the_call():
    x = torch.ones(1 << 24, device="cuda")
    found = of_cuda().kernels(lambda: [x.add_(1.0), x.add_(1.0), torch.exp(x)])
    assert sorted(kernel.launches for kernel in found) == [1.0, 2.0]
    assert all(1.0 < kernel.us < 1e4 for kernel in found)


@pytest.mark.gpu
def test_cuda_graphs_hold_forward_and_backward():
    x = torch.randn(256, 256, device="cuda", requires_grad=True)
    doubled = torch.ones(256, 256, device="cuda")

    def both():
        y = x @ x
        return [y.detach(), *torch.autograd.grad([y], [x], [doubled])]

    def waits():
        return [x.detach() * x.sum().item()]

    before = torch.cuda.current_stream()
    replays, reasons = captured({"both": [both] * 2, "waits": [waits], "after": [both]}, of_cuda())
    assert list(replays) == ["both", "after"]
    assert reasons["waits"].startswith("not captured: ")
    assert torch.cuda.current_stream() == before
    for replay in replays["both"]:
        replay()
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_a_whole_run_on_a_gpu():
    one = scorer("torch", instruments=of_cuda())
    one.request = dataclasses.replace(one.request, device="cuda", facts=device_facts("cuda", None))
    score = one.run({})
    assert score.complete
    assert {row.timing for row in score.rows} == {"events", "graph"}
    assert all(o.value > 0 for o in score.once if o.what == "peak memory")
    assert all(row.ours.ms or row.ours.reason.startswith("not captured") for row in score.rows)


# --- the command line ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dispatch"], f"no op is called dispatch; known: {', '.join(OPS)}; `chunkwise bench host`"),
        ([OP, "--shapes", "h3-*"], "no benchmark shape 'h3-*'"),
        ([OP, "--peer", "nobody"], "no peer is called nobody; known peers: fla-core, flash-qla"),
        ([OP, "--route", "nowhere"], "nowhere"),
        ([OP, "--modes", "backward"], "no mode is called backward; known: forward, forward+backward"),
        ([OP, "--dtype", "fp8"], "no dtype is called fp8; known: bf16, "),
        ([OP, "--calls", "0"], "at least 1 is expected"),
    ],
)
def test_what_is_not_understood_is_exit_code_2(capsys, arguments, message):
    assert core_cli.main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_peer_is_exit_code_2(capsys, monkeypatch):
    monkeypatch.setattr("chunkwise_testing.peers.adapter.probes.installed", lambda module: False)
    assert core_cli.main(["bench", OP, "--peer", "flash-qla"]) == 2
    assert "pip install 'flash-qla" in capsys.readouterr().err


def test_no_gpu_is_said(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert core_cli.main(["bench", OP, "--device", "cuda"]) == 2
    assert "torch sees no GPU" in capsys.readouterr().err


def test_host_figures_have_a_subcommand(capsys):
    with pytest.raises(SystemExit):
        commands.bench(["host", "nothing"])
    assert "known: dispatch, import, speed, memory" in capsys.readouterr().err


def test_cold_caches_are_fresh_and_come_back(monkeypatch, tmp_path):
    for name in ("triton", "tilelang"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TILELANG_CACHE_DIR", raising=False)
    with cli._caches(cold=True) as words:
        folders = {os.environ[name] for name in cli.CACHES}
        assert len(folders) == len(cli.CACHES)
        assert str(tmp_path) not in folders
        assert "fresh" in words
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path)
    assert "TILELANG_CACHE_DIR" not in os.environ


def test_cold_comes_too_late_behind_triton(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "tilelang", raising=False)  # another test may have imported it
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    assert core_cli.main(["bench", OP, "--cold"]) == 2
    assert "triton was imported before the caches could be moved" in capsys.readouterr().err


def test_the_command_imports_no_torch_before_the_caches_are_moved():
    code = "import sys, chunkwise_testing.commands, chunkwise_testing.scorer.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- provenance ----------------------------------------------------------------------------------------------------


def test_commit_says_dirty_and_no_checkout(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    file = tmp_path / "module.py"
    file.write_text("1\n")
    git("init")
    assert provenance.commit(file) == "no checkout"  # not tracked: installed within somebody's checkout
    git("add", "module.py")
    git("commit", "-m", "one")
    clean = provenance.commit(file)
    assert len(clean) == 40
    file.write_text("2\n")
    assert provenance.commit(file) == f"{clean} dirty"


def test_environment_names_what_figures_depend_on(monkeypatch):
    monkeypatch.setenv("CHUNKWISE_BACKEND", "torch")
    found = provenance.environment_of(CPU, [], "as found")
    assert set(provenance.PACKAGES) | {"python", "cuda", "date", "commit", "device", "caches"} <= set(found)
    assert found["CHUNKWISE_BACKEND"] == "torch"
    assert json.dumps(found)
