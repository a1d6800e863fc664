"""Discovery of NVRTC: CUDA's compiler as a library, for hosts that run kernels and have no toolkit to build them.

torch's own wheels bring the library and the runtime's headers. What else it takes is cuda-python, which drives it, and
CUDA's C++ headers (``cuda/std``), which TileLang's templates include: ``pip install 'chunkwise-tilelang[nvrtc]'``.
Headers may be older than the library, not newer: those of CUDA 13.0 do not compile under NVRTC 12.6.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from chunkwise.dispatcher import probes
from chunkwise_tilelang.toolkit.arch import Version, dotted, too_old

FIX = "pip install 'chunkwise-tilelang[nvrtc]'"
DEFAULT_HOME = Path("/usr/local/cuda")
_RUNTIME_WHEELS = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")
_CXX_WHEELS = ("nvidia-cuda-cccl", "nvidia-cuda-cccl-cu12")
_RUNTIME_HEADER = "cuda_fp8.h"
_CXX_HEADER = Path("cuda", "std", "cassert")
_CXX_FOLDER = "cccl"  # where a toolkit has them


@dataclass(frozen=True)
class Nvrtc:
    """The NVRTC that cuda-python finds, and the headers that it would compile with.

    Args:
        version: its CUDA release, ``(12, 9)``; None if it could not be found out.
        includes: the folders of the runtime's and of the C++ headers.
        rejected: why it cannot be used at all, or None.
    """

    version: Version | None = None
    includes: tuple[Path, ...] = ()
    rejected: str | None = None

    def objection(self, arch: str) -> str | None:
        """Why it cannot compile for ``arch`` (``sm90``), or None."""
        return self.rejected or too_old(self.version, arch)

    def describe(self) -> str:
        """One line for ``doctor``."""
        if self.rejected is not None:
            return f"NVRTC: rejected: {self.rejected}"
        return f"NVRTC {dotted(self.version)} with the headers in {', '.join(map(str, self.includes))}"


@cache
def discover() -> Nvrtc:
    """NVRTC with headers that fit it, or why there is none; looked for once a process."""
    version = _library_version()
    if isinstance(version, str):
        return Nvrtc(rejected=version)
    runtimes = dict(_runtime_headers())
    fitting = [folder for folder, release in runtimes.items() if release[0] == version[0] and release <= version]
    if not fitting:
        others = "; ".join(f"{folder} is of {dotted(release)}" for folder, release in runtimes.items())
        wanted = f"no headers of the CUDA runtime {version[0]}.0 to {dotted(version)}"
        return Nvrtc(version, rejected=f"{wanted}" + (f": {others}" if others else ""))
    cxx = next(_cxx_headers(), None)
    if cxx is None:
        return Nvrtc(version, (fitting[0],), "no C++ headers of CUDA (cuda/std, the nvidia-cuda-cccl wheel)")
    # From CUDA 13 on headers are named with and without that folder.
    around = (cxx.parent,) if cxx.name == _CXX_FOLDER else ()
    return Nvrtc(version, tuple(dict.fromkeys((fitting[0], *around, cxx))))


def _library_version() -> Version | str:
    """The version of the library that cuda-python loads, or why there is none."""
    if not probes.installed("cuda.bindings.nvrtc"):
        return "cuda-python is not installed"
    try:
        from cuda.bindings import nvrtc

        error, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, OSError, RuntimeError) as problem:
        return f"cuda-python finds no NVRTC: {(str(problem).splitlines() or ['unknown'])[0]}"
    return (int(major), int(minor)) if int(error) == 0 else f"NVRTC does not say its version: {error}"


def _toolkit_includes() -> Iterator[Path]:
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), DEFAULT_HOME):
        if home:
            yield Path(home) / "include"
            yield from sorted(Path(home).glob("targets/*/include"))


def _runtime_headers() -> Iterator[tuple[Path, Version]]:
    """The folders with the runtime's headers, with their releases; those of wheels first."""
    wheels = [folder for name in _RUNTIME_WHEELS if (folder := _in_wheel(name, Path(_RUNTIME_HEADER)))]
    for folder in (*wheels, *_toolkit_includes()):
        if (folder / _RUNTIME_HEADER).is_file() and (release := header_version(folder)):
            yield folder, release


def _cxx_headers() -> Iterator[Path]:
    wheels = [folder for name in _CXX_WHEELS if (folder := _in_wheel(name, _CXX_HEADER))]
    toolkits = (folder / inside for folder in _toolkit_includes() for inside in (_CXX_FOLDER, "."))
    for folder in (*wheels, *toolkits):
        if (folder / _CXX_HEADER).is_file():
            yield folder


def _in_wheel(name: str, header: Path) -> Path | None:
    """The folder of a wheel that holds a header."""
    try:
        files = importlib.metadata.files(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files or ():
        if file.parts[-len(header.parts) :] == header.parts:
            return Path(str(file.locate())).parents[len(header.parts) - 1]
    return None


def header_version(folder: Path) -> Version | None:
    """The release of the CUDA runtime's headers in a folder, or None."""
    try:
        text = (folder / "cuda_runtime_api.h").read_text(errors="replace")
    except OSError:
        return None
    found = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    return (int(found[1]) // 1000, int(found[1]) % 1000 // 10) if found else None
