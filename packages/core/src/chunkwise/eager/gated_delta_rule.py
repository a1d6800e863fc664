"""`chunk_gated_delta_rule` in chunkwise PyTorch, with an explicit backward.

Inside a chunk, with `G_t` the sum of the gates up to row t, `D[t, s] = G_t - G_s`, and `S` the entry state:

    A[t, s] = beta_t exp(D[t, s]) k_t . k_s   (s < t)            P[t, s] = exp(D[t, s]) q_t . k_s   (s <= t)
    v_new = (I + A)^-1 (beta v - beta exp(G) k S)                o = scale (exp(G) q S + P v_new)
    S' = exp(G_C) S + sum_t exp(G_C - G_t) k_t v_new_t^T

This is the WY form of a product of Householder-like factors: Yang et al.,
"Parallelizing Linear Transformers with the Delta Rule over Sequence Length", section 3, with the gates of
"Gated Delta Networks". Everything is computed in fp32; all gates are natural-log decays.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from chunkwise.autograd.residuals import entry_slots
from chunkwise.eager.calls import layout_of, states_or_zeros, walk, walk_back
from chunkwise.eager.chunks import ChunkGroup, ChunkLayout
from chunkwise.eager.precision import exact_matmuls
from chunkwise.eager.state_scan import Transition, scan_states, scan_states_backward
from chunkwise.eager.triangular import (
    multiply_last,
    ones_lower,
    prefix_sums,
    segment_sums,
    segment_sums_backward,
    unit_lower_inverse,
    with_columns,
)

LEAN = "gdn-wy64@2"
"""Residuals `g_cumsum` `[B, T, HV]` fp32, `inverse` `[B, T, HV, 64]`, the rows of `(I + A)^-1`, and `entry_states`
`[B, entries, HV, K, V]` fp32, the states before every 32nd chunk, which this backward does not read."""
FULL = "gdn-states64@1"
"""Those of LEAN but for `entry_states`, and `w = (I + A)^-1 (beta exp(G) k)` `[B, T, HV, K]`, `v_new`
`[B, T, HV, V]`, and the entry state of every chunk, `states` `[slots, HV, K, V]`: no state has to be carried again."""

_EPS = 1e-6  # of the L2 norm
# exp is 0 in fp32 far above this; a gate of -inf (a reset) would give NaN in sums that multiply by zero.
LOWEST_GATE = -1e4


class Schedule(Protocol):
    """What is read of a launch configuration."""

    @property
    def chunk_size(self) -> int:
        """Tokens in a chunk."""
        ...


class Inputs(Protocol):
    """The canonical arguments of a call, in the axes of the op."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    scale: float
    initial_state: Tensor | None
    output_final_state: bool
    cu_seqlens: Tensor | None
    cu_seqlens_cpu: Tensor | None
    use_qk_l2norm_in_kernel: bool


