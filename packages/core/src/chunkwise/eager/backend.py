"""The built-in backend ``torch``. It needs nothing but PyTorch and reads ragged offsets on the host."""

from __future__ import annotations

from chunkwise.dispatcher.registry import Backend

BACKEND = Backend(
    name="torch",
    distribution="chunkwise",
    core=">=0.1,<0.2",
    tables=("chunkwise.eager.implementations:IMPLEMENTATIONS",),
)
