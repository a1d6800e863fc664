"""Softmax attention with a learned sink a head (Xiao et al.: Efficient Streaming Language Models with Attention Sinks,
ICLR 2024; the logit without a token as in gpt-oss)."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from chunkwise import errors
from chunkwise.autograd.residuals import ResidualField, ResidualFormat
from chunkwise.protocol.axes import Divides
from chunkwise.protocol.cases import Budget, Case, Cost
from chunkwise.protocol.contracts import finite_or_minus_infinity
from chunkwise.protocol.declaration import Offsets, Output
from chunkwise.protocol.op import op
from chunkwise.reference import attention

LSE = ResidualFormat(
    "attention-lse@1",
    "lean",
    None,
    (ResidualField("lse", "B HQ T", "fp32", "natural log of exp(sink) and every exp(scale q.k) that the query sees"),),
    sizes=lambda sizes, ragged: {},
    outputs=("o",),
)


def _settle(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Nothing is left open; a window must have a key in it, and an end."""
    window = options["window_size"]
    if window is not None and window < 1:
        raise errors.window_too_small("sink_attention", window)
    if window is not None and not options["causal"]:
        raise errors.window_needs_causal("sink_attention", window)
    return {}


def _cost(sizes: Mapping[str, Any], activation_bytes: int) -> Cost:
    """Q K^T and the product with V, over the pairs of a query and a key that it sees."""
    b, t, s, d = (sizes[axis] for axis in ("B", "T", "S", "D"))
    most = sizes.get("window_size") or s
    last = range(s - t + 1, s + 1) if sizes.get("causal", True) else [s] * t  # keys up to each query's position
    flops = 4.0 * b * sizes["HQ"] * d * sum(min(most, max(0, keys)) for keys in last)
    return Cost(flops=flops, bytes=float(b * d * (2 * t * sizes["HQ"] + 2 * s * sizes["HK"]) * activation_bytes))


def _sizes(b: int, rows: tuple[int, int], heads: tuple[int, int], width: int) -> dict[str, int]:
    return {"B": b, "T": rows[0], "S": rows[1], "HQ": heads[0], "HK": heads[1], "D": width}


LSE_TOO = {"return_lse": True}

CASES = (
    Case("dense", _sizes(2, (130, 130), (6, 3), 24), options=LSE_TOO),
    Case("one-token", _sizes(2, (1, 1), (3, 3), 16)),
    Case("decoding", _sizes(2, (1, 150), (6, 3), 24), options=LSE_TOO),
    Case("more-keys", _sizes(1, (70, 150), (3, 3), 40), options=LSE_TOO),
    Case("more-queries", _sizes(1, (150, 70), (6, 3), 16), options=LSE_TOO),
    Case("not-causal", _sizes(2, (67, 130), (6, 3), 24), options={**LSE_TOO, "causal": False}),
    Case("window", _sizes(1, (200, 200), (6, 3), 24), options={**LSE_TOO, "window_size": 37}),
    Case("window-of-one", _sizes(1, (70, 90), (3, 3), 16), options={**LSE_TOO, "window_size": 1}),
    Case("odd-rows", _sizes(1, (250, 250), (3, 1), 20), options={"window_size": 100}),
    Case(
        "ragged",
        _sizes(1, (192, 230), (6, 3), 24),
        offsets=(0, 0, 63, 64, 65, 65, 192),
        more_offsets={"cu_seqlens_k": (0, 7, 70, 71, 71, 80, 230)},
        options=LSE_TOO,
    ),
    Case(
        "padded-window",
        _sizes(1, (300, 480), (16, 2), 16),
        offsets=(0, 140, 140, 260),
        more_offsets={"cu_seqlens_k": (0, 300, 310, 400)},
        options={**LSE_TOO, "window_size": 128},
    ),
    Case(
        "ragged-not-causal",
        _sizes(1, (100, 90), (3, 3), 24),
        offsets=(0, 30, 30, 100),
        more_offsets={"cu_seqlens_k": (0, 0, 20, 90)},
        options={**LSE_TOO, "causal": False},
    ),
)

BENCHMARKS = (
    Case("h64-hk8-d64-w128-1x8192", _sizes(1, (8192, 8192), (64, 8), 64), options={"window_size": 128}),
    Case("h64-hk8-d64-1x8192", _sizes(1, (8192, 8192), (64, 8), 64)),
    Case("h64-hk8-d128-1x4096", _sizes(1, (4096, 4096), (64, 8), 128)),
    Case("h32-hk8-d128-4x4096", _sizes(4, (4096, 4096), (32, 8), 128)),
)