class Residuals(Protocol):
    """What a forward left for the backward."""

    @property
    def format(self) -> str:
        """LEAN or FULL."""
        ...

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the format, by name."""
        ...


class _Chunk(NamedTuple):
    """Inputs of the chunks of a group, packed and widened to fp32, and what follows from them alone."""

    q: Tensor  # [chunks, H, C, K], normalised where asked
    k: Tensor  # [chunks, H, C, K], normalised where asked
    v: Tensor  # [chunks, HV, C, V]
    beta: Tensor  # [chunks, HV, C]
    q_norm: Tensor | None  # [chunks, H, C, 1] the factors that normalised q and k
    k_norm: Tensor | None
    decay: Tensor  # [chunks, HV, C, C] exp(D), zero above the diagonal
    g_cumsum: Tensor  # [chunks, HV, C] G
    from_start: Tensor  # [chunks, HV, C] exp(G_t)
    to_end: Tensor  # [chunks, HV, C] exp(G_C - G_t)
    whole: Tensor  # [chunks, HV] exp(G_C)
    keys: Tensor  # [chunks, H, C, C] k k^T
    scale: float


class _Saved(NamedTuple):
    """What the backward reads of the forward, packed and widened to fp32."""

    inverse: Tensor  # [chunks, HV, C, C]
    v_new: Tensor  # [chunks, HV, C, V]
    states: Tensor  # [chunks, HV, K, V], the entry state of every chunk


def forward(
    schedule: Schedule, inputs: Inputs, save: str | None
) -> tuple[tuple[Tensor, Tensor | None], dict[str, Tensor]]:
    """Compute `(o, final_state or None)` and the residuals of the format `save`, none when it is None."""
    with exact_matmuls(inputs.v.device):
        layout = layout_of(schedule.chunk_size, inputs)
        final = states_or_zeros(inputs, layout, inputs.initial_state)
        tensors = _residual_tensors(schedule, inputs, layout, save)
        o = inputs.v.new_empty(inputs.v.shape) if layout.covers else inputs.v.new_zeros(inputs.v.shape)

        def compute(group: ChunkGroup, state: Tensor) -> dict[str, Tensor]:
            found = _forward_group(group, inputs, state, save == FULL)
            return {**found, "inverse": with_columns(found["inverse"], schedule.chunk_size)}

        walk(layout, final, {**tensors, "o": o}, compute)
    return (o, final if inputs.output_final_state else None), tensors


def _residual_tensors(schedule: Schedule, inputs: Inputs, layout: ChunkLayout, save: str | None) -> dict[str, Tensor]:
    """Zeros in the axes and dtypes of the format `save`."""
    if save is None:
        return {}
    v = inputs.v
    rows, key_width = v.shape[:3], inputs.k.shape[-1]
    tensors = {
        "g_cumsum": v.new_zeros(rows, dtype=torch.float32),
        "inverse": v.new_zeros(*rows, schedule.chunk_size),
    }
    if save == FULL:
        tensors["w"] = v.new_zeros(*rows, key_width)
        tensors["v_new"] = v.new_zeros(v.shape)
        tensors["states"] = v.new_zeros(layout.slots, v.shape[2], key_width, v.shape[3])
    else:
        entries = entry_slots({"T": v.shape[1], "C": schedule.chunk_size}, inputs.cu_seqlens is not None)["entries"]
        shape = (v.shape[0], entries, v.shape[2], key_width, v.shape[3])
        tensors["entry_states"] = v.new_zeros(shape, dtype=torch.float32)
    return tensors


def _forward_group(group: ChunkGroup, inputs: Inputs, state: Tensor, full: bool) -> dict[str, Tensor]:
    """Everything of one group, packed; `state` holds the states before it and receives those after it."""
    chunk = _pack(group, inputs)
    inverse = unit_lower_inverse(_times_pairs(chunk.decay, chunk.keys).mul_(chunk.beta.unsqueeze(-1)))
    saved = _solve(group, chunk, inverse, state)
    q = chunk.q * chunk.scale
    attention = _multiply_pairs_(chunk.decay, q @ chunk.k.mT)  # the decay is not read again
    o = _scaled(q, chunk.from_start) @ saved.states
    o.flatten(0, 1).baddbmm_(attention.flatten(0, 1), saved.v_new.flatten(0, 1))
    found = {"o": o, "g_cumsum": chunk.g_cumsum, **saved._asdict()}
    if full:
        found["w"] = inverse @ _scaled(chunk.k, chunk.beta * chunk.from_start)
    return found


def _solve(group: ChunkGroup, chunk: _Chunk, inverse: Tensor, state: Tensor) -> _Saved:
    """From the inverse: the scan of the states, which moves `state` in place."""
    rhs = chunk.v * chunk.beta.unsqueeze(-1)
    v_new, states = scan_states(group, _transition(chunk, inverse), rhs, state)
    return _Saved(inverse, v_new, states)


def _transition(chunk: _Chunk, inverse: Tensor) -> Transition:
    """How the chunks move the state."""
    key_in = _scaled(chunk.k, chunk.beta * chunk.from_start)
    return Transition(inverse, key_in, _scaled(chunk.k, chunk.to_end), chunk.whole.unsqueeze(-1))


def backward(
    schedule: Schedule,
    inputs: Inputs,
    residuals: Residuals,
    grads: tuple[Tensor | None, Tensor | None],
    needs: frozenset[str],
) -> dict[str, Tensor]:
    """Compute the gradients named in `needs` from `grads = (d_o, d_final_state)`; either may be None."""
    d_o, d_final = grads
    with exact_matmuls(inputs.v.device):
        layout = layout_of(schedule.chunk_size, inputs)
        states = states_or_zeros(inputs, layout, inputs.initial_state)
        d_states = states_or_zeros(inputs, layout, d_final)
        rows = {name: getattr(inputs, name) for name in needs - {"initial_state"}}
        rows = {name: x.new_zeros(x.shape) for name, x in rows.items()}

        def recover(group: ChunkGroup, state: Tensor) -> tuple[_Chunk, _Saved]:
            chunk = _pack(group, inputs)
            return chunk, _recover(group, chunk, residuals, state)

        def gradients(group: ChunkGroup, known: tuple[_Chunk, _Saved], d_state: Tensor) -> dict[str, Tensor]:
            return _backward_group(group, *known, None if d_o is None else group.pack(d_o), d_state)

        walk_back(layout, states, d_states, rows, recover, gradients)
    return rows | ({"initial_state": d_states} if "initial_state" in needs else {})


def _backward_group(
    group: ChunkGroup, chunk: _Chunk, saved: _Saved, d_o: Tensor | None, d_state: Tensor
) -> dict[str, Tensor]:
    """Packed gradients of one group; `d_state`, of the states after it, becomes that of those before it."""
    d_o = torch.zeros_like(chunk.v) if d_o is None else d_o.mul_(chunk.scale)
    scores = chunk.q @ chunk.k.mT  # [chunks, H, C, C]
    d_v_new = _times_pairs(chunk.decay, scores).mT @ d_o
    query = _scaled(chunk.q, chunk.from_start)
    d_rhs, d_exit = scan_states_backward(group, _transition(chunk, saved.inverse), d_v_new, d_state, query, d_o)
    # v_new = (I + A)^-1 rhs with rhs = beta (v - exp(G) k S), hence d A = -d_rhs v_new^T.
    grads = _pair_gradients(chunk, scores, saved.v_new, d_o, d_rhs)
    _add_state_gradients(grads, chunk, saved, (d_o, d_rhs, d_exit))
    grads["v"] = d_rhs * chunk.beta.unsqueeze(-1)
    grads["beta"] += (d_rhs * chunk.v).sum(-1)
    if chunk.q_norm is not None and chunk.k_norm is not None:
        grads["q"] = _normalise_backward(chunk.q, chunk.q_norm, grads["q"])
        grads["k"] = _normalise_backward(chunk.k, chunk.k_norm, grads["k"])
    return grads


def _recover(group: ChunkGroup, chunk: _Chunk, residuals: Residuals, state: Tensor) -> _Saved:
    """Read the residuals of a group; from a lean format, carry `state` through it once more."""
    # Two tensors are left alone: decays inside a chunk need more digits of g_cumsum than fp32 has, and w, which
    # strong decay takes below the least fp16, is not needed.
    tensors = residuals.tensors
    inverse = with_columns(group.pack(tensors["inverse"]), group.rows)
    if residuals.format != FULL:
        return _solve(group, chunk, inverse, state)
    states = tensors["states"].index_select(0, group.slots).float()
    return _Saved(inverse, group.pack(tensors["v_new"]), states)


def _pair_gradients(chunk: _Chunk, scores: Tensor, v_new: Tensor, d_o: Tensor, d_rhs: Tensor) -> dict[str, Tensor]:
    """What reaches q, k, g and beta through pairs of rows of one chunk: through P and A."""
    heads = chunk.k.shape[1]
    d_scores = (d_o @ v_new.mT).mul_(chunk.decay)
    d_keys = (d_rhs @ v_new.mT).mul_(chunk.decay).tril_(-1)  # of k k^T, but for -beta_t
    weighted = _times_pairs(d_keys, chunk.keys)
    d_beta = weighted.sum(-1).neg_()

    d_keys.mul_(chunk.beta.unsqueeze(-1))
    weighted.mul_(chunk.beta.unsqueeze(-1))
    d_g = segment_sums_backward(_times_pairs(d_scores, scores).sub_(weighted))

    d_scores = _group_sum(d_scores, heads)
    d_keys = _group_sum(d_keys, heads)
    d_k = (d_scores.mT @ chunk.q).sub_((d_keys + d_keys.mT) @ chunk.k)
    return {"q": d_scores @ chunk.k, "k": d_k, "g": d_g, "beta": d_beta}


def _add_state_gradients(
    grads: dict[str, Tensor], chunk: _Chunk, saved: _Saved, upstream: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Add what reaches q, k, g and beta through the entry state and the exit state of the chunk."""
    d_o, d_rhs, d_exit = upstream
    heads, rows = chunk.k.shape[1:3]
    at_entry = chunk.from_start.unsqueeze(-1)
    by_query = (d_o @ saved.states.mT).mul_(at_entry)  # [chunks, HV, C, K]
    by_error = (d_rhs @ saved.states.mT).mul_(at_entry)
    by_exit = (saved.v_new @ d_exit.mT).mul_(chunk.to_end.unsqueeze(-1))

    query_sum = _dot(by_query, chunk.q)
    error_sum = _dot(by_error, chunk.k)
    exit_sum = _dot(by_exit, chunk.k)
    grads["beta"] -= error_sum
    # exp(G_t) is moved by every gate up to row t, exp(G_C - G_t) by every gate after it, exp(G_C) by all.
    grads["g"] += multiply_last(query_sum - chunk.beta * error_sum, ones_lower(rows, chunk.beta))
    grads["g"] += multiply_last(exit_sum, ones_lower(rows, chunk.beta, -1).mT)
    grads["g"] += ((saved.states * d_exit).sum((-2, -1)) * chunk.whole).unsqueeze(-1)

    grads["q"] += _group_sum(by_query, heads)
    grads["k"] += _group_sum(by_exit.sub_(by_error.mul_(chunk.beta.unsqueeze(-1))), heads)


