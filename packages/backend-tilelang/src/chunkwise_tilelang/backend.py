"""The backend ``tilelang``: what it needs of the machine. Imports no tilelang."""

from __future__ import annotations

from chunkwise.dispatcher import probes
from chunkwise.dispatcher.registry import Backend, Finding, Need
from chunkwise_tilelang.toolkit import discover

_ARCHS = {(9, 0): "sm90", (12, 0): "sm120", (12, 1): "sm121"}
_WANTED = "an NVIDIA GPU of sm_90, sm_120 or sm_121"


def probe_device() -> Finding:
    """A GPU of one of the architectures; any of the machine's will do, which tensors run is the rules' matter."""
    return probes.nvidia_gpu(lambda capability: capability in _ARCHS, _WANTED)


def probe_compiler() -> Finding:
    """An nvcc that TileLang takes, or NVRTC, that compiles for one of the machine's supported GPUs."""
    try:
        capabilities = {capability for _, capability in probes.visible_gpus()}
    except (RuntimeError, AssertionError):  # CUDA does not start; probe_device says so
        capabilities = set()
    return discover.probe_compiler([arch for capability, arch in _ARCHS.items() if capability in capabilities])


BACKEND = Backend(
    name="tilelang",
    distribution="chunkwise-tilelang",
    core=">=0.1,<0.2",
    tables=(
        "chunkwise_tilelang.gated_delta_rule.implementations:IMPLEMENTATIONS",
        "chunkwise_tilelang.delta_rule.implementations:IMPLEMENTATIONS",
    ),
    needs=(
        Need(_WANTED, probe_device),
        Need("tilelang", discover.probe_tilelang),
        Need("a CUDA compiler", probe_compiler),
        Need("a C compiler", discover.probe_host_compiler),
    ),
)
