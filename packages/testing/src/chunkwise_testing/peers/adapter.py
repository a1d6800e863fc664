"""What an adapter says of a peer: the op, the function to call, and what it does not support."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from chunkwise.dispatcher import probes
from chunkwise.errors import ChunkwiseError
from chunkwise.verifier.facts import Facts


class PeerError(ChunkwiseError):
    """A peer that is not known, not installed, cannot be imported, or has no adapter for the op."""


def _never(_: Facts) -> str | None:
    return None


@dataclass(frozen=True)
class Adapter:
    """How a peer computes one op.

    Args:
        op: the op's name.
        function: ``module:attribute`` of the peer's public function.
        arguments: the tensors and options of the op that the function takes, under the same names and with the same
            meaning. A call that uses any other is not supported.
        unsupported: why a call is beyond the peer, or None.
    """

    op: str
    function: str
    arguments: tuple[str, ...]
    unsupported: Callable[[Facts], str | None] = _never

    def reason(self, facts: Facts, defaults: Mapping[str, Any]) -> str | None:
        """Why the peer cannot run a call with these facts, or None.

        Args:
            facts: of the call.
            defaults: option name to default; an option at its default need not be passed on.
        """
        used = [*facts.dtypes, *(n for n, default in defaults.items() if facts.flags.get(n, default) != default)]
        if odd := [name for name in used if name not in self.arguments]:
            return f"it has no {', '.join(odd)}"
        return self.unsupported(facts)


@dataclass(frozen=True)
class Peer:
    """A library to compare with.

    Args:
        name: of its pip package.
        module: its top-level module.
        adapters: one for each op that it has.
        environment: variables that are set before it is imported, unless the user has set them.
        needs: its pip package with what else it needs here, for the message where it is missing.
    """

    name: str
    module: str
    adapters: tuple[Adapter, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: str = ""

    def adapter_for(self, op: str) -> Adapter:
        """The adapter for an op; imports nothing.

        Raises:
            PeerError: there is none, or the peer is not installed.
        """
        adapter = next((a for a in self.adapters if a.op == op), None)
        if adapter is None:
            ops = ", ".join(a.op for a in self.adapters)
            raise PeerError(f"peer {self.name}: it was asked for {op}, but has an adapter for {ops} only; leave it out")
        if not probes.installed(self.module):
            raise PeerError(f"peer {self.name}: its module {self.module} is not installed; {self._install()}")
        return adapter

    def load(self, op: str, clock: Callable[[], float] = time.perf_counter) -> LoadedPeer:
        """Import the peer for an op.

        Raises:
            PeerError: it has no adapter for the op, is not installed, or its import fails.
        """
        adapter = self.adapter_for(op)
        for name, value in self.environment.items():
            os.environ.setdefault(name, value)
        module, _, attribute = adapter.function.partition(":")
        start = clock()
        try:
            function = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, OSError, RuntimeError, ValueError) as error:
            raise PeerError(
                f"peer {self.name}: {adapter.function} cannot be imported here: {type(error).__name__}: {error}; "
                f"mend what it lacks ({self._install()}), or leave it out"
            ) from error
        return LoadedPeer(self, adapter, function, clock() - start)

    def _install(self) -> str:
        return f"pip install {self.needs or self.name}"

    def __str__(self) -> str:
        """Its version, and the variables that it reads as they are or will be set."""
        settings = [f"{name}={os.environ.get(name, value)}" for name, value in self.environment.items()]
        return " ".join([probes.version_of([self.name]) or "of unknown version", *settings])


@dataclass(frozen=True)
class LoadedPeer:
    """A peer's function for one op, and how long its import took in seconds."""

    peer: Peer
    adapter: Adapter
    function: Callable[..., Any]
    import_s: float


def find(names: Iterable[str], known: Mapping[str, Peer]) -> list[Peer]:
    """The peers of these names, each once; an unknown one raises PeerError that lists those that are known."""
    unique = list(dict.fromkeys(names))
    if unknown := [name for name in unique if name not in known]:
        raise PeerError(f"no peer is called {', '.join(unknown)}; known peers: {', '.join(known)}")
    return [known[name] for name in unique]
