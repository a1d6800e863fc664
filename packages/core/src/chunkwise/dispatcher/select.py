"""Selection: from a checked call to its route, or to every reason why there is none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from chunkwise import errors
from chunkwise.autograd.residuals import POLICIES, ResidualFormat
from chunkwise.dispatcher import failure
from chunkwise.dispatcher.canonical import CanonicalForm
from chunkwise.dispatcher.policy import Policy
from chunkwise.dispatcher.registry import registry
from chunkwise.dispatcher.route import Route, Runner
from chunkwise.protocol import derive
from chunkwise.protocol.axes import dtype_name
from chunkwise.protocol.declaration import Declaration
from chunkwise.verifier.device import device_facts
from chunkwise.verifier.facts import Facts
from chunkwise.verifier.implementation import Implementation, Verdict


@dataclass(frozen=True)
class Request:
    """A checked call, with what the user asked beside it.

    Args:
        facts: of the call; their options become those that the op settles.
        forced: the backend, implementation or ``forward+backward`` pair that the user named, or None.
        source: who named it, for messages.
        residuals: the format (or ``lean``, ``full``) that the user asked for, or None.
        on_this_machine: False for a device that is only described: what backends need of a machine is not asked.
    """

    declaration: Declaration
    facts: Facts
    forced: str | None
    source: str
    residuals: str | None
    on_this_machine: bool = True

    def __post_init__(self) -> None:
        flags = derive.settled(self.declaration, self.facts.flags, self.residuals)
        object.__setattr__(self, "facts", dataclasses.replace(self.facts, flags=flags))


@dataclass(frozen=True)
class Candidate:
    """An implementation with the verifier's judgement; ``barred`` is a reason that lies outside the facts."""

    implementation: Implementation
    verdict: Verdict
    barred: str | None = None

    @property
    def possible(self) -> bool:
        """Whether nothing hard stands against it."""
        return self.barred is None and not self.verdict.hard


@dataclass(frozen=True)
class Selection:
    """All candidates, and the chosen pair where there is one."""

    request: Request
    format: ResidualFormat | None
    candidates: tuple[Candidate, ...]
    forward: Candidate | None = None
    backward: Candidate | None = None


def request_of(
    declaration: Declaration,
    tensors: Sequence[Any],
    options: Sequence[Any],
    needs: frozenset[str],
    policy: Policy,
    residuals: str | None = None,
) -> Request:
    """Check a call and gather its facts. Raises ValueError or TypeError that names the argument.

    ``residuals`` names the format where it is fixed already; else the policy may.
    """
    binding = derive.check(declaration, tensors, options)
    values = dict(zip(declaration.option_names, options, strict=True))
    named = values.pop("backend", None)
    device = next(t for t in tensors if t is not None).device
    facts = Facts(
        op=declaration.name,
        device=device_facts(device.type, device.index),
        sizes=binding.sizes,
        dtypes={
            name: dtype_name(t.dtype)
            for name, t in zip(declaration.tensor_names, tensors, strict=True)
            if t is not None
        },
        flags={**values, "ragged": binding.ragged},
        needs=needs,
    )
    forced, source = (named, "backend=") if named is not None else (policy.backend, policy.source)
    if forced is not None:
        registry().check_name(forced, source)
    return Request(declaration, facts, forced, source, residuals or policy.residuals)


def needed_gradients(declaration: Declaration, tensors: Sequence[Any]) -> frozenset[str]:
    """The arguments whose gradient the call must be able to give."""
    if not torch.is_grad_enabled():
        return frozenset()
    named = zip(declaration.tensor_names, tensors, strict=True)
    wanted = declaration.promises.differentiable
    return frozenset(name for name, t in named if name in wanted and t is not None and t.requires_grad)


def fixed_facts(declaration: Declaration, facts: Facts) -> Facts:
    """The facts that do not vary between the calls of one graph: no B, T or N."""
    static = declaration.promises.static_axes
    return dataclasses.replace(facts, sizes={axis: facts.sizes[axis] for axis in static})


def choose_format(request: Request) -> ResidualFormat | None:
    """The residual format, from facts that do not vary, so that eager and compiled calls choose alike."""
    if not request.facts.needs:
        return None
    declaration = request.declaration
    formats = _allowed_formats(request)
    facts = fixed_facts(declaration, request.facts)
    usable = [
        i
        for loaded, i in registry().implementations(declaration.name)
        if (loaded.usable or not request.on_this_machine)
        and not failure.is_quarantined(i.name)
        and i.accepts_fixed(facts)
    ]
    for residual_format in formats:
        with_format = [i for i in usable if residual_format.name in i.residuals]
        writers = [i for i in with_format if i.forward and _named(request, i, "forward")]
        readers = [i for i in with_format if i.backward and _named(request, i, "backward")]
        if writers and readers:
            return residual_format
    return formats[0]


