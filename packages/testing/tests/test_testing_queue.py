"""Benches that share a queue: warm side by side, time one by one; and peers that tune themselves meanwhile."""

import dataclasses
import importlib.machinery
import itertools
import json
import subprocess
import sys
import time
import types

import pytest

from chunkwise import cli as core_cli
from chunkwise.ops import OPS
from chunkwise.verifier.device import CPU
from chunkwise_testing.peers import Adapter, Peer
from chunkwise_testing.sampling import PLANS
from chunkwise_testing.scorer import queueing
from chunkwise_testing.scorer import score as scoring
from chunkwise_testing.scorer.floors import Rates
from chunkwise_testing.scorer.gate import Gate
from chunkwise_testing.scorer.inputs import FORWARD, MODES, shapes_of
from chunkwise_testing.scorer.instruments import of_cpu
from chunkwise_testing.scorer.queueing import Place, QueueError
from chunkwise_testing.scorer.results import Score
from chunkwise_testing.scorer.score import SHARED, Request, Scorer
from chunkwise_testing.scorer.tuning import Tuners, TuningError

OP = "chunk_gated_delta_rule"
DECLARATION = OPS[OP].declaration

# --- the queue -----------------------------------------------------------------------------------------------------

PROCESS = """
import json, os, signal, sys, time
from pathlib import Path
from chunkwise_testing.scorer.queueing import Place

folder, of, wait, how, meet = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4], int(sys.argv[5])

def say(what, words=""):
    print(json.dumps([what, time.monotonic(), words]), flush=True)

with Place(folder, of, wait) as place:
    place.watch()
    say("joined")
    (folder / f"{place.number}.warming").touch()
    while len(list(folder.glob("*.warming"))) < meet:
        time.sleep(0.01)
    if how == "dies warming":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60 if how == "late" else 0.3)
    say("warm")
    with place.turn() as words:
        say("start", words)
        if how == "dies timing":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.3)
        say("end")
"""


class Started:
    """A process of the queue; what it says is read when it has ended."""

    def __init__(self, folder, of, wait, how="", meet=1):
        command = [sys.executable, "-c", PROCESS, *map(str, (folder, of, wait, how, meet))]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.joined = json.loads(self.process.stdout.readline())  # so that they arrive in order

    def ended(self):
        out, self.err = self.process.communicate(timeout=20)
        self.at = time.monotonic()
        found = [json.loads(line) for line in out.splitlines()]
        self.times = {what: when for what, when, _ in found}
        self.words = next((words for what, _, words in found if what == "start"), None)
        return self


def run(folder, *hows, wait=60.0, of=None, meet=1):
    started = [Started(folder, of or len(hows), wait, how, meet) for how in hows]
    return [one.ended() for one in started]


def test_they_warm_side_by_side_and_time_one_by_one(tmp_path):
    found = run(tmp_path / "q", "", "", "", meet=3)  # each warms until all three do
    assert [one.process.returncode for one in found] == [0, 0, 0]
    last_warm = max(one.times["warm"] for one in found)
    ends = [last_warm, *(one.times["end"] for one in found)]
    starts = [one.times["start"] for one in found]
    assert all(end <= start for end, start in zip(ends, starts, strict=False)), (ends, starts)
    assert [one.words for one in found] == [f"turn {i} of 3, 0 left out" for i in (1, 2, 3)]


@pytest.mark.parametrize(
    ("how", "turns"),
    [
        ("dies warming", ("turn 1 of 2, 1 left out", "turn 2 of 2, 1 left out")),
        ("dies timing", ("turn 1 of 3, 0 left out", "turn 3 of 3, 0 left out")),
    ],
)
def test_who_dies_hangs_nobody(tmp_path, how, turns):
    first, dead, last = run(tmp_path / "q", "", how, "")
    assert (first.process.returncode, dead.process.returncode, last.process.returncode) == (0, -9, 0)
    assert (first.words, last.words) == turns
    assert first.times["end"] <= last.times["start"]


def test_who_is_late_ends_at_once_and_the_others_go_on(tmp_path):
    first, late, last = run(tmp_path / "q", "", "late", "", wait=1.0)
    assert late.process.returncode == 2 and "start" not in late.times
    assert "late: the others of --queue" in late.err and "nothing is timed" in late.err
    assert first.words == "turn 1 of 2, 1 left out"  # and gone, or it would be said that it still runs
    assert last.words == "turn 2 of 2, 1 left out"
    assert 1.0 <= first.times["start"] - first.times["warm"] < 10.0
    assert first.times["end"] <= last.times["start"]


