"""`chunk_dplr_delta_rule` in chunkwise PyTorch, with an explicit backward; right for any gate, no promise is needed.

With `u_t = S_{t-1}^T a_t`, what a reads of the state, `S_t = diag(exp gk_t) S_{t-1} + b_t u_t^T + k_t v_t^T`. Inside a
chunk, with `G_t` the sum of the gates up to row t, a number for each channel of the keys, and `S` the entry state, all
products over channels weighted by the decay between their rows:

    P_qk[t, s], P_qb[t, s] = <q_t, k_s>, <q_t, b_s> under exp(G_t - G_s)        (s <= t)
    P_ak[t, s], P_ab[t, s] = <a_t, k_s>, <a_t, b_s> under exp(G_{t-1} - G_s)    (s < t)
    u = (I - P_ab)^-1 (P_ak v + (exp(G_{t-1}) a) S)      o = scale ((exp(G) q) S + P_qk v + P_qb u)
    S' = diag(exp G_C) S + sum_t (exp(G_C - G_t) b_t) u_t^T + (exp(G_C - G_t) k_t) v_t^T

a reads the state before its own row, so it is moved up a row and then decays as q does: row t of `a_up` is `a_{t+1}`.
Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution", equation 17, and the WY form of Yang et al.,
"Parallelizing Linear Transformers with the Delta Rule over Sequence Length", section 3, for general a and b.
Everything is computed in fp32; all gates are natural-log decays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from chunkwise.eager.calls import layout_of, states_or_zeros, walk, walk_back
from chunkwise.eager.channel_decay import (
    ChannelDecays,
    channel_decays,
    pair_products,
    pair_products_backward,
    state_gates_gradient,
)
from chunkwise.eager.chunks import ChunkGroup, ChunkLayout
from chunkwise.eager.gated_delta_rule import Schedule
from chunkwise.eager.precision import exact_matmuls
from chunkwise.eager.state_scan import Transition, scan_states, scan_states_backward
from chunkwise.eager.triangular import unit_lower_inverse, with_columns


class _Chunk(NamedTuple):
    """Inputs of the chunks of a group, packed and widened to fp32, and what follows from them alone."""

    q: Tensor  # [chunks, H, C, K]
    k: Tensor  # [chunks, H, C, K]
    v: Tensor  # [chunks, H, C, V]
    a_up: Tensor  # [chunks, H, C, K] a one row up, zero in the last row
    b: Tensor  # [chunks, H, C, K]
    decays: ChannelDecays
    before: Tensor  # [chunks, H, C, K] exp(G_{t-1}), 1 in the first row
    a_in: Tensor  # [chunks, H, C, K] exp(G_{t-1}) a_t
    q_in: Tensor  # [chunks, H, C, K] exp(G_t) q_t
    k_out: Tensor  # [chunks, H, C, K] exp(G_C - G_t) k_t
    b_out: Tensor  # [chunks, H, C, K] exp(G_C - G_t) b_t
    pairs: Tensor  # [2, 2, chunks, H, C, C] of q and a_up with k and b

    @property
    def attention(self) -> tuple[Tensor, Tensor]:
        """P_qk and P_qb."""
        return self.pairs[0, 0], self.pairs[0, 1]

    def reads(self, of: int) -> Tensor:
        """P_ak (0) or P_ab (1)."""
        return _down(self.pairs[1, of])


class _Solved(NamedTuple):
    """What the scan of the states gives."""

    inverse: Tensor  # [chunks, H, C, C] (I - P_ab)^-1
    u: Tensor  # [chunks, H, C, V]
    states: Tensor  # [chunks, H, K, V], the entry state of every chunk


def _up(x: Tensor) -> Tensor:
    """Row t becomes row t - 1; zeros in the last row."""
    return torch.nn.functional.pad(x[..., 1:, :], (0, 0, 0, 1))


def _down(x: Tensor) -> Tensor:
    """Row t becomes row t + 1; zeros in the first row."""
    return torch.nn.functional.pad(x[..., :-1, :], (0, 0, 1, 0))


def _is_full(format_name: str | None) -> bool:
    """Whether a format keeps u and the states beside the gates' sums and the inverse."""
    return format_name is not None and format_name.startswith("dplr-states")


