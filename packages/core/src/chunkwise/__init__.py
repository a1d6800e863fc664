"""Chunkwise linear attention and sink attention behind one op interface.

Importing this package imports no backend, no op and initialises no CUDA; names are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chunkwise.dispatcher.explain import Explanation, explain
    from chunkwise.dispatcher.policy import prefer
    from chunkwise.errors import ChunkwiseError, NoImplementationError
    from chunkwise.ops import OPS
    from chunkwise.ops.delta_rule import chunk_delta_rule
    from chunkwise.ops.dplr_delta_rule import chunk_dplr_delta_rule
    from chunkwise.ops.gated_delta_rule import chunk_gated_delta_rule
    from chunkwise.ops.gla import chunk_gla
    from chunkwise.ops.rwkv7 import chunk_rwkv7
    from chunkwise.ops.simple_gla import chunk_simple_gla
    from chunkwise.ops.sink_attention import sink_attention

__version__ = "0.1.0"

_EXPORTS = {
    "ChunkwiseError": "chunkwise.errors",
    "Explanation": "chunkwise.dispatcher.explain",
    "NoImplementationError": "chunkwise.errors",
    "OPS": "chunkwise.ops",
    "chunk_delta_rule": "chunkwise.ops.delta_rule",
    "chunk_dplr_delta_rule": "chunkwise.ops.dplr_delta_rule",
    "chunk_gated_delta_rule": "chunkwise.ops.gated_delta_rule",
    "chunk_gla": "chunkwise.ops.gla",
    "chunk_rwkv7": "chunkwise.ops.rwkv7",
    "chunk_simple_gla": "chunkwise.ops.simple_gla",
    "explain": "chunkwise.dispatcher.explain",
    "prefer": "chunkwise.dispatcher.policy",
    "sink_attention": "chunkwise.ops.sink_attention",
}

__all__ = [
    "OPS",
    "ChunkwiseError",
    "Explanation",
    "NoImplementationError",
    "chunk_delta_rule",
    "chunk_dplr_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gla",
    "chunk_rwkv7",
    "chunk_simple_gla",
    "explain",
    "prefer",
    "sink_attention",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'chunkwise' has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
