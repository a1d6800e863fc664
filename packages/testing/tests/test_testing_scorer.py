"""The scorer's parts: turns, medians, inputs, floors, summaries, the report and its JSON."""

import dataclasses
import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from chunkwise.errors import UnknownNameError
from chunkwise.ops import OPS
from chunkwise.protocol.cases import Case, Cost
from chunkwise.verifier.device import CPU, FAKE_DEVICES
from chunkwise_testing import sampling
from chunkwise_testing.routes import facts_of
from chunkwise_testing.sampling import PLANS
from chunkwise_testing.scorer import floors, graphs, inputs, instruments, timing
from chunkwise_testing.scorer.gate import Check
from chunkwise_testing.scorer.inputs import BOTH, FORWARD
from chunkwise_testing.scorer.instruments import ClockTimer, of_cpu
from chunkwise_testing.scorer.render import render
from chunkwise_testing.scorer.results import BEST, Accuracy, Figure, Kernel, Once, Row, Score

OP = "chunk_gated_delta_rule"
DECLARATION = OPS[OP].declaration
PLAN = PLANS["bf16-mixed"]


class Clock:
    """Stands still, but for what a call takes."""

    def __init__(self):
        self.now = 0.0
        self.calls = []

    def __call__(self):
        return self.now

    def run(self, name, *durations_ms):
        """A call that takes the durations in turn, over and over."""
        taken = iter(range(10**6))

        def run():
            self.calls.append(name)
            self.now += durations_ms[next(taken) % len(durations_ms)] * 1e-3

        return run


# --- turns and medians ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sides", [1, 2, 3, 4])
@pytest.mark.parametrize("sets", [1, 2, 3, 4])
def test_turns_are_fair(sides, sets):
    rounds = timing.rounds_of_a_period(sides, sets)
    order = list(timing.turns(sides, sets, rounds * 2))
    counts = Counter(order)
    assert len(counts) == sides * sets
    assert len(set(counts.values())) == 1
    assert [chosen for _, chosen in order] == [i % sets for i in range(len(order))]
    for start in range(0, len(order), sides):
        assert {side for side, _ in order[start : start + sides]} == set(range(sides))
    places = Counter((side, i % sides) for i, (side, _) in enumerate(order))
    assert len(set(places.values())) == 1


def test_the_figure_is_the_median_of_medians():
    clock = Clock()
    # Three calls to warm up, then four a repeat: their medians are 2, 5 and 3 ms, whatever the slow call in each.
    ours = clock.run("ours", 60, 60, 60, 2, 2, 2, 90, 5, 5, 5, 70, 3, 3, 3, 80)
    found = timing.time_sides({"ours": [ours]}, ClockTimer(clock), repeats=3, calls=4)["ours"]
    assert found.repeats_ms == pytest.approx((2.0, 5.0, 3.0))
    assert found.ms == pytest.approx(3.0)
    assert found.spread == pytest.approx(1.0)
    assert found.calls == 4


def test_sides_are_interleaved_on_rotating_inputs():
    clock = Clock()
    runs = {name: [clock.run((name, i), ms) for i in range(3)] for name, ms in (("a", 1), ("b", 4))}
    found = timing.time_sides(runs, ClockTimer(clock), repeats=2, calls=5)
    assert found["a"].calls == found["b"].calls == 6
    assert (found["a"].ms, found["b"].ms) == (pytest.approx(1.0), pytest.approx(4.0))
    warm, timed = clock.calls[: 2 * timing.WARM_UPS], clock.calls[2 * timing.WARM_UPS :]
    assert Counter(warm) == {("a", 0): timing.WARM_UPS, ("b", 0): timing.WARM_UPS}
    assert Counter(timed) == dict.fromkeys(((n, i) for n in "ab" for i in range(3)), 4)
    assert timed[:6] == [("a", 0), ("b", 1), ("a", 2), ("b", 0), ("a", 1), ("b", 2)]


def test_calls_fill_a_repeat():
    clock = Clock()
    found = timing.time_sides({"a": [clock.run("a", 10.0)] * 2}, ClockTimer(clock), repeats=1)
    assert found["a"].calls == 26  # a quarter second, in whole periods of two sets
    assert len(clock.calls) == timing.WARM_UPS + 26
    assert timing.rounds_for(1e9, 1, 1) == timing.FEWEST
    assert timing.rounds_for(0.0, 1, 1) == timing.MOST
    assert timing.rounds_for(1e9, 2, 4) % timing.rounds_of_a_period(2, 4) == 0


# --- shapes and inputs ---------------------------------------------------------------------------------------------


def names(*patterns, tokens=None):
    return [case.name for case in inputs.shapes_of(DECLARATION, patterns, tokens)]


