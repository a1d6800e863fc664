"""The scan of states over chunks, forward and backward, for recurrences with one decay a head or a
channel of the keys.

For one chunk with entry state `S` `[K, V]`, all rows at once:

    v_new = inverse (rhs - key_in S)            S' = decay S + key_out^T v_new

for delta rules, whose S' may have one more term that is known before, and for states that only forget and add:
`S' = decay S + key_out^T v`.

All functions walk the steps of a group of chunks; each step is a few batched products over the sequences
that still have a chunk, and all heads. States are carried in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from chunkwise.eager.chunks import ChunkGroup


class Transition(NamedTuple):
    """How chunks move the state."""

    inverse: Tensor  # [chunks, HV, C, C]
    key_in: Tensor  # [chunks, HV, C, K]
    key_out: Tensor  # [chunks, HV, C, K]
    decay: Tensor  # [chunks, HV, 1 or K], the factor of the state over a chunk
    added: Tensor | None = None  # [chunks, HV, K, V], what the state gains beside key_out^T v_new


def scan_states(group: ChunkGroup, transition: Transition, rhs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Carry the states through the chunks of a group.

    Args:
        group: the chunks.
        transition: their factors.
        rhs: `[chunks, HV, C, V]`; overwritten.
        state: `[n, HV, K, V]` of the table's sequences before the group; becomes that after it.

    Returns:
        `(v_new, states)`: `[chunks, HV, C, V]`, and the entry state of every chunk `[chunks, HV, K, V]`.
    """
    v_new = torch.empty_like(rhs)
    states = state.new_empty(group.chunks, *state.shape[1:])
    carried = state.flatten(0, 1)
    inverse, key_in, key_out, decay, added = transition
    given = () if added is None else (added,)
    pieces = _steps(group, rhs, v_new, states, inverse, key_in, key_out.mT, decay.unsqueeze(-1), *given)
    for r, x, entry, a, k_in, k_out, factor, *more in pieces:
        current = carried[: entry.shape[0]]
        entry.copy_(current)
        torch.bmm(a, r.baddbmm_(k_in, current, alpha=-1.0), out=x)
        current.mul_(factor).baddbmm_(k_out, x)
        for term in more:
            current.add_(term)
    return v_new, states


def scan_states_backward(
    group: ChunkGroup, transition: Transition, d_v_new: Tensor, d_state: Tensor, query: Tensor, d_o: Tensor
) -> tuple[Tensor, Tensor]:
    """Carry the gradients of the states back through the chunks of a group.

    Args:
        group: the chunks.
        transition: their factors, as in the forward.
        d_v_new: `[chunks, HV, C, V]`, what the outputs of a chunk give to its own v_new; overwritten.
        d_state: `[n, HV, K, V]` of the states after the group; becomes that of the states before it.
        query: `[chunks, HV, C, K]`, the factor of S in the outputs.
        d_o: `[chunks, HV, C, V]`.

    Returns:
        `(d_rhs, d_exit)`: `[chunks, HV, C, V]`, and of every chunk's exit state `[chunks, HV, K, V]`.
    """
    d_rhs = torch.empty_like(d_v_new)
    d_exit = d_state.new_empty(group.chunks, *d_state.shape[1:])
    carried = d_state.flatten(0, 1)
    inverse, key_in, key_out, decay, _ = transition
    pieces = _steps(group, d_v_new, d_rhs, d_exit, inverse.mT, key_in.mT, key_out, decay.unsqueeze(-1), query.mT, d_o)
    for x, r, leaving, a, k_in, k_out, factor, q, d in reversed(list(pieces)):
        current = carried[: leaving.shape[0]]
        leaving.copy_(current)
        torch.bmm(a, x.baddbmm_(k_out, current), out=r)
        current.mul_(factor).baddbmm_(q, d).baddbmm_(k_in, r, alpha=-1.0)
    return d_rhs, d_exit


def accumulate_states(group: ChunkGroup, key_out: Tensor, decay: Tensor, v: Tensor, state: Tensor) -> Tensor:
    """Carry states that forget and add, `S' = decay S + key_out^T v`, through the chunks of a group.

    Args:
        group: the chunks.
        key_out: `[chunks, H, C, K]`.
        decay: `[chunks, H, 1 or K]`.
        v: `[chunks, H, C, V]`.
        state: `[n, H, K, V]` of the table's sequences before the group; becomes that after it.

    Returns:
        The entry state of every chunk, `[chunks, H, K, V]`.
    """
    states = state.new_empty(group.chunks, *state.shape[1:])
    carried = state.flatten(0, 1)
    for entry, k_out, factor, x in _steps(group, states, key_out.mT, decay.unsqueeze(-1), v):
        current = carried[: entry.shape[0]]
        entry.copy_(current)
        current.mul_(factor).baddbmm_(k_out, x)
    return states


def accumulate_states_backward(group: ChunkGroup, query: Tensor, decay: Tensor, d_o: Tensor, d_state: Tensor) -> Tensor:
    """Carry the gradients of such states back.

    Args:
        group: the chunks.
        query: `[chunks, H, C, K]`, the factor of S in the outputs.
        decay: `[chunks, H, 1 or K]`.
        d_o: `[chunks, H, C, V]`.
        d_state: `[n, H, K, V]` of the states after the group; becomes that of the states before it.

    Returns:
        The gradient of every chunk's exit state, `[chunks, H, K, V]`.
    """
    d_exit = d_state.new_empty(group.chunks, *d_state.shape[1:])
    carried = d_state.flatten(0, 1)
    for leaving, q, factor, d in reversed(list(_steps(group, d_exit, query.mT, decay.unsqueeze(-1), d_o))):
        current = carried[: leaving.shape[0]]
        leaving.copy_(current)
        current.mul_(factor).baddbmm_(q, d)
    return d_exit


def _steps(group: ChunkGroup, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views `[sequences * HV, ...]` of tensors `[chunks, HV, ...]`, step by step."""
    heads = tensors[0].shape[1]
    sizes = [count * heads for count in group.active]
    return zip(*(x.flatten(0, 1).split(sizes) for x in tensors), strict=True)
