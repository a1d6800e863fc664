"""Keep fp32 products in fp32, whatever the process-wide switches allow."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_FULL = ("none", "ieee")


class _MatmulSwitch:
    """One backend's process-wide precision of fp32 products, held at ieee while anybody needs it."""

    def __init__(self, control: Any) -> None:
        self._control = control
        self._lock = threading.Lock()
        self._holders = 0
        self._found = "none"

    def acquire(self) -> bool:
        """Switch to ieee when products are degraded; True when `release` must follow."""
        with self._lock:
            if self._holders == 0:
                self._found = self._control.fp32_precision
                if self._found in _FULL:
                    return False
                self._control.fp32_precision = "ieee"
            self._holders += 1
            return True

    def release(self) -> None:
        """Put back what was found, once the last holder has gone."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                self._control.fp32_precision = self._found


_SWITCHES = {
    "cpu": _MatmulSwitch(torch.backends.mkldnn.matmul),  # type: ignore[attr-defined]  # its stubs lack it
    "cuda": _MatmulSwitch(torch.backends.cuda.matmul),
}


@contextmanager
def exact_matmuls(device: torch.device) -> Iterator[None]:
    """Inside, products of fp32 tensors on `device` are neither tf32 nor bf16.

    `torch.set_float32_matmul_precision("high")` and "medium" license both; a recurrence cannot afford either.
    Costs a lock and one read when nothing is degraded. Threads that overlap share one hold.
    """
    switch = _SWITCHES.get(device.type)
    held = switch is not None and switch.acquire()
    try:
        yield
    finally:
        if switch is not None and held:
            switch.release()