def test_shapes_are_chosen_by_pattern():
    assert names() == [case.name for case in DECLARATION.promises.benchmarks]
    assert names("h16-hv32-1x8192", "h2-hv8-8x*") == ["h16-hv32-1x8192", "h2-hv8-8x1024", "h2-hv8-8x4096"]
    with pytest.raises(UnknownNameError, match=r"h3-.*h16-hv32-1x2048"):
        names("h3-*")


def test_tokens_take_the_place_of_the_shapes_own():
    assert names("h2-hv8-*", tokens=64) == ["h2-hv8-1x2048@T64", "h2-hv8-8x1024@T64", "h2-hv8-4x8192@T64"]
    ragged = Case("packed", DECLARATION.promises.benchmarks[0].sizes, offsets=(0, 5, 2048))
    promises = dataclasses.replace(DECLARATION.promises, benchmarks=(ragged,))
    with pytest.raises(UnknownNameError, match="packed have lengths of their own"):
        inputs.shapes_of(dataclasses.replace(DECLARATION, promises=promises), (), 64)


def test_reduced_shapes_keep_widths_and_the_ratio_of_heads():
    first, last = inputs.shapes_of(DECLARATION, ["h16-hv32-1x2048", "h2-hv8-4x8192"])
    assert inputs.reduced(DECLARATION, first, 512, 4).sizes == {"B": 1, "T": 512, "H": 4, "HV": 8, "K": 128, "V": 128}
    assert inputs.reduced(DECLARATION, last, 64, 4).sizes == {"B": 1, "T": 64, "H": 2, "HV": 8, "K": 128, "V": 128}
    odd = Case("odd", {**first.sizes, "H": 3, "HV": 6})
    assert inputs.reduced(DECLARATION, odd, 64, 2).sizes == {**first.sizes, "T": 64, "H": 2, "HV": 4}


@pytest.mark.parametrize("mode", [FORWARD, BOTH])
def test_facts_of_a_shape_are_those_of_its_call(mode):
    case = sampling.variant(DECLARATION.promises.cases[2], sizes={"B": 2})
    call = sampling.draw(OPS[OP], case, PLAN)
    needs = sampling.default_needs(call) if mode == BOTH else ()
    assert inputs.facts_of_case(OPS[OP], case, PLAN, CPU, mode) == facts_of(call, needs)
    assert inputs.facts_of_case(OPS[OP], case, PLAN, FAKE_DEVICES["H200"], mode).device.arch == "sm90"


@pytest.mark.parametrize(
    ("set_bytes", "cache", "free", "count"),
    [(6, 50, 10**6, 4), (20, 50, 10**6, 3), (50, 50, 10**6, 2), (800, 50, 10**6, 2), (800, 50, 2400, 1), (6, 0, 99, 2)],
)
def test_sets_exceed_the_cache_where_memory_allows(set_bytes, cache, free, count):
    assert inputs.how_many_sets(set_bytes, cache, free) == count


def test_sets_are_drawn_independently():
    case = inputs.shapes_of(DECLARATION, ["h2-hv8-1x2048"], 3)[0]
    sets = inputs.draw_sets(OPS[OP], case, PLAN, "cpu", cache_bytes=10**9, free_bytes=10**9)
    assert len(sets) == inputs.MOST_SETS
    for name in ("q", "v", "g", "beta"):
        assert len({s.call.tensors[name].sum().item() for s in sets}) == len(sets)
    assert len({s.gradients["o"].sum().item() for s in sets}) == len(sets)
    tokens = 3 * (2 * 2 * 128 * 2 + 2 * 8 * 128 * 2 + 2 * 8 * 4)  # q and k, v and do in bf16, g and beta in fp32
    assert sets[0].bytes == tokens


# --- floors --------------------------------------------------------------------------------------------------------


def test_floor_is_the_larger_of_memory_and_compute():
    rates = floors.Rates(copy_bytes_per_s=4e12, matmul_flops=8e14, how="")
    found = floors.floor_of(Cost(flops=8e11, bytes=2e9), rates)
    assert (found.memory_ms, found.compute_ms) == (pytest.approx(0.5), pytest.approx(1.0))
    assert found.ms == found.compute_ms
    assert floors.floor_of(Cost(flops=1.0, bytes=2e9), rates).ms == pytest.approx(0.5)


def test_rates_count_read_and_written_bytes_and_two_flops_a_product():
    class Steps:
        """One millisecond a call."""

        def mark(self):
            return 0

        def read_ms(self, spans):
            return [1.0] * len(spans)

    rates = floors.measure_rates("cpu", Steps())
    assert rates.copy_bytes_per_s == pytest.approx(2 * (32 << 20) / 1e-3)
    assert rates.matmul_flops == pytest.approx(2 * 256**3 / 1e-3)
    assert "32 MiB" in rates.how


