"""The ops: one module each, found by name and imported when first used."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from chunkwise import errors

if TYPE_CHECKING:
    from chunkwise.protocol.op import Op

_MODULES = {
    "chunk_gated_delta_rule": "chunkwise.ops.gated_delta_rule",
    "chunk_delta_rule": "chunkwise.ops.delta_rule",
    "chunk_simple_gla": "chunkwise.ops.simple_gla",
    "chunk_gla": "chunkwise.ops.gla",
    "chunk_dplr_delta_rule": "chunkwise.ops.dplr_delta_rule",
    "sink_attention": "chunkwise.ops.sink_attention",
}


class _Ops(Mapping[str, "Op[Any, Any]"]):
    """Op name to op."""

    def __getitem__(self, name: str) -> Op[Any, Any]:
        if name not in _MODULES:
            raise errors.unknown_op(name, _MODULES)
        op: Op[Any, Any] = getattr(importlib.import_module(_MODULES[name]), name)
        return op

    def __contains__(self, name: object) -> bool:
        return name in _MODULES

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


OPS = _Ops()
