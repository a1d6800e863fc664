"""Rules: pure predicates over facts, each with its message, its counterexample and its accepted neighbour.

A rule says what it reads (``reads``: axis names, ``dtype:q``, ``flag:ragged``, ``device``, ``needs``), so
that a trace can ask only those that read nothing that varies. ``violate`` and ``satisfy`` edit facts into a
call that the rule must refuse and into the nearest one that it must accept: tests are generated from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from chunkwise.protocol.axes import ACTIVATION_DTYPES
from chunkwise.verifier.device import FAKE_DEVICES
from chunkwise.verifier.evidence import Row
from chunkwise.verifier.facts import Facts
from chunkwise.verifier.refusal import Kind, Refusal

Predicate = Callable[[Facts], bool]
Message = Callable[[Facts], str]
Edit = Callable[[Facts], Facts]


@dataclass(frozen=True)
class Rule:
    """One condition on the facts.

    Args:
        name: unique within an implementation.
        kind: the kind of refusal when it does not hold.
        reads: the facts that the predicate reads.
        holds: the predicate; an exception in it is a bug and propagates.
        message: what was given and what is expected; called only when somebody reads the refusal.
        remedy: what would make it hold.
        violate: edits facts into the nearest call that this rule refuses.
        satisfy: edits facts into the nearest call that this rule accepts.
        against: for a "slower" rule, the rival implementation that wins here.
    """

    name: str
    kind: Kind
    reads: frozenset[str]
    holds: Predicate
    message: Message
    remedy: str
    violate: Edit
    satisfy: Edit
    against: str | None = None

    def refusal(self, facts: Facts) -> Refusal | None:
        """The refusal where the rule does not hold, else None."""
        if self.holds(facts):
            return None
        return Refusal(self.kind, self.name, lambda: self.message(facts), self.remedy, self.against)


def one_of(axis: str, *sizes: int) -> Rule:
    """The axis has one of the given sizes."""
    allowed = ", ".join(map(str, sizes))
    return Rule(
        name=f"{axis} one of {allowed}",
        kind=Kind.UNSUPPORTED,
        reads=frozenset({axis}),
        holds=lambda f: f.size(axis) in sizes,
        message=lambda f: f"{axis} is {f.size(axis)}, expected one of {allowed}",
        remedy=f"give {axis} one of these sizes, or let another implementation run",
        violate=lambda f: f.with_size(axis, max(sizes) + 1),
        satisfy=lambda f: f.with_size(axis, min(sizes, key=lambda s: abs(s - f.size(axis)))),
    )


def size_at_most(axis: str, limit: int) -> Rule:
    """The axis is no larger than ``limit``."""
    return Rule(
        name=f"{axis} <= {limit}",
        kind=Kind.UNSUPPORTED,
        reads=frozenset({axis}),
        holds=lambda f: f.size(axis) <= limit,
        message=lambda f: f"{axis} is {f.size(axis)}, expected at most {limit}",
        remedy=f"give {axis} at most {limit}, or let another implementation run",
        violate=lambda f: f.with_size(axis, limit + 1),
        satisfy=lambda f: f.with_size(axis, min(limit, f.size(axis))),
    )


def size_multiple_of(axis: str, factor: int) -> Rule:
    """The axis is a multiple of ``factor``."""
    return Rule(
        name=f"{axis} a multiple of {factor}",
        kind=Kind.UNSUPPORTED,
        reads=frozenset({axis}),
        holds=lambda f: f.size(axis) % factor == 0,
        message=lambda f: f"{axis} is {f.size(axis)}, expected a multiple of {factor}",
        remedy=f"pad {axis} to a multiple of {factor}, or let another implementation run",
        violate=lambda f: f.with_size(axis, f.size(axis) // factor * factor + 1),
        satisfy=lambda f: f.with_size(axis, max(factor, f.size(axis) // factor * factor)),
    )


def dtype(name: str, *allowed: str) -> Rule:
    """The argument, where it is given, has one of the dtypes."""
    others = [d for d in ACTIVATION_DTYPES if d not in allowed]
    if not others:
        raise ValueError(f"dtype({name!r}, ...) allows every dtype that an op takes; leave the rule out")
    expected = " or ".join(allowed)
    return Rule(
        name=f"{name} is {expected}",
        kind=Kind.UNSUPPORTED,
        reads=frozenset({f"dtype:{name}"}),
        holds=lambda f: f.dtype(name) in (None, *allowed),
        message=lambda f: f"{name} is {f.dtype(name)}, expected {expected}",
        remedy=f"convert {name} to {expected}, or let another implementation run",
        violate=lambda f: f.with_dtype(name, others[0]),
        satisfy=lambda f: f.with_dtype(name, allowed[0]),
    )


def _dtypes_of(facts: Facts, names: Iterable[str]) -> str:
    return ", ".join(f"{name} is {facts.dtype(name)}" for name in names if facts.given(name))


def same_dtype(names: str) -> Rule:
    """The arguments (names separated by spaces) that are given share one dtype."""
    wanted = names.split()

    def found(facts: Facts) -> set[str]:
        return {d for d in map(facts.dtype, wanted) if d is not None}

    def violate(facts: Facts) -> Facts:
        other = next(d for d in ACTIVATION_DTYPES if d != facts.dtype(wanted[0]))
        return facts.with_dtype(wanted[-1], other)

    def satisfy(facts: Facts) -> Facts:
        for name in wanted[1:]:
            if facts.given(name):
                facts = facts.with_dtype(name, str(facts.dtype(wanted[0])))
        return facts

    return Rule(
        name=f"{names} of one dtype",
        kind=Kind.UNSUPPORTED,
        reads=frozenset(f"dtype:{name}" for name in wanted),
        holds=lambda f: len(found(f)) <= 1,
        message=lambda f: f"{_dtypes_of(f, wanted)}; expected one dtype",
        remedy=f"convert {names} to one dtype, or let another implementation run",
        violate=violate,
        satisfy=satisfy,
    )


def flag_is(name: str, value: object, remedy: str, otherwise: object = None) -> Rule:
    """The option has the value; ``otherwise`` is a value that it must not have (for the counterexample)."""
    wrong = (not value) if isinstance(value, bool) else otherwise
    return Rule(
        name=f"{name} is {value}",
        kind=Kind.UNSUPPORTED,
        reads=frozenset({f"flag:{name}"}),
        holds=lambda f: f.flag(name) == value,
        message=lambda f: f"{name} is {f.flag(name)}, expected {value}",
        remedy=remedy,
        violate=lambda f: f.with_flag(name, wrong),
        satisfy=lambda f: f.with_flag(name, value),
    )


def needs_promise(name: str, reads: Iterable[str], holds: Predicate, remedy: str, violate: Edit, satisfy: Edit) -> Rule:
    """The caller has promised (by an option) what the implementation cannot find out by itself."""
    return Rule(
        name=name,
        kind=Kind.PROMISE,
        reads=frozenset(reads),
        holds=holds,
        message=lambda f: f"the promise {name} was not given",
        remedy=remedy,
        violate=violate,
        satisfy=satisfy,
    )


EXPONENT_LIMIT_LOG2 = 124.0
"""Powers of two up to here leave room for the sums of products in what fp32, tf32 and bf16 hold."""
SPLIT_EXPONENT_LIMIT_LOG2 = 108.0
"""Up to here fp32 keeps its digits in two parts of tf32 (tf32x3): the lower part is 2^-12 of the number, and tf32 ends
at 2^-136. What is lost beyond, 2^-11 of a decay, is no more than a 16-bit activation has lost."""


def centred_exponent_log2(chunk_size: int, lower_bound: float) -> float:
    """The largest exponent, base 2, of gates >= ``lower_bound`` that are cumulated from the middle of a chunk."""
    return (chunk_size / 2 + 1) * abs(lower_bound) * math.log2(math.e)


def _centred_limit_log2(facts: Facts) -> float:
    return SPLIT_EXPONENT_LIMIT_LOG2 if facts.dtype("q") == "fp32" else EXPONENT_LIMIT_LOG2


def centred_gates_fit() -> Rule:
    """The promised ``lower_bound`` of the gates keeps exponents that are centred in the chunk within fp32's range.

    A product of decayed rows, ``exp(G_t - G_s)``, may be taken apart into ``exp(G_t - G_m) exp(G_m - G_s)`` with m the
    chunk's middle row where ``(chunk_size / 2 + 1) |lower_bound| log2(e) <= 124``; it then is one product of matrices.
    That holds for fp32, tf32 and bf16 operands; fp16 ends at 2^16, so fp16 activations are widened first. For fp32
    activations it is 108, since their products are taken in parts.
    """

    def holds(facts: Facts) -> bool:
        bound, chunk = facts.flag("lower_bound"), facts.flag("chunk_size")
        return bound is not None and centred_exponent_log2(chunk, bound) <= _centred_limit_log2(facts)

    def message(facts: Facts) -> str:
        bound, chunk = facts.flag("lower_bound"), facts.flag("chunk_size")
        if bound is None:
            return "no lower_bound is promised, and gates that may fall to any depth leave what fp32 holds"
        reached, limit = centred_exponent_log2(chunk, bound), _centred_limit_log2(facts)
        found = f"lower_bound {bound:g} in chunks of {chunk} reaches 2^{reached:.0f}, beyond 2^{limit:.0f}"
        return f"{found}, where fp32 keeps its digits" if reached <= EXPONENT_LIMIT_LOG2 else found

    def satisfy(facts: Facts) -> Facts:
        deepest = _centred_limit_log2(facts) / centred_exponent_log2(facts.flag("chunk_size"), 1.0)
        return facts if holds(facts) else facts.with_flag("lower_bound", -0.99 * deepest)

    return Rule(
        name="centred gates fit fp32",
        kind=Kind.PROMISE,
        reads=frozenset({"flag:lower_bound", "flag:chunk_size", "dtype:q"}),
        holds=holds,
        message=message,
        remedy="promise a lower_bound (or safe_gate) with (chunk_size / 2 + 1) |lower_bound| log2(e) <= 124 (108 for "
        "fp32 activations), or take smaller chunks; else a robust implementation runs, which is right for any gate",
        violate=lambda f: f.with_flag("lower_bound", None),
        satisfy=satisfy,
    )


def on_archs(archs: tuple[str, ...]) -> Rule:
    """The device is of one of the architectures (``sm90``, ``cpu``, ``interpreter``; ``any`` for all)."""
    takes_any = "any" in archs
    known = list(FAKE_DEVICES.values())
    expected = ", ".join(archs)

    def edited(facts: Facts, accepted: bool) -> Facts:
        for device in known:
            if (device.arch in archs) == accepted:
                return facts.on(device)
        raise ValueError(f"no fake device is {'of' if accepted else 'outside'} {expected}")

    return Rule(
        name=f"device of {expected}",
        kind=Kind.UNSUPPORTED,
        reads=frozenset({"device"}),
        holds=lambda f: takes_any or f.device.arch in archs,
        message=lambda f: f"the tensors are on {f.device.name} ({f.device.arch}), expected {expected}",
        remedy="move the tensors to such a device, or let another implementation run",
        violate=lambda f: edited(f, accepted=False),
        satisfy=lambda f: f if takes_any else edited(f, accepted=True),
    )


@dataclass(frozen=True)
class Region:
    """Where a measurement holds: the facts that it reads, the predicate, and edits into and out of it."""

    reads: frozenset[str]
    inside: Predicate
    enter: Edit
    leave: Edit


def measured(row: Row, region: Region) -> Rule:
    """Slower than ``row.against`` inside ``region``, as the evidence row shows."""
    return Rule(
        name=row.name,
        kind=Kind.SLOWER,
        reads=region.reads,
        holds=lambda f: not region.inside(f),
        message=lambda f: f"a measured rival wins here: {row}",
        remedy="name the implementation with backend= to run it all the same",
        violate=region.enter,
        satisfy=region.leave,
        against=row.against,
    )