def _allowed_formats(request: Request) -> Sequence[ResidualFormat]:
    formats = request.declaration.promises.formats
    chunk_size = request.facts.flags.get("chunk_size")
    fitting = [f for f in formats if chunk_size in (None, f.chunk_size)]
    if request.residuals is None:
        return [f for f in fitting if f.policy == "full"] if request.facts.flags.get("disable_recompute") else fitting
    chosen = [f for f in fitting if request.residuals in (f.name, f.policy)]
    if not chosen and request.residuals in POLICIES:
        return fitting  # a policy is for a whole model, some of whose ops may have one format only
    if not chosen:
        known = dict.fromkeys(name for f in formats for name in (f.policy, f.name))
        raise errors.unknown_residuals(request.residuals, request.declaration.name, known)
    return chosen


def _named(request: Request, implementation: Implementation, part: str) -> bool:
    """Whether the user's choice, if there is one, lets this implementation run this part."""
    if request.forced is None:
        return True
    names = request.forced.split("+")
    name = names[0] if part == "forward" or len(names) == 1 else names[1]
    if "/" not in name:
        return implementation.backend == name
    if implementation.name == name:
        return True
    if len(names) == 2:
        return False
    # One implementation was named: it runs what it has; for a part that it lacks, any that fits will do.
    chosen = next(i for _, i in registry().implementations() if i.name == name)
    return getattr(chosen, part) is None


def judge_all(request: Request) -> tuple[Candidate, ...]:
    """Every implementation of the op, with every reason against it."""
    return tuple(
        Candidate(implementation, implementation.judge(request.facts), _bar(request, loaded, implementation))
        for loaded, implementation in registry().implementations(request.declaration.name)
    )


def _bar(request: Request, loaded: Any, implementation: Implementation) -> str | None:
    if request.on_this_machine and not loaded.usable:
        return str(loaded.lacks())
    if failure.is_quarantined(implementation.name):
        return failure.quarantine_reason(implementation.name)
    parts = [p for p in ("forward", "backward") if getattr(implementation, p)]
    if not any(_named(request, implementation, part) for part in parts):
        return f"{request.source} chose {request.forced}"
    return None


def select(request: Request, residual_format: ResidualFormat | None) -> Selection:
    """Choose the pair of lowest rank among those that nothing speaks against."""
    candidates = judge_all(request)
    selection = Selection(request, residual_format, candidates)
    possible = [c for c in candidates if c.possible]
    forwards = [c for c in possible if c.implementation.forward and _named(request, c.implementation, "forward")]
    if residual_format is None:
        if not forwards:
            return selection
        best = min(_not_slower(request, forwards), key=lambda c: (c.implementation.rank, c.implementation.name))
        return dataclasses.replace(selection, forward=best)
    backwards = [c for c in possible if c.implementation.backward and _named(request, c.implementation, "backward")]
    fitting = _fitting(residual_format)
    forwards, backwards = list(filter(fitting, forwards)), list(filter(fitting, backwards))
    if not forwards or not backwards:
        return selection
    pairs = [(f, b) for f in _not_slower(request, forwards) for b in _not_slower(request, backwards)]
    forward, backward = min(pairs, key=_pair_order)
    return dataclasses.replace(selection, forward=forward, backward=backward)


def _fitting(residual_format: ResidualFormat) -> Callable[[Candidate], bool]:
    return lambda candidate: residual_format.name in candidate.implementation.residuals


def _pair_order(pair: tuple[Candidate, Candidate]) -> tuple[int, bool, str, str]:
    forward, backward = (candidate.implementation for candidate in pair)
    return forward.rank + backward.rank, forward is not backward, forward.name, backward.name


def _not_slower(request: Request, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Leave out those that a measured rival beats, where that rival can run the call."""
    rivals: set[str | None] = {c.implementation.name for c in candidates}
    named = set((request.forced or "").split("+"))
    kept = [c for c in candidates if c.implementation.name in named or not _is_beaten(c, rivals)]
    return kept or list(candidates)


def _is_beaten(candidate: Candidate, rivals: Collection[str | None]) -> bool:
    return any(not r.kind.hard and r.against in rivals for r in candidate.verdict.refusals)


def build_route(selection: Selection, tensors: Sequence[Any], policy: Policy) -> Route:
    """The route of a selection that found a pair."""
    request, declaration = selection.request, selection.request.declaration
    if selection.forward is None:
        raise ValueError("a selection without a forward has no route")
    device = next(t for t in tensors if t is not None).device
    offsets = [o for o in declaration.promises.offsets if request.facts.given(o.name)]
    hosts = [o for o in offsets if request.facts.given(o.host) or device.type == "cpu"]
    width = request.facts.size(declaration.promises.scale_axis)
    return Route(
        declaration=declaration,
        form=CanonicalForm(declaration, tensors, request.facts.flags, width),
        forward=_runner(selection.forward, "forward"),
        backward=_runner(selection.backward, "backward") if selection.backward else None,
        format=selection.format,
        needs=request.facts.needs,
        forced=request.forced is not None,
        check_values=policy.check_values,
        check_offsets=bool(hosts),
        device_index=device.index if device.type == "cuda" else None,
    )


def _runner(candidate: Candidate, part: str) -> Runner:
    implementation = candidate.implementation
    return Runner(implementation, candidate.verdict.schedule, implementation.function(part))
