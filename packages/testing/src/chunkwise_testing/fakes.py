"""Backends that exist for the length of a block, to test and measure core with."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator, Sequence

from chunkwise.dispatcher.cache import ROUTES
from chunkwise.dispatcher.registry import Backend, LoadedBackend, Need, registry
from chunkwise.verifier.implementation import Implementation


@contextlib.contextmanager
def installed(
    name: str,
    table: Sequence[Implementation],
    *,
    functions: dict[str, object] | None = None,
    needs: Sequence[Need] = (),
) -> Iterator[LoadedBackend]:
    """Register a backend ``name`` with the given implementations, as if its package were installed.

    Args:
        name: the backend's name.
        table: its implementations.
        functions: what the implementations' paths find in the module ``fake_<name>``.
        needs: its needs.
    """
    module = types.ModuleType(f"fake_{name}")
    module.__dict__.update(functions or {}, TABLE=tuple(table))
    sys.modules[module.__name__] = module
    backend = Backend(name, "chunkwise", ">=0", tables=(f"{module.__name__}:TABLE",), needs=tuple(needs))
    try:
        registry().add(backend)
        ROUTES.clear()
        yield registry().loaded[name]
    finally:
        registry().loaded.pop(name, None)
        del sys.modules[module.__name__]
        ROUTES.clear()
