"""Refusals: why an implementation does not run a call, each with its kind, its reason and what to do."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass


class Kind(enum.Enum):
    """The four kinds of refusal. Only ``SLOWER`` yields when the user names the implementation."""

    UNSUPPORTED = "unsupported"
    PROMISE = "promise"
    DOES_NOT_FIT = "does not fit"
    SLOWER = "slower"

    @property
    def hard(self) -> bool:
        """Whether running all the same would be wrong or impossible."""
        return self is not Kind.SLOWER


@dataclass(frozen=True)
class Refusal:
    """One reason. Its text is formatted when somebody reads it: formatting in a trace would fix a size."""

    kind: Kind
    rule: str
    reason: Callable[[], str]
    remedy: str
    against: str | None = None

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.reason()}; {self.remedy}"


@dataclass(frozen=True)
class DoesNotFit:
    """What a schedule function returns when no tile fits the device: bytes needed, bytes there."""

    need_bytes: int
    have_bytes: int
    what: str = "shared memory"

    def refusal(self) -> Refusal:
        """This as a refusal."""
        return Refusal(
            Kind.DOES_NOT_FIT,
            "schedule",
            lambda: f"needs {self.need_bytes} bytes of {self.what}, the device has {self.have_bytes}",
            "use smaller widths or another implementation",
        )