def test_who_never_comes_is_waited_for_no_longer_than_asked(tmp_path):
    (alone,) = run(tmp_path / "q", "", of=2, wait=0.5)
    assert alone.process.returncode == 0 and alone.words == "turn 1 of 1, 1 left out"
    assert alone.times["start"] - alone.times["warm"] >= 0.5


def test_the_late_one_refuses_even_where_nobody_watches(tmp_path, monkeypatch):
    monkeypatch.setattr(queueing, "LEAVING_S", 0.1)
    with Place(tmp_path, 2, 0.0) as first, Place(tmp_path, 2, 0.0) as late, first.turn() as words:
        assert words == "turn 1 of 1, 1 left out, 1 of them still running"
        with pytest.raises(QueueError, match="late: the others"), late.turn():
            raise AssertionError("it must not come here")


def test_a_folder_is_for_one_queue(tmp_path):
    with Place(tmp_path, 2), pytest.raises(QueueError, match=r"--of 3: the others in .* have --of 2"):
        Place(tmp_path, 3)
    with Place(tmp_path, 2) as second:
        with pytest.raises(QueueError, match="2 of 2 processes have joined it"):
            Place(tmp_path, 2)
        with second.turn() as words:
            assert words == "turn 1 of 1, 1 left out"
    with pytest.raises(QueueError, match="name a fresh folder"):
        Place(tmp_path, 3)


# --- whole benches -------------------------------------------------------------------------------------------------

BENCH = """
import itertools, json, sys, time
from chunkwise import cli
from chunkwise_testing.scorer import score
from chunkwise_testing.scorer.gate import Gate

every, warm, times = Gate._samples, score.Scorer._warm, score.time_sides
Gate._samples = lambda self, timed: itertools.islice(every(self, timed), 1, 2)

def noted(what, function):
    def run(*given, **named):
        start = time.monotonic()
        if what == "time":
            time.sleep(0.3)
        found = function(*given, **named)
        print(json.dumps([what, start, time.monotonic()]), file=sys.stderr)
        return found
    return run

score.Scorer._warm, score.time_sides = noted("warm", warm), noted("time", times)
sys.exit(cli.main(sys.argv[1:]))
"""


def test_two_benches_take_turns(tmp_path):
    arguments = [OP, "--shapes", "h2-hv8-1x2048", "--tokens", "16", "--device", "cpu", "--route", "torch"]
    arguments += ["--calls", "2", "--repeats", "1", "--accuracy", "none", "--modes", "forward"]
    arguments += ["--queue", str(tmp_path / "q"), "--of", "2"]
    files = [tmp_path / f"{i}.json" for i in range(2)]
    commands = [[sys.executable, "-c", BENCH, "bench", *arguments, "--json", str(file)] for file in files]
    started = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c in commands]
    spans = []
    for one in started:
        _, err = one.communicate(timeout=60)
        assert one.returncode == 0, err
        spans.append([json.loads(line) for line in err.splitlines() if line.startswith("[")])
    warm = [end for found in spans for what, _, end in found if what == "warm"]
    timed = sorted([(start, end) for what, start, end in found if what == "time"] for found in spans)
    assert len(warm) == 2 and all(timed)
    assert max(warm) <= timed[0][0][0]
    assert timed[0][-1][1] <= timed[1][0][0]
    scores = [Score.from_json(file.read_text(encoding="utf-8")) for file in files]
    assert {s.environment["queue"] for s in scores} == {f"turn {i} of 2, 0 left out" for i in (1, 2)}
    for score in scores:
        assert score.complete
        assert [(o.value, o.reason) for o in score.once if o.what == "first call"] == [(None, SHARED)]


@pytest.mark.parametrize("given", [["--queue", "q"], ["--of", "2"]])
def test_a_queue_has_a_folder_and_a_number(capsys, given):
    assert core_cli.main(["bench", OP, *given]) == 2
    assert "--queue and --of go together" in capsys.readouterr().err


def test_candidates_are_timed_anew_in_a_queue_only(capsys):
    assert core_cli.main(["bench", OP, "--candidate-ms", "5"]) == 2
    assert "--candidate-ms goes with --queue" in capsys.readouterr().err


