"""RWKV-7's recurrence under its own names (Peng et al.: RWKV-7 Goose with Expressive Dynamic State Evolution, 2025,
equation 17): a plain function over ``chunk_dplr_delta_rule``."""

from __future__ import annotations

import math

from torch import Tensor

from chunkwise.ops.dplr_delta_rule import chunk_dplr_delta_rule

DECAY_BOUND = -math.exp(-0.5)
"""RWKV-7's decay is ``exp(-exp(-0.5) sigmoid(x))``: its log lies between this and 0."""


def chunk_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    *,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_size: int | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = DECAY_BOUND,
    disable_recompute: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """RWKV-7's mixer: ``chunk_dplr_delta_rule(r, k, v, a, b, w)``.

    For each sequence and head, with ``S`` of shape ``[K, V]`` (zero, or ``initial_state``)::

        S <- diag(exp(w_t)) S + b_t (a_t^T S) + k_t v_t^T      (both terms read the old S)
        o_t = scale * S^T r_t

    Args:
        r: receptances, the queries, ``[B, T, H, K]``; bf16, fp16 or fp32.
        w: natural-log decays ``[B, T, H, K]``, ``<= 0``: RWKV-7's ``-exp(-0.5) * sigmoid(x)``.
        k, v: keys ``[B, T, H, K]`` and values ``[B, T, H, V]``.
        a, b: ``[B, T, H, K]``; in RWKV-7 ``a = -kappa`` and ``b = kappa * eta``, with kappa of unit length and eta the
            in-context learning rate.
        scale: of the output; 1 by default, unlike the op's.
        initial_state, output_final_state, state_v_first, cu_seqlens, cu_seqlens_cpu, chunk_size, safe_gate,
            disable_recompute, backend: as in :func:`chunk_dplr_delta_rule`.
        lower_bound: promises that ``lower_bound <= w <= 0``. By default RWKV-7's own bound ``-exp(-0.5)``, at which
            chunks of 64 fit tensor cores; decays of another form need their own bound, and None promises nothing.

    Returns:
        ``(o, final_state)``: o ``[B, T, H, V]`` in v's dtype; final_state fp32, fresh memory, or None.

    Raises:
        ValueError, TypeError, NoImplementationError: as :func:`chunk_dplr_delta_rule`, under its argument names.
    """
    o, final_state = chunk_dplr_delta_rule(
        r,
        k,
        v,
        a,
        b,
        w,
        scale,
        initial_state,
        output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        chunk_size=chunk_size,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        disable_recompute=disable_recompute,
        backend=backend,
    )
    return o, final_state
