"""The gated delta rule (Yang, Kautz, Hatamizadeh: Gated Delta Networks, ICLR 2025, equation 10)."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from chunkwise import errors
from chunkwise.autograd.residuals import ResidualField, ResidualFormat, chunk_slots, entry_slots, entry_states
from chunkwise.protocol.axes import Divides
from chunkwise.protocol.cases import Budget, Case, Cost, drawn
from chunkwise.protocol.contracts import at_most
from chunkwise.protocol.declaration import Offsets, Output, Prologue
from chunkwise.protocol.op import op
from chunkwise.reference import recurrence

SOLVED_FIELDS = (
    ResidualField("g_cumsum", "B T HV", "fp32", "natural-log gates summed from the chunk's first row to this one"),
    ResidualField(
        "inverse",
        "B T HV C",
        "v",
        "(I + A)^-1, A[t, s] = beta_t exp(G_t - G_s) k_t.k_s for s < t within the chunk",
    ),
)
LEAN_FIELDS = (*SOLVED_FIELDS, entry_states("HV K V"))
FULL_FIELDS = (
    *SOLVED_FIELDS,
    ResidualField("w", "B T HV K", "v", "inverse @ (beta exp(G) k)"),
    ResidualField("v_new", "B T HV V", "v", "inverse @ (beta v) - w S, S the state at the chunk's start"),
    ResidualField("states", "slots HV K V", "v", "the state at each chunk's start"),
)

WY64 = ResidualFormat("gdn-wy64@2", "lean", 64, LEAN_FIELDS, sizes=entry_slots)
STATES64 = ResidualFormat("gdn-states64@1", "full", 64, FULL_FIELDS, sizes=chunk_slots)


def _apply_model_options(tensors: Mapping[str, Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The gate from ``A_log`` and ``dt_bias``, beta from its logits; fp32, differentiable."""
    name = "chunk_gated_delta_rule"
    replaced: dict[str, Any] = {}
    raw_g, raw_beta = (_without_padding(tensors[name], tensors["cu_seqlens"]) for name in ("g", "beta"))
    a_log, dt_bias = options["A_log"], options["dt_bias"]
    if options["use_gate_in_kernel"]:
        if a_log is None:
            raise errors.requires(name, "use_gate_in_kernel=True", "A_log")
        raw = raw_g.float()
        if dt_bias is not None:
            raw = raw + _per_head("dt_bias", dt_bias, tensors["g"]).float()
        replaced["g"] = -_per_head("A_log", a_log, tensors["g"]).float().exp() * functional.softplus(raw)
    elif a_log is not None or dt_bias is not None:
        raise errors.requires(name, "A_log" if a_log is not None else "dt_bias", "use_gate_in_kernel=True")
    if options["use_beta_sigmoid_in_kernel"]:
        beta = raw_beta.float().sigmoid()
        replaced["beta"] = 2.0 * beta if options["allow_neg_eigval"] else beta
    elif options["allow_neg_eigval"]:
        raise errors.requires(name, "allow_neg_eigval=True", "use_beta_sigmoid_in_kernel=True")
    return replaced