def _pack(group: ChunkGroup, inputs: Inputs) -> _Chunk:
    """Gather the rows of a group and compute the decays inside its chunks."""
    q, k = group.pack(inputs.q), group.pack(inputs.k)
    q_norm = k_norm = None
    if inputs.use_qk_l2norm_in_kernel:
        q_norm, k_norm = _norm_factor(q), _norm_factor(k)
        q, k = q * q_norm, k * k_norm
    high, low = prefix_sums(group.pack(inputs.g).clamp_(min=LOWEST_GATE))
    sums = segment_sums(high, low)
    # The exponential of a large sum needs the digits that rounding it to fp32 took away.
    from_start = high.exp().mul_(low.exp())
    return _Chunk(
        q=q,
        k=k,
        v=group.pack(inputs.v),
        beta=group.pack(inputs.beta),
        q_norm=q_norm,
        k_norm=k_norm,
        g_cumsum=high,
        from_start=from_start,
        to_end=sums[..., -1, :].exp(),
        whole=from_start[..., -1],
        decay=sums.exp_().tril_(),  # inf above the diagonal is overwritten, not multiplied
        keys=k @ k.mT,
        scale=inputs.scale,
    )


def _norm_factor(x: Tensor) -> Tensor:
    """`rsqrt(sum(x^2) + eps)` over the last axis, kept as an axis of one."""
    return torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPS)


