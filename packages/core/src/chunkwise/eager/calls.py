"""What every recurrent op starts from: where the chunks of a call lie, and its states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from chunkwise.eager.chunks import ChunkLayout, Tiling, dense_layout, ragged_layout

# Elements of one temporary tensor: a core's cache holds a few; a GPU wants wide launches.
_ELEMENTS_AT_ONCE = 1 << 18
_ELEMENTS_AT_ONCE_ON_GPU = 1 << 25


def layout_of(chunk_size: int, inputs: Any) -> ChunkLayout:
    """Where the chunks of a call with `v` `[B, T, HV, V]` and `k` `[B, T, H, K]` lie."""
    v = inputs.v
    batch, length, heads, value_width = v.shape
    per_row = heads * max(chunk_size, inputs.k.shape[-1], value_width)
    elements = _ELEMENTS_AT_ONCE if v.device.type == "cpu" else _ELEMENTS_AT_ONCE_ON_GPU
    tiling = Tiling(chunk_size, elements // max(per_row, 1), v.device)
    if inputs.cu_seqlens is None:
        return dense_layout(batch, length, tiling)
    offsets = inputs.cu_seqlens if inputs.cu_seqlens_cpu is None else inputs.cu_seqlens_cpu
    return ragged_layout(length, offsets, tiling)


def states_or_zeros(inputs: Any, layout: ChunkLayout, states: Tensor | None) -> Tensor:
    """A fresh fp32 `[N, HV, K, V]`: a copy of `states`, or zeros."""
    if states is not None:
        return states.to(torch.float32, copy=True)
    shape = (layout.sequences, inputs.v.shape[2], inputs.k.shape[-1], inputs.v.shape[-1])
    return torch.zeros(shape, dtype=torch.float32, device=inputs.v.device)
