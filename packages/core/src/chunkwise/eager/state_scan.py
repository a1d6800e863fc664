"""The scan of states over chunks, forward and backward, for rules of delta form with a scalar decay.

For one chunk with entry state `S` `[K, V]`, all rows at once:

    v_new = u - w S            S' = decay S + key^T v_new

Both functions walk the steps of a group of chunks; each step is a few batched products over the sequences that
still have a chunk, and all heads.
"""

from __future__ import annotations

from torch import Tensor

from chunkwise.eager.chunks import ChunkGroup


def scan_states(
    group: ChunkGroup, u: Tensor, w: Tensor, key: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Carry the states through the chunks of a group.

    Args:
        u: `[chunks, HV, C, V]`; becomes `v_new`.
        w, key: `[chunks, HV, C, K]`.
        decay: `[chunks, HV]`, the factor of the state over the chunk.
        state: `[n, HV, K, V]` of the table's sequences; becomes the states after the group.

    Returns:
        `(v_new, states)`: u, and the entry state of every chunk `[chunks, HV, K, V]`.
    """
    states = state.new_empty(group.chunks, *state.shape[1:])
    decay = decay[..., None, None]
    for part, count in group.steps():
        current = state[:count]
        states[part] = current
        _flat(u[part]).baddbmm_(_flat(w[part]), _flat(current), alpha=-1.0)
        _flat(current.mul_(decay[part])).baddbmm_(_flat(key[part]).mT, _flat(u[part]))
    return u, states


def scan_states_backward(
    group: ChunkGroup,
    d_v_new: Tensor,
    d_state: Tensor,
    *,
    w: Tensor,
    key: Tensor,
    decay: Tensor,
    query: Tensor,
    d_o: Tensor,
) -> tuple[Tensor, Tensor]:
    """Carry the gradients of the states back through the chunks of a group.

    Args:
        d_v_new: `[chunks, HV, C, V]`, what the chunk's own outputs contribute; becomes the whole gradient.
        d_state: `[n, HV, K, V]` of the states after the group; becomes that of the states before it.
        w, key, decay: as in `scan_states`.
        query: `[chunks, HV, C, K]` with `o = query S + ...`.
        d_o: `[chunks, HV, C, V]`.

    Returns:
        `(d_v_new, d_exit)`, the latter `[chunks, HV, K, V]`: the gradient of every chunk's exit state.
    """
    d_exit = d_state.new_empty(group.chunks, *d_state.shape[1:])
    decay = decay[..., None, None]
    for part, count in reversed(list(group.steps())):
        current = d_state[:count]
        d_exit[part] = current
        _flat(d_v_new[part]).baddbmm_(_flat(key[part]), _flat(current))
        current.mul_(decay[part])
        _flat(current).baddbmm_(_flat(query[part]).mT, _flat(d_o[part]))
        _flat(current).baddbmm_(_flat(w[part]).mT, _flat(d_v_new[part]), alpha=-1.0)
    return d_v_new, d_exit


def _flat(x: Tensor) -> Tensor:
    """`[a, b, c, d]` -> view `[a * b, c, d]`."""
    return x.view(-1, *x.shape[2:])