def forward(
    schedule: Schedule, inputs: Any, save: str | None
) -> tuple[tuple[Tensor, Tensor | None], dict[str, Tensor]]:
    """Compute `(o, final_state or None)` and the residuals of the format `save`, none when it is None."""
    with exact_matmuls(inputs.v.device):
        layout = layout_of(schedule.chunk_size, inputs)
        final = states_or_zeros(inputs, layout, inputs.initial_state)
        saved = _residual_tensors(schedule, inputs, layout, save)
        o = inputs.v.new_empty(inputs.v.shape) if layout.covers else inputs.v.new_zeros(inputs.v.shape)

        def compute(group: ChunkGroup, state: Tensor) -> dict[str, Tensor]:
            chunk = _pack(group, inputs)
            solved = _solve(group, chunk, unit_lower_inverse(-chunk.reads(1)), state)
            qk, qb = chunk.attention
            o = (chunk.q_in @ solved.states).add_(qk @ chunk.v).add_(qb @ solved.u).mul_(inputs.scale)
            inverse = with_columns(solved.inverse, schedule.chunk_size)
            return {**solved._asdict(), "o": o, "g_cumsum": chunk.decays.high, "inverse": inverse}

        walk(layout, final, {**saved, "o": o}, compute)
    return (o, final if inputs.output_final_state else None), saved


def _residual_tensors(schedule: Schedule, inputs: Any, layout: ChunkLayout, save: str | None) -> dict[str, Tensor]:
    """Zeros in the axes and dtypes of the format `save`."""
    if save is None:
        return {}
    v, gates = inputs.v, inputs.gk.shape
    saved = {
        "g_cumsum": v.new_zeros(gates, dtype=torch.float32),
        "inverse": v.new_zeros(*v.shape[:3], schedule.chunk_size),
    }
    if _is_full(save):
        saved["u"] = v.new_zeros(v.shape)
        saved["states"] = v.new_zeros(layout.slots, v.shape[2], gates[-1], v.shape[3], dtype=torch.float32)
    return saved


def _pack(group: ChunkGroup, inputs: Any) -> _Chunk:
    """Gather the rows of a group and compute what lies between the rows of a chunk."""
    q, k, v, a, b = (group.pack(x) for x in (inputs.q, inputs.k, inputs.v, inputs.a, inputs.b))
    decays = channel_decays(group.pack(inputs.gk))
    a_up = _up(a)
    before = _down(decays.from_start)
    before[..., 0, :] = 1.0  # the first row reads the entry state as it is
    return _Chunk(
        q=q,
        k=k,
        v=v,
        a_up=a_up,
        b=b,
        decays=decays,
        before=before,
        a_in=a * before,
        q_in=q * decays.from_start,
        k_out=k * decays.to_end,
        b_out=b * decays.to_end,
        pairs=pair_products(decays, [q, a_up], [k, b]),
    )


def _transition(chunk: _Chunk, inverse: Tensor) -> Transition:
    """How the chunks move the state."""
    return Transition(inverse, -chunk.a_in, chunk.b_out, chunk.decays.whole, chunk.k_out.mT @ chunk.v)


def _solve(group: ChunkGroup, chunk: _Chunk, inverse: Tensor, state: Tensor) -> _Solved:
    """From the inverse: the scan of the states, which moves `state` in place."""
    u, states = scan_states(group, _transition(chunk, inverse), chunk.reads(0) @ chunk.v, state)
    return _Solved(inverse, u, states)


