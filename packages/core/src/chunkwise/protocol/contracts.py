"""Contracts on values. Checking one costs a device sync, so only tests and CHUNKWISE_CHECK=values do it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chunkwise import errors


@dataclass(frozen=True)
class Contract:
    """A bound on the values of one argument; NaN breaks every contract.

    Args:
        name: of the argument.
        lower, upper: the least and the largest value.
        lower_option: the option by which a caller may promise a lower bound; a value may lie an ulp beyond that, since
            the bound itself need not be a number of the argument's dtype.
    """

    name: str
    lower: float | None = None
    upper: float | None = None
    lower_option: str | None = None
    minus_infinity: bool = False

    def __str__(self) -> str:
        bounds = []
        if self.lower is not None:
            bounds.append(f"{self.name} >= {self.lower:g}")
        if self.upper is not None:
            bounds.append(f"{self.name} <= {self.upper:g}")
        if self.lower_option is not None and self.lower is None:
            bounds.append(f"{self.name} >= {self.lower_option} where that is given")
        return " and ".join(bounds) or f"{self.name} is {'finite or -inf' if self.minus_infinity else 'finite'}"

    def under(self, options: Mapping[str, Any]) -> Contract:
        """The contract of a call with these options."""
        promised = options.get(self.lower_option) if self.lower_option is not None else None
        return self if promised is None else dataclasses.replace(self, lower=float(promised))

    def check(self, op: str, values: Tensor) -> None:
        """Raise, naming the first value outside the contract. Syncs with the device."""
        bad = ~torch.isfinite(values)
        if self.minus_infinity:
            bad &= ~torch.isneginf(values)
        if self.lower is not None:
            beyond = torch.finfo(values.dtype).eps * abs(self.lower) if self.lower_option is not None else 0.0
            bad |= values < self.lower - beyond
        if self.upper is not None:
            bad |= values > self.upper
        if bool(bad.any()):
            index = tuple(int(i) for i in bad.nonzero()[0])
            raise errors.value_outside_contract(op, self.name, index, float(values[index]), str(self))


def at_most(name: str, upper: float, *, lower_option: str | None = None) -> Contract:
    """Every value of ``name`` is finite and at most ``upper``; an option may promise how low it goes."""
    return Contract(name, upper=upper, lower_option=lower_option)


def finite(name: str) -> Contract:
    """No value of ``name`` is NaN or infinite."""
    return Contract(name)


def finite_or_minus_infinity(name: str) -> Contract:
    """No value of ``name`` is NaN or +infinite; -infinity stands for what is not there."""
    return Contract(name, minus_infinity=True)


def offset_problem(offsets: Tensor, total: int, axis: str = "T") -> tuple[int, int, str] | None:
    """The first bad entry of host offsets: (index, value, what is wrong with it), or None.

    Offsets ``[N+1]`` start at 0, never decrease and end at ``total`` rows of ``axis`` or before.
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
        return index, int(offsets[index]), f"passes {axis} = {total}"
    return None