# --- graphs --------------------------------------------------------------------------------------------------------


class FakeGraph:
    """Runs the call again at each replay; ``escaped`` outputs are not refilled."""

    def __init__(self, run, pool, escaped=()):
        assert pool == "pool"
        self.run, self.outputs, self.escaped = run, run(), escaped

    def replay(self):
        for i, (kept, new) in enumerate(zip(self.outputs, self.run(), strict=False)):
            if i not in self.escaped:
                kept.copy_(new)


def capturing(capture):
    return dataclasses.replace(of_cpu(), capture=capture, new_pool=lambda: "pool")


def adding(count):
    def run():
        count.append(1)
        return [torch.arange(1.0, 5.0), torch.ones(2)]

    return run


def test_captured_sides_are_replayed():
    count = []
    replays, reasons = graphs.captured({"a": [adding(count)] * 2}, capturing(FakeGraph))
    assert reasons == {}
    before = len(count)
    for replay in replays["a"]:
        replay()
    assert len(count) == before + 2


def test_what_a_graph_does_not_hold_is_seen():
    instruments = capturing(lambda run, pool: FakeGraph(run, pool, escaped=(1,)))
    replays, reasons = graphs.captured({"a": [adding([])]}, instruments)
    assert replays == {}
    assert "does not hold all of it" in reasons["a"]


def test_why_a_side_is_not_captured():
    def capture(run, pool):
        if "sync" in str(run()):
            try:
                raise RuntimeError("operation not permitted when stream is capturing")
            except RuntimeError:
                raise RuntimeError("capture was invalidated")  # noqa: B904  # as torch's own exit does
        return FakeGraph(run, pool)

    instruments = capturing(capture)
    replays, reasons = graphs.captured({"a": [adding([])], "b": [lambda: ["sync"]]}, instruments)
    assert list(replays) == ["a"]
    assert "capture was invalidated" in reasons["b"]
    assert "operation not permitted" in reasons["b"]
    replays, reasons = graphs.captured({"a": [adding([])]}, of_cpu())
    assert (replays, reasons) == ({}, {"a": "not available on cpu"})


# --- results -------------------------------------------------------------------------------------------------------


def row(shape, ours, *peers, mode=FORWARD, timing="events", **changes):
    figures = [Figure("chunkwise", ours, 0.1, (ours, ours), None if ours else "it broke")]
    figures += [
        Figure(name, value) if isinstance(value, float) else Figure(name, reason=value)
        for name, value in zip(("fla-core", "flash-qla"), peers, strict=False)
    ]
    made = Row(shape, {"B": 1, "T": 64}, mode, timing, "torch/x/y (forward)", 2, 1 << 20, 10, tuple(figures), 0.5)
    return dataclasses.replace(made, **changes)


def score_of(*rows):
    return Score(
        op=OP,
        plan="bf16-mixed",
        environment={"device": "H200", "torch": "2.11.0"},
        rates={"copy_bytes_per_s": 4e12, "matmul_flops": 8e14, "how": "copy of 1024 MiB"},
        parity=(Check("torch/x/y", "dense", 0.5, "o"), Check("torch/x/y", "tail", reason="refused: K is 16")),
        accuracy=(
            Accuracy("chunkwise", "o", "fp64", "modest", 1.5e-3),
            Accuracy("fla-core", "", "fp64", "modest", reason="it runs on GPUs only"),
        ),
        once=(
            Once("chunkwise", "first call", "s1", FORWARD, 1.25, "s"),
            Once("fla-core", "first call", "s1", FORWARD, None, "s", "it runs on GPUs only"),
            Once("chunkwise", "peak memory", "s1", FORWARD, float(3 << 20), "bytes"),
        ),
        rows=tuple(rows),
    )


def test_summaries_have_geomean_and_worst_row():
    score = score_of(row("s1", 1.0, 2.0), row("s2", 2.0, 1.0), row("s3", 1.0, 4.0), row("s4", 1.0, "too wide"))
    (summary,) = score.summaries()
    assert (summary.peer, summary.rows, summary.left_out) == ("fla-core", 3, 1)
    assert summary.geomean == pytest.approx(4.0 ** (1 / 3))
    assert (summary.worst, summary.worst_shape) == (pytest.approx(0.5), "s2")
    assert score.over_floor() == [(FORWARD, "events", pytest.approx((2.0 * 4.0 * 2.0 * 2.0) ** 0.25))]