def backward(
    schedule: Schedule, inputs: Any, residuals: Any, grads: tuple[Tensor | None, Tensor | None], needs: frozenset[str]
) -> dict[str, Tensor]:
    """Compute the gradients named in `needs` from `grads = (d_o, d_final_state)`; either may be None."""
    d_o, d_final = grads
    with exact_matmuls(inputs.v.device):
        layout = layout_of(schedule.chunk_size, inputs)
        states = states_or_zeros(inputs, layout, inputs.initial_state)
        d_states = states_or_zeros(inputs, layout, d_final)
        rows = {name: torch.zeros_like(getattr(inputs, name)) for name in needs - {"initial_state"}}

        def recover(group: ChunkGroup, state: Tensor) -> tuple[_Chunk, _Solved]:
            chunk = _pack(group, inputs)
            return chunk, _recover(group, chunk, residuals, state)

        def gradients(group: ChunkGroup, known: tuple[_Chunk, _Solved], d_state: Tensor) -> dict[str, Tensor]:
            chunk, solved = known
            d_packed = torch.zeros_like(chunk.v) if d_o is None else group.pack(d_o).mul_(inputs.scale)
            return _backward_group(group, chunk, solved, d_packed, d_state)

        walk_back(layout, states, d_states, rows, recover, gradients)
    return rows | ({"initial_state": d_states} if "initial_state" in needs else {})


def _recover(group: ChunkGroup, chunk: _Chunk, residuals: Any, state: Tensor) -> _Solved:
    """Read the residuals of a group; from a lean format, carry `state` through it once more."""
    # The sums of the gates are left alone: decays inside a chunk need more of their digits than fp32 has.
    tensors = residuals.tensors
    inverse = with_columns(group.pack(tensors["inverse"]), group.rows)
    if not _is_full(residuals.format):
        return _solve(group, chunk, inverse, state)
    return _Solved(inverse, group.pack(tensors["u"]), tensors["states"].index_select(0, group.slots))


def _backward_group(
    group: ChunkGroup, chunk: _Chunk, solved: _Solved, d_o: Tensor, d_state: Tensor
) -> dict[str, Tensor]:
    """Packed gradients of one group; `d_state`, of the states after it, becomes that of those before it."""
    qk, qb = chunk.attention
    transition = _transition(chunk, solved.inverse)
    d_rhs, d_exit = scan_states_backward(group, transition, qb.mT @ d_o, d_state, chunk.q_in, d_o)
    # u = (I - P_ab)^-1 rhs with rhs = P_ak v + a_in S, hence d P_ab = d_rhs u^T.
    d_pairs = torch.stack([_pair_gradients(d_o, chunk.v, solved.u), _up(_pair_gradients(d_rhs, chunk.v, solved.u))])
    (d_q, d_a_up), (d_k, d_b), d_g = pair_products_backward(
        chunk.decays, [chunk.q, chunk.a_up], [chunk.k, chunk.b], d_pairs
    )
    d_v = (qk.mT @ d_o).add_(chunk.reads(0).mT @ d_rhs).add_(chunk.k_out @ d_exit)
    found = _state_gradients(chunk, solved, d_o, d_rhs, d_exit)
    found["gk"] += d_g
    return {
        "q": found["q"].add_(d_q),
        "k": found["k"].add_(d_k),
        "v": d_v,
        "a": found["a"].add_(_down(d_a_up)),
        "b": found["b"].add_(d_b),
        "gk": found["gk"],
    }


def _pair_gradients(d: Tensor, v: Tensor, u: Tensor) -> Tensor:
    """`[2, chunks, H, C, C]` of the products with k, which weigh v, and with b, which weigh u."""
    return torch.stack([d @ v.mT, d @ u.mT])


def _state_gradients(chunk: _Chunk, solved: _Solved, d_o: Tensor, d_rhs: Tensor, d_exit: Tensor) -> dict[str, Tensor]:
    """What reaches q, k, a, b and the gates through the states at a chunk's start and end."""
    decays, entry = chunk.decays, solved.states.mT
    d_a_in = d_rhs @ entry
    d_q = (d_o @ entry).mul_(decays.from_start)
    d_k = (chunk.v @ d_exit.mT).mul_(decays.to_end)
    d_b = (solved.u @ d_exit.mT).mul_(decays.to_end)
    # The exponent of a_t is G_{t-1}: it belongs to the row above, and the first row has none.
    at_entry = (d_q * chunk.q).add_(_up(d_a_in * chunk.a_in))
    at_exit = (d_k * chunk.k).add_(d_b * chunk.b)
    d_g = state_gates_gradient(at_entry, at_exit, (solved.states * d_exit).sum(-1) * decays.whole)
    return {"q": d_q, "k": d_k, "a": d_a_in * chunk.before, "b": d_b, "gk": d_g}
