"""The one place that compiles kernels: builders to launchers, through TileLang.

A builder is a plain function of compile-time constants, all keyword arguments, that returns a TileLang PrimFunc::

    def scan(*, key_width: int, chunk_size: int) -> PrimFunc: ...

Callers pass every tensor, the outputs too; a kernel allocates nothing. A launcher is TVM's compiled function itself,
without the Python that TileLang puts around it, which takes longer than the launch.

Callers whose first call should be quick name a builder as ``module:function``: it is imported, and TileLang with it,
only where no earlier process has compiled the kernel (:mod:`.remembered`).

Kernels are kept in TileLang's cache on disk. It is safe under many processes and under a kill half-way (an entry is
written aside and renamed, and its hashes are checked when it is read), but its keys leave out which compiler built an
entry: that is why the flags of every kernel name the compiler. Processes that want the same kernel wait for the first.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import filelock
import torch

from chunkwise.errors import CompileFailure
from chunkwise.verifier.implementation import resolve
from chunkwise_tilelang.toolkit import discover, nvrtc, nvrtc_build, remembered
from chunkwise_tilelang.toolkit.arch import dotted, target
from chunkwise_tilelang.toolkit.discover import Candidate
from chunkwise_tilelang.toolkit.stubs import compile_flags

Builder = Callable[..., Any] | str
Launcher = Callable[..., None]
Work = tuple[Builder, dict[str, Any]]

PASS_CONFIGS: dict[str, Any] = {}
"""TileLang's pass configuration for every kernel; a builder adds to it with ``T.annotate_pass_configs``."""

_WAIT_S = 600.0
_functions: dict[tuple[Any, ...], Any] = {}
_launchers: dict[tuple[Any, ...], Launcher] = {}
_building: dict[tuple[Any, ...], threading.Lock] = {}
_tracing = threading.Lock()
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def kernel(builder: Builder, device: torch.device | int, **constants: Any) -> Launcher:
    """The launcher of a kernel on a device, compiled now if nobody did.

    It is called with the builder's parameters in order: contiguous tensors of that device, ints and floats. It runs on
    the current stream of the device, which need not be the current one. Keep it: finding it again costs a microsecond.

    Args:
        builder: returns the PrimFunc, or its ``module:function``; its constants are hashable.
        device: a CUDA device with its index; the architecture is taken from it.
        constants: the builder's keyword arguments.

    Raises:
        CompileFailure: TileLang or the CUDA compiler refuses the kernel; nothing was launched.
    """
    index = device if isinstance(device, int) else device.index
    key = (builder, index, *sorted(constants.items()))
    launcher = _launchers.get(key)
    if launcher is None:
        capability = torch.cuda.get_device_capability(index)
        launcher = _launchers.setdefault(key, _on_device(function(builder, target(capability), **constants), index))
    return launcher


def build(work: Sequence[Work], device: torch.device | int) -> None:
    """Compile several kernels side by side; raises the first failure, in the order given, when all have ended."""
    with ThreadPoolExecutor(max(1, min(len(work), os.cpu_count() or 1))) as pool:
        futures = [pool.submit(kernel, builder, device, **constants) for builder, constants in work]
    for future in futures:
        future.result()


def function(builder: Builder, arch: str, **constants: Any) -> Any:
    """The compiled function of a kernel for an architecture (``sm_90a``), which needs no GPU to compile."""
    key = (builder, arch, *sorted(constants.items()))
    if key not in _functions:
        with _building.setdefault(key, threading.Lock()):
            if key not in _functions:
                _functions[key] = _compile(builder, arch, constants)
    return _functions[key]


def _on_device(compiled: Any, index: int) -> Launcher:
    """The function, with the current device left as it was: TVM sets the tensors' and does not set it back."""

    def launch(*arguments: Any) -> None:
        if _current_device() == index:
            compiled(*arguments)
        else:
            with torch.cuda.device(index):
                compiled(*arguments)

    return launch


# --- compiling -------------------------------------------------------------------------------------------


def _compile(builder: Builder, arch: str, constants: dict[str, Any]) -> Any:
    known = _flags_without_tilelang(arch)
    note = remembered.name_of(*_place(builder), constants, arch, known, PASS_CONFIGS) if known else None
    if note is not None and (found := remembered.find(note)) is not None:
        return found
    flags = flags_for(arch)
    import tilelang

    function = resolve(builder) if isinstance(builder, str) else builder
    with _tracing:
        traced = function(**constants)
    if traced.attrs and "tilelang_out_idx" in traced.attrs:
        raise ValueError(f"{_named(builder, constants)} allocates an output; take every output as a parameter")
    try:
        with _alone(f"{arch} {flags} {traced.script(show_meta=True)}"):
            built = tilelang.compile(
                traced,
                target={"kind": "cuda", "arch": arch},
                execution_backend="tvm_ffi",
                pass_configs=dict(PASS_CONFIGS),
                compile_flags=list(flags),
            )
            entry = _entry(built)
    except (RuntimeError, ValueError, TypeError, AssertionError, OSError, subprocess.SubprocessError) as cause:
        raise CompileFailure(f"{_named(builder, constants)} for {arch}: {_said(cause)}") from cause
    if note is not None and flags == known:
        remembered.keep(note, _library(built))
    return entry


