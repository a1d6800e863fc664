"""Schedules of the gated delta rule: how the fused forward is laid out on Hopper. Imports no kernel language."""

from __future__ import annotations

from dataclasses import dataclass

from chunkwise.verifier.facts import Facts
from chunkwise.verifier.refusal import DoesNotFit

CHUNK = 64
GROUP_WIDTH = 64
"""Columns of V that one warpgroup has."""

STAGES = 3
"""Chunks that the fused kernel loads ahead."""

_BARRIERS_BYTES = 1024  # static; rounded up to the alignment of the tiles behind them
REGISTERS = {1: (240, 160, 40), 2: (208, 72, 24)}
"""Of a thread that has states, that computes pairs, that copies, by groups: the first needs what ptxas takes without
spills, out of 65,536 for all."""

# The time of a block with two groups over that of one with one, both alone on their multiprocessor (NOTES.md).
_TWO_GROUPS_COST = 1.75


@dataclass(frozen=True)
class Schedule:
    """The launch configuration of the forward.

    Args:
        chunk_size: rows of a chunk.
        groups: warpgroups of 64 columns of V in a block of the fused kernel.
        stages: chunks that it loads ahead.
        registers: of its threads, by role: states, pairs, copies.
        shared_memory_bytes: that it takes.
    """

    chunk_size: int
    groups: int
    stages: int
    registers: tuple[int, int, int]
    shared_memory_bytes: int


def fused_bytes(key_width: int, groups: int, stages: int = STAGES) -> int:
    """Shared memory of the fused kernel: q, k, v, the solved chunk and three fp32 rows a stage; pairs; outputs."""
    a_stage = 2 * CHUNK * (2 * key_width + groups * GROUP_WIDTH + CHUNK) + 3 * 4 * CHUNK
    pairs, outputs = 2 * 2 * CHUNK * CHUNK, groups * 2 * CHUNK * GROUP_WIDTH
    return stages * a_stage + pairs + outputs + _BARRIERS_BYTES


def _groups(facts: Facts) -> int:
    """One or two groups a block: the fewer rounds over the multiprocessors, each weighed by what it takes."""
    if facts.size("V") % (2 * GROUP_WIDTH):
        return 1
    states = facts.size("N") * facts.size("HV") * facts.size("V") // GROUP_WIDTH
    rounds = {groups: -(-states // (groups * facts.device.sm_count)) for groups in (1, 2)}
    return 1 if rounds[1] <= rounds[2] * _TWO_GROUPS_COST else 2


def schedule(facts: Facts) -> Schedule | DoesNotFit:
    """Blocks that keep the device busy, if they fit it."""
    groups = _groups(facts)
    need, have = fused_bytes(facts.size("K"), groups), facts.device.shared_memory_bytes
    if need > have:
        return DoesNotFit(need, have)
    return Schedule(CHUNK, groups, STAGES, REGISTERS[groups], need)
