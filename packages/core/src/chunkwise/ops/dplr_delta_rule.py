"""The delta rule of a diagonal and a low-rank part, DPLR (Peng et al.: RWKV-7 Goose with Expressive Dynamic State
Evolution, 2025, equation 17, for general a and b)."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from chunkwise import errors
from chunkwise.autograd.residuals import ResidualField, ResidualFormat, chunk_slots
from chunkwise.protocol.cases import Budget, Case, Cost, drawn, recurrent_cases, sizes_of
from chunkwise.protocol.contracts import at_most
from chunkwise.protocol.declaration import Offsets, Output
from chunkwise.protocol.op import op
from chunkwise.reference import recurrence
from chunkwise.verifier.rules import EXPONENT_LIMIT_LOG2, centred_exponent_log2

CHUNK_SIZES = (16, 32, 64)
SAFE_GATE_BOUND = -5.0
"""What ``safe_gate`` promises as a lower bound."""

LEAN_FIELDS = (
    ResidualField("g_cumsum", "B T H K", "fp32", "natural-log gates summed from the chunk's first row to this one, G"),
    ResidualField(
        "inverse",
        "B T H C",
        "v",
        "(I - P)^-1, P[t, s] = sum over channels of a_t exp(G_{t-1} - G_s) b_s for s < t within the chunk",
    ),
)
# fp32: the gradient of a gate is a product of two whole states, which may cancel to less than bf16 keeps of either.
FULL_FIELDS = (
    *LEAN_FIELDS,
    ResidualField("u", "B T H V", "v", "S_{t-1}^T a_t, what a reads of the state before its row"),
    ResidualField("states", "slots H K V", "fp32", "the state at each chunk's start"),
)


def _formats(chunk_size: int) -> tuple[ResidualFormat, ResidualFormat]:
    """Lean and full of one chunk size."""
    lean = ResidualFormat(f"dplr-wy{chunk_size}@1", "lean", chunk_size, LEAN_FIELDS, sizes=lambda sizes, ragged: {})
    return lean, ResidualFormat(f"dplr-states{chunk_size}@1", "full", chunk_size, FULL_FIELDS, sizes=chunk_slots)


def _settle(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The one bound that the caller promises, and the chunk size."""
    chunk_size, bound = options["chunk_size"], options["lower_bound"]
    if chunk_size not in (None, *CHUNK_SIZES):
        raise errors.not_one_of("chunk_dplr_delta_rule", "chunk_size", chunk_size, CHUNK_SIZES)
    if bound is not None and bound >= 0:
        raise errors.bound_not_negative("chunk_dplr_delta_rule", "lower_bound", bound)
    if options["safe_gate"]:
        bound = SAFE_GATE_BOUND if bound is None else max(bound, SAFE_GATE_BOUND)
    if chunk_size is None:
        fitting = [c for c in CHUNK_SIZES if bound and centred_exponent_log2(c, bound) <= EXPONENT_LIMIT_LOG2]
        chunk_size = max(fitting, default=CHUNK_SIZES[0])
    return {"chunk_size": chunk_size, "lower_bound": bound}


def _cost(sizes: Mapping[str, int], activation_bytes: int) -> Cost:
    """Chunk 16: q and a with k and b, three products of pairs and that of the inverse, and four with the state."""
    rows, c = sizes["B"] * sizes["T"], 16
    h, k, v = (sizes[axis] for axis in ("H", "K", "V"))
    flops = 2.0 * rows * h * (4 * c * (k + v) + 4 * k * v)
    return Cost(flops=flops, bytes=float(rows * h * ((4 * k + 2 * v) * activation_bytes + 4 * k)))


# What a erases is a share of what b writes back, as in RWKV-7: keys of unit length, steps that differ by head.
DRAW = {"q": "unit", "k": "unit", "a": "erase", "b": "write", "gk": "gate"}

CASES = (
    *recurrent_cases(),
    Case("strong-decay", sizes_of(1, 100, 3, (16, 24)), draw={"gk": "strong"}, present=("initial_state",)),
    Case("mixed-decay", sizes_of(1, 100, 3, (16, 24)), draw={"gk": "mixed"}, present=("initial_state",)),
    Case("no-decay", sizes_of(1, 100, 3, (16, 24)), draw={"gk": "zero"}),
    Case("unlike-keys", sizes_of(1, 70, 3, (24, 16)), draw={"a": "unit", "b": "unit"}, present=("initial_state",)),
    Case(
        "parallel-keys",
        sizes_of(1, 128, 5, (24, 24)),
        draw={"k": "parallel", "a": "erase-parallel", "b": "write-parallel"},
    ),
    Case("safe-gate", sizes_of(1, 100, 3, (16, 24)), options={"safe_gate": True}, present=("initial_state",)),
)

BENCHMARKS = (
    Case("h32-d64-c32-8x4096", sizes_of(8, 4096, 32, (64, 64)), options={"safe_gate": True, "chunk_size": 32}),
    Case("h32-d128-c32-4x4096", sizes_of(4, 4096, 32, (128, 128)), options={"safe_gate": True, "chunk_size": 32}),
)


