"""How the backward of the gated delta rule is laid out on Hopper. Imports no kernel language."""

from __future__ import annotations

from functools import lru_cache

from chunkwise.verifier.facts import Facts
from chunkwise.verifier.refusal import DoesNotFit
from chunkwise_tilelang.gated_delta_rule import schedules

PASSES_REGISTERS = schedules.REGISTERS
"""As :data:`schedules.REGISTERS`, of the passes over the chunks."""

PASSES_STAGES = {1: 3, 2: 2}
"""Chunks that a pass loads ahead, by groups: two groups leave no shared memory for more."""

GRADIENTS_REGISTERS = (224, 56)
"""Of a thread that computes gradients, and of one that loads for it, out of 168 for each of 384."""

_BARRIERS_BYTES = 1024

# Of S, dS', x and dr: what is kept of all chunks at once, and what of them is kept at a time where that is possible.
_AT_ONCE_BYTES = 128 << 20
_KEPT_BYTES = 1 << 30

GRADIENTS_ROUNDS = 4
"""Blocks of the gradients for each multiprocessor where they run beside the passes: small ones, for what gets free."""

# Microseconds, measured (NOTES.md). Of a chunk of the passes: alone, and what a full device adds, by the square of its
# busy part; of a chunk of the summaries, backwards and forwards; of a segment in the composition; of two launches.
_PASSES_US = (1.65, 0.48)
_SUMMARIES_US = (1.42, 0.95)
_COMPOSITION_US = 2.9
_LAUNCHES_US = 10.0

# The part of the device that the passes may take where the gradients are to run beside them.
_BESIDE = 0.6

# The time of a block with two groups over that of one with one: as in the forward, not measured here.
_TWO_GROUPS_COST = 1.75