def test_a_bench_that_is_refused_has_ended_for_the_others(tmp_path, monkeypatch):
    watched = []
    monkeypatch.setattr(Place, "watch", lambda place: watched.append(place))
    assert core_cli.main(["bench", OP, "--peer", "nobody", "--queue", str(tmp_path), "--of", "2"]) == 2
    assert [place.wait_s for place in watched] == [queueing.WAIT_S]
    with Place(tmp_path, 2, 60.0) as other, other.turn() as words:
        assert words == "turn 1 of 1, 1 left out"


# --- tuners --------------------------------------------------------------------------------------------------------


class FakeTuner:
    """Tunes as Triton's does: a choice for each key, by the times that ``do_bench`` says."""

    def __init__(self, benchmark, candidates=(1, 2)):
        self.benchmark, self.candidates = benchmark, candidates
        self.cache, self.cache_results, self.ran = {}, True, []

    class Lazily:
        """Looks the benchmark up, as a cached property does."""

        def __get__(self, tuner, kind):
            return tuner.benchmark

    do_bench = Lazily()

    def choose(self, key):
        times = {c: self.do_bench(lambda c=c: self.ran.append(c), quantiles=(0.5,)) for c in self.candidates}
        self.cache[key] = min(times, key=times.get)

    def run(self, key):
        if key not in self.cache:
            self.choose(key)
        self.ran.append(self.cache[key])


def falling(log):
    """A benchmark that finds each candidate quicker than the one before it."""

    def benchmark(call, quantiles):
        call()
        log.append("timed")
        return [1.0 / len(log)] * len(quantiles)

    return benchmark


@pytest.fixture
def log():
    return []


@pytest.fixture
def tuner(log):
    return FakeTuner(falling(log))


def fake_tuners(**changes):
    return Tuners(**{"find": lambda: FakeTuner, **changes})


def test_candidates_run_once_untimed_until_the_turn(tuner, log):
    waits = []
    with fake_tuners(synchronize=lambda: waits.append(1)) as tuners:
        with tuners.call("a"):
            tuner.run(5)
        assert (tuner.ran, log, tuner.cache, len(waits)) == ([1, 2, 1], [], {5: 1}, 2)
        assert tuner.do_bench(lambda: None) == 1.0
        tuners.time_anew()
        assert tuner.cache == {}
        with tuners.call("a"):
            tuner.run(5)
            tuner.run(5)
        assert (log, tuner.cache) == (["timed"] * 2, {5: 2})
        assert str(tuners) == "2 candidates for 1 choices, timed in the turn"
    assert tuner.do_bench is tuner.benchmark


def test_how_long_a_candidate_is_timed(tuner, log, monkeypatch):
    asked = []

    def do_bench(call, warmup, rep, quantiles):
        call()
        asked.append((warmup, rep))
        return [1.0 / len(asked)] * len(quantiles)

    monkeypatch.setitem(sys.modules, "triton.testing", types.SimpleNamespace(do_bench=do_bench))
    with fake_tuners(candidate_ms=10) as tuners:
        with tuners.call("a"):
            tuner.run(5)
        assert asked == []
        tuners.time_anew()
        with tuners.call("a"):
            tuner.run(5)
        assert (asked, log, tuner.cache) == ([(3, 10)] * 2, [], {5: 2})
        assert str(tuners) == "2 candidates for 1 choices, timed in the turn, 10 ms each"


def test_no_choice_is_kept_on_disk_by_tuners_old_or_new(tuner):
    with fake_tuners():
        late = FakeTuner(None)
        assert (tuner.cache_results, late.cache_results) == (False, False)
    assert (tuner.cache_results, late.cache_results) == (True, True)
    assert "cache_results" not in vars(FakeTuner)


def test_a_choice_that_comes_back_by_itself_is_an_error(tuner):
    with fake_tuners() as tuners:
        tuners.time_anew()
        with tuners.call("a"):
            tuner.run(5)
        with pytest.raises(TuningError, match="a choice that it did not time in this turn"), tuners.call("b"):
            tuner.cache[6] = 1  # as if read from a disk
    with fake_tuners() as tuners:
        tuners.time_anew()
        with pytest.raises(TuningError, match="did not time"), tuners.call("b"):
            tuner.run(5)
            tuner.cache[6] = 1  # beside one that was timed


