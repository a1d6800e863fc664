"""Routes to test: every forward with every backward that shares a residual format, each forced by name."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

import chunkwise
from chunkwise.dispatcher import policy, select
from chunkwise.dispatcher.registry import registry
from chunkwise.ops import OPS
from chunkwise.verifier.facts import Facts
from chunkwise.verifier.implementation import Implementation
from chunkwise_testing.oracle import Result, evaluate
from chunkwise_testing.sampling import Call

BUILT_IN = "torch"


@dataclass(frozen=True)
class Pair:
    """A forward and a backward implementation, by full name, and the residual format that joins them."""

    op: str
    forward: str
    backward: str
    format: str

    def __str__(self) -> str:
        short = [name.split("/", 2)[0] + "." + name.rsplit("/", 1)[-1] for name in (self.forward, self.backward)]
        return f"{short[0] if short[0] == short[1] else '+'.join(short)}-{self.format}"

    @contextlib.contextmanager
    def forced(self) -> Iterator[None]:
        """Within the block, calls run on this pair or raise."""
        with chunkwise.prefer(f"{self.forward}+{self.backward}", residuals=self.format):
            yield

    @property
    def implementations(self) -> tuple[Implementation, ...]:
        """The two implementations."""
        known = {i.name: i for _, i in registry().implementations(self.op)}
        return known[self.forward], known[self.backward]

    @property
    def atomic(self) -> bool:
        """Whether one of them may give other last bits in another run."""
        return any(i.atomic for i in self.implementations)

    @property
    def batch_invariant(self) -> bool:
        """Whether both promise a row the same bits whatever else the batch holds."""
        return all(i.batch_invariant for i in self.implementations)

    def refusals(self, facts: Facts) -> list[str]:
        """Every hard reason against running a call on this pair."""
        return [
            f"{i.name}: {refusal}"
            for i in self.implementations
            for refusal in i.judge(facts).refusals
            if refusal.kind.hard
        ]

    def run(
        self, call: Call, needs: Collection[str] = (), gradients: Mapping[str, Tensor | None] | None = None
    ) -> Result:
        """Run a call forward and backward on this pair."""
        with self.forced():
            return evaluate(call, needs, gradients)


def facts_of(call: Call, needs: Collection[str] = ()) -> Facts:
    """The facts of a call, as the dispatcher gathers them."""
    tensors, options = call.arguments()
    return select.request_of(call.declaration, tensors, options, frozenset(needs), policy.ACTIVE).facts


def _order(backend: str) -> tuple[bool, str]:
    """The built-in backend first, then by name: a pair of two backends is tested by the later one."""
    return backend != BUILT_IN, backend


def pairs_of(op: str, backend: str) -> list[Pair]:
    """The pairs that ``backend`` answers for: its own, and those with backends that come before it."""
    implementations = [i for _, i in registry().implementations(op) if _order(i.backend) <= _order(backend)]
    pairs = []
    for forward in implementations:
        for backward in implementations:
            if (
                forward.forward is None
                or backward.backward is None
                or backend not in (forward.backend, backward.backend)
            ):
                continue
            shared = [f.name for f in OPS[op].declaration.promises.formats if f.name in forward.residuals]
            pairs += [Pair(op, forward.name, backward.name, f) for f in shared if f in backward.residuals]
    return sorted(pairs, key=str)


def implementations_of(backend: str) -> list[Implementation]:
    """Every implementation of a backend, by name; none where it could not be loaded."""
    loaded = registry().loaded.get(backend)
    return sorted(loaded.implementations, key=lambda i: i.name) if loaded else []


def devices_of(pair: Pair) -> list[str]:
    """The kinds of device on which both implementations of a pair may run.

    Triton's interpreter is one only where an implementation names it.
    """
    kinds = [{_kind(arch) for arch in i.archs} for i in pair.implementations]
    named = {kind for k in kinds for kind in k} | {"cpu", "cuda"}
    return [d for d in ("cpu", "cuda", "interpreter") if d in named and all("any" in k or d in k for k in kinds)]


def _kind(arch: str) -> str:
    return arch if arch in ("any", "cpu", "interpreter") else "cuda"