def _normalise_backward(y: Tensor, factor: Tensor, grad: Tensor) -> Tensor:
    """Gradient of x for `y = x * factor(x)`."""
    return (grad - y * (y * grad).sum(-1, keepdim=True)).mul_(factor)


def _times_pairs(weights: Tensor, pairs: Tensor) -> Tensor:
    """`[chunks, HV, C, C] * [chunks, H, C, C]`, value head h with key head `h // (HV // H)`."""
    if weights.shape[1] == pairs.shape[1]:
        return weights * pairs
    grouped: Tensor = weights.unflatten(1, (pairs.shape[1], -1)) * pairs.unsqueeze(2)
    return grouped.flatten(1, 2)


def _multiply_pairs_(weights: Tensor, pairs: Tensor) -> Tensor:
    """The same in the memory of `weights`."""
    weights.unflatten(1, (pairs.shape[1], -1)).mul_(pairs.unsqueeze(2))
    return weights


def _scaled(x: Tensor, factor: Tensor) -> Tensor:
    """Rows of `[chunks, H, C, K]` times `[chunks, HV, C]` -> `[chunks, HV, C, K]`."""
    return _times_pairs(factor.unsqueeze(-1), x)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Row sums of `[chunks, HV, C, K] * [chunks, H, C, K]` -> `[chunks, HV, C]`."""
    return _times_pairs(x, y).sum(-1)


def _group_sum(x: Tensor, heads: int) -> Tensor:
    """Sum the value heads that share a key head: `[chunks, HV, ...]` -> `[chunks, H, ...]`."""
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(2)
