"""Recurrences evaluated one token at a time, in the dtype of their inputs.

In fp64 these are the oracle that every implementation is measured against. They use out-of-place operations
only, so autograd differentiates them; they are slow by design.

An op is one step function `(state, token) -> (state, o_t)`; `scan` runs it over dense or ragged sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

Step = Callable[..., tuple[Tensor, Tensor]]
"""`step(state, *token) -> (state, o_t)`: state `[n, HV, K, V]`, token tensors `[n, ...]`, o_t `[n, HV, V]`."""

Offsets = Tensor | Sequence[int]


def sequence_bounds(batch: int, length: int, cu_seqlens: Offsets | None) -> tuple[list[int], list[int]]:
    """First row in the flattened `[B * T]` rows, and number of tokens, of each sequence."""
    if cu_seqlens is None:
        return [b * length for b in range(batch)], [length] * batch
    if batch != 1:
        raise ValueError(f"cu_seqlens packs the sequences of one row: expected B = 1, got B = {batch}")
    offsets = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
    lengths = [end - start for start, end in pairwise(offsets)]
    if offsets[0] != 0 or offsets[-1] > length or min(lengths, default=0) < 0:
        raise ValueError(f"cu_seqlens must start at 0, never decrease and end at or before T = {length}")
    return offsets[:-1], lengths


def scan(
    step: Step, tokens: Sequence[Tensor], like: Tensor, state: Tensor, cu_seqlens: Offsets | None = None
) -> tuple[Tensor, Tensor]:
    """Run `step` over every token of every sequence, all unfinished sequences at once.

    Args:
        step: the recurrence of one token.
        tokens: what a step reads, each `[B, T, ...]`.
        like: `[B, T, HV, V]`, the shape of the output.
        state: the state each sequence starts from, `[N, ...]`.
        cu_seqlens: offsets `[N + 1]` of ragged sequences, or None for one sequence in each row.

    Returns:
        The outputs `[B, T, HV, V]`, zero in rows of no sequence, which are never read; the last states `[N, ...]`.
    """
    batch, length = like.shape[:2]
    starts, lengths = sequence_bounds(batch, length, cu_seqlens)
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])  # unfinished sequences stay a prefix
    active, rows = _schedule([starts[n] for n in order], [lengths[n] for n in order])

    index = torch.tensor(rows, dtype=torch.long, device=like.device)
    steps = [x.flatten(0, 1).index_select(0, index).split(active) for x in tokens]
    state = state.index_select(0, torch.tensor(order, dtype=torch.long, device=state.device))
    finished: list[Tensor] = []
    outputs = [like.flatten(0, 1)[:0]]  # keeps the graph and the dtype when there is no token at all
    for count, *token in zip(active, *steps, strict=True):
        if count < state.shape[0]:
            finished.append(state[count:])
            state = state[:count]
        state, o = step(state, *token)
        outputs.append(o)

    finished.append(state)
    back = sorted(range(len(order)), key=order.__getitem__)
    places = torch.tensor(back, dtype=torch.long, device=state.device)
    final = torch.cat(finished[::-1]).index_select(0, places)
    blank = like.new_zeros(batch * length, *like.shape[2:])
    return blank.index_copy(0, index, torch.cat(outputs)).view_as(like), final


def _schedule(starts: list[int], lengths: list[int]) -> tuple[list[int], list[int]]:
    """For lengths that fall: how many sequences have a t-th token, and the rows of those tokens, t by t."""
    active: list[int] = []
    rows: list[int] = []
    count = len(lengths)
    for t in range(lengths[0] if lengths else 0):
        while lengths[count - 1] <= t:
            count -= 1
        active.append(count)
        rows.extend(start + t for start in starts[:count])
    return active, rows


def widest(*given: Tensor | None) -> torch.dtype:
    """The dtype that all tensors given promote to."""
    dtypes = [x.dtype for x in given if x is not None]
    return functools.reduce(torch.promote_types, dtypes)


def _first_state(initial_state: Tensor | None, k: Tensor, v: Tensor, cu_seqlens: Offsets | None) -> Tensor:
    """Where each sequence starts, `[N, HV, K, V]` in v's dtype: as given, or zero."""
    if initial_state is not None:
        return initial_state.to(v.dtype)
    sequences = len(sequence_bounds(v.shape[0], v.shape[1], cu_seqlens)[0])
    return v.new_zeros(sequences, v.shape[2], k.shape[-1], v.shape[-1])


def k_first(state: Tensor | None, state_v_first: bool) -> Tensor | None:
    """A given state as `[N, HV, K, V]`."""
    return state.transpose(-1, -2) if state is not None and state_v_first else state