@op(
    outputs=(Output("o", "B T HQ D", dtype="q"), Output("lse", "B HQ T", "fp32", when="return_lse")),
    differentiable=("q", "k", "v", "sinks"),
    formats=(LSE,),
    static_axes=("HQ", "HK", "D"),
    cost=_cost,
    constraints=(Divides("HQ", "HK"),),
    contracts=(finite_or_minus_infinity("sinks"),),
    widened=("sinks",),
    offsets=(
        Offsets("cu_seqlens_q", host="cu_seqlens_q_cpu"),
        Offsets("cu_seqlens_k", host="cu_seqlens_k_cpu", rows="S"),
    ),
    scale_axis="D",
    settle=_settle,
    bare=True,
    cases=CASES,
    benchmarks=BENCHMARKS,
    budget=Budget(half=4.0, full=8.0),
)
def sink_attention(
    q: Float[Tensor, "B T HQ D"],
    k: Float[Tensor, "B S HK D"],
    v: Float[Tensor, "B S HK D"],
    sinks: Float[Tensor, "HQ"],
    scale: float | None = None,
    *,
    window_size: int | None = None,
    causal: bool = True,
    cu_seqlens_q: Int[Tensor, "N+1"] | None = None,
    cu_seqlens_k: Int[Tensor, "N+1"] | None = None,
    cu_seqlens_q_cpu: Int[Tensor, "N+1"] | None = None,
    cu_seqlens_k_cpu: Int[Tensor, "N+1"] | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Float[Tensor, "B T HQ D"] | tuple[Float[Tensor, "B T HQ D"], Float[Tensor, "B HQ T"]]:
    """Softmax attention whose denominator has one more term, ``exp(sinks[h])``, that carries no value.

    For each sequence and query head, with ``s_ij = scale * q_i . k_j`` over the keys j that query i sees::

        lse_i = log(exp(sinks[h]) + sum_j exp(s_ij))
        o_i = sum_j exp(s_ij - lse_i) v_j

    Query head ``h`` reads key and value head ``h // (HQ // HK)``. With ``p = i + S - T`` (the ends of both sequences
    are aligned), query i sees the keys ``j <= p``, of those with a window ``j > p - window_size`` only; where causal is
    False it sees all. A query that sees no key has o = 0 and lse = sinks[h]. Keys and values that no query sees are
    not read.

    Args:
        q: queries ``[B, T, HQ, D]``; bf16, fp16 or fp32; its dtype is the output's.
        k, v: keys and values ``[B, S, HK, D]``, HQ a multiple of HK.
        sinks: logits ``[HQ]`` (natural log, not scaled) of any float dtype, widened to fp32; -inf: no sink.
        scale: of the scores; ``D ** -0.5`` by default.
        window_size: how many keys a query sees at most, its own position included; needs ``causal``. What other
            libraries call a window (left, 0) is ``left + 1`` here.
        causal: no query sees a later key.
        cu_seqlens_q, cu_seqlens_k: int32 or int64 offsets ``[N+1]`` of the query and key rows of sequences packed into
            one row (B = 1), both or none: they start at 0 and never decrease. Rows past the last offset are padding:
            their outputs and gradients are zero.
        cu_seqlens_q_cpu, cu_seqlens_k_cpu: host copies; they let the offsets be checked without a sync.
        return_lse: return lse as well.
        backend: the backend (``torch``) or implementation that must run the call.

    Returns:
        o ``[B, T, HQ, D]`` in q's dtype; with ``return_lse`` ``(o, lse)``, lse ``[B, HQ, T]`` fp32, natural log, the
        sink included, differentiable.

    Raises:
        ValueError: shapes that disagree, HQ not a multiple of HK, a window below 1 or without ``causal``, bad offsets,
            those of one side only, B > 1 with offsets, an unknown backend.
        TypeError: a wrong dtype, an unknown keyword, an argument that is no tensor, a window that is a pair.
        NoImplementationError: nothing installed (or the forced backend) can run the call; every reason is given.
    """
    _settle({"window_size": window_size, "causal": causal})
    o, lse = attention.sink_attention(
        q,
        k,
        v,
        sinks,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        window_size=window_size,
        causal=causal,
        cu_seqlens_q=cu_seqlens_q if cu_seqlens_q_cpu is None else cu_seqlens_q_cpu,
        cu_seqlens_k=cu_seqlens_k if cu_seqlens_k_cpu is None else cu_seqlens_k_cpu,
    )
    return (o, lse) if return_lse else o
