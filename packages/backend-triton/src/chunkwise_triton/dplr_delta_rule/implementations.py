"""The table of the DPLR delta rule, and with it of RWKV-7, on Triton. Imports no kernel language."""

from __future__ import annotations

from chunkwise.verifier.implementation import Implementation
from chunkwise.verifier.rules import centred_gates_fit
from chunkwise_triton.common.rules import ARCHS, anywhere, wide_fp32_needs_hopper
from chunkwise_triton.dplr_delta_rule import schedules

CHUNK_SIZES = (16, 32, 64)
# fp16 activations are widened.
REQUIRES = (*anywhere("q k v a b"), wide_fp32_needs_hopper("fp16", "fp32"))
RESIDUALS = tuple(f"dplr-{kept}{size}@1" for size in CHUNK_SIZES for kept in ("wy", "states"))

ROBUST = Implementation(
    "triton/dplr_delta_rule/robust",
    op="chunk_dplr_delta_rule",
    rank=100,
    archs=ARCHS,
    requires=REQUIRES,
    schedule=schedules.robust,
    forward="chunkwise_triton.dplr_delta_rule.launch:forward",
    backward="chunkwise_triton.dplr_delta_rule.launch:backward",
    compile="chunkwise_triton.dplr_delta_rule.launch:compile",
    residuals=RESIDUALS,
    batch_invariant=True,
)

CENTRED = Implementation(
    "triton/dplr_delta_rule/centred",
    op="chunk_dplr_delta_rule",
    rank=90,
    archs=ARCHS,
    requires=REQUIRES,
    promises=(centred_gates_fit(),),
    schedule=schedules.centred,
    forward="chunkwise_triton.dplr_delta_rule.launch:forward",
    backward="chunkwise_triton.dplr_delta_rule.launch:backward",
    compile="chunkwise_triton.dplr_delta_rule.launch:compile",
    residuals=RESIDUALS,
    batch_invariant=True,
)

IMPLEMENTATIONS = (ROBUST, CENTRED)
