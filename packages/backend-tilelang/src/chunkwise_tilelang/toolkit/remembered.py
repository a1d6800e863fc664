"""Kernels that an earlier process compiled, found without importing TileLang and without tracing anything.

TileLang finds an entry of its cache by the text of the traced kernel: importing it and tracing the kernels of a call
takes seconds, loading them milliseconds. So a note is kept beside its entries: from what decides that text (the
builder, its constants, the sources, versions, and the flags, which name the compiler) to the entry's library and its
hash. A note that is missing, damaged or of a library that is gone or changed finds nothing, and TileLang is asked.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parents[1]
_LIBRARIES = (("z3", "z3"), ("tilelang", "tvm_runtime"), ("tilelang", "tvm_compiler"), ("tilelang", "tilelang"))
_NEEDED = ("ffi.Module.load_from_bytes.cuda", "__tvm_set_device", "__tvm_tensormap_create_tiled")
_OFF = ("1", "true", "yes", "on")


def folder() -> Path | None:
    """Where the notes are: in TileLang's cache, as its environment variables place it; None where it is off."""
    if os.environ.get("TILELANG_DISABLE_CACHE", "0").lower() in _OFF:
        return None
    return Path(os.environ.get("TILELANG_CACHE_DIR") or Path.home() / ".tilelang" / "cache") / "chunkwise-notes"


def name_of(
    module: str,
    function: str,
    constants: Mapping[str, Any],
    arch: str,
    flags: Sequence[str],
    configs: Mapping[str, Any],
) -> str | None:
    """The name of a kernel's note; None where its sources or versions cannot be told."""
    try:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            return None
        versions = [importlib.metadata.version(name) for name in ("tilelang", "apache-tvm-ffi")]
        parts = (module, function, sorted(constants.items()), arch, *flags, sorted(configs.items()), *versions)
        digest = hashlib.sha256("\n".join(map(repr, parts)).encode())
        digest.update(_sources().encode())
        digest.update(Path(spec.origin).read_bytes())
    except (OSError, ImportError, ValueError):
        return None
    return digest.hexdigest()[:32]


@cache
def _sources() -> str:
    """A hash of this package's files, which kernels share pieces of."""
    digest = hashlib.sha256()
    for file in sorted(path for path in _PACKAGE.rglob("*") if path.suffix in (".py", ".h")):
        digest.update(f"{file.relative_to(_PACKAGE)}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def find(name: str) -> Any:
    """The function of the kernel that a note names, or None."""
    notes = folder()
    if notes is None:
        return None
    try:
        note = json.loads((notes / f"{name}.json").read_text(encoding="utf-8"))
        library = notes.parent / note["library"]
        if hashlib.sha256(library.read_bytes()).hexdigest() != note["sha256"] or not _runtime_is_there():
            return None
        return _load(library)
    except (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError, AttributeError):
        return None


def keep(name: str, library: Path) -> None:
    """Note the library of a kernel, if it lies in the cache; written aside and renamed, so that no half is read."""
    notes = folder()
    if notes is None or not library.is_file():
        return
    try:
        inside = library.resolve().relative_to(notes.parent.resolve())
        digest = hashlib.sha256(library.read_bytes()).hexdigest()
        notes.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=notes, suffix=".tmp", delete=False, encoding="utf-8") as file:
            file.write(json.dumps({"library": str(inside), "sha256": digest}))
        os.replace(file.name, notes / f"{name}.json")
    except (OSError, ValueError):  # a cache that cannot be written, or a library elsewhere: nothing is remembered
        return


def _load(library: Path) -> Any:
    import tvm_ffi

    return tvm_ffi.load_module(str(library)).get_function("main", query_imports=True)


@cache
def _runtime_is_there() -> bool:
    """Load what kernels are run by, as TileLang's import does, and see that all of it is there."""
    import tvm_ffi

    if "tilelang" not in sys.modules:
        for package, name in _LIBRARIES:
            spec = importlib.util.find_spec(package)
            if spec is None or spec.origin is None:
                return False
            library = Path(spec.origin).parent / "lib" / f"lib{name}.so"
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL | os.RTLD_LAZY)
    return all(tvm_ffi.get_global_func(name, allow_missing=True) is not None for name in _NEEDED)
