"""Cases that the implementations under test accept: widths and dtypes moved to the nearest that their rules take.

The suite's small cases have odd widths and fp32, which not every implementation runs. Under :func:`fitted_to` a case is
drawn as the rules of a pair's implementations edit it; what they accept is left alone. A cell of the parity matrix
keeps its dtypes: there a refusal stands with its reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING

from chunkwise.protocol.cases import Case
from chunkwise.verifier.device import CPU, DeviceFacts, device_facts
from chunkwise.verifier.facts import Facts
from chunkwise.verifier.rules import Rule

if TYPE_CHECKING:
    from chunkwise_testing.routes import Pair

WIDTHS = ("K", "V", "D")
_active: ContextVar[tuple[DeviceFacts, tuple[Rule, ...]]] = ContextVar("active", default=(CPU, ()))


@contextlib.contextmanager
def fitted_to(pair: Pair, device: str, dtypes: bool = True) -> Iterator[None]:
    """Within the block, cases are drawn as the pair accepts them on a kind of device; widths, and dtypes too."""
    hard = (rule for i in pair.implementations for rule in i.rules if rule.kind.hard)
    token = _active.set((device_facts(device, None), tuple(rule for rule in hard if _readable(rule, dtypes))))
    try:
        yield
    finally:
        _active.reset(token)


def active() -> tuple[str, ...]:
    """What the cases drawn now are fitted to: part of a key to what was drawn."""
    device, rules = _active.get()
    return (device.arch, *(rule.name for rule in rules)) if rules else ()


def fit(op: str, case: Case, sizes: Mapping[str, int], dtypes: Mapping[str, str]) -> tuple[Case, dict[str, str]]:
    """The case and the dtypes of its tensors, as the rules accept them. Unlike widths stay unlike."""
    device, active_rules = _active.get()
    given = Facts(op, device, sizes=sizes, dtypes=dtypes)
    rules = [rule for rule in active_rules if rule.reads <= given.names]
    facts = given
    for rule in rules:
        if not rule.holds(facts):
            facts = rule.satisfy(facts)
    if given.sizes.get("K") != given.sizes.get("V") and facts.sizes.get("K") == facts.sizes.get("V"):
        wider = facts.with_size("V", 2 * facts.size("V"))
        facts = wider if all(rule.holds(wider) for rule in rules) else facts
    moved = {axis: size for axis, size in facts.sizes.items() if size != sizes[axis]}
    return dataclasses.replace(case, sizes={**case.sizes, **moved}), dict(facts.dtypes)


def _readable(rule: Rule, dtypes: bool) -> bool:
    """Whether a rule reads widths (and dtypes), and at most the device beside them."""
    of_tensors = {name for name in rule.reads if name in WIDTHS or (dtypes and name.startswith("dtype:"))}
    return bool(of_tensors) and rule.reads <= of_tensors | {"device"}
