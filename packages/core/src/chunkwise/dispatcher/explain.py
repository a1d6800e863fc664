"""explain: the route that a call would take, and why each other implementation lost. Runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ParamSpec, TypeVar

from chunkwise.dispatcher import policy, select
from chunkwise.dispatcher.registry import LoadedBackend, registry
from chunkwise.dispatcher.route import in_words
from chunkwise.protocol.declaration import Declaration, apply_prologue

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Explanation:
    """Why a call runs where it runs; ``str()`` gives the text.

    Args:
        selection: every candidate with its refusals, and the chosen pair.
    """

    selection: select.Selection

    @property
    def route(self) -> str | None:
        """The chosen implementations and the residual format in words, or None."""
        forward, backward = self.selection.forward, self.selection.backward
        if forward is None:
            return None
        partner = None if backward is None else backward.implementation
        return in_words(forward.implementation, partner, self.selection.format)

    @property
    def implementations(self) -> tuple[str, ...]:
        """The names of the chosen implementations."""
        chosen = (self.selection.forward, self.selection.backward)
        return tuple(dict.fromkeys(c.implementation.name for c in chosen if c is not None))

    @cached_property
    def _text(self) -> str:
        request = self.selection.request
        lines = [f"{request.declaration.name} {request.facts.describe()}"]
        if request.forced is not None:
            lines.append(f"forced: {request.source} {request.forced}")
        lines.append(f"route: {self.route or 'none'}")
        lines += self._losers()
        lines += _backend_lines(request)
        return "\n".join(lines)

    def _losers(self) -> Iterator[str]:
        for candidate in self.selection.candidates:
            name = candidate.implementation.name
            if name in self.implementations:
                continue
            reasons = [candidate.barred] if candidate.barred else []
            reasons += [str(refusal) for refusal in candidate.verdict.refusals]
            for reason in reasons or [self._outranked(candidate)]:
                yield f"  {name}  {reason}"

    def _outranked(self, candidate: select.Candidate) -> str:
        residual_format = self.selection.format
        if residual_format is not None and residual_format.name not in candidate.implementation.residuals:
            return f"does not write or read {residual_format.name}; use prefer(residuals=...)"
        if self.selection.forward is None:
            return "lacks a partner for the other direction; install or allow a backend that has it"
        winner, rank = self.implementations[0], candidate.implementation.rank
        return f"possible, but rank {rank} is not the lowest; name it with backend= to run it before {winner}"

    def __str__(self) -> str:
        return self._text


def _state(loaded: LoadedBackend) -> str:
    return "usable" if loaded.usable else loaded.lacks()


def _backend_lines(request: select.Request) -> Iterator[str]:
    yield "backends:"
    for name, loaded in sorted(registry().loaded.items()):
        count = sum(1 for i in loaded.implementations if i.op == request.declaration.name)
        state = _state(loaded) if request.on_this_machine else "its needs were not asked, the device is not here"
        yield f"  {name} {loaded.version}: {count} implementation{'' if count == 1 else 's'} of this op; {state}"
    for name, failure in sorted(registry().failures.items()):
        yield f"  {name}: {failure}"


def explain(op: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Explanation:
    """Say which route a call would take, and what stands against every other implementation.

    Nothing is computed and nothing is compiled. ``print(chunkwise.explain(op, q, k, ...))`` shows the text.

    Raises:
        ValueError, TypeError: as the call itself would.
    """
    declaration = getattr(op, "declaration", None)
    if not isinstance(declaration, Declaration):
        raise TypeError(f"explain: expected an op of this library, got {op!r}; pass chunkwise.chunk_gated_delta_rule")
    tensors, options, extras = declaration.bind(*args, **kwargs)
    if extras is not None:
        tensors = apply_prologue(declaration, tensors, extras)
    needs = select.needed_gradients(declaration, tensors)
    request = select.request_of(declaration, tensors, options, needs, policy.ACTIVE)
    return Explanation(select.select(request, select.choose_format(request)))


def explain_facts(request: Any) -> Explanation:
    """The same for facts alone, as the command line and tests against fake devices use it."""
    return Explanation(select.select(request, select.choose_format(request)))
