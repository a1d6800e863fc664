"""Routes: the forward/backward pair that the dispatcher chose for the calls of one key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from chunkwise.autograd.residuals import ResidualFormat
from chunkwise.dispatcher.canonical import CanonicalForm
from chunkwise.protocol.declaration import Declaration
from chunkwise.verifier.implementation import Implementation


@dataclass(frozen=True, eq=False)
class Runner:
    """One part of a route: the function to call and the schedule that the verifier accepted."""

    implementation: Implementation
    schedule: Any
    function: Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Route:
    """What runs a call.

    Args:
        declaration: the op.
        form: the conversions between the caller's call and the backend's.
        forward, backward: the chosen pair; no backward where no gradient is needed.
        format: the residual format that joins them.
        needs: the arguments whose gradient may be asked for.
        forced: whether the user named what runs; failures raise then.
        check_values, check_offsets: what to hold the values against in every call.
        device_index: the CUDA device to make current, or None.
    """

    declaration: Declaration
    form: CanonicalForm
    forward: Runner
    backward: Runner | None
    format: ResidualFormat | None
    needs: frozenset[str]
    forced: bool
    check_values: bool
    check_offsets: bool
    device_index: int | None

    @cached_property
    def kept_outputs(self) -> tuple[int, ...]:
        """The places of the outputs that the format keeps for the backward."""
        return self.declaration.kept_outputs(self.format) if self.format else ()

    def __str__(self) -> str:
        backward = self.backward.implementation if self.backward else None
        return in_words(self.forward.implementation, backward, self.format)


def in_words(forward: Implementation, backward: Implementation | None, residual_format: ResidualFormat | None) -> str:
    """A pair and the format that joins it, as explain and the log show them."""
    if backward is None or residual_format is None:
        return f"{forward.name} (forward)"
    if backward is forward:
        return f"{forward.name} (forward and backward), residuals {residual_format.name}"
    return f"{forward.name} (forward) + {backward.name} (backward), residuals {residual_format.name}"
