"""Facts: all that a rule or a schedule may read of a call. Plain numbers and names; no tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from chunkwise.verifier.device import CPU, DeviceFacts


@dataclass(frozen=True)
class Facts:
    """The facts of one call.

    Args:
        op: the op's name.
        device: where its tensors are.
        sizes: axis name to size. When a graph is traced the sizes that vary between calls are absent.
        dtypes: argument name to short dtype name, for the tensors that are given.
        flags: option name to value, and ``ragged``.
        needs: the arguments whose gradient is asked for.
        residuals: the format that the forward saves, where a route with gradients has been chosen.
    """

    op: str
    device: DeviceFacts = CPU
    sizes: Mapping[str, int] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()
    residuals: str | None = None

    def size(self, axis: str) -> int:
        """The size of an axis."""
        return self.sizes[axis]

    def dtype(self, name: str) -> str | None:
        """The short dtype name of an argument, or None if it is absent."""
        return self.dtypes.get(name)

    def flag(self, name: str) -> Any:
        """The value of an option, or of ``ragged``."""
        return self.flags[name]

    def given(self, name: str) -> bool:
        """Whether a tensor argument is present."""
        return name in self.dtypes

    def with_size(self, axis: str, size: int) -> Facts:
        """The same facts with one axis changed."""
        return dataclasses.replace(self, sizes={**self.sizes, axis: size})

    def with_dtype(self, name: str, dtype: str) -> Facts:
        """The same facts with one argument's dtype changed."""
        return dataclasses.replace(self, dtypes={**self.dtypes, name: dtype})

    def with_flag(self, name: str, value: Any) -> Facts:
        """The same facts with one option changed."""
        return dataclasses.replace(self, flags={**self.flags, name: value})

    def on(self, device: DeviceFacts) -> Facts:
        """The same facts on another device."""
        return dataclasses.replace(self, device=device)

    @cached_property
    def names(self) -> frozenset[str]:
        """Everything that can be read, in the spelling of :attr:`Rule.reads`."""
        dtypes = (f"dtype:{name}" for name in self.dtypes)
        flags = (f"flag:{name}" for name in self.flags)
        return frozenset(("device", "needs", *self.sizes, *dtypes, *flags))

    def describe(self) -> str:
        """One line for explain: device, sizes, dtypes, options that are set, gradients that are asked for."""
        parts = (
            " ".join(f"{axis}={size}" for axis, size in self.sizes.items()),
            " ".join(f"{name}:{dtype}" for name, dtype in self.dtypes.items()),
            " ".join(f"{name}={value}" for name, value in self.flags.items() if value not in (False, None)),
            f"gradients: {' '.join(sorted(self.needs)) or 'none'}",
        )
        where = self.device.name if self.device.arch == self.device.kind else f"{self.device.name} ({self.device.arch})"
        return f"on {where}: {'; '.join(part for part in parts if part)}"