def results(o: Tensor, state: Tensor, output_final_state: bool, state_v_first: bool) -> tuple[Tensor, Tensor | None]:
    """What an op returns of `(o, state)`: the state only where it is asked for, in the layout of the call."""
    if not output_final_state:
        return o, None
    return o, state.transpose(-1, -2) if state_v_first else state


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """`x * rsqrt(sum(x^2) + eps)` over the last axis."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def gated_delta_rule_step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """`S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q`: q, k `[n, HV, K]`, g, beta `[n, HV]`."""
    state = state * g.exp()[..., None, None]
    error = v - _read(state, k)
    state = state + k.unsqueeze(-1) * (beta.unsqueeze(-1) * error).unsqueeze(-2)
    return state, _read(state, q)


def _read(state: Tensor, key: Tensor) -> Tensor:
    """`S^T key`: state `[n, HV, K, V]`, key `[n, HV, K]` -> `[n, HV, V]`."""
    return (key.unsqueeze(-2) @ state).squeeze(-2)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None = None,
    cu_seqlens: Offsets | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule, `S <- exp(g_t) S`, `S <- S + k_t (beta_t (v_t - S^T k_t))^T`, `o_t = scale * S^T q_t`.

    Shapes: q, k `[B, T, H, K]`, v `[B, T, HV, V]`, g (natural log) and beta `[B, T, HV]`, states
    `[N, HV, K, V]`; value head h reads query head `h // (HV // H)`. Computed in the widest dtype given.

    Returns:
        `(o, final_state)`, o shaped like v.

    Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", equation 10.
    """
    dtype = widest(q, k, v, g, beta, initial_state)
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)

    heads = v.shape[2]
    q, k = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
    state = _first_state(initial_state, k, v, cu_seqlens)
    return scan(gated_delta_rule_step, (q * scale, k, v, g, beta), v, state, cu_seqlens)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None = None,
    cu_seqlens: Offsets | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """The delta rule, `S <- S + k_t (beta_t (v_t - S^T k_t))^T`, `o_t = scale * S^T q_t`: no gate.

    Shapes: q, k `[B, T, H, K]`, v `[B, T, H, V]`, beta `[B, T, H]`, states `[N, H, K, V]`.

    Returns:
        `(o, final_state)`, o shaped like v.

    Source: Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", equation 5.
    """
    return gated_delta_rule(
        q,
        k,
        v,
        torch.zeros_like(beta),
        beta,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )


def simple_gla_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """`S <- exp(g) S + k v^T;  o = S^T q`: q, k `[n, H, K]`, v `[n, H, V]`, g `[n, H]`."""
    state = state * g.exp()[..., None, None] + k.unsqueeze(-1) * v.unsqueeze(-2)
    return state, _read(state, q)


def simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    scale: float,
    initial_state: Tensor | None = None,
    cu_seqlens: Offsets | None = None,
) -> tuple[Tensor, Tensor]:
    """Linear attention with one gate a head, `S <- exp(g_t) S + k_t v_t^T`, `o_t = scale * S^T q_t`.

    Shapes: q, k `[B, T, H, K]`, v `[B, T, H, V]`, g (natural log; None: no decay) `[B, T, H]`, states `[N, H, K, V]`.
    Computed in the widest dtype given.

    Returns:
        `(o, final_state)`, o shaped like v.

    Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training", section 4.
    """
    dtype = widest(q, k, v, g, initial_state)
    gates = q.new_zeros(q.shape[:3]) if g is None else g
    q, k, v, gates = (x.to(dtype) for x in (q, k, v, gates))
    state = _first_state(initial_state, k, v, cu_seqlens)
    return scan(simple_gla_step, (q * scale, k, v, gates), v, state, cu_seqlens)


def gla_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """`S <- diag(exp g) S + k v^T;  o = S^T q`: q, k, g `[n, H, K]`, v `[n, H, V]`."""
    state = state * g.exp().unsqueeze(-1) + k.unsqueeze(-1) * v.unsqueeze(-2)
    return state, _read(state, q)


def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None = None,
    cu_seqlens: Offsets | None = None,
) -> tuple[Tensor, Tensor]:
    """Gated linear attention, `S <- diag(exp g_t) S + k_t v_t^T`, `o_t = scale * S^T q_t`.

    Shapes: q, k, g (natural log) `[B, T, H, K]`, v `[B, T, H, V]`, states `[N, H, K, V]`. Computed in the widest dtype
    given.

    Returns:
        `(o, final_state)`, o shaped like v.

    Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training", section 4.
    """
    dtype = widest(q, k, v, g, initial_state)
    q, k, v, g = (x.to(dtype) for x in (q, k, v, g))
    state = _first_state(initial_state, k, v, cu_seqlens)
    return scan(gla_step, (q * scale, k, v, g), v, state, cu_seqlens)


def dplr_delta_rule_step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gk: Tensor
) -> tuple[Tensor, Tensor]:
    """`S <- diag(exp gk) S + b (a^T S) + k v^T;  o = S^T q`, both terms of the old S: q, k, a, b, gk `[n, H, K]`."""
    read = b.unsqueeze(-1) * _read(state, a).unsqueeze(-2)
    state = state * gk.exp().unsqueeze(-1) + read + k.unsqueeze(-1) * v.unsqueeze(-2)
    return state, _read(state, q)


def dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None = None,
    cu_seqlens: Offsets | None = None,
) -> tuple[Tensor, Tensor]:
    """The delta rule of a diagonal and a low-rank part, `S <- diag(exp gk_t) S + b_t (a_t^T S) + k_t v_t^T`.

    `o_t = scale * S^T q_t`. Shapes: q, k, a, b, gk (natural log) `[B, T, H, K]`, v `[B, T, H, V]`, states
    `[N, H, K, V]`. Computed in the widest dtype given.

    Returns:
        `(o, final_state)`, o shaped like v.

    Source: Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution", equation 17, for general a and b.
    """
    dtype = widest(q, k, v, a, b, gk, initial_state)
    q, k, v, a, b, gk = (x.to(dtype) for x in (q, k, v, a, b, gk))
    state = _first_state(initial_state, k, v, cu_seqlens)
    return scan(dplr_delta_rule_step, (q * scale, k, v, a, b, gk), v, state, cu_seqlens)