def test_a_choice_that_is_kept_elsewhere_is_an_error(tuner):
    memo = {}

    def call():
        if not memo:
            tuner.run(5)
            memo[5] = tuner.cache[5]

    with fake_tuners() as tuners:
        with tuners.call("a"):
            call()
        tuners.time_anew()
        with pytest.raises(TuningError, match="did not choose again"), tuners.call("a"):
            call()


def test_what_a_failing_call_chose_in_time_counts(tuner):
    with fake_tuners() as tuners:
        tuners.time_anew()
        with pytest.raises(RuntimeError), tuners.call("a"):
            tuner.run(5)
            raise RuntimeError("and then it failed")
        with tuners.call("b"):
            tuner.run(5)
        tuners.check()


def test_tuners_are_taken_over_when_they_are_imported(tuner, log):
    found = []
    with Tuners(find=lambda: found[0] if found else None) as tuners:
        with tuners.call("a"):
            found.append(FakeTuner)  # within the call, which tunes at once
            tuner.run(5)
        assert log and tuner.cache
        tuners.time_anew()
        assert tuner.cache == {}
        with pytest.raises(TuningError, match="did not choose again"), tuners.call("a"):
            pass


def test_an_unknown_kind_of_tuner_is_refused():
    with pytest.raises(TuningError, match="no do_bench to take over"), fake_tuners(find=lambda: dict):
        pass


# --- Triton's own --------------------------------------------------------------------------------------------------


@pytest.fixture
def tritons(log, monkeypatch, tmp_path):
    """A tuner of Triton with a kernel that notes its candidates in place of a launch; it keeps its choices on disk."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import autotuner

    target = types.SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    monkeypatch.setattr(autotuner, "driver", types.SimpleNamespace(active=target))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    kernel = triton.JITFunction(_kernel)
    monkeypatch.setattr(kernel, "run", lambda *given, **named: ran.append(named["SIZE"]), raising=False)
    ran = []
    configs = [triton.Config({"SIZE": size}) for size in (1, 2)]
    made = triton.autotune(configs, key=["n"], do_bench=falling(log), cache_results=True)(kernel)
    made.ran = ran
    made.files = lambda: list((tmp_path / "triton").rglob("*.autotune.json"))
    return made


def _kernel(x, n, SIZE):
    pass


def launched(tuner, n=5):
    tuner.ran.clear()
    tuner[(1,)](None, n)
    return tuner.ran


def test_triton_keeps_choices_on_disk_where_nobody_stops_it(tritons, log):
    assert launched(tritons) == [1, 2, 2]
    assert len(tritons.files()) == 1
    tritons.cache.clear()
    assert launched(tritons) == [2] and len(log) == 2  # the choice came from the disk


def test_tritons_tuner_chooses_in_the_turn_and_never_from_disk(tritons, log):
    with Tuners() as tuners:
        with tuners.call("a"):
            assert launched(tritons) == [1, 2, 1]
        assert log == [] and tritons.files() == []
        tuners.time_anew()
        with tuners.call("a"):
            assert launched(tritons) == [1, 2, 2]
        assert len(log) == 2 and tritons.files() == []
    assert tritons.cache_results
    tritons.cache.clear()
    assert launched(tritons, 6) == [1, 2, 2] and len(tritons.files()) == 1
    tritons.cache.clear()
    with Tuners() as tuners:  # nor is it read where there is one
        tuners.time_anew()
        with tuners.call("a"):
            assert launched(tritons, 6) == [1, 2, 2]


# --- a score with a peer that tunes itself -------------------------------------------------------------------------


@pytest.fixture
def scorer(monkeypatch, tmp_path):
    """A function that makes a scorer in a queue of one, whose peer calls the function given."""
    every = Gate._samples
    monkeypatch.setattr(Gate, "_samples", lambda self, timed: itertools.islice(every(self, timed), 1, 2))

    def make(function, place=True):
        module = types.ModuleType("self_tuning")
        module.__spec__ = importlib.machinery.ModuleSpec("self_tuning", None)
        module.function = function
        monkeypatch.setitem(sys.modules, "self_tuning", module)
        peer = Peer("self-tuning", "self_tuning", (Adapter(OP, "self_tuning:function", ("q", "k", "v", "g", "beta")),))
        shapes = shapes_of(DECLARATION, ("h2-hv8-1x2048", "h2-hv8-4x8192"), 16)
        request = Request(OPS[OP], shapes, PLANS["bf16-mixed"], "cpu", CPU, "torch", (peer,))
        request = dataclasses.replace(request, repeats=1, calls=2, accuracy="none")
        made = Scorer(request, of_cpu(), lambda: Rates(1e9, 1e9, "made up"))
        made.place = Place(tmp_path / "q", 1) if place else None
        return made

    return make


def exactly_ours(**arguments):
    return OPS[OP](**arguments, backend="torch")


def key_of(arguments):
    return (*arguments["q"].shape, arguments["q"].requires_grad)


@pytest.fixture
def as_tritons(monkeypatch):
    """The fake tuner in place of Triton's."""
    monkeypatch.setitem(sys.modules, "triton.runtime.autotuner", types.SimpleNamespace(Autotuner=FakeTuner))