@op(
    outputs=(
        Output("o", "B T H V", dtype="v"),
        Output("final_state", "N H K V", "fp32", when="output_final_state"),
    ),
    differentiable=("q", "k", "v", "a", "b", "gk", "initial_state"),
    formats=tuple(f for chunk_size in CHUNK_SIZES for f in _formats(chunk_size)),
    static_axes=("H", "K", "V"),
    cost=_cost,
    contracts=(at_most("gk", 0.0, lower_option="lower_bound"),),
    states=("initial_state", "final_state"),
    offsets=(Offsets("cu_seqlens", host="cu_seqlens_cpu"),),
    settle=_settle,
    cases=drawn(CASES, DRAW),
    benchmarks=drawn(BENCHMARKS, DRAW),
    budget=Budget(half=4.0, full=8.0),
)
def chunk_dplr_delta_rule(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    a: Float[Tensor, "B T H K"],
    b: Float[Tensor, "B T H K"],
    gk: Float[Tensor, "B T H K"],
    scale: float | None = None,
    initial_state: Float[Tensor, "N H K V"] | None = None,
    output_final_state: bool = False,
    *,
    state_v_first: bool = False,
    cu_seqlens: Int[Tensor, "N+1"] | None = None,
    cu_seqlens_cpu: Int[Tensor, "N+1"] | None = None,
    chunk_size: int | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    backend: str | None = None,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "N H K V"] | None]:
    """Linear attention whose state moves by a diagonal matrix and one of rank one.

    For each sequence and head, with ``S`` of shape ``[K, V]`` (zero, or ``initial_state``)::

        S <- diag(exp(gk_t)) S + b_t (a_t^T S) + k_t v_t^T      (both terms read the old S)
        o_t = scale * S^T q_t

    The recurrence is stable where a and b are opposite (``a = -x``, ``b = beta x`` with x of unit length and beta up to
    1 or 2); for others it is the caller's matter. ``chunk_rwkv7`` is this op under RWKV-7's names.

    A promise on the gates, ``safe_gate`` or ``lower_bound``, lets a backend centre exponents in the chunk and run on
    tensor cores, where ``(chunk_size / 2 + 1) |bound| log2(e) <= 124`` (108 for fp32 activations). Without one, or
    where it does not fit, what runs is right for any gate ``<= 0``; ``chunkwise.explain`` says which, and why. A gate
    beyond a promised bound gives wrong results, which ``CHUNKWISE_CHECK=values`` finds.

    Args:
        q, k: queries and keys ``[B, T, H, K]``; bf16, fp16 or fp32.
        v: values ``[B, T, H, V]``; its dtype is the output's.
        a, b: what is read of the state before a token, and where that is written, ``[B, T, H, K]``.
        gk: gates ``[B, T, H, K]``, natural-log decays, ``<= 0``; summed in fp32, so fp32 gates beside bf16 or fp16
            activations keep their digits.
        scale: of the output; ``K ** -0.5`` by default.
        initial_state: ``[N, H, K, V]``, any float dtype, widened to fp32; N = B dense, the number of sequences
            ragged.
        output_final_state: also return the state behind the last token of each sequence.
        state_v_first: states are ``[N, H, V, K]``. Where K = V a wrong layout cannot be detected.
        cu_seqlens: int32 or int64 offsets ``[N+1]`` of sequences packed into one row (B = 1): they start at 0 and
            never decrease. Rows past the last offset are padding: their outputs and gradients are zero.
        cu_seqlens_cpu: a host copy of ``cu_seqlens``; it lets the offsets be checked without a sync.
        chunk_size: tokens in a chunk: 16, 32 or 64. None: the largest one that the promise fits; 16 without a promise.
        safe_gate: promises that ``-5 <= gk <= 0``, which fits chunks of 16 and 32.
        lower_bound: promises that ``lower_bound <= gk <= 0``, in natural-log units, up to one ulp of gk's dtype. Of two
            promises the narrower holds.
        disable_recompute: keep the states for the backward, which then recomputes none: more memory, less time.
        backend: the backend (``torch``) or implementation that must run the call.

    Returns:
        ``(o, final_state)``: o ``[B, T, H, V]`` in v's dtype; final_state fp32, fresh memory, or None.

    Raises:
        ValueError: shapes that disagree, another chunk size, a bound that is not below 0, bad offsets, B > 1 with
            ``cu_seqlens``, an unknown backend.
        TypeError: a wrong dtype, an unknown keyword, an argument that is no tensor.
        NoImplementationError: nothing installed (or the forced backend) can run the call; every reason is given.
    """
    o, state = recurrence.dplr_delta_rule(
        q,
        k,
        v,
        a,
        b,
        gk,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        initial_state=recurrence.k_first(initial_state, state_v_first),
        cu_seqlens=cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu,
    )
    return recurrence.results(o, state, output_final_state, state_v_first)
