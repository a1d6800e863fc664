"""The table of the gated delta rule on TileLang. Imports no kernel language."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from chunkwise.verifier.facts import Facts
from chunkwise.verifier.implementation import Implementation
from chunkwise.verifier.refusal import Kind
from chunkwise.verifier.rules import Rule, dtype, one_of, same_dtype, size_at_most, size_multiple_of
from chunkwise_tilelang.gated_delta_rule import schedules, schedules_backward


def _unasked(name: str, why: str, reads: set[str], tried: Callable[[Facts], bool], against: str) -> Rule:
    """With gradients a call comes here unasked only where the backward has been measured and held against the suite."""
    return Rule(
        name=name,
        kind=Kind.SLOWER,
        reads=frozenset({"needs", *reads}),
        holds=lambda f: not f.needs or tried(f),
        message=lambda f: why,
        remedy="name the implementation with backend= to run it all the same",
        violate=lambda f: replace(f.with_flag("ragged", True), needs=frozenset({"q"})),
        satisfy=lambda f: replace(f, needs=frozenset()),
        against=against,
    )


def _tried(facts: Facts) -> bool:
    return not facts.flag("ragged") and facts.size("K") == facts.size("V") == 128


DENSE_GRADIENTS = _unasked(
    "gradients of dense calls at K = V = 128",
    "ragged, its gate gradients are less exact in sequences of few tokens; at other widths its backward is not timed",
    {"K", "V", "flag:ragged"},
    _tried,
    "triton/gated_delta_rule/split",
)
NO_GRADIENTS = _unasked(
    "gradients only where it is named", "its backward is not timed", set(), lambda f: False, "triton/delta_rule/split"
)
"""Of the delta rule, which runs on the same kernels."""

REQUIRES = (
    one_of("K", 64, 128),  # the state of 64 columns of V stands in a warpgroup's registers
    size_multiple_of("V", schedules.GROUP_WIDTH),
    size_at_most("V", 256),
    dtype("q", "bf16", "fp16"),
    same_dtype("q k v"),
)
"""What the kernels cannot do on any op."""

FUSED = Implementation(
    "tilelang/gated_delta_rule/fused",
    op="chunk_gated_delta_rule",
    rank=10,
    archs=("sm90",),
    requires=REQUIRES,
    slower=(DENSE_GRADIENTS,),
    schedule=schedules_backward.schedule,
    forward="chunkwise_tilelang.gated_delta_rule.launch:forward",
    backward="chunkwise_tilelang.gated_delta_rule.launch_backward:backward",
    compile="chunkwise_tilelang.gated_delta_rule.launch_backward:compile",
    residuals=("gdn-wy64@1",),
)

IMPLEMENTATIONS = (FUSED,)
