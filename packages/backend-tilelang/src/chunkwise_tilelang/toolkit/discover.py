"""Discovery of the compilers, and of a tilelang that fits, without importing tilelang.

TileLang looks for nvcc once, when it is imported, and takes the first place that is set: CUDA_HOME, CUDA_PATH,
``nvcc`` on PATH, the nvidia-cuda-nvcc wheel, /usr/local/cuda. It does not look whether a compiler is there, nor go
on to the next place if not. So the first candidate is the one that counts; the others are what a user could
point CUDA_HOME to. Where it is no good, NVRTC compiles, if it is there.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from chunkwise.dispatcher import probes
from chunkwise.dispatcher.registry import Finding
from chunkwise_tilelang.toolkit import nvrtc
from chunkwise_tilelang.toolkit.arch import OLDEST, Version, dotted, too_old
from chunkwise_tilelang.toolkit.nvrtc import Nvrtc

TILELANG = "==0.1.15"
"""The version of tilelang that the kernels are written for; the package's metadata pins the same."""

DEFAULT_HOME = Path("/usr/local/cuda")
_NVCC = "nvcc.exe" if os.name == "nt" else "nvcc"
_WHEEL = "nvidia-cuda-nvcc"
_TIMEOUT_S = 20.0
_CXX = ("g++", "clang++", "c++")
_C = ("gcc", "clang", "cc")


@dataclass(frozen=True)
class Candidate:
    """A place where nvcc should be.

    Args:
        path: of nvcc itself.
        source: what names the place: ``CUDA_HOME``, ``CUDA_PATH``, ``PATH``, a wheel or a default folder.
        version: its CUDA release, ``(13, 0)``; None if it could not be found out.
        rejected: why it cannot be used at all, or None.
    """

    path: Path
    source: str
    version: Version | None = None
    rejected: str | None = None

    @property
    def home(self) -> Path:
        """The toolkit that it belongs to, as CUDA_HOME would name it."""
        return self.path.parent.parent

    def objection(self, arch: str) -> str | None:
        """Why it cannot compile for ``arch`` (``sm90``), or None."""
        return self.rejected or too_old(self.version, arch)

    def describe(self) -> str:
        """One line for ``doctor``."""
        state = f"rejected: {self.rejected}" if self.rejected else f"nvcc {dotted(self.version)}"
        return f"{self.path} (from {self.source}): {state}"


def discover() -> tuple[Candidate, ...]:
    """Every nvcc that this machine names, in TileLang's order; empty where nothing names one."""
    versions: dict[Path, Version | str] = {}
    found = []
    for path, source in _places():
        if path not in versions:
            versions[path] = _examine(path)
        outcome = versions[path]
        if isinstance(outcome, str):
            found.append(Candidate(path, source, rejected=outcome))
        else:
            found.append(Candidate(path, source, version=outcome))
    return tuple(found)


def usable(arch: str, candidates: Sequence[Candidate] | None = None) -> Candidate | None:
    """The nvcc that TileLang takes, if it compiles for ``arch`` (``sm90``, ``sm120`` or ``sm121``)."""
    found = discover() if candidates is None else candidates
    return found[0] if found and found[0].objection(arch) is None else None


def choose(arch: str) -> Candidate | Nvrtc | None:
    """What compiles for ``arch`` (``sm90``, ``sm120`` or ``sm121``): the nvcc that TileLang takes, else NVRTC."""
    nvcc = usable(arch)
    if nvcc is not None and _host_compiler(*_CXX):
        return nvcc
    library = nvrtc.discover()
    return library if library.objection(arch) is None else None


# --- places ----------------------------------------------------------------------------------------------


def _places() -> Iterator[tuple[Path, str]]:
    taken = getattr(sys.modules.get("tilelang.env"), "CUDA_HOME", None)
    if taken:
        yield Path(taken) / "bin" / _NVCC, "tilelang, which took it when it was imported"
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "bin" / _NVCC, variable
    on_path = shutil.which("nvcc")
    if on_path is not None:
        yield _home_around(Path(on_path)) / "bin" / _NVCC, "PATH"
    wheel = _in_wheel()
    if wheel is not None:
        yield wheel, f"the {_WHEEL} wheel"
    if DEFAULT_HOME.exists():
        yield DEFAULT_HOME / "bin" / _NVCC, str(DEFAULT_HOME)


def _home_around(nvcc: Path) -> Path:
    """The toolkit of an nvcc on PATH: where the headers are beside it, else behind its symbolic links."""
    visible = _home_above(nvcc)
    if (visible / "include" / "cuda_runtime.h").exists():
        return visible
    return _home_above(nvcc.resolve())


def _home_above(nvcc: Path) -> Path:
    in_hpc_sdk = "hpc_sdk" in str(nvcc).lower() and "cuda" not in str(nvcc).lower()
    levels = nvcc.parents
    wanted = 2 if in_hpc_sdk else 1  # the HPC SDK has one more level: compilers/bin/nvcc
    return levels[min(wanted, len(levels) - 1)]


def _in_wheel() -> Path | None:
    """nvcc inside the wheel, or where it should be if the wheel has none; None where no wheel is installed."""
    try:
        files = importlib.metadata.files(_WHEEL)
    except importlib.metadata.PackageNotFoundError:
        return None
    located = [Path(str(file.locate())) for file in files or () if file.name == _NVCC]
    return located[0] if located else Path(_WHEEL) / "bin" / _NVCC


