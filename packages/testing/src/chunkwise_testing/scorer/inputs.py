"""Which shapes are scored, the facts of their calls, and the input sets that the timed calls rotate through."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from chunkwise.errors import UnknownNameError
from chunkwise.protocol.cases import Case
from chunkwise.protocol.declaration import Declaration
from chunkwise.protocol.op import Op
from chunkwise.verifier.device import DeviceFacts
from chunkwise.verifier.facts import Facts
from chunkwise_testing import routes, sampling
from chunkwise_testing.sampling import HEAD_AXES, Call, Plan, ragged_argument, variant

MOST_SETS, FEWEST_SETS = 4, 2
FORWARD, BOTH = "forward", "forward+backward"
MODES = (FORWARD, BOTH)


def shapes_of(declaration: Declaration, patterns: Iterable[str] = (), tokens: int | None = None) -> list[Case]:
    """The op's frozen benchmark shapes.

    Args:
        declaration: of the op.
        patterns: names of shapes, ``*`` and ``?`` allowed; none for all.
        tokens: the size of the row axis in place of the shape's own; shapes that are equal then are taken once.

    Raises:
        UnknownNameError: a pattern that fits no shape, or ``tokens`` with a ragged shape.
    """
    known = declaration.promises.benchmarks
    wanted = list(patterns) or ["*"]
    for pattern in wanted:
        if not any(fnmatch.fnmatchcase(case.name, pattern) for case in known):
            names = ", ".join(case.name for case in known) or "none"
            raise UnknownNameError(
                f"{declaration.name} has no benchmark shape {pattern!r}; its shapes: {names} (patterns with * will do)"
            )
    chosen = [case for case in known if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in wanted)]
    return chosen if tokens is None else _with_tokens(declaration, chosen, tokens)


def _with_tokens(declaration: Declaration, cases: Sequence[Case], tokens: int) -> list[Case]:
    if ragged := [case.name for case in cases if case.offsets is not None]:
        raise UnknownNameError(
            f"--tokens {tokens}: the sequences of {', '.join(ragged)} have lengths of their own; leave them out"
        )
    rows = ragged_argument(declaration).rows
    unique: dict[tuple[tuple[str, int], ...], Case] = {}
    for case in cases:
        alike = {axis: tokens for axis in _row_axes(declaration) if case.sizes[axis] == case.sizes[rows]}
        changed = variant(case, f"{case.name}@{rows}{tokens}", sizes=alike)
        unique.setdefault(tuple(sorted(changed.sizes.items())), changed)
    return list(unique.values())


def _row_axes(declaration: Declaration) -> list[str]:
    return [offsets.rows for offsets in declaration.promises.offsets]


def reduced(declaration: Declaration, case: Case, tokens: int, heads: int) -> Case:
    """A small relative of a benchmark shape: one row, as wide, with its ratio of heads; for the fp64 oracle.

    Args:
        declaration: of the op.
        case: the benchmark shape.
        tokens: at most so many.
        heads: at most so many in the head axis that has fewest.
    """
    offsets = ragged_argument(declaration)
    counts = {axis: size for axis, size in case.sizes.items() if axis in HEAD_AXES}
    common = math.gcd(*counts.values()) if counts else 1
    # The fewest heads are a multiple of `common`; as many multiples of the ratio as stay within `heads`.
    times = max(1, min(common, heads * common // min(counts.values(), default=common)))
    sizes = {axis: size // common * times for axis, size in counts.items()}
    rows = {axis: min(tokens, case.sizes[axis]) for axis in _row_axes(declaration)}
    small = variant(case, sizes={**sizes, offsets.batch: 1, **rows})
    name = "-".join(f"{axis}{size}" for axis, size in small.sizes.items())
    return dataclasses.replace(small, name=name, offsets=None, more_offsets={})


def facts_of_case(op: Op[..., Any], case: Case, plan: Plan, device: DeviceFacts, mode: str) -> Facts:
    """The facts of a shape's call on a device; nothing of its size is allocated."""
    tiny = variant(case, sizes={} if case.offsets is not None else dict.fromkeys(_row_axes(op.declaration), 1))
    call = sampling.draw(op, tiny, plan)
    needs = sampling.default_needs(call) if mode == BOTH else frozenset[str]()
    facts = routes.facts_of(call, needs)
    return dataclasses.replace(facts, sizes={**facts.sizes, **sampling.all_sizes(op.declaration, case)}, device=device)


@dataclasses.dataclass(frozen=True, eq=False)
class InputSet:
    """One independently drawn call and the gradients of its outputs."""

    call: Call
    gradients: dict[str, Tensor]

    @functools.cached_property
    def bytes(self) -> int:
        """Of all its tensors."""
        tensors = [*self.call.tensors.values(), *self.gradients.values()]
        return sum(t.numel() * t.element_size() for t in tensors)


def draw_set(op: Op[..., Any], case: Case, plan: Plan, device: str, seed: int) -> InputSet:
    """Draw a call and its gradients on the device."""
    call = sampling.draw(op, case, plan, device=device, seed=seed, drawn_on=device)
    return InputSet(call, sampling.draw_gradients(call, seed=seed + 1000, drawn_on=device))


def how_many_sets(set_bytes: int, cache_bytes: int, free_bytes: int) -> int:
    """So many that together they exceed the cache, between two and four; one where memory allows no more.

    A third of the free memory is for inputs; calls need room of their own.
    """
    wanted = max(FEWEST_SETS, min(MOST_SETS, cache_bytes // max(set_bytes, 1) + 1))
    return max(1, min(wanted, free_bytes // 3 // max(set_bytes, 1)))


def draw_sets(
    op: Op[..., Any], case: Case, plan: Plan, device: str, *, cache_bytes: int, free_bytes: int
) -> list[InputSet]:
    """The input sets of a shape, each drawn from a seed of its own."""
    first = draw_set(op, case, plan, device, 0)
    count = how_many_sets(first.bytes, cache_bytes, free_bytes)
    return [first, *(draw_set(op, case, plan, device, seed) for seed in range(1, count))]
