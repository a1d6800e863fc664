"""The backend ``triton``: what it needs of the machine, and how its compile errors look. Imports no triton."""

from __future__ import annotations

import sys

from chunkwise.dispatcher import probes
from chunkwise.dispatcher.registry import Backend, Finding, Need
from chunkwise.verifier.device import interpreting

VERSIONS = ">=3.6"
"""The versions of triton that the kernels are right with: what 3.4 and 3.5 compile of some gradients for Hopper refills
a tile that a product still reads (gated_delta_rule/NOTES.md). torch 2.10, the oldest that core takes, brings 3.6."""

_OLDEST = (8, 0)
_DISTRIBUTIONS = ("triton", "pytorch-triton", "triton-windows")

_COMPILE_ERRORS = frozenset(
    {
        "triton.compiler.errors.CompilationError",
        "triton.runtime.errors.OutOfResources",
        "triton.runtime.errors.PTXASError",
    }
)
# What Triton raises as a plain RuntimeError: a failed MLIR pass, and no C compiler to build its launcher with.
_COMPILE_MESSAGES = ("PassManager::run failed", "Failed to find C compiler")


def probe_device() -> Finding:
    """An NVIDIA GPU of sm_80 or newer; under ``TRITON_INTERPRET=1`` the interpreter stands in for it."""
    if interpreting():
        return _probe_interpreter()
    return probes.nvidia_gpu(lambda capability: capability >= _OLDEST, "an NVIDIA GPU of sm_80 or newer")


def _probe_interpreter() -> Finding:
    if probes.installed("numpy"):
        return Finding(True, "TRITON_INTERPRET=1: Triton's interpreter on the CPU stands in for the GPU")
    return Finding(
        False,
        "TRITON_INTERPRET=1, but numpy, which Triton's interpreter needs, is not installed",
        "pip install numpy, or unset TRITON_INTERPRET",
    )


def probe_triton() -> Finding:
    """A triton of the supported versions, which is not imported."""
    fix = f"pip install 'triton{VERSIONS}'"
    if not sys.platform.startswith("linux"):
        fix = "Triton is published for Linux; elsewhere use the backend torch"
    return probes.package("triton", _DISTRIBUTIONS, VERSIONS, fix)


def is_compile_failure(error: BaseException) -> bool:
    """Whether Triton failed to compile or to load a kernel, so that it was not launched."""
    names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(error).__mro__}
    if names & _COMPILE_ERRORS:
        return True
    return type(error) is RuntimeError and any(text in str(error) for text in _COMPILE_MESSAGES)


BACKEND = Backend(
    name="triton",
    distribution="chunkwise-triton",
    core=">=0.1,<0.2",
    tables=(
        "chunkwise_triton.gated_delta_rule.implementations:IMPLEMENTATIONS",
        "chunkwise_triton.delta_rule.implementations:IMPLEMENTATIONS",
        "chunkwise_triton.dplr_delta_rule.implementations:IMPLEMENTATIONS",
        "chunkwise_triton.gla.implementations:IMPLEMENTATIONS",
        "chunkwise_triton.simple_gla.implementations:IMPLEMENTATIONS",
        "chunkwise_triton.sink_attention.implementations:IMPLEMENTATIONS",
    ),
    needs=(Need("an NVIDIA GPU of sm_80 or newer", probe_device), Need("triton", probe_triton)),
    is_compile_failure=is_compile_failure,
)
