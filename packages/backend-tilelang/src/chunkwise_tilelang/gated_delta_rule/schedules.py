"""Schedules of the gated delta rule: how the fused forward is laid out on Hopper. Imports no kernel language."""

from __future__ import annotations

from dataclasses import dataclass, replace

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

SUMMARY_REGISTERS = (216, 40)
"""Of a thread of the summarising kernel that has states, and of one that loads, where a block has two groups; with one
there are registers enough for all."""

# Time of a chunk by the number of groups of a block, in units of what the fused kernel takes with one: NOTES.md.
_FUSED_TIME = {1: 1.0, 2: 1.75}
_SUMMARY_TIME = {1: 0.8, 2: 1.0}
# The same for what a split costs beside its chunks: a step of the composition, and two launches.
_COMPOSITION_TIME = 1.6
_LAUNCHES_TIME = 8.0
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True)
class Schedule:
    """The launch configuration of the forward.

    Args:
        chunk_size: rows of a chunk.
        groups: warpgroups of 64 columns of V in a block of the fused kernel.
        stages: chunks that it loads ahead.
        registers: of its threads, by role: states, pairs, copies.
        shared_memory_bytes: that it takes.
        segment: chunks of a segment, where sequences are split; 0 where they are not.
        summary_groups: warpgroups of 64 columns in a block of the summarising kernel.
    """

    chunk_size: int
    groups: int
    stages: int
    registers: tuple[int, int, int]
    shared_memory_bytes: int
    segment: int = 0
    summary_groups: int = 1


def fused_bytes(key_width: int, groups: int, stages: int = STAGES, kept: bool = False) -> int:
    """Shared memory of the fused kernel: q, k, v, the solved chunk and three fp32 rows a stage; pairs; outputs; S and x
    where they are kept."""
    a_stage = 2 * CHUNK * (2 * key_width + groups * GROUP_WIDTH + CHUNK) + 3 * 4 * CHUNK
    pairs, outputs = 2 * 2 * CHUNK * CHUNK, groups * 2 * CHUNK * GROUP_WIDTH
    kept_bytes = 2 * GROUP_WIDTH * (key_width + CHUNK) if kept else 0
    return stages * a_stage + pairs + outputs + kept_bytes + _BARRIERS_BYTES


def keeping(schedule: Schedule, key_width: int) -> Schedule:
    """The schedule of a forward that keeps S and x of every chunk: two groups have no shared memory for that."""
    need = fused_bytes(key_width, 1, schedule.stages, kept=True)
    return replace(schedule, groups=1, registers=REGISTERS[1], shared_memory_bytes=need)


def summarise_bytes(key_width: int, groups: int, stages: int = STAGES) -> int:
    """Shared memory of the summarising kernel: k, v, the solved chunk and two fp32 rows a stage."""
    return stages * (2 * CHUNK * (key_width + groups * GROUP_WIDTH + CHUNK) + 2 * 4 * CHUNK) + _BARRIERS_BYTES


def compose_bytes(key_width: int) -> int:
    """Shared memory of the composing kernel: two bf16 parts of two maps."""
    return 2 * 2 * 2 * key_width * key_width + _BARRIERS_BYTES


def _time(facts: Facts, groups: int, segments: int, summary_groups: int) -> float:
    """What a layout is expected to take, by rounds over the multiprocessors."""
    sequences, value_heads, keys, columns = (facts.size(axis) for axis in ("N", "HV", "K", "V"))
    chunks = -(-_chunks(facts) // segments)

    def rounds(blocks: int) -> int:
        return -(-blocks // facts.device.sm_count)

    def blocks(segments: int, columns: int, groups: int) -> int:
        return sequences * segments * value_heads * -(-columns // (groups * GROUP_WIDTH))

    fused = rounds(blocks(segments, columns, groups)) * chunks * _FUSED_TIME[groups]
    if segments == 1:
        return fused
    summaries = rounds(blocks(segments - 1, columns + keys, summary_groups)) * chunks * _SUMMARY_TIME[summary_groups]
    return fused + summaries + segments * _COMPOSITION_TIME + _LAUNCHES_TIME


def _chunks(facts: Facts) -> int:
    """Chunks of a sequence, if all are alike."""
    return -(-facts.size("B") * facts.size("T") // (max(facts.size("N"), 1) * CHUNK))


def layout(facts: Facts) -> tuple[int, int, int]:
    """Groups of a block, chunks of a segment (0: no split), groups of a summary's block: the fastest by the model."""
    chunks = _chunks(facts)
    groups = (1, 2) if facts.size("V") % (2 * GROUP_WIDTH) == 0 else (1,)
    splits = [s for s in _SPLITS if s == 1 or s <= chunks // 2]
    choices = [(g, s, m) for s in splits for g in groups for m in (1, 2)]
    best = min(choices, key=lambda choice: _time(facts, *choice))
    return best[0], 0 if best[1] == 1 else -(-chunks // best[1]), best[2]


def schedule(facts: Facts) -> Schedule | DoesNotFit:
    """Blocks that keep the device busy, if they fit it."""
    groups, segment, summary_groups = layout(facts)
    need, have = fused_bytes(facts.size("K"), groups), facts.device.shared_memory_bytes
    if need > have:
        return DoesNotFit(need, have)
    return Schedule(CHUNK, groups, STAGES, REGISTERS[groups], need, segment, summary_groups)