def test_a_peer_is_timed_with_what_it_chose_in_its_turn(scorer, tuner, log, as_tritons, monkeypatch):
    def function(**arguments):
        tuner.run(key_of(arguments))
        return exactly_ours(**arguments)

    made = scorer(function)
    warmed, timed, kept = [], [], []
    time_sides = scoring.time_sides
    made.progress = lambda line: line.startswith("ready") and warmed.append((len(log), set(tuner.ran), len(tuner.ran)))
    monkeypatch.setattr(scoring, "time_sides", lambda *a, **k: (timed.append(len(tuner.ran)), time_sides(*a, **k))[1])
    made.keep = kept.append
    score = made.run({"device": "CPU"})
    assert warmed[0][:2] == (0, {1, 2})  # both candidates were compiled and run, neither was timed
    shapes = len(made.request.cases)
    assert len(log) == 2 * shapes * len(MODES) and set(tuner.cache.values()) == {2}
    assert set(tuner.ran[timed[0] :]) >= {2} and tuner.ran[-1] == 2
    assert score.environment["tuning"] == f"{len(log)} candidates for {len(tuner.cache)} choices, timed in the turn"
    assert score.environment["queue"] == "turn 1 of 1, 0 left out" and score.environment["device"] == "CPU"
    assert [len(so_far.rows) for so_far in kept] == [4, 8] and kept[-1] == score and score.rates["how"] == "made up"
    assert score.complete
    assert {o.reason for o in score.once if o.what in ("import", "first call")} == {SHARED}
    assert tuner.do_bench is tuner.benchmark


@pytest.mark.parametrize("mode", MODES)
def test_no_score_of_a_choice_that_was_made_before_the_turn(scorer, tuner, as_tritons, mode):
    memo = {}

    def function(**arguments):
        if key_of(arguments) not in memo:
            tuner.run(key_of(arguments))
            memo[key_of(arguments)] = tuner.cache[key_of(arguments)]
        return exactly_ours(**arguments)

    made, kept = scorer(function), []
    made.request = dataclasses.replace(made.request, modes=[mode])
    made.keep = kept.append
    with pytest.raises(TuningError, match="did not choose again"):
        made.run({})
    assert kept == []


def test_calls_are_warmed_before_accuracy_makes_their_choices(scorer, tuner, as_tritons):
    memo = {}

    def function(**arguments):
        batch = arguments["q"].shape[0]
        if batch != 4 and batch not in memo:  # the first calls are of the other shape
            memo[batch] = tuner.run(batch)
        return exactly_ours(**arguments)

    made, kept = scorer(function), []
    cases = made.request.cases[::-1]
    made.request = dataclasses.replace(made.request, modes=[FORWARD], accuracy="all", cases=cases)
    made.keep = kept.append
    with pytest.raises(TuningError, match="did not choose again"):
        made.run({})
    assert {row.shape for so_far in kept for row in so_far.rows} == {cases[0].name}


def test_without_a_queue_tuners_are_left_alone(scorer, tuner, log, as_tritons):
    def function(**arguments):
        tuner.run(key_of(arguments))
        return exactly_ours(**arguments)

    made = scorer(function, place=False)
    made.request = dataclasses.replace(made.request, modes=[FORWARD], cases=made.request.cases[:1])
    score = made.run({})
    assert log == ["timed"] * 2 and tuner.cache_results
    assert not {"queue", "tuning"} & set(score.environment)
    assert all(o.value is not None for o in score.once if o.what == "first call")