def _library(built: Any) -> Path:
    """The linked library of what TileLang returns, in its cache."""
    return Path(getattr(built, "_tilelang_cache_path", None) or "") / "executable.so"


def _entry(built: Any) -> Any:
    """TVM's function inside what TileLang returns."""
    executable = built.adapter.get_exportable_executable()
    if hasattr(executable, "jit"):  # not read from disk: take the library that was just linked, or link one
        from tilelang import tvm

        library = _library(built)
        executable = tvm.runtime.load_module(str(library)) if library.is_file() else executable.jit()
    return executable.get_function("main", query_imports=True)


@cache
def flags_for(arch: str) -> tuple[str, ...]:
    """The flags of every kernel: the header stubs, and which compiler builds it; that compiler is made ready.

    Raises:
        CompileFailure: no compiler here compiles for ``arch`` (``sm_90a``).
    """
    import tilelang  # noqa: F401 - from here on TileLang's own choice of an nvcc is known

    compiler = discover.choose(_family(arch))
    if compiler is None:
        finding = discover.probe_compiler([_family(arch)])
        raise CompileFailure(f"nothing compiles for {arch}: {finding.found}; {finding.fix}")
    if not isinstance(compiler, Candidate):
        nvrtc_build.install()
    return _flags_of(compiler)


@cache
def _flags_without_tilelang(arch: str) -> tuple[str, ...]:
    """The flags that :func:`flags_for` will find, unless TileLang prefers another nvcc than is seen without it."""
    compiler = discover.choose(_family(arch))
    return () if compiler is None else _flags_of(compiler)


def _family(arch: str) -> str:
    """``sm90`` of ``sm_90a``."""
    return arch.replace("_", "").rstrip("a")


def _flags_of(compiler: Candidate | nvrtc.Nvrtc) -> tuple[str, ...]:
    if isinstance(compiler, Candidate):
        return (*map(shlex.quote, compile_flags("nvcc")), f"-DCHUNKWISE_TOOLKIT=nvcc_{_identity(compiler)}")
    headers = "_".join(dotted(nvrtc.header_version(compiler.includes[0])).split("."))
    mark = f"{nvrtc_build.MARK}_{'_'.join(map(str, compiler.version or ()))}_{headers}_{_hashed(*compiler.includes)}"
    return (*map(shlex.quote, compile_flags("nvrtc")), mark)


def _identity(nvcc: Candidate) -> str:
    """What tells one nvcc from another: release and build, its place, its headers, and flags that its user adds."""
    ran = subprocess.run([str(nvcc.path), "--version"], capture_output=True, text=True, errors="replace", check=True)
    headers = nvrtc.header_version(nvcc.home / "include")
    added = [os.environ.get(f"NVCC_{place}_FLAGS", "") for place in ("PREPEND", "APPEND")]
    return f"{'_'.join(map(str, nvcc.version or ()))}_{_hashed(ran.stdout, nvcc.path.resolve(), headers, *added)}"


def _hashed(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:12]


@contextlib.contextmanager
def _alone(kernel_text: str) -> Iterator[None]:
    """Wait while another process compiles the same kernel, so that it is read and not built again.

    The cache is safe without this: where there is no locking, or a holder hangs, the kernel is built once more. A lock
    ends with the process that holds it.
    """
    from tilelang.env import env

    folder = Path(env.TILELANG_CACHE_DIR) / "chunkwise-locks"
    lock = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / f"{_hashed(kernel_text)}.lock", thread_local=False)
        lock.acquire(timeout=_WAIT_S)
    except (OSError, NotImplementedError):  # filelock.Timeout is an OSError
        lock = None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _place(builder: Builder) -> tuple[str, str]:
    """Module and name of a builder."""
    if isinstance(builder, str):
        module, _, name = builder.partition(":")
        return module, name
    return builder.__module__, builder.__qualname__


def _named(builder: Builder, constants: dict[str, Any]) -> str:
    return f"{'.'.join(_place(builder))}({', '.join(f'{k}={v!r}' for k, v in constants.items())})"


def _said(cause: BaseException) -> str:
    """What a compiler said, without the source that it said it of."""
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() and line != "Compilation error:"]
    return "; ".join((errors or lines or [type(cause).__name__])[:4])