def groups(sequences: int, value_heads: int, value_width: int, multiprocessors: int) -> int:
    """Warpgroups of 64 columns of V in a block of the passes: the fewer rounds, each weighed by what it takes."""
    if value_width % (2 * schedules.GROUP_WIDTH):
        return 1
    states = 2 * sequences * value_heads * value_width // schedules.GROUP_WIDTH  # of both passes
    rounds = {count: -(-states // (count * multiprocessors)) for count in (1, 2)}
    return 1 if rounds[1] <= rounds[2] * _TWO_GROUPS_COST else 2


def _rounds_us(long: tuple[int, float], short: tuple[int, float], multiprocessors: int) -> float:
    """When the last of some long and then of some short blocks ends, each taking the first free multiprocessor."""
    (ahead, ahead_us), (behind, behind_us) = long, short
    rounds, more = divmod(ahead, multiprocessors)
    free = ((more, (rounds + 1) * ahead_us), (multiprocessors - more, rounds * ahead_us))
    turns = range(behind // multiprocessors + int(ahead_us / behind_us) + 3)
    ends = [when + turn * behind_us for _, when in free for turn in turns]
    last = max(when for count, when in free if count)
    done = [end for end in ends if sum(n * max(0, int((end - at) / behind_us + 1e-6)) for n, at in free) >= behind]
    return max(last if ahead else 0.0, min(done))


def _passes_us(chunks: int, segments: int, states: tuple[int, int], multiprocessors: int) -> float:
    """What the passes take in segments: with the summaries and their composition, where there is more than one.

    ``states`` are the blocks for the columns of all heads' V, and those for the columns of their A.
    """
    blocks, maps = states
    length = -(-chunks // segments)
    alone, added = _PASSES_US
    passes = length * (alone + added * (2 * blocks * segments / multiprocessors) ** 2)
    if segments == 1:
        return passes
    backwards, forwards = (length * each for each in _SUMMARIES_US)
    shorter = blocks * (segments - 1)
    summaries = _rounds_us((shorter, backwards), (shorter + maps * segments, forwards), multiprocessors)
    return passes + summaries + segments * _COMPOSITION_US + _LAUNCHES_US


@lru_cache(maxsize=4096)
def layout(sequences: int, rows: int, sizes: tuple[int, int, int], multiprocessors: int) -> tuple[int, int]:
    """Groups of a block of the passes, and chunks of a segment (0: no split): the fastest by the model.

    ``rows`` are those of all sequences together, taken to be alike; ``sizes`` are HV, K and V. No more segments than
    fill one round of the multiprocessors: behind that only the composition grows.
    """
    value_heads, key_width, value_width = sizes
    chunks = -(-rows // (max(sequences, 1) * schedules.CHUNK))
    blocks, maps = (sequences * value_heads * width // schedules.GROUP_WIDTH for width in (value_width, key_width))
    most = min(multiprocessors // (2 * max(blocks, 1)), chunks // 2)
    choices = range(1, most + 1)
    best = min(choices, key=lambda segments: _passes_us(chunks, segments, (blocks, maps), multiprocessors), default=1)
    if best == 1:
        return groups(sequences, value_heads, value_width, multiprocessors), 0
    return 1, -(-chunks // best)


def state_bytes(places: int, slots: int, sizes: tuple[int, int, int], itemsize: int) -> int:
    """Of S, dS', x and dr in ``slots`` chunks of each place, in a dtype of ``itemsize`` bytes; ``sizes`` as above."""
    value_heads, key_width, value_width = sizes
    return places * slots * value_heads * 2 * (key_width + schedules.CHUNK) * value_width * itemsize


def bands(
    places: int, chunks: int, groups: int, sizes: tuple[int, int, int], itemsize: int, multiprocessors: int
) -> tuple[int, int]:
    """In how many bands a dense call is best taken, and how many of them are kept at a time.

    Places are sequences or their segments, with ``chunks`` chunks each; ``groups`` are those of a block of the passes.
    A band more costs what it takes to start its kernels, and a round of blocks that is not full. Where the passes leave
    a good part of the device free, the gradients of a band run beside the passes of the next one, which is more than
    that; elsewhere halves are enough, but for calls whose halves are large.
    """
    kept = state_bytes(places, chunks, sizes, itemsize)
    if kept <= _AT_ONCE_BYTES:
        return 1, 1
    value_heads, _, value_width = sizes
    blocks = 2 * places * value_heads * value_width // (groups * schedules.GROUP_WIDTH)
    rooms = 2 if blocks <= multiprocessors * _BESIDE else 1
    return max(2 * rooms, -(-kept * rooms // _KEPT_BYTES)), rooms


def passes_bytes(key_width: int, groups: int) -> int:
    """Shared memory of the passes.

    k, q, v or do, M and six fp32 rows a stage; pairs; a state and two tiles of rows on their way to memory.
    """
    chunk, width = schedules.CHUNK, groups * schedules.GROUP_WIDTH
    a_stage = 2 * chunk * (2 * key_width + width + chunk) + 6 * 4 * chunk
    pairs, passed = 2 * 2 * chunk * chunk, 2 * width * (key_width + 2 * chunk)
    return PASSES_STAGES[groups] * a_stage + pairs + passed + _BARRIERS_BYTES


def summaries_bytes(key_width: int) -> int:
    """Shared memory of the summaries of the passes: what the passes have but for what passes on to memory."""
    passed = 2 * schedules.GROUP_WIDTH * (key_width + 2 * schedules.CHUNK)
    return passes_bytes(key_width, 1) - passed


def value_block(value_width: int) -> int:
    """Columns of V that the gradients take at a time."""
    return 128 if value_width % 128 == 0 else 64


def gradients_bytes(key_width: int, value_width: int) -> int:
    """Shared memory of the gradients: q, k and v; S and dS'; x, dr, do twice; [C, C]; sixteen fp32 rows, twice.

    The gradients of the scores, two more [C, C], take the place of x where that is wide enough.
    """
    chunk, width = schedules.CHUNK, value_block(value_width)
    rows = 2 * chunk * key_width + chunk * width + 2 * 3 * chunk * width
    tiles = rows + 2 * width * key_width + (1 if width == 2 * chunk else 3) * chunk * chunk
    return 2 * tiles + 2 * 16 * 4 * chunk + _BARRIERS_BYTES


def backward_bytes(key_width: int, value_width: int) -> int:
    """The most shared memory that a kernel of the backward takes."""
    return max(*(passes_bytes(key_width, count) for count in PASSES_STAGES), gradients_bytes(key_width, value_width))


def schedule(facts: Facts) -> schedules.Schedule | DoesNotFit:
    """The forward's schedule, if the device also holds the backward where one is to follow."""
    found = schedules.schedule(facts)
    need, have = backward_bytes(facts.size("K"), facts.size("V")), facts.device.shared_memory_bytes
    return DoesNotFit(need, have) if facts.needs and need > have and isinstance(found, schedules.Schedule) else found