def test_modes_and_timings_are_summed_up_apart_and_the_best_peer_counts():
    rows = [row("s1", 1.0, 2.0, 3.0), row("s1", 1.0, 2.0, 0.5, timing="graph"), row("s1", 1.0, 4.0, 3.0, mode=BOTH)]
    found = {(s.peer, s.mode, s.timing): s.geomean for s in score_of(*rows).summaries()}
    assert found[BEST, FORWARD, "events"] == pytest.approx(2.0)
    assert found[BEST, FORWARD, "graph"] == pytest.approx(0.5)
    assert found[BEST, BOTH, "events"] == pytest.approx(3.0)
    assert found["flash-qla", BOTH, "events"] == pytest.approx(3.0)
    assert len(found) == 9


def test_rows_without_our_time_make_no_ratio_and_no_complete_score():
    score = score_of(row("s1", None, 2.0), row("s2", 1.0, 2.0))
    assert [s.rows for s in score.summaries()] == [1]
    assert not score.complete
    assert score_of(row("s1", 1.0), row("s1", None, timing="graph")).complete
    assert not score_of().complete
    assert score_of(row("s1", 1.0, "no")).summaries()[0].geomean is None


def test_json_goes_there_and_back():
    score = score_of(row("s1", 1.0, 2.0, "too wide"), row("s1", 1.0, 2.0, 1.0, floor_ms=None, floor_reason="none"))
    text = score.to_json()
    assert Score.from_json(text) == score
    assert json.loads(text)["summaries"][0]["geomean"] == pytest.approx(2.0)
    with pytest.raises(ValueError, match="schema 0"):
        Score.from_json(text.replace('"schema": 1', '"schema": 0'))


def test_report_has_every_figure_and_reason():
    rows = [row("s1", 1.0, 2.0, "too wide"), row("s2", 1.0, 0.5, 4.0, floor_ms=None, floor_reason="no cost")]
    lines = render(score_of(*rows)).splitlines()
    found = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line.startswith(("  s1 ", "  s2 "))}
    assert found == {
        "s1": "forward events 1.0000 (10%) 2.0000 (0%) 2.000 [2] - 0.5000 2.000 2 x 0.5 MiB",
        "s2": "forward events 1.0000 (10%) 0.5000 (0%) 0.500 4.0000 (0%) 4.000 [3] - 2 x 0.5 MiB",
    }
    assert {"[1] it runs on GPUs only", "[2] too wide", "[3] no cost"} <= set(lines)
    text = "\n".join(lines)
    assert "1 cases within budget, the worst at 0.5 of it; 1 refused" in text
    assert "4000.0 GB/s, 800 TFLOP/s" in text
    assert "1.50e-03" in text
    assert "1.250" in text and "3.0" in text
    assert any(line.split()[:4] == ["fla-core", "forward", "events", "1.000"] for line in lines)


def test_kernels_have_shares_of_their_call():
    of = {"side": "chunkwise", "shape": "s1", "mode": FORWARD}
    found = [
        Kernel(**of, name="gated_" * 20, us=30.0, launches=2.0),
        Kernel(**of, name="solve", us=10.0, launches=1.0),
        Kernel("fla-core", "s1", FORWARD, "scan", 50.0, 0.5),
        Kernel("flash-qla", "s1", FORWARD, reason="too wide"),
    ]
    score = dataclasses.replace(score_of(row("s1", 1.0)), kernels=tuple(found))
    lines = render(score).split("Kernels, us a call\n")[1].split("\n\n")[0].splitlines()
    assert [line.split()[2:] for line in lines[1:]] == [
        ["chunkwise", "gated_" * 10, "2", "30.0", "75%"],
        ["chunkwise", "solve", "1", "10.0", "25%"],
        ["fla-core", "scan", "0.5", "50.0", "100%"],
        ["flash-qla", "[2]", "-", "-", "-"],
    ]
    assert Score.from_json(score.to_json()) == score
    old = json.loads(score.to_json())
    del old["kernels"]
    assert Score.from_json(json.dumps(old)).kernels == ()


def test_a_profilers_entries_become_kernels():
    seen = [("scan", 35.0, 10), ("cudaLaunchKernel", 0.0, 30), ("solve", 400.0, 20)]
    entries = [SimpleNamespace(key=name, device_time_total=us, count=count) for name, us, count in seen]
    assert instruments.kernel_times(entries, 10) == [("solve", 40.0, 2.0), ("scan", 3.5, 1.0)]


def test_columns_line_up():
    lines = render(score_of(row("s1", 1.0, 2.0), row("a-longer-name", 100.0, 200.0))).splitlines()
    head = next(line for line in lines if line.split()[:3] == ["shape", "mode", "timing"])
    found = [line for line in lines if line.startswith(("  s1 ", "  a-longer-name "))]
    assert len(found) == 2
    assert all(line[head.index("ratio") :].startswith("2.000") for line in found)
