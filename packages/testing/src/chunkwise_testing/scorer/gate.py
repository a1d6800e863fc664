"""The gate: no speed of a route that is not within its accuracy budget on this device, in the dtypes that are timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

import chunkwise
from chunkwise.dispatcher import policy, select
from chunkwise.dispatcher.explain import explain_facts
from chunkwise.dispatcher.registry import registry
from chunkwise.errors import ChunkwiseError
from chunkwise.ops import OPS
from chunkwise.protocol.cases import Case
from chunkwise.verifier.facts import Facts
from chunkwise_testing.oracle import Result, evaluate
from chunkwise_testing.routes import Pair, facts_of
from chunkwise_testing.sampling import Call
from chunkwise_testing.study import Sample
from chunkwise_testing.suite.accuracy import Cell
from chunkwise_testing.suite.base import Subject


class RefusedError(ChunkwiseError):
    """The scorer will not time: the route is over its accuracy budget, could not be checked, or is none."""


@dataclass(frozen=True)
class Timed:
    """What the dispatcher picks for a timed call; without a backward where no gradient is taken."""

    op: str
    forward: str
    backward: str | None = None
    format: str | None = None

    def __str__(self) -> str:
        if self.backward is None:
            return f"{self.forward} (forward)"
        both = self.forward if self.forward == self.backward else f"{self.forward} + {self.backward}"
        return f"{both}, residuals {self.format}"


def timed_of(facts: Facts, route: str | None) -> Timed:
    """The implementations that a call takes, compile failures of this process counted.

    Args:
        facts: of the call.
        route: what the caller forces (``backend=``), or None.

    Raises:
        UnknownNameError: nothing is called ``route``.
        RefusedError: nothing can run the call; the message is that of ``explain``.
    """
    active = policy.ACTIVE
    forced, source = (route, "--route") if route is not None else (active.backend, active.source)
    if forced is not None:
        registry().check_name(forced, source)
    request = select.Request(OPS[facts.op].declaration, facts, forced, source, active.residuals)
    selection = select.select(request, select.choose_format(request))
    forward, backward = selection.forward, selection.backward
    if forward is None:
        raise RefusedError(
            f"bench: nothing can run this shape; choose another --route or other --shapes\n{explain_facts(request)}"
        )
    if backward is None or selection.format is None:
        return Timed(facts.op, forward.implementation.name)
    return Timed(facts.op, forward.implementation.name, backward.implementation.name, selection.format.name)


@dataclass(frozen=True)
class Check:
    """One accuracy cell of a timed route: its worst error over budget, or why it was not measured.

    Args:
        route: what ran, in words.
        case: the declared case.
        over_budget: error over budget of the worst quantity; at most 1 passes. None where ``reason`` is given.
        quantity: which output or gradient that is.
        reason: why nothing was measured.
        failed: the check ran and is red.
        detail: what to show where it is.
    """

    route: str
    case: str
    over_budget: float | None = None
    quantity: str = ""
    reason: str | None = None
    failed: bool = False
    detail: str = ""


@dataclass
class Gate:
    """Checks routes, each once.

    Args:
        plan: the dtypes that are timed.
        device: the kind of device: ``cuda``, ``cpu`` or ``interpreter``.
        wide: cases as wide as what is timed, beside the declared ones: some kernels have one width only.
    """

    plan: str
    device: str
    wide: Sequence[Case]
    checks: dict[Timed, list[Check]] = field(default_factory=dict)

    def require(self, timed: Timed) -> None:
        """Raise RefusedError unless the route is within budget in every case that it accepts, and accepts one."""
        if timed not in self.checks:
            self.checks[timed] = [_check(timed, sample, self.device) for sample in self._samples(timed)]
        checks = self.checks[timed]
        if red := [check for check in checks if check.failed]:
            lines = "\n".join(f"  {check.case}: {check.detail}" for check in red)
            raise RefusedError(
                f"bench: parity is red for {timed} on {self.device} in {self.plan}, so nothing is timed: "
                f"{len(red)} of {len(checks)} cases are over budget; mend the route, or choose another one\n{lines}"
            )
        if all(check.over_budget is None for check in checks):
            reasons = "\n".join(f"  {check.case}: {check.reason}" for check in checks)
            raise RefusedError(
                f"bench: parity of {timed} could not be checked on {self.device} in {self.plan}, so nothing is timed: "
                f"it refuses every case; declare one that it accepts\n{reasons}"
            )

    def all_checks(self) -> list[Check]:
        """What was checked so far."""
        return [check for checks in self.checks.values() for check in checks]

    def _samples(self, timed: Timed) -> Iterable[Sample]:
        pair = Pair(timed.op, timed.forward, timed.backward or timed.forward, timed.format or "")
        for case in OPS[timed.op].declaration.promises.cases:
            yield Cell(Subject(pair, self.device), case, self.plan).sample()
        for case in self.wide:
            yield Sample(timed.op, case, self.plan)


def _check(timed: Timed, sample: Sample, device: str) -> Check:
    study = sample.study()
    if timed.backward is None:
        study = study.restricted(())
    call, gradients = study.on("cuda" if device == "cuda" else "cpu")
    empty = Check(str(timed), sample.case.name)
    if refusals := _refusals(timed, facts_of(call, study.needs)):
        return dataclasses.replace(empty, reason=f"refused: {refusals[0]}")
    try:
        measures = study.measures(_run(timed, call, study.needs, gradients))
    except (AssertionError, RuntimeError) as error:  # a quantity is missing, or what ran raised: red either way
        return dataclasses.replace(empty, reason="failed", failed=True, detail=f"{type(error).__name__}: {error}")
    worst = max(measures, key=lambda measure: measure.over_budget)
    return dataclasses.replace(
        empty,
        over_budget=worst.over_budget,
        quantity=worst.name,
        failed=not worst.ok,
        detail="; ".join(str(measure) for measure in measures if not measure.ok),
    )


def _refusals(timed: Timed, facts: Facts) -> list[str]:
    known = {i.name: i for _, i in registry().implementations(timed.op)}
    names = dict.fromkeys(name for name in (timed.forward, timed.backward) if name is not None)
    hard = [(name, refusal) for name in names for refusal in known[name].judge(facts).refusals if refusal.kind.hard]
    return [f"{name}: {refusal}" for name, refusal in hard]


def _run(timed: Timed, call: Call, needs: Collection[str], gradients: Mapping[str, Tensor | None]) -> Result:
    if timed.backward is not None and timed.format is not None:
        return Pair(timed.op, timed.forward, timed.backward, timed.format).run(call, needs, gradients)
    with chunkwise.prefer(timed.forward):
        return evaluate(call)
