"""How the backward of the gated delta rule is laid out on Hopper. Imports no kernel language."""

from __future__ import annotations

from chunkwise.verifier.facts import Facts
from chunkwise.verifier.refusal import DoesNotFit
from chunkwise_tilelang.gated_delta_rule import schedules

PASSES_REGISTERS = schedules.REGISTERS
"""As :data:`schedules.REGISTERS`, of the passes over the chunks."""

PASSES_STAGES = {1: 3, 2: 2}
"""Chunks that a pass loads ahead, by groups: two groups leave no shared memory for more."""

GRADIENTS_REGISTERS = (232, 40)
"""Of a thread that computes gradients, and of one that loads for it, out of 168 for each of 384."""

_BARRIERS_BYTES = 1024


# The time of a block with two groups over that of one with one: as in the forward, not measured here.
_TWO_GROUPS_COST = 1.75


def groups(sequences: int, value_heads: int, value_width: int, multiprocessors: int) -> int:
    """Warpgroups of 64 columns of V in a block of the passes: the fewer rounds, each weighed by what it takes."""
    if value_width % (2 * schedules.GROUP_WIDTH):
        return 1
    states = 2 * sequences * value_heads * value_width // schedules.GROUP_WIDTH  # of both passes
    rounds = {count: -(-states // (count * multiprocessors)) for count in (1, 2)}
    return 1 if rounds[1] <= rounds[2] * _TWO_GROUPS_COST else 2


def passes_bytes(key_width: int, groups: int) -> int:
    """Shared memory of the passes.

    k, q, v or do, M and six fp32 rows a stage; pairs; a state and two tiles of rows on their way to memory.
    """
    chunk, width = schedules.CHUNK, groups * schedules.GROUP_WIDTH
    a_stage = 2 * chunk * (2 * key_width + width + chunk) + 6 * 4 * chunk
    pairs, passed = 2 * 2 * chunk * chunk, 2 * width * (key_width + 2 * chunk)
    return PASSES_STAGES[groups] * a_stage + pairs + passed + _BARRIERS_BYTES


def value_block(value_width: int) -> int:
    """Columns of V that the gradients take at a time."""
    return 128 if value_width % 128 == 0 else 64


def gradients_bytes(key_width: int, value_width: int) -> int:
    """Shared memory of the gradients: q and k; S and dS'; x, dr, do twice; three [C, C]; eighteen fp32 rows, twice."""
    chunk, width = schedules.CHUNK, value_block(value_width)
    tiles = 2 * chunk * key_width + 2 * width * key_width + 2 * 3 * chunk * width + 3 * chunk * chunk
    return 2 * tiles + 2 * 18 * 4 * chunk + _BARRIERS_BYTES


def backward_bytes(key_width: int, value_width: int) -> int:
    """The most shared memory that a kernel of the backward takes."""
    return max(*(passes_bytes(key_width, count) for count in PASSES_STAGES), gradients_bytes(key_width, value_width))


def schedule(facts: Facts) -> schedules.Schedule | DoesNotFit:
    """The forward's schedule, if the device also holds the backward where one is to follow."""
    found = schedules.schedule(facts)
    need, have = backward_bytes(facts.size("K"), facts.size("V")), facts.device.shared_memory_bytes
    return DoesNotFit(need, have) if facts.needs and need > have and isinstance(found, schedules.Schedule) else found