# --- one nvcc --------------------------------------------------------------------------------------------


def _examine(nvcc: Path) -> Version | str:
    """The CUDA release of an nvcc, or why it cannot be used."""
    if not nvcc.exists():
        return "no such file"
    if not nvcc.is_file():
        return "not a file"
    if not os.access(nvcc, os.X_OK):
        return "not executable"
    try:
        ran = subprocess.run(
            [str(nvcc), "--version"], capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"`nvcc --version` did not answer within {_TIMEOUT_S:g} s"
    except OSError as error:
        return f"`nvcc --version` cannot be started: {error.strerror or error}"
    if ran.returncode != 0:
        said = (ran.stderr or ran.stdout).strip().splitlines()
        return f"`nvcc --version` exits with {ran.returncode}" + (f": {said[-1]}" if said else "")
    release = re.search(r"release (\d+)\.(\d+)", ran.stdout)
    if release is None:
        return "`nvcc --version` names no release"
    version = (int(release[1]), int(release[2]))
    oldest = min(OLDEST.values())
    if version < oldest:
        return f"nvcc {dotted(version)} is older than {dotted(oldest)}"
    return version


# --- findings --------------------------------------------------------------------------------------------


def probe_compiler(archs: Sequence[str]) -> Finding:
    """Whether anything here compiles for any of the machine's architectures: TileLang's nvcc, else NVRTC.

    Args:
        archs: those of the visible GPUs that the backend supports; where there are none, the easiest is asked.
    """
    nvcc = probe_nvcc(archs)
    if nvcc.ok and not _host_compiler(*_CXX):
        nvcc = Finding(False, f"{nvcc.found}; it needs one of {', '.join(_CXX)} on PATH", "install g++")
    if nvcc.ok:
        return nvcc
    library = nvrtc.discover()
    objections = [library.objection(arch) for arch in list(archs) or ["sm90"]]
    too_old_for = [text for text in dict.fromkeys(objections) if text and not library.rejected]
    found = "; ".join([nvcc.found, library.describe(), *too_old_for])
    if None in objections:
        return Finding(True, found)
    return Finding(False, found, f"{nvcc.fix}; or, for NVRTC, {nvrtc.FIX}")


def probe_nvcc(archs: Sequence[str]) -> Finding:
    """Whether TileLang's nvcc compiles for any of the machine's architectures; arguments as above."""
    candidates = discover()
    if not candidates:
        return Finding(
            False,
            f"no nvcc: CUDA_HOME and CUDA_PATH are not set, none is on PATH, no {_WHEEL} wheel is installed, "
            f"{DEFAULT_HOME} does not exist",
            _install_fix(archs),
        )
    wanted = list(archs) or ["sm90"]
    objections = {arch: candidates[0].objection(arch) for arch in wanted}
    found = "; ".join(candidate.describe() for candidate in candidates)
    too_old_for = [text for text in dict.fromkeys(objections.values()) if text and not candidates[0].rejected]
    if too_old_for:
        found = "; ".join([found, *too_old_for])
    if any(objection is None for objection in objections.values()):
        return Finding(True, found)
    others = [c for c in candidates[1:] if any(c.objection(arch) is None for arch in wanted)]
    return Finding(False, found, f"set CUDA_HOME={others[0].home}" if others else _install_fix(archs))


def _install_fix(archs: Sequence[str]) -> str:
    oldest = min(OLDEST[arch] for arch in archs or OLDEST)
    return (
        f"install CUDA {dotted(oldest)} or newer and set CUDA_HOME to it, "
        f"or pip install 'tilelang[nvcc]{TILELANG}' and unset CUDA_HOME"
    )


def probe_host_compiler() -> Finding:
    """A C compiler, as TVM looks for one: it builds the host's part of each kernel, whatever compiles the rest."""
    found = _host_compiler(*_CXX, *_C)
    if found is not None:
        return Finding(True, found)
    named = os.environ.get("CXX") or os.environ.get("CC")
    reason = f"CXX or CC is {named}, which is no program" if named else f"none of {', '.join((*_CXX, *_C))} is on PATH"
    return Finding(False, reason, "install g++ (apt-get install g++), or set CXX to a compiler")


def _host_compiler(*names: str) -> str | None:
    named = os.environ.get("CXX") or os.environ.get("CC")
    return next((found for name in ((named,) if named else names) if (found := shutil.which(name))), None)


def probe_tilelang() -> Finding:
    """The supported tilelang and the apache-tvm-ffi that it pins: a wrong one can abort the process at import."""
    fix = f"pip install 'tilelang{TILELANG}'"
    finding = probes.package("tilelang", ("tilelang",), TILELANG, fix)
    if not finding.ok:
        return finding
    partner = probes.package("tvm_ffi", ("apache-tvm-ffi",), _partner_versions(), fix)
    if not partner.ok:
        return partner
    return Finding(True, f"{finding.found}, {partner.found}")


def _partner_versions() -> str:
    """The versions of apache-tvm-ffi that the installed tilelang asks for."""
    from packaging.requirements import Requirement

    for text in importlib.metadata.requires("tilelang") or ():
        requirement = Requirement(text)
        if requirement.name == "apache-tvm-ffi":
            return str(requirement.specifier)
    return ""
