"""Linear attention with one gate a head (Yang, Wang, Shen, Panda, Kim: Gated Linear Attention Transformers with
Hardware-Efficient Training, ICML 2024, section 4; retention where the gate is a constant)."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from chunkwise import errors
from chunkwise.autograd.residuals import ResidualField, ResidualFormat, chunk_slots
from chunkwise.protocol.cases import Budget, Case, Cost, drawn, recurrent_cases, sizes_of
from chunkwise.protocol.contracts import at_most
from chunkwise.protocol.declaration import Offsets, Output, Prologue
from chunkwise.protocol.op import op
from chunkwise.reference import recurrence

LEAN_FIELDS = (
    ResidualField("g_cumsum", "B T H", "fp32", "natural-log gates summed from the chunk's first row to this one"),
)
# fp32: the gradient of a gate is a product of two whole states, which may cancel to less than bf16 keeps of either.
FULL_FIELDS = (*LEAN_FIELDS, ResidualField("states", "slots H K V", "fp32", "the state at each chunk's start"))

GATES64 = ResidualFormat("simple-gla64@1", "lean", 64, LEAN_FIELDS, sizes=lambda sizes, ragged: {})
STATES64 = ResidualFormat("simple-gla-states64@1", "full", 64, FULL_FIELDS, sizes=chunk_slots)


def _constant_gate(tensors: Mapping[str, Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The gate of every token from ``g_gamma`` ``[H]``; fp32, differentiable."""
    name, gamma, q = "chunk_simple_gla", options["g_gamma"], tensors["q"]
    if tensors["g"] is not None:
        raise errors.exclude_each_other(name, "g", "g_gamma")
    if gamma.dim() != 1:
        raise errors.wrong_rank(name, "g_gamma", gamma.shape, "H")
    if q.dim() == 4 and gamma.shape[0] != q.shape[2]:
        raise errors.axis_disagrees(name, "g_gamma", "H", gamma.shape[0], "q", q.shape[2])
    return {"g": gamma.float().expand(*q.shape[:2], gamma.shape[0])}


def _cost(sizes: Mapping[str, int], activation_bytes: int) -> Cost:
    """Chunk 64: Q K^T, the product with V, and the two with the state."""
    rows, c = sizes["B"] * sizes["T"], 64
    h, k, v = (sizes[axis] for axis in ("H", "K", "V"))
    flops = 2.0 * rows * h * (c * (k + v) + 2 * k * v)
    return Cost(flops=flops, bytes=float(rows * h * ((2 * k + 2 * v) * activation_bytes + 4)))


# Unit length is no need of this recurrence; it keeps sums over many tokens within what fp16 holds.
DRAW = {"q": "unit", "k": "unit", "g": "gate"}
BOTH = ("g", "initial_state")

CASES = (
    *recurrent_cases("g"),
    Case("no-gate", sizes_of(1, 100, 3, (16, 24)), present=("initial_state",), options={"output_final_state": True}),
    Case("strong-decay", sizes_of(1, 100, 3, (16, 24)), draw={"g": "strong"}, present=BOTH),
    Case("no-decay", sizes_of(1, 100, 3, (16, 24)), draw={"g": "zero"}, present=("g",)),
)

BENCHMARKS = (
    Case("h64-d128-4x4096", sizes_of(4, 4096, 64, (128, 128)), present=("g",)),
    Case("h32-d256-8x2048", sizes_of(8, 2048, 32, (256, 256)), present=("g",)),
)


@op(
    outputs=(
        Output("o", "B T H V", dtype="v"),
        Output("final_state", "N H K V", "fp32", when="output_final_state"),
    ),
    differentiable=("q", "k", "v", "g", "initial_state"),
    formats=(GATES64, STATES64),
    static_axes=("H", "K", "V"),
    cost=_cost,
    contracts=(at_most("g", 0.0),),
    states=("initial_state", "final_state"),
    offsets=(Offsets("cu_seqlens", host="cu_seqlens_cpu"),),
    prologue=Prologue(("g_gamma",), _constant_gate),
    cases=drawn(CASES, DRAW),
    benchmarks=drawn(BENCHMARKS, DRAW),
    budget=Budget(half=4.0, full=8.0),
)
def chunk_simple_gla(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H"] | None = None,
    g_gamma: Float[Tensor, "H"] | None = None,
    scale: float | None = None,
    initial_state: Float[Tensor, "N H K V"] | None = None,
    output_final_state: bool = False,
    *,
    state_v_first: bool = False,
    cu_seqlens: Int[Tensor, "N+1"] | None = None,
    cu_seqlens_cpu: Int[Tensor, "N+1"] | None = None,
    backend: str | None = None,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "N H K V"] | None]:
    """Linear attention whose state forgets by one gate a head.

    For each sequence and head, with ``S`` of shape ``[K, V]`` (zero, or ``initial_state``)::

        S <- exp(g_t) S + k_t v_t^T
        o_t = scale * S^T q_t

    Args:
        q, k: queries and keys ``[B, T, H, K]``; bf16, fp16 or fp32.
        v: values ``[B, T, H, V]``; its dtype is the output's.
        g: gates ``[B, T, H]``, natural-log decays, ``<= 0``; summed in fp32. None: nothing is forgotten.
        g_gamma: ``[H]``, one gate for all tokens of a head (retention), in place of ``g``.
        scale: of the output; ``K ** -0.5`` by default.
        initial_state: ``[N, H, K, V]``, any float dtype, widened to fp32; N = B dense, the number of sequences
            ragged.
        output_final_state: also return the state behind the last token of each sequence.
        state_v_first: states are ``[N, H, V, K]``. Where K = V a wrong layout cannot be detected.
        cu_seqlens: int32 or int64 offsets ``[N+1]`` of sequences packed into one row (B = 1): they start at 0 and
            never decrease. Rows past the last offset are padding: their outputs and gradients are zero.
        cu_seqlens_cpu: a host copy of ``cu_seqlens``; it lets the offsets be checked without a sync.
        backend: the backend (``torch``) or implementation that must run the call.

    Returns:
        ``(o, final_state)``: o ``[B, T, H, V]`` in v's dtype; final_state fp32, fresh memory, or None.

    Raises:
        ValueError: shapes that disagree, both ``g`` and ``g_gamma``, bad offsets, B > 1 with ``cu_seqlens``, an
            unknown backend.
        TypeError: a wrong dtype, an unknown keyword, an argument that is no tensor.
        NoImplementationError: nothing installed (or the forced backend) can run the call; every reason is given.
    """
    if g_gamma is not None:
        g = _constant_gate({"q": q, "g": g}, {"g_gamma": g_gamma})["g"]
    o, state = recurrence.simple_gla(
        q,
        k,
        v,
        g,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        initial_state=recurrence.k_first(initial_state, state_v_first),
        cu_seqlens=cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu,
    )
    return recurrence.results(o, state, output_final_state, state_v_first)
