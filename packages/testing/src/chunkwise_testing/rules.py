"""Rules under test: the facts that a predicate really reads, and calls that exactly one rule refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from chunkwise.verifier.device import FAKE_DEVICES, DeviceFacts
from chunkwise.verifier.facts import Facts
from chunkwise.verifier.implementation import Implementation
from chunkwise.verifier.rules import Rule


class _Watched(Mapping[str, Any]):
    """A mapping that notes which keys are looked up."""

    def __init__(self, values: Mapping[str, Any], prefix: str, seen: set[str]) -> None:
        self._values, self._prefix, self._seen = values, prefix, seen

    def __getitem__(self, key: str) -> Any:
        self._seen.add(self._prefix + key)
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        self._seen.add(f"{self._prefix}{key}")
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        self._seen.update(self._prefix + key for key in self._values)
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class RecordingFacts(Facts):
    """Facts that note what is read of them, in the spelling of ``Rule.reads``."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("device", "needs"):
            object.__getattribute__(self, "seen").add(name)
        return object.__getattribute__(self, name)


def recording(facts: Facts) -> tuple[RecordingFacts, set[str]]:
    """The same facts, and the set that fills with what is read."""
    seen: set[str] = set()
    watched = RecordingFacts.__new__(RecordingFacts)
    for field in dataclasses.fields(facts):
        object.__setattr__(watched, field.name, getattr(facts, field.name))
    object.__setattr__(watched, "sizes", _Watched(facts.sizes, "", seen))
    object.__setattr__(watched, "dtypes", _Watched(facts.dtypes, "dtype:", seen))
    object.__setattr__(watched, "flags", _Watched(facts.flags, "flag:", seen))
    object.__setattr__(watched, "seen", seen)
    return watched, seen


def read_by(rule: Rule, facts: Facts) -> frozenset[str]:
    """The facts that a rule's predicate reads on a call."""
    watched, seen = recording(facts)
    rule.holds(watched)
    return frozenset(seen)


def accepted_facts(implementation: Implementation, calls: Iterable[Facts]) -> Facts | None:
    """Facts that no rule of an implementation refuses, found from those of real calls on the fake devices."""
    for facts in calls:
        for device in devices_for(implementation):
            edited = facts.on(device)
            for rule in implementation.rules:
                edited = edited if rule.holds(edited) else rule.satisfy(edited)
            if not implementation.judge(edited).refusals:
                return edited
    return None


def devices_for(implementation: Implementation) -> list[DeviceFacts]:
    """The fake devices that an implementation is made for."""
    archs = implementation.archs
    return [d for d in FAKE_DEVICES.values() if "any" in archs or d.arch in archs]


def refused_by(implementation: Implementation, facts: Facts) -> list[str]:
    """The names of the rules that refuse a call."""
    return [rule.name for rule in implementation.rules if not rule.holds(facts)]


def counterexample(implementation: Implementation, rule: Rule, accepted: Facts) -> Facts:
    """An accepted call edited so that this rule refuses it, and if possible no other one does.

    Rules overlap (a limit and a multiple of the same axis; the dtype of q, and one dtype for q, k and v): what
    ``violate`` gives is moved on to larger sizes, and mended for the other rules as far as this one goes on refusing.
    """
    violated = rule.violate(accepted)
    sizes = sorted(rule.reads & violated.sizes.keys())
    larger = (violated.with_size(axis, violated.size(axis) + step) for axis in sizes for step in range(1, 257))
    for candidate in (violated, *larger):
        mended = _mended(implementation, rule, candidate)
        if refused_by(implementation, mended) == [rule.name]:
            return mended
    return violated


def _mended(implementation: Implementation, rule: Rule, facts: Facts) -> Facts:
    for other in implementation.rules:
        if other is not rule and not other.holds(facts):
            edited = other.satisfy(facts)
            facts = facts if rule.holds(edited) else edited
    return facts


def counterexample_problems(implementation: Implementation, accepted: Facts) -> list[str]:
    """What is wrong with an implementation's rules; empty where all is well.

    From an accepted call each rule's ``violate`` must lead to one that this rule alone refuses, with a message; its
    ``satisfy`` must make that one acceptable to it again; and the predicate must read what ``reads`` says, no more.
    """
    problems = []
    for rule in implementation.rules:
        if rule.violate(accepted) == accepted:
            problems.append(f"{rule.name}: violate changed nothing")
            continue
        if rule.holds(rule.violate(accepted)):
            problems.append(f"{rule.name}: accepts what violate gives")
            continue
        violated = counterexample(implementation, rule, accepted)
        found = [refusal.rule for refusal in implementation.judge(violated).refusals]
        if found != [rule.name]:
            problems.append(f"{rule.name}: its counterexample is refused by {found or 'no rule'}")
        refusal = rule.refusal(violated)
        if refusal is not None and not (refusal.reason() and refusal.remedy):
            problems.append(f"{rule.name}: refuses without a reason or a remedy")
        if not rule.holds(rule.satisfy(violated)):
            problems.append(f"{rule.name}: refuses the neighbour that satisfy gives")
        extra = (read_by(rule, accepted) | read_by(rule, violated)) - rule.reads
        if extra:
            problems.append(f"{rule.name}: reads {sorted(extra)}, which it does not name")
    return problems
