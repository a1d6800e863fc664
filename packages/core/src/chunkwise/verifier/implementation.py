"""Implementations: one way in which a backend runs an op, and the judgement of the verifier on it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from chunkwise.verifier.facts import Facts
from chunkwise.verifier.refusal import DoesNotFit, Refusal
from chunkwise.verifier.rules import Rule, on_archs


@dataclass(frozen=True)
class Verdict:
    """What the verifier found: every refusal, and the schedule where nothing hard stands against it."""

    refusals: tuple[Refusal, ...]
    schedule: Any = None

    @property
    def hard(self) -> bool:
        """Whether a refusal makes the implementation wrong or impossible for the call."""
        return any(refusal.kind.hard for refusal in self.refusals)


@dataclass(frozen=True, eq=False)
class Implementation:
    """One way to run an op: forward, backward or both.

    Args:
        name: ``backend/op/variant``; the first part is the backend's name.
        op: the name of the op.
        rank: lower is preferred among those that nothing speaks against.
        archs: architectures (``sm90``), device kinds (``cpu``, ``interpreter``), or ``any``.
        schedule: pure function from facts to a frozen schedule, or to :class:`DoesNotFit`.
        forward: ``module:function`` of ``forward(schedule, inputs, save) -> (outputs, residuals by name)``;
            ``save`` names the residual format to write, or is None. Absent outputs are None.
        backward: ``module:function`` of ``backward(schedule, inputs, residuals, grads, needs)``, which
            returns exactly the gradients named in ``needs``; absent gradients of outputs are None.
        residuals: the names of the formats that forward writes and backward reads.
        requires, promises, slower: the rules, by the kind of refusal that they give.
        compile: ``module:function`` of ``compile(schedule, facts, parts)``; builds kernels before the first
            launch and raises :class:`chunkwise.errors.CompileFailure`. ``parts`` holds ``forward``,
            ``backward`` or both, ``facts.residuals`` the format between them, None where no gradient is needed.
        atomic: results may differ in the last bits from run to run.
        batch_invariant: promised that what else a batch holds changes no bit of a row's results.
    """

    name: str
    op: str
    rank: int
    archs: tuple[str, ...]
    schedule: Callable[[Facts], Any]
    forward: str | None = None
    backward: str | None = None
    residuals: tuple[str, ...] = ()
    requires: tuple[Rule, ...] = ()
    promises: tuple[Rule, ...] = ()
    slower: tuple[Rule, ...] = ()
    compile: str | None = None
    atomic: bool = False
    batch_invariant: bool = False

    @property
    def backend(self) -> str:
        """The name of the backend that it belongs to."""
        return self.name.partition("/")[0]

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """All rules, the architectures first."""
        device = () if "any" in self.archs else (on_archs(self.archs),)
        return (*device, *self.requires, *self.promises, *self.slower)

    def judge(self, facts: Facts) -> Verdict:
        """Hold every rule against the facts; then, if none is hard, compute the schedule."""
        refusals = [r for rule in self.rules if (r := rule.refusal(facts)) is not None]
        if any(refusal.kind.hard for refusal in refusals):
            return Verdict(tuple(refusals))
        schedule = self.schedule(facts)
        if isinstance(schedule, DoesNotFit):
            return Verdict((*refusals, schedule.refusal()))
        return Verdict(tuple(refusals), schedule)

    def accepts_fixed(self, facts: Facts) -> bool:
        """Whether no hard rule that reads only the given facts refuses; rules that read more are left out."""
        return all(rule.holds(facts) for rule in self.rules if rule.kind.hard and rule.reads <= facts.names)

    @cached_property
    def _functions(self) -> dict[str, Callable[..., Any]]:
        return {}

    def function(self, part: str) -> Callable[..., Any]:
        """``forward``, ``backward`` or ``compile``, imported when it is first asked for."""
        if part not in self._functions:
            self._functions[part] = resolve(getattr(self, part))
        return self._functions[part]


def resolve(path: str) -> Any:
    """Import ``module:attribute``."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)
