"""Contracts on values. Checking one costs a device sync, so only tests and CHUNKWISE_CHECK=values do it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from chunkwise import errors


@dataclass(frozen=True)
class Contract:
    """A bound on the values of one argument; NaN breaks every contract."""

    name: str
    lower: float | None = None
    upper: float | None = None

    def __str__(self) -> str:
        bounds = []
        if self.lower is not None:
            bounds.append(f"{self.name} >= {self.lower:g}")
        if self.upper is not None:
            bounds.append(f"{self.name} <= {self.upper:g}")
        return " and ".join(bounds) or f"{self.name} is finite"

    def check(self, op: str, values: Tensor) -> None:
        """Raise, naming the first value outside the contract. Syncs with the device."""
        bad = ~torch.isfinite(values)
        if self.lower is not None:
            bad |= values < self.lower
        if self.upper is not None:
            bad |= values > self.upper
        if bool(bad.any()):
            index = tuple(int(i) for i in bad.nonzero()[0])
            raise errors.value_outside_contract(op, self.name, index, float(values[index]), str(self))


def at_most(name: str, upper: float) -> Contract:
    """Every value of ``name`` is finite and at most ``upper``."""
    return Contract(name, upper=upper)


def finite(name: str) -> Contract:
    """No value of ``name`` is NaN or infinite."""
    return Contract(name)


def offset_problem(offsets: Tensor, total: int) -> tuple[int, int, str] | None:
    """The first bad entry of host offsets: (index, value, what is wrong with it), or None.

    Offsets ``[N+1]`` start at 0, never decrease and end at ``total`` rows or before.
    """
    first = int(offsets[0])
    if first != 0:
        return 0, first, "is not 0"
    decreasing = (offsets[1:] < offsets[:-1]).nonzero()
    if decreasing.numel():
        index = int(decreasing[0]) + 1
        return index, int(offsets[index]), f"is less than the entry before it, {int(offsets[index - 1])}"
    last = int(offsets[-1])
    if last > total:
        index = int((offsets > total).nonzero()[0])
        return index, int(offsets[index]), f"passes T = {total}"
    return None
