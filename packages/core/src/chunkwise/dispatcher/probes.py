"""Probes that backends share: what this machine has, told as a finding.

None of them raises, imports a kernel language or allocates on a GPU. They run at the first dispatch or for
``chunkwise doctor``, never at import.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence

import torch

from chunkwise.dispatcher.registry import Finding

Capability = tuple[int, int]


def visible_gpus() -> list[tuple[str, Capability]]:
    """Name and compute capability of every GPU that torch sees; raises what torch raises."""
    return [(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in range(gpu_count())]


def gpu_count() -> int:
    """How many GPUs torch sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def nvidia_gpu(accepts: Callable[[Capability], bool], wanted: str) -> Finding:
    """Whether any visible GPU is an NVIDIA GPU whose compute capability is accepted.

    Args:
        accepts: the capabilities that will do; ``(12, 1)`` is sm_121.
        wanted: those in words, for the message.
    """
    if torch.version.hip is not None:
        return Finding(
            False,
            f"torch {torch.__version__} was built for AMD GPUs (ROCm {torch.version.hip})",
            f"use a machine with {wanted} and a CUDA build of torch",
        )
    if torch.version.cuda is None:
        return Finding(
            False,
            f"torch {torch.__version__} was built without CUDA",
            f"install a CUDA build of torch on a machine with {wanted}",
        )
    try:
        gpus = visible_gpus()
    except (RuntimeError, AssertionError) as error:
        return Finding(False, f"CUDA does not start: {error}", "see that nvidia-smi works, then try again")
    if not gpus:
        return Finding(False, "torch sees no GPU", "see that nvidia-smi works and CUDA_VISIBLE_DEVICES is not empty")
    seen = ", ".join(f"{name} (sm_{major}{minor})" for name, (major, minor) in gpus)
    if any(accepts(capability) for _, capability in gpus):
        return Finding(True, seen)
    return Finding(False, f"only {seen}", f"run on {wanted}")


def installed(module: str) -> bool:
    """Whether a top-level module can be imported; it is not."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a module in sys.modules without a spec
        return False


def version_of(distributions: Sequence[str]) -> str | None:
    """The version of the first of the distributions that is installed."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def package(module: str, distributions: Sequence[str], versions: str, fix: str) -> Finding:
    """Whether a package is installed in one of the versions, found without importing it.

    Args:
        module: its top-level module.
        distributions: the names under which it is published.
        versions: a specifier set, ``>=3.6``.
        fix: how to get it.
    """
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    if not installed(module):
        return Finding(False, f"{module} is not installed", fix)
    found = version_of(distributions)
    if found is None:
        return Finding(False, f"{module} can be imported, but no installed package says its version", fix)
    try:
        fits = Version(found) in SpecifierSet(versions, prereleases=True)
    except InvalidVersion:
        fits = False
    return Finding(True, f"{module} {found}") if fits else Finding(False, f"{module} {found}, not {versions}", fix)
