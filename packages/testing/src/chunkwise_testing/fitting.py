"""Cases that the implementations under test accept: widths and dtypes moved to the nearest that their rules take.

The suite's small cases have odd widths, fp32 and no promises, which not every implementation runs. Under
:func:`fitted_to` a case is drawn as the rules of a pair's implementations edit it; what they accept is left alone. A
cell of the parity matrix keeps its dtypes and promises: there a refusal stands with its reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import NamedTuple, Protocol

from chunkwise.protocol import derive
from chunkwise.protocol.cases import Case
from chunkwise.protocol.declaration import Declaration
from chunkwise.verifier.device import CPU, DeviceFacts, device_facts
from chunkwise.verifier.facts import Facts
from chunkwise.verifier.implementation import Implementation
from chunkwise.verifier.refusal import Kind
from chunkwise.verifier.rules import Rule

WIDTHS = ("K", "V", "D")


class Pair(Protocol):
    """What is read of :class:`chunkwise_testing.routes.Pair`."""

    @property
    def implementations(self) -> tuple[Implementation, ...]:
        """The forward's and the backward's."""

    @property
    def format(self) -> str:
        """The residual format that joins them."""


class _Target(NamedTuple):
    """What cases are fitted to: rules on widths and dtypes, and on what is promised in a residual format."""

    device: DeviceFacts = CPU
    rules: tuple[Rule, ...] = ()
    promises: tuple[Rule, ...] = ()
    format: str | None = None


_NOTHING = _Target()
_active: ContextVar[_Target] = ContextVar("active", default=_NOTHING)


@contextlib.contextmanager
def fitted_to(pair: Pair, device: str, cell: bool = False) -> Iterator[None]:
    """Within the block, cases are drawn as the pair accepts them on a kind of device; a cell in widths alone."""
    hard = [rule for i in pair.implementations for rule in i.rules if rule.kind.hard]
    readable = tuple(rule for rule in hard if _readable(rule, dtypes=not cell))
    promises = tuple(rule for rule in hard if rule.kind is Kind.PROMISE and not cell)
    token = _active.set(_Target(device_facts(device, None), readable, promises, pair.format))
    try:
        yield
    finally:
        _active.reset(token)


def active() -> tuple[str, ...]:
    """What the cases drawn now are fitted to: part of a key to what was drawn."""
    target = _active.get()
    names = [rule.name for rule in (*target.rules, *target.promises)]
    return (target.device.arch, str(target.format if target.promises else None), *names) if names else ()


def fit(op: str, case: Case, sizes: Mapping[str, int], dtypes: Mapping[str, str]) -> tuple[Case, dict[str, str]]:
    """The case and the dtypes of its tensors, as the rules accept them. Unlike widths stay unlike."""
    target = _active.get()
    given = Facts(op, target.device, sizes=sizes, dtypes=dtypes)
    rules = [rule for rule in target.rules if rule.reads <= given.names]
    facts = given
    for rule in rules:
        if not rule.holds(facts):
            facts = rule.satisfy(facts)
    if given.sizes.get("K") != given.sizes.get("V") and facts.sizes.get("K") == facts.sizes.get("V"):
        wider = facts.with_size("V", 2 * facts.size("V"))
        facts = wider if all(rule.holds(wider) for rule in rules) else facts
    moved = {axis: size for axis, size in facts.sizes.items() if size != sizes[axis]}
    return dataclasses.replace(case, sizes={**case.sizes, **moved}), dict(facts.dtypes)


def promise(declaration: Declaration, case: Case, dtypes: Mapping[str, str]) -> Case:
    """The case with the promises that the rules ask for, where its options make others."""
    target = _active.get()
    options = {spec.name: case.options.get(spec.name, spec.default) for spec in declaration.options}
    flags = derive.settled(declaration, options, target.format)
    given = Facts(declaration.name, target.device, dtypes=dtypes, flags=flags)
    facts = given
    for rule in target.promises:
        facts = facts if rule.holds(facts) else rule.satisfy(facts)
    promised = {name: value for name, value in facts.flags.items() if value != given.flags[name]}
    return dataclasses.replace(case, options={**case.options, **promised}) if promised else case


def _readable(rule: Rule, dtypes: bool) -> bool:
    """Whether a rule reads widths (and dtypes), and at most the device beside them."""
    of_tensors = {name for name in rule.reads if name in WIDTHS or (dtypes and name.startswith("dtype:"))}
    return bool(of_tensors) and rule.reads <= of_tensors | {"device"}
