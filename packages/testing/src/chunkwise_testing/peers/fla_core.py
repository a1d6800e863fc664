"""flash-linear-attention's kernels (pip package ``fla-core``, module ``fla``), from 0.6 on."""

from __future__ import annotations

from chunkwise.verifier.facts import Facts
from chunkwise_testing.peers.adapter import Adapter, Peer

_GATED_DELTA_RULE_ARGUMENTS = (
    *("q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "cu_seqlens"),
    *("cu_seqlens_cpu", "use_qk_l2norm_in_kernel", "state_v_first"),
)

_DELTA_RULE_ARGUMENTS = (
    *("q", "k", "v", "beta", "scale", "initial_state", "output_final_state", "cu_seqlens", "cu_seqlens_cpu"),
    "use_qk_l2norm_in_kernel",
)
_GLA_ARGUMENTS = (
    *("q", "k", "v", "g", "scale", "initial_state", "output_final_state", "cu_seqlens", "cu_seqlens_cpu"),
    "state_v_first",
)
_DPLR_ARGUMENTS = (
    *("q", "k", "v", "a", "b", "gk", "scale", "initial_state", "output_final_state", "cu_seqlens", "cu_seqlens_cpu"),
    *("safe_gate", "chunk_size", "disable_recompute", "lower_bound"),
)


def _unsupported(facts: Facts) -> str | None:
    if facts.device.kind != "cuda":
        return f"it runs on GPUs only, not on {facts.device.name}"
    return None


FLA_CORE = Peer(
    name="fla-core",
    module="fla",
    adapters=(
        Adapter(
            op="chunk_gated_delta_rule",
            function="fla.ops.gated_delta_rule:chunk_gated_delta_rule",
            arguments=_GATED_DELTA_RULE_ARGUMENTS,
            unsupported=_unsupported,
        ),
        Adapter(
            op="chunk_delta_rule",
            function="fla.ops.delta_rule:chunk_delta_rule",
            arguments=_DELTA_RULE_ARGUMENTS,
            unsupported=_unsupported,
        ),
        Adapter(
            op="chunk_simple_gla",
            function="fla.ops.simple_gla:chunk_simple_gla",
            arguments=_GLA_ARGUMENTS,
            unsupported=_unsupported,
        ),
        Adapter(
            op="chunk_gla",
            function="fla.ops.gla:chunk_gla",
            arguments=_GLA_ARGUMENTS,
            unsupported=_unsupported,
        ),
        Adapter(
            op="chunk_dplr_delta_rule",
            function="fla.ops.generalized_delta_rule:chunk_dplr_delta_rule",
            arguments=_DPLR_ARGUMENTS,
            unsupported=_unsupported,
        ),
    ),
    # Its Triton backward refuses gates on Hopper, its TileLang one does not; and flash-qla, which it would call where
    # it is installed, is a peer of its own here. Its tuners keep no choice on disk: one that is found there may have
    # been made on a busy device, or on another one.
    environment={"FLA_TILELANG": "1", "FLA_FLASH_QLA": "0", "FLA_CACHE_RESULTS": "0"},
    needs="'fla-core>=0.6' triton tilelang",
)
