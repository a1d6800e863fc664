"""The kernels of the backend as they are compiled: what is proved of each without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from chunkwise.verifier.implementation import resolve

TABLES: tuple[str, ...] = ("chunkwise_tilelang.gated_delta_rule.variants:variants",)
"""``module:function`` of each op's list: ``function(whole) -> Sequence[Variant]``, all of them or a covering set."""


@dataclass(frozen=True)
class Variant:
    """A kernel with its constants.

    Args:
        name: op, kernel and what is special about it.
        builder: as for :func:`chunkwise_tilelang.toolkit.compile.kernel`.
        constants: the builder's keyword arguments.
        arch: ``sm_90a``.
        shared_memory_bytes: of a block, as its schedule says; static memory is part of it.
        spill_bytes: what it may spill, loads and stores of a thread, where NOTES.md says why.
    """

    name: str
    builder: Callable[..., Any]
    constants: Mapping[str, Any]
    arch: str
    shared_memory_bytes: int
    spill_bytes: int = 0


def variants(whole: bool = False) -> list[Variant]:
    """All kernels of the tables, or a set that covers what differs between them."""
    return [variant for path in TABLES for variant in resolve(path)(whole)]
