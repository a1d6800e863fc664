"""FlashQLA (pip package ``flash-qla``, module ``flash_qla``)."""

from __future__ import annotations

from chunkwise.verifier.facts import Facts
from chunkwise_testing.peers.adapter import Adapter, Peer

_GATED_DELTA_RULE_ARGUMENTS = (
    *("q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "cu_seqlens"),
    *("use_qk_l2norm_in_kernel", "state_v_first"),
)
_ARCHS = ("sm90", "sm100", "sm103", "sm120", "sm121")


def _unsupported(facts: Facts) -> str | None:
    if facts.device.arch not in _ARCHS:
        return f"it runs on {', '.join(_ARCHS)}, not on {facts.device.name} ({facts.device.arch})"
    if (widths := (facts.size("K"), facts.size("V"))) != (128, 128):
        return f"it has K = V = 128 only, not K = {widths[0]}, V = {widths[1]}"
    dtypes = {name: facts.dtype(name) for name in ("q", "k", "v")}
    if len(set(dtypes.values())) > 1 or dtypes["q"] not in ("bf16", "fp16"):
        return f"it takes q, k and v in bf16 or all in fp16, not {dtypes}"
    return None


FLASH_QLA = Peer(
    name="flash-qla",
    module="flash_qla",
    adapters=(
        Adapter(
            op="chunk_gated_delta_rule",
            function="flash_qla:chunk_gated_delta_rule",
            arguments=_GATED_DELTA_RULE_ARGUMENTS,
            unsupported=_unsupported,
        ),
    ),
    needs="'flash-qla>=0.1.3' tilelang",
)
