"""What each architecture asks of a CUDA compiler."""

from __future__ import annotations

Version = tuple[int, int]

OLDEST: dict[str, Version] = {"sm90": (12, 6), "sm120": (12, 8), "sm121": (12, 9)}
"""The oldest CUDA release that compiles for each architecture that the backend supports."""


def dotted(version: Version | None) -> str:
    """``12.8``."""
    return "an unknown version" if version is None else ".".join(map(str, version))


def too_old(version: Version | None, arch: str) -> str | None:
    """Why a compiler of this release cannot compile for ``arch`` (``sm90``), or None."""
    oldest = OLDEST[arch]
    if version is None or version < oldest:
        return f"{dotted(version)} is too old for {arch}, which needs {dotted(oldest)} or newer"
    return None


def target(capability: Version) -> str:
    """The compiler's name of a compute capability: ``sm_90a``, with all that this architecture alone can do."""
    return f"sm_{capability[0]}{capability[1]}a"
