"""Devices as the rules see them: plain numbers, taken from a real device or from the table of fake ones."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceFacts:
    """What a rule or a schedule may know of a device.

    Args:
        name: for messages.
        kind: torch's device type (``cuda``, ``cpu``, ...) or ``interpreter`` (Triton's, on the CPU).
        arch: ``sm90`` for compute capability 9.0 of an NVIDIA GPU; else the kind.
        sm_count: streaming multiprocessors; 0 where there are none.
        shared_memory_bytes: the most that one block may opt in to; 0 where there is none.
    """

    name: str
    kind: str
    arch: str
    sm_count: int = 0
    shared_memory_bytes: int = 0


def _nvidia(name: str, arch: str, sm_count: int, shared_memory_bytes: int) -> DeviceFacts:
    return DeviceFacts(name, "cuda", arch, sm_count, shared_memory_bytes)


CPU = DeviceFacts("CPU", "cpu", "cpu")
INTERPRETER = DeviceFacts("Triton interpreter", "interpreter", "interpreter")

FAKE_DEVICES: dict[str, DeviceFacts] = {
    device.name: device
    for device in (
        _nvidia("A100", "sm80", 108, 166_912),
        _nvidia("RTX 4090", "sm89", 128, 101_376),
        _nvidia("H100", "sm90", 132, 232_448),
        _nvidia("H200", "sm90", 132, 232_448),
        _nvidia("B200", "sm100", 148, 232_448),
        _nvidia("RTX PRO 6000", "sm120", 188, 101_376),
        _nvidia("RTX 5090", "sm120", 170, 101_376),
        _nvidia("GB10", "sm121", 48, 101_376),
        CPU,
        INTERPRETER,
    )
}
"""Devices to hold the whole implementation table against on a machine that has none of them."""


def interpreting() -> bool:
    """Whether Triton interprets its kernels on the CPU in this process."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.lru_cache(maxsize=64)
def _cuda_facts(index: int) -> DeviceFacts:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return DeviceFacts(properties.name, "cuda", properties.gcnArchName, properties.multi_processor_count)
    return _nvidia(
        properties.name,
        f"sm{properties.major}{properties.minor}",
        properties.multi_processor_count,
        getattr(properties, "shared_memory_per_block_optin", 0),
    )


def device_facts(kind: str, index: int | None) -> DeviceFacts:
    """The facts of a torch device, given as its type and index."""
    if kind == "cuda":
        return _cuda_facts(torch.cuda.current_device() if index is None else index)
    if kind == "cpu":
        return INTERPRETER if interpreting() else CPU
    return DeviceFacts(kind, kind, kind)