def _without_padding(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Rows past the last offset as zeros: they may hold NaN, which would reach A_log and dt_bias as 0 * NaN."""
    if cu_seqlens is None:
        return x
    live = torch.arange(x.shape[1], device=x.device) < cu_seqlens[-1]
    return torch.where(live[None, :, None], x, 0.0)


def _per_head(argument: str, given: Tensor, g: Tensor) -> Tensor:
    if given.dim() != 1:
        raise errors.wrong_rank("chunk_gated_delta_rule", argument, given.shape, "HV")
    if given.shape[0] != g.shape[-1]:
        raise errors.axis_disagrees("chunk_gated_delta_rule", argument, "HV", given.shape[0], "g", g.shape[-1])
    return given


def _cost(sizes: Mapping[str, int], activation_bytes: int) -> Cost:
    """Chunk 64: K K^T and Q K^T, the products with the inverse, with the state, and the two of the output."""
    rows, c = sizes["B"] * sizes["T"], 64
    h, hv, k, v = (sizes[axis] for axis in ("H", "HV", "K", "V"))
    flops = 2.0 * rows * (2 * h * c * k + hv * (c * (k + 2 * v) + 3 * k * v))
    activations = rows * (2 * h * k + 2 * hv * v) * activation_bytes
    return Cost(flops=flops, bytes=float(activations + rows * hv * 8))


def _sizes(b: int, t: int, heads: tuple[int, int], widths: tuple[int, int]) -> dict[str, int]:
    return {"B": b, "T": t, "H": heads[0], "HV": heads[1], "K": widths[0], "V": widths[1]}


# Keys of unit length, as the recurrence wants them; gates and steps that differ from head to head.
DRAW = {"q": "unit", "k": "unit", "g": "gate", "beta": "step"}

CASES = (
    Case("dense", _sizes(2, 130, (3, 6), (24, 40))),
    Case("one-token", _sizes(2, 1, (3, 3), (16, 24))),
    Case("short", _sizes(1, 37, (3, 6), (24, 16)), present=("initial_state",)),
    Case(
        "tail",
        _sizes(1, 200, (3, 3), (16, 24)),
        present=("initial_state",),
        options={"output_final_state": True},
    ),
    Case(
        "ragged",
        _sizes(1, 192, (3, 6), (16, 24)),
        offsets=(0, 0, 63, 64, 65, 65, 192),
        present=("initial_state",),
        options={"output_final_state": True},
    ),
    Case(
        "padded",
        _sizes(1, 192, (3, 6), (24, 16)),
        offsets=(0, 100, 160),
        options={"output_final_state": True, "state_v_first": True},
        present=("initial_state",),
    ),
    Case(
        "l2norm",
        _sizes(2, 70, (3, 6), (20, 36)),
        options={"use_qk_l2norm_in_kernel": True},
        draw={"q": "normal", "k": "normal"},
    ),
    Case("strong-decay", _sizes(1, 100, (3, 6), (16, 24)), draw={"g": "strong"}, present=("initial_state",)),
    Case("no-decay", _sizes(1, 100, (3, 3), (16, 24)), draw={"g": "zero"}),
    Case("parallel-keys", _sizes(1, 128, (5, 5), (24, 24)), draw={"k": "parallel", "beta": "near-one"}),
)


def _benchmark(heads: tuple[int, int], batch: int, tokens: int) -> Case:
    name = f"h{heads[0]}-hv{heads[1]}-{batch}x{tokens}"
    return Case(name, _sizes(batch, tokens, heads, (128, 128)))


BENCHMARKS = tuple(
    _benchmark(heads, batch, tokens)
    for heads in ((16, 32), (16, 64), (2, 8))
    for batch, tokens in ((1, 2048), (1, 8192), (1, 32768), (8, 1024), (8, 4096), (4, 8192))
) + tuple(  # of the first heads, divided over two and eight devices
    _benchmark(heads, batch, tokens)
    for heads in ((8, 16), (2, 4))
    for batch, tokens in ((1, 8192), (1, 32768), (8, 4096))
)


@op(
    outputs=(
        Output("o", "B T HV V", dtype="v"),
        Output("final_state", "N HV K V", "fp32", when="output_final_state"),
    ),
    differentiable=("q", "k", "v", "g", "beta", "initial_state"),
    formats=(WY64, STATES64),
    static_axes=("H", "HV", "K", "V"),
    cost=_cost,
    constraints=(Divides("HV", "H"),),
    contracts=(at_most("g", 0.0),),
    states=("initial_state", "final_state"),
    offsets=(Offsets("cu_seqlens", host="cu_seqlens_cpu"),),
    prologue=Prologue(
        ("use_gate_in_kernel", "A_log", "dt_bias", "use_beta_sigmoid_in_kernel", "allow_neg_eigval"),
        _apply_model_options,
    ),
    cases=drawn(CASES, DRAW),
    benchmarks=drawn(BENCHMARKS, DRAW),
    budget=Budget(half=4.0, full=8.0),
)
def chunk_gated_delta_rule(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    g: Float[Tensor, "B T HV"],
    beta: Float[Tensor, "B T HV"],
    scale: float | None = None,
    initial_state: Float[Tensor, "N HV K V"] | None = None,
    output_final_state: bool = False,
    *,
    state_v_first: bool = False,
    cu_seqlens: Int[Tensor, "N+1"] | None = None,
    cu_seqlens_cpu: Int[Tensor, "N+1"] | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Float[Tensor, "HV"] | None = None,
    dt_bias: Float[Tensor, "HV"] | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    backend: str | None = None,
) -> tuple[Float[Tensor, "B T HV V"], Float[Tensor, "N HV K V"] | None]:
    """Linear attention whose state forgets by a gate and is corrected by the delta rule.

    For each sequence and value head, with ``S`` of shape ``[K, V]`` (zero, or ``initial_state``)::

        S <- exp(g_t) S
        S <- S + k_t (beta_t (v_t - S^T k_t))^T
        o_t = scale * S^T q_t

    Value head ``h`` uses query and key head ``h // (HV // H)``. The keys should be of unit length (or pass
    ``use_qk_l2norm_in_kernel``): the recurrence is unstable where ``beta * |k|^2 > 2``.

    Args:
        q, k: queries and keys ``[B, T, H, K]``; bf16, fp16 or fp32.
        v: values ``[B, T, HV, V]``, HV a multiple of H; its dtype is the output's.
        g: gates ``[B, T, HV]``, natural-log decays, ``<= 0``; summed in fp32.
        beta: step sizes ``[B, T, HV]``, usually in (0, 1).
        scale: of the output; ``K ** -0.5`` by default.
        initial_state: ``[N, HV, K, V]``, any float dtype, widened to fp32; N = B dense, the number of sequences
            ragged.
        output_final_state: also return the state behind the last token of each sequence.
        state_v_first: states are ``[N, HV, V, K]``. Where K = V a wrong layout cannot be detected.
        cu_seqlens: int32 or int64 offsets ``[N+1]`` of sequences packed into one row (B = 1): they start at 0 and
            never decrease. Rows past the last offset are padding: their outputs and gradients are zero.
        cu_seqlens_cpu: a host copy of ``cu_seqlens``; it lets the offsets be checked without a sync.
        use_qk_l2norm_in_kernel: replace q and k by ``x * rsqrt(sum(x^2) + 1e-6)``; gradients are with respect to
            the raw q and k.
        use_gate_in_kernel: g holds raw values, the gate is ``-exp(A_log) * softplus(g + dt_bias)``.
        A_log, dt_bias: ``[HV]``, for ``use_gate_in_kernel``.
        use_beta_sigmoid_in_kernel: beta holds logits, the step size is ``sigmoid(beta)``.
        allow_neg_eigval: the step size is ``2 * sigmoid(beta)``; with ``use_beta_sigmoid_in_kernel`` only.
        backend: the backend (``torch``) or implementation that must run the call.

    Returns:
        ``(o, final_state)``: o ``[B, T, HV, V]`` in v's dtype; final_state fp32, fresh memory, or None.

    Raises:
        ValueError: shapes that disagree, HV not a multiple of H, bad offsets, B > 1 with ``cu_seqlens``, an unknown
            backend.
        TypeError: a wrong dtype, an unknown keyword, an argument that is no tensor.
        NoImplementationError: nothing installed (or the forced backend) can run the call; every reason is given.
    """
    tensors: dict[str, Any] = {"g": g, "beta": beta, "cu_seqlens": cu_seqlens}
    options = {
        "use_gate_in_kernel": use_gate_in_kernel,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval,
    }
    tensors.update(_apply_model_options(tensors, options))
    o, state = recurrence.gated_delta_rule(
        q,
        k,
        v,
        tensors["g"],
        tensors["beta"],
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        initial_state=recurrence.k_first(initial_state, state_v_first),
        cu_seqlens=cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )
    return recurrence.results(o, state, output_final_state, state_v_first)
