"""Failures: what a kernel that cannot be compiled does to the route, and what always raises.

In an eager forward of an implementation that the user did not name, a compile failure puts the implementation
into quarantine for this process, with one warning, and the next one runs. Anything else raises as it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from chunkwise import errors
from chunkwise.dispatcher.cache import ROUTES
from chunkwise.dispatcher.registry import registry
from chunkwise.dispatcher.route import Route
from chunkwise.verifier.implementation import Implementation

_quarantine: dict[str, BaseException] = {}
_lock = threading.Lock()


def is_quarantined(name: str) -> bool:
    """Whether an implementation failed to compile in this process."""
    return name in _quarantine


def quarantine_reason(name: str) -> str:
    """Why an implementation is in quarantine."""
    cause = _quarantine[name]
    return f"quarantined, it failed to compile in this process: {type(cause).__name__}: {cause}"


def quarantine(name: str, cause: BaseException) -> None:
    """Leave an implementation out from now on, and warn once."""
    with _lock:
        known = name in _quarantine
        _quarantine.setdefault(name, cause)
    ROUTES.clear()
    if not known:
        warnings.warn(errors.quarantined(name, cause), RuntimeWarning, stacklevel=5)


def release_all() -> None:
    """Forget every quarantine, as after a toolkit was mended."""
    with _lock:
        _quarantine.clear()
    ROUTES.clear()


def attempt(run: Callable[[Route, Sequence[Any]], Any], route: Route, tensors: Sequence[Any]) -> Any:
    """Run a forward; None if its implementation failed to compile and went into quarantine."""
    try:
        return run(route, tensors)
    except Exception as cause:  # sorted right below: only compile failures are recovered from
        if route.forced or not _is_compile_failure(route.forward.implementation.backend, cause):
            raise
        quarantine(route.forward.implementation.name, cause)
        return None


def prepare(route: Route, facts: Any) -> bool:
    """Compile a route's kernels, the backward's too, before anything is launched. False: try another route."""
    facts = dataclasses.replace(facts, residuals=route.format.name if route.format else None)
    for implementation, schedule, parts in _compiles(route):
        with contextlib.nullcontext() if route.device_index is None else torch.cuda.device(route.device_index):
            cause = compile_kernels(implementation, schedule, facts, parts)
        if cause is None:
            continue
        if route.forced:
            raise cause
        quarantine(implementation.name, cause)
        return False
    return True


def compile_kernels(
    implementation: Implementation, schedule: Any, facts: Any, parts: Sequence[str]
) -> Exception | None:
    """Compile the kernels of an implementation's parts; returns the compile failure if there is one."""
    try:
        implementation.function("compile")(schedule, facts, parts)
    except Exception as cause:  # sorted right here: only compile failures are recovered from
        if not _is_compile_failure(implementation.backend, cause):
            raise
        return cause
    return None


def _compiles(route: Route) -> list[tuple[Any, Any, tuple[str, ...]]]:
    runners = [("forward", route.forward)] + ([("backward", route.backward)] if route.backward else [])
    work: dict[str, tuple[Any, Any, tuple[str, ...]]] = {}
    for part, runner in runners:
        implementation = runner.implementation
        if implementation.compile is not None:
            _, _, parts = work.get(implementation.name, (None, None, ()))
            work[implementation.name] = (implementation, runner.schedule, (*parts, part))
    return list(work.values())


def _is_compile_failure(backend: str, cause: BaseException) -> bool:
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().query()  # raises a pending CUDA error; does not wait
    loaded = registry().loaded[backend]
    return isinstance(cause, errors.CompileFailure) or loaded.backend.is_compile_failure(cause)
