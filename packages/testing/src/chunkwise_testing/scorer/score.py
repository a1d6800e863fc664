"""One run of the scorer: first calls, the gate, then every shape with all sides in turn."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from chunkwise.protocol.axes import DTYPES
from chunkwise.protocol.cases import Case, Cost
from chunkwise.protocol.op import Op
from chunkwise.verifier.device import DeviceFacts
from chunkwise.verifier.facts import Facts
from chunkwise_testing.peers import Peer
from chunkwise_testing.sampling import Plan, ragged_argument
from chunkwise_testing.scorer import accuracy
from chunkwise_testing.scorer.floors import Rates, floor_of
from chunkwise_testing.scorer.gate import Gate, RefusedError, Timed, timed_of
from chunkwise_testing.scorer.graphs import Runs, captured
from chunkwise_testing.scorer.inputs import (
    BOTH,
    FORWARD,
    MODES,
    InputSet,
    draw_set,
    draw_sets,
    facts_of_case,
    reduced,
)
from chunkwise_testing.scorer.instruments import Instruments
from chunkwise_testing.scorer.queueing import Place
from chunkwise_testing.scorer.results import Accuracy, Figure, Kernel, Once, Row, Score
from chunkwise_testing.scorer.sides import Side, failures, in_words, ours, theirs
from chunkwise_testing.scorer.timing import REPEATS, Reading, time_sides
from chunkwise_testing.scorer.tuning import Tuners

GRAPH = "graph"
ACCURACY = ("all", "ours", "none")
NO_BACKWARD_COST = "the declaration has the forward's cost only"
SHARED = "not timed: other processes of the queue were at work"
_GATE_TOKENS, _GATE_HEADS = 192, 2


@dataclass(frozen=True)
class Request:
    """What to score.

    Args:
        op: the op.
        cases: its shapes.
        plan: the dtypes.
        device: ``cpu`` or ``cuda``, as torch takes it.
        facts: of that device.
        route: what our side forces, or None for the dispatcher's choice.
        peers: to compare with; imported when ours has run, since what they import may be ours to import too.
        modes: of :data:`MODES`.
        repeats, calls: see :func:`chunkwise_testing.scorer.timing.time_sides`.
        accuracy: of :data:`ACCURACY`: whose results are held against fp64, and the peers' against ours.
        kernels: whether each side's kernels are listed, when all times are taken.
    """

    op: Op[..., Any]
    cases: Sequence[Case]
    plan: Plan
    device: str
    facts: DeviceFacts
    route: str | None = None
    peers: Sequence[Peer] = ()
    modes: Sequence[str] = MODES
    repeats: int = REPEATS
    calls: int | None = None
    accuracy: str = "all"
    kernels: bool = False


def _ignored(_: object) -> None:
    return None


@dataclass
class Scorer:
    """Scores a request.

    Args:
        request: what to score.
        instruments: what measures.
        rates: measures the device's rates; called once, behind the gate.
        progress: is told what is measured now.
        keep: is given the score so far, shape by shape.
        place: in a queue of processes that warm up side by side; everything is timed in its turn.
        candidate_ms: there, how long a peer that tunes itself times each candidate; None: as it does.
    """

    request: Request
    instruments: Instruments
    rates: Callable[[], Rates]
    progress: Callable[[str], object] = _ignored
    keep: Callable[[Score], object] = _ignored
    place: Place | None = None
    candidate_ms: int | None = None
    tuners: Tuners | None = None
    sides: list[Side] = field(default_factory=list)
    once: list[Once] = field(default_factory=list)

    def run(self, environment: Mapping[str, str]) -> Score:
        """Measure everything.

        Raises:
            RefusedError: parity is red, could not be checked, or the route changed while it was timed.
            PeerError: a peer cannot be imported.
        """
        for case in self.request.cases:  # a shape without a route is an error before anything is compiled
            for mode in self.request.modes:
                timed_of(self._facts(case, mode), self.request.route)
        if self.place is None:
            return self._timed(self._untimed(environment))
        with Tuners(self.instruments.synchronize, candidate_ms=self.candidate_ms) as self.tuners:
            score = self._untimed(environment)
            self.instruments.release()
            self.instruments.synchronize()
            self.progress("ready; waiting for the turn")
            with self.place.turn() as words:
                self.progress(words)
                self.tuners.time_anew()
                score = self._timed(dataclasses.replace(score, environment={**environment, "queue": words}))
                self.instruments.release()
        return score

    def _untimed(self, environment: Mapping[str, str]) -> Score:
        """What goes before the shapes: first calls, the gate, accuracy; in a queue each call that will be timed."""
        self._first_calls()
        gate, request = self._gate(), self.request
        if self.tuners is not None:
            self._warm(self.tuners)  # before accuracy: a choice must be seen with the timed call that makes it
        return Score(
            op=request.op.declaration.name,
            plan=request.plan.name,
            environment=environment,
            rates={},
            parity=tuple(gate.all_checks()),
            accuracy=tuple(self._accuracy()),
        )

    def _timed(self, score: Score) -> Score:
        """The score with the rates and the rows of all shapes."""
        rates = self.rates()
        score = dataclasses.replace(score, rates=dataclasses.asdict(rates))
        for case in self.request.cases:
            rows = tuple(self._rows(case, rates))
            score = dataclasses.replace(score, once=tuple(self.once), rows=(*score.rows, *rows))
            if self.tuners is not None:
                self.tuners.check()
                score = dataclasses.replace(score, environment={**score.environment, "tuning": str(self.tuners)})
            self.keep(score)
        if self.request.kernels:  # behind all times: launches may take longer where a profiler has been at work
            score = dataclasses.replace(score, kernels=tuple(self._kernels()))
            self.keep(score)
        return score

    def _warm(self, tuners: Tuners) -> None:
        """Run every call that will be timed once, on one input set, and leave nothing on the device."""
        request = self.request
        tuners.forget()  # so that each call says what it chooses, and not only the first of its kind
        for case in request.cases:
            self.instruments.release()
            sets = [draw_set(request.op, case, request.plan, request.device, seed=0)]
            for mode in request.modes:
                self.progress(f"warming {case.name}, {mode}")
                self._ready(case, mode, sets)
            del sets

    def _facts(self, case: Case, mode: str) -> Facts:
        return facts_of_case(self.request.op, case, self.request.plan, self.request.facts, mode)

    # --- before the shapes -----------------------------------------------------------------------------------

    def _first_calls(self) -> None:
        """Every side's very first call, compilation and all; a later mode compiles only what is new to it."""
        case, request = self.request.cases[0], self.request
        inputs = draw_set(request.op, case, request.plan, request.device, seed=0)
        _start_torch(request.device)
        self._first_calls_of(ours(request.op, request.route), case, inputs)
        for peer in request.peers:
            loaded = peer.load(request.op.declaration.name)
            if self.tuners is not None:
                self.tuners.take_over()
            self._once_s(peer.name, "import", ("", ""), loaded.import_s)
            self._first_calls_of(theirs(request.op, loaded), case, inputs)

    def _first_calls_of(self, side: Side, case: Case, inputs: InputSet) -> None:
        self.sides.append(side)
        for mode in self.request.modes:
            self.progress(f"first call of {side.name}, {mode}")
            value, reason = None, side.unsupported(self._facts(case, mode))
            if reason is None:
                with self._tuning((case.name, mode, side.name)):
                    value, reason = self._first_call_s(side, inputs, mode)
            self._once_s(side.name, "first call", (case.name, mode), value, reason)

    def _once_s(
        self, side: str, what: str, call: tuple[str, str], value: float | None, reason: str | None = None
    ) -> None:
        """Note seconds; those taken beside other processes are none."""
        if self.place is not None:
            value, reason = None, reason or SHARED
        self.once.append(Once(side, what, *call, value, "s", reason))

    def _first_call_s(self, side: Side, inputs: InputSet, mode: str) -> tuple[float | None, str | None]:
        run = side.run_of(inputs, mode)
        self.instruments.synchronize()
        start = self.instruments.clock()
        try:
            run()
            self.instruments.synchronize()
        except failures() as error:
            return None, in_words(error)
        return self.instruments.clock() - start, None

    def _gate(self) -> Gate:
        request = self.request
        declaration = request.op.declaration
        wide = {c.name: c for c in (reduced(declaration, c, _GATE_TOKENS, _GATE_HEADS) for c in request.cases)}
        self.gate = gate = Gate(request.plan.name, request.facts.kind, tuple(wide.values()))
        for case in request.cases:
            for mode in request.modes:
                timed = timed_of(self._facts(case, mode), request.route)
                if timed not in gate.checks:
                    self.progress(f"parity of {timed}")
                gate.require(timed)
        return gate

    def _accuracy(self) -> Iterator[Accuracy]:
        request = self.request
        declaration = request.op.declaration
        mode = BOTH if BOTH in request.modes else FORWARD
        rows = ragged_argument(declaration).rows
        tokens = min(accuracy.TOKENS, max(case.sizes[rows] for case in request.cases))
        modest = reduced(declaration, declaration.promises.benchmarks[0], tokens, accuracy.HEADS)
        smallest = min(request.cases, key=lambda case: self._cost(case).bytes)
        compared = [(modest, accuracy.against_oracle)]
        compared += [(smallest, accuracy.against_ours)] if request.peers and request.accuracy == "all" else []
        shown = {"all": self.sides, "ours": self.sides[:1], "none": []}[request.accuracy]
        for case, compare in compared if shown else ():
            self.progress(f"accuracy at {case.name}")
            sides = [(side, self._facts(case, mode)) for side in shown]
            yield from compare(request.op, case, request.plan, request.device, sides, mode)

    def _cost(self, case: Case) -> Cost:
        known = {**case.sizes, **case.options}
        return self.request.op.declaration.promises.cost(known, DTYPES[self.request.plan.activations].itemsize)

    # --- a shape ---------------------------------------------------------------------------------------------

    def _rows(self, case: Case, rates: Rates) -> Iterator[Row]:
        request, instruments = self.request, self.instruments
        instruments.release()
        sets = draw_sets(
            request.op,
            case,
            request.plan,
            request.device,
            cache_bytes=instruments.cache_bytes,
            free_bytes=instruments.free_bytes(),
        )
        for mode in request.modes:
            self.progress(f"{case.name}, {mode}")
            timed = timed_of(self._facts(case, mode), request.route)
            runs, reasons = self._ready(case, mode, sets)
            self._peaks(case, mode, runs, reasons)
            floor_ms = floor_of(self._cost(case), rates).ms if mode == FORWARD else None
            for timing, figures, calls in self._timings(runs, reasons):
                yield Row(
                    shape=case.name,
                    sizes=dict(case.sizes),
                    mode=mode,
                    timing=timing,
                    route=str(timed),
                    sets=len(sets),
                    input_bytes=sum(s.bytes for s in sets),
                    calls=calls,
                    figures=figures,
                    floor_ms=floor_ms,
                    floor_reason=None if mode == FORWARD else NO_BACKWARD_COST,
                )
            self._unchanged(case, mode, timed)

    def _unchanged(self, case: Case, mode: str, timed: Timed) -> None:
        """A compile failure puts an implementation aside: what ran then is not what the gate saw."""
        self.gate.require(timed)
        now = timed_of(self._facts(case, mode), self.request.route)
        if now != timed:
            raise RefusedError(
                f"bench: {case.name}, {mode}: the route changed from {timed} to {now} while it was timed; "
                f"mend the compile failure that was warned of, or name a --route"
            )

    def _ready(self, case: Case, mode: str, sets: Sequence[InputSet]) -> tuple[Runs, dict[str, str]]:
        """The calls of the sides that work, each run once on each set; the reasons of the others."""
        runs, reasons = {}, {}
        for side in self.sides:
            reason = side.unsupported(self._facts(case, mode))
            own = [side.run_of(inputs, mode) for inputs in sets]
            if reason is None:
                reason = self._failure((case.name, mode, side.name), own)
            if reason is None:
                runs[side.name] = own
            else:
                reasons[side.name] = reason
        return runs, reasons

    def _failure(self, call: Hashable, runs: Sequence[Callable[[], object]]) -> str | None:
        try:
            with self._tuning(call):
                for run in runs:
                    run()
                self.instruments.synchronize()
        except failures() as error:
            return in_words(error)
        return None

    def _tuning(self, call: Hashable) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.tuners is None else self.tuners.call(call)

    def _peaks(self, case: Case, mode: str, runs: Runs, reasons: Mapping[str, str]) -> None:
        peak = self.instruments.peak_bytes
        for side in self.sides:
            value, reason = None, reasons.get(side.name) or (peak if isinstance(peak, str) else None)
            if reason is None and not isinstance(peak, str):
                value = float(peak(runs[side.name][0]))
            self.once.append(Once(side.name, "peak memory", case.name, mode, value, "bytes", reason))

    # --- kernels ---------------------------------------------------------------------------------------------

    def _kernels(self) -> Iterator[Kernel]:
        """What each side runs in each call, on one input set."""
        request = self.request
        for case in request.cases:
            self.instruments.release()
            sets = [draw_set(request.op, case, request.plan, request.device, seed=0)]
            for mode in request.modes:
                self.progress(f"kernels of {case.name}, {mode}")
                runs, reasons = self._ready(case, mode, sets)
                for side in self.sides:
                    yield from self._kernels_of((side.name, case.name, mode), runs, reasons)
            del sets

    def _kernels_of(self, call: tuple[str, str, str], runs: Runs, reasons: Mapping[str, str]) -> list[Kernel]:
        look, reason = self.instruments.kernels, reasons.get(call[0])
        if reason is None and not isinstance(look, str):
            return [Kernel(*call, *kernel) for kernel in look(runs[call[0]][0])]
        return [Kernel(*call, reason=reason or str(look))]

    # --- timings ---------------------------------------------------------------------------------------------

    def _timings(self, runs: Runs, reasons: Mapping[str, str]) -> Iterator[tuple[str, tuple[Figure, ...], int]]:
        """Each timing's name, figures and number of calls."""
        yield self.instruments.timing, *self._figures(runs, reasons)
        replays, graph_reasons = captured(runs, self.instruments)
        yield GRAPH, *self._figures(replays, {**graph_reasons, **reasons})

    def _figures(
        self, runs: Mapping[str, Sequence[Callable[[], object]]], reasons: Mapping[str, str]
    ) -> tuple[tuple[Figure, ...], int]:
        readings: dict[str, Reading] = {}
        failed: dict[str, str] = {}
        if runs:
            request = self.request
            try:
                readings = time_sides(runs, self.instruments.timer, repeats=request.repeats, calls=request.calls)
            except failures() as error:
                failed = dict.fromkeys(runs, f"failed while it was timed: {in_words(error)}")
        known = {**reasons, **failed}
        figures = tuple(_figure(side.name, readings.get(side.name), known) for side in self.sides)
        return figures, max((reading.calls for reading in readings.values()), default=0)


def _start_torch(device: str) -> None:
    """Torch loads modules for seconds at the first gradient of a process; no side should be charged with it."""
    x = torch.ones(8, 8, device=device, requires_grad=True)
    torch.autograd.grad([x @ x], [x], [torch.ones_like(x)])


def _figure(side: str, reading: Reading | None, reasons: Mapping[str, str]) -> Figure:
    if reading is None:
        return Figure(side, reason=reasons.get(side, "not timed"))
    return Figure(side, reading.ms, reading.spread, reading.repeats_ms)
