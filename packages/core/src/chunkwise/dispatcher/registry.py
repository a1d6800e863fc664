"""The registry: backends found by entry point, loaded at the first dispatch, each all or nothing."""

from __future__ import annotations

import importlib.metadata
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import chunkwise
from chunkwise import errors
from chunkwise.verifier.implementation import Implementation, resolve

GROUP = "chunkwise.backends"


@dataclass(frozen=True)
class Finding:
    """What a probe found: whether the need is met, what is there, and what to do if it is not."""

    ok: bool
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Need:
    """Something outside Python's packages that a backend cannot do without, and how to look for it."""

    name: str
    probe: Callable[[], Finding]


def _never(_: BaseException) -> bool:
    return False


@dataclass(frozen=True)
class Backend:
    """What a backend package declares; importing it must import no kernel language.

    Args:
        name: what users write in ``backend=``; the first part of its implementations' names.
        distribution: the package that holds it, for its version.
        core: the versions of core that it was built for (``>=0.1,<0.2``).
        tables: ``module:ATTRIBUTE`` of each sequence of implementations; imported when the backend is loaded.
        needs: what the machine must have for any of its implementations to run.
        is_compile_failure: recognises the compile errors of its kernel language (nothing was launched).
    """

    name: str
    distribution: str
    core: str
    tables: tuple[str, ...] = ()
    needs: tuple[Need, ...] = ()
    is_compile_failure: Callable[[BaseException], bool] = _never


@dataclass(frozen=True, eq=False)
class LoadedBackend:
    """A backend whose tables were imported and hold together."""

    backend: Backend
    version: str
    implementations: tuple[Implementation, ...]

    @cached_property
    def findings(self) -> tuple[tuple[Need, Finding], ...]:
        """Every need with what was found; probed once a process."""
        return tuple((need, need.probe()) for need in self.backend.needs)

    @property
    def usable(self) -> bool:
        """Whether every need is met."""
        return all(finding.ok for _, finding in self.findings)

    def lacks(self) -> str:
        """What is missing, and what to do about it, in one line."""
        missing = [(need, finding) for need, finding in self.findings if not finding.ok]
        return "; ".join(f"lacks {need.name}: {finding.found}; {finding.fix}" for need, finding in missing)


@dataclass(frozen=True)
class LoadFailure:
    """A backend that could not be loaded, with the error as it was raised."""

    name: str
    error: BaseException

    def __str__(self) -> str:
        return f"failed to load: {type(self.error).__name__}: {self.error}"


class Registry:
    """All backends of this process."""

    def __init__(self, entry_points: Sequence[importlib.metadata.EntryPoint]) -> None:
        self.loaded: dict[str, LoadedBackend] = {}
        self.failures: dict[str, LoadFailure] = {}
        for entry in sorted(entry_points, key=lambda e: e.name):
            try:
                backend = entry.load()
                self.add(backend)
            except Exception as error:  # whatever a package raises: it is kept and quoted, and others go on
                self.failures[entry.name] = LoadFailure(entry.name, error)

    def add(self, backend: Backend) -> None:
        """Import a backend's tables and check that they hold together; nothing is kept if anything fails."""
        from packaging.specifiers import SpecifierSet  # 30 ms, so not before the first dispatch

        if chunkwise.__version__ not in SpecifierSet(backend.core, prereleases=True):
            problem = f"it was built for chunkwise {backend.core}, but {chunkwise.__version__} is installed"
            raise errors.bad_backend(backend.name, f"{problem}; upgrade {backend.distribution}")
        implementations = tuple(i for table in backend.tables for i in resolve(table))
        _check_table(backend, implementations)
        version = importlib.metadata.version(backend.distribution)
        self.loaded[backend.name] = LoadedBackend(backend, version, implementations)

    def implementations(self, op: str | None = None) -> Iterator[tuple[LoadedBackend, Implementation]]:
        """Every implementation (of one op) of every backend that loaded, usable or not."""
        for loaded in self.loaded.values():
            for implementation in loaded.implementations:
                if op in (None, implementation.op):
                    yield loaded, implementation

    @property
    def backend_names(self) -> list[str]:
        """The names of all backends, those that failed to load included."""
        return sorted({*self.loaded, *self.failures})

    def check_name(self, name: str, source: str) -> None:
        """Raise if ``name`` (a backend, an implementation, or ``forward+backward``) is not known."""
        known = [implementation.name for _, implementation in self.implementations()]
        for part in name.split("+"):
            if part not in known and part not in self.backend_names:
                raise errors.unknown_backend(name, source, self.backend_names, sorted(known))


def _check_table(backend: Backend, implementations: Sequence[Implementation]) -> None:
    from chunkwise.ops import OPS

    seen: set[str] = set()
    for implementation in implementations:
        name = implementation.name
        if implementation.backend != backend.name:
            raise errors.bad_backend(backend.name, f"implementation {name} must be called {backend.name}/...")
        if name in seen:
            raise errors.bad_backend(backend.name, f"two implementations are called {name}")
        seen.add(name)
        if implementation.op not in OPS:
            raise errors.bad_backend(backend.name, f"{name} implements the unknown op {implementation.op}")
        formats = {f.name for f in OPS[implementation.op].declaration.promises.formats}
        if odd := set(implementation.residuals) - formats:
            raise errors.bad_backend(backend.name, f"{name} names unknown residual formats: {sorted(odd)}")
        rules = [rule.name for rule in implementation.rules]
        if len(rules) != len(set(rules)):
            raise errors.bad_backend(backend.name, f"{name} has two rules of one name")


_lock = threading.RLock()
_registry: Registry | None = None


def registry() -> Registry:
    """The process's registry, filled at the first call."""
    global _registry
    if _registry is None:
        with _lock:
            if _registry is None:
                _registry = Registry(tuple(importlib.metadata.entry_points(group=GROUP)))
    return _registry
