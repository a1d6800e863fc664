"""The delta rule (Yang, Wang, Zhang, Shen, Kim: Parallelizing Linear Transformers with the Delta Rule over Sequence
Length, NeurIPS 2024, equation 5)."""

from collections.abc import Mapping

from jaxtyping import Float, Int
from torch import Tensor

from chunkwise.autograd.residuals import ResidualField, ResidualFormat, chunk_slots, entry_slots, entry_states
from chunkwise.protocol.cases import Budget, Case, Cost, drawn, recurrent_cases, sizes_of
from chunkwise.protocol.declaration import Offsets, Output
from chunkwise.protocol.op import op
from chunkwise.reference import recurrence

SOLVED_FIELDS = (
    ResidualField("inverse", "B T H C", "v", "(I + A)^-1, A[t, s] = beta_t k_t.k_s for s < t within the chunk"),
)
LEAN_FIELDS = (*SOLVED_FIELDS, entry_states("H K V"))
FULL_FIELDS = (
    *SOLVED_FIELDS,
    ResidualField("w", "B T H K", "v", "inverse @ (beta k)"),
    ResidualField("v_new", "B T H V", "v", "inverse @ (beta v) - w S, S the state at the chunk's start"),
    ResidualField("states", "slots H K V", "v", "the state at each chunk's start"),
)

WY64 = ResidualFormat("delta-wy64@2", "lean", 64, LEAN_FIELDS, sizes=entry_slots)
STATES64 = ResidualFormat("delta-states64@1", "full", 64, FULL_FIELDS, sizes=chunk_slots)


def _cost(sizes: Mapping[str, int], activation_bytes: int) -> Cost:
    """Chunk 64: K K^T and Q K^T, the products with the inverse, with the state, and the two of the output."""
    rows, c = sizes["B"] * sizes["T"], 64
    h, k, v = (sizes[axis] for axis in ("H", "K", "V"))
    flops = 2.0 * rows * h * (2 * c * k + c * (k + 2 * v) + 3 * k * v)
    return Cost(flops=flops, bytes=float(rows * h * ((2 * k + 2 * v) * activation_bytes + 4)))


# Keys of unit length, as the recurrence wants them; steps that differ from head to head.
DRAW = {"q": "unit", "k": "unit", "beta": "step"}

CASES = (
    *recurrent_cases(),
    Case(
        "l2norm",
        sizes_of(2, 70, 3, (20, 36)),
        options={"use_qk_l2norm_in_kernel": True},
        draw={"q": "normal", "k": "normal"},
    ),
    Case("parallel-keys", sizes_of(1, 128, 5, (24, 24)), draw={"k": "parallel", "beta": "near-one"}),
)

BENCHMARKS = (
    Case("h64-d128-4x4096", sizes_of(4, 4096, 64, (128, 128))),
    Case("h32-d256-8x2048", sizes_of(8, 2048, 32, (256, 256))),
)


@op(
    outputs=(
        Output("o", "B T H V", dtype="v"),
        Output("final_state", "N H K V", "fp32", when="output_final_state"),
    ),
    differentiable=("q", "k", "v", "beta", "initial_state"),
    formats=(WY64, STATES64),
    static_axes=("H", "K", "V"),
    cost=_cost,
    states=("initial_state", "final_state"),
    offsets=(Offsets("cu_seqlens", host="cu_seqlens_cpu"),),
    cases=drawn(CASES, DRAW),
    benchmarks=drawn(BENCHMARKS, DRAW),
    budget=Budget(half=4.0, full=8.0),
)
def chunk_delta_rule(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    beta: Float[Tensor, "B T H"],
    scale: float | None = None,
    initial_state: Float[Tensor, "N H K V"] | None = None,
    output_final_state: bool = False,
    *,
    state_v_first: bool = False,
    cu_seqlens: Int[Tensor, "N+1"] | None = None,
    cu_seqlens_cpu: Int[Tensor, "N+1"] | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    backend: str | None = None,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "N H K V"] | None]:
    """Linear attention whose state is corrected by the delta rule, and never forgets by itself.

    For each sequence and head, with ``S`` of shape ``[K, V]`` (zero, or ``initial_state``)::

        S <- S + k_t (beta_t (v_t - S^T k_t))^T
        o_t = scale * S^T q_t

    The keys should be of unit length (or pass ``use_qk_l2norm_in_kernel``): the recurrence is unstable where
    ``beta * |k|^2 > 2``. It is ``chunk_gated_delta_rule`` with g = 0 and HV = H.

    Args:
        q, k: queries and keys ``[B, T, H, K]``; bf16, fp16 or fp32.
        v: values ``[B, T, H, V]``; its dtype is the output's.
        beta: step sizes ``[B, T, H]``, usually in (0, 1).
        scale: of the output; ``K ** -0.5`` by default.
        initial_state: ``[N, H, K, V]``, any float dtype, widened to fp32; N = B dense, the number of sequences
            ragged.
        output_final_state: also return the state behind the last token of each sequence.
        state_v_first: states are ``[N, H, V, K]``. Where K = V a wrong layout cannot be detected.
        cu_seqlens: int32 or int64 offsets ``[N+1]`` of sequences packed into one row (B = 1): they start at 0 and
            never decrease. Rows past the last offset are padding: their outputs and gradients are zero.
        cu_seqlens_cpu: a host copy of ``cu_seqlens``; it lets the offsets be checked without a sync.
        use_qk_l2norm_in_kernel: replace q and k by ``x * rsqrt(sum(x^2) + 1e-6)``; gradients are with respect to
            the raw q and k.
        backend: the backend (``torch``) or implementation that must run the call.

    Returns:
        ``(o, final_state)``: o ``[B, T, H, V]`` in v's dtype; final_state fp32, fresh memory, or None.

    Raises:
        ValueError: shapes that disagree, bad offsets, B > 1 with ``cu_seqlens``, an unknown backend.
        TypeError: a wrong dtype, an unknown keyword, an argument that is no tensor.
        NoImplementationError: nothing installed (or the forced backend) can run the call; every reason is given.
    """
    o, state = recurrence.delta_rule(
        q,
        k,
        v,
        beta,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        initial_state=recurrence.k_first(initial_state, state_v_first),
        cu_seqlens=cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )
    return recurrence.results(o, state, output_final_state, state_v_first)
