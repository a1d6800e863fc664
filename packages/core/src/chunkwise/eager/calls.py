"""What ops share: how much is computed at once; of recurrent ones, where the chunks of a call lie, its states, the walk
over its chunks and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from chunkwise.eager.chunks import ChunkGroup, ChunkLayout, Tiling, dense_layout, ragged_layout

Known = TypeVar("Known")

# Elements of one temporary tensor: a core's cache holds a few; a GPU wants wide launches.
_ELEMENTS_AT_ONCE = 1 << 18
_ELEMENTS_AT_ONCE_ON_GPU = 1 << 25


def elements_at_once(device: torch.device) -> int:
    """Elements of one temporary tensor on a device."""
    return _ELEMENTS_AT_ONCE if device.type == "cpu" else _ELEMENTS_AT_ONCE_ON_GPU


def layout_of(chunk_size: int, inputs: Any) -> ChunkLayout:
    """Where the chunks of a call with `v` `[B, T, HV, V]` and `k` `[B, T, H, K]` lie."""
    v = inputs.v
    batch, length, heads, value_width = v.shape
    per_row = heads * max(chunk_size, inputs.k.shape[-1], value_width)
    tiling = Tiling(chunk_size, elements_at_once(v.device) // max(per_row, 1), v.device)
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


def walk(
    layout: ChunkLayout,
    states: Tensor,
    outs: Mapping[str, Tensor],
    compute: Callable[[ChunkGroup, Tensor], Mapping[str, Tensor]],
) -> None:
    """Compute all chunks in the order of their sequences.

    Args:
        layout: of the call.
        states: `[N, ...]` where each sequence starts; becomes where it ends.
        outs: what to fill: rows `[B, T, ...]` by name, `states` `[slots, ...]`, the entry states, and `entry_states`
            `[B, entries, ...]`, those of them that a lean format keeps (`entry_slots` of `autograd.residuals`).
        compute: everything of one group, packed, by the same names, all entry states as `states`; moves the states that
            it is given in place.
    """
    for table in layout.tables:
        state = states.index_select(0, table.sequences)
        for group in table.groups:
            found = compute(group, state)
            for name, out in outs.items():
                if name == "states":
                    out.index_copy_(0, group.slots, found[name].to(out.dtype))
                elif name == "entry_states":
                    group.unpack_entries(found["states"], out, layout.length)
                else:
                    group.unpack(found[name], out)
        states.index_copy_(0, table.sequences, state)


def walk_back(
    layout: ChunkLayout,
    states: Tensor,
    d_states: Tensor,
    outs: Mapping[str, Tensor],
    recover: Callable[[ChunkGroup, Tensor], Known],
    gradients: Callable[[ChunkGroup, Known, Tensor], Mapping[str, Tensor]],
) -> None:
    """Compute the gradients of all chunks, the last ones of each sequence first.

    Args:
        layout: of the call.
        states: `[N, ...]` where each sequence starts.
        d_states: gradients of where it ends; become those of where it starts.
        outs: rows `[B, T, ...]` to fill, by name.
        recover: what the gradients of a group need, in the order of the forward; moves the states in place.
        gradients: packed gradients of one group, by name; moves the states' gradients in place.
    """
    for table in layout.tables:
        state = states.index_select(0, table.sequences)
        d_state = d_states.index_select(0, table.sequences)
        known = [recover(group, state) for group in table.groups]
        for group in reversed(table.groups):
            found = gradients(group, known.pop(), d_state)
            for name, out in outs.items():
                group.unpack(found[name], out)
        d_states.index_copy_(0, table.sequences, d_state)
