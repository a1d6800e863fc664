"""The backward's chunks band by band: its launches on the CPU, by the kernels' arithmetic of places.

In place of each kernel stands one that writes what a chunk's state is called instead of the state.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import chunkwise
from chunkwise.autograd.residuals import ENTRY_CHUNKS, chunk_slots
from chunkwise_tilelang.gated_delta_rule import bands_backward, schedules_backward
from chunkwise_tilelang.gated_delta_rule.schedules import CHUNK

SIZES = (32, 128, 128)
NEEDS = frozenset({"q", "k", "v", "g", "beta", "initial_state"})


@pytest.fixture(scope="module")
def arithmetic(samples: ModuleType) -> Any:
    import tilelang

    return tilelang.compile(samples.bands(CHUNK), target="c", execution_backend="cython")


def test_when_chunks_are_taken_in_bands() -> None:
    """One chunk of these sizes has 3 MiB with 32 value heads, 1.5 MiB with 16; an H200 has 132 multiprocessors."""

    def bands(places: int, chunks: int, groups: int = 1, value_heads: int = 32) -> tuple[int, int]:
        return schedules_backward.bands(places, chunks, groups, (value_heads, 128, 128), 2, 132)

    assert bands(1, 42) == (1, 1)  # 126 MiB
    assert bands(1, 43) == (2, 1)
    assert bands(1, 512) == (2, 1)  # the passes fill the device
    assert bands(8, 64, groups=2) == (2, 1)
    assert bands(1, 2048) == (6, 1)  # 1 GiB each
    assert bands(1, 512, value_heads=16) == (4, 2)  # 64 blocks of the passes leave room beside them
    assert bands(1, 2048, value_heads=16) == (6, 2)
    assert bands(1, 512, value_heads=4) == (4, 2)


@pytest.mark.parametrize("bands, rooms, part", [(2, 1, 0.5), (4, 2, 0.5), (6, 2, 0.34), (8, 2, 0.25)])
@pytest.mark.parametrize("chunks", [256, 512, 2048])
def test_what_is_kept(chunks: int, bands: int, rooms: int, part: float) -> None:
    plan = bands_backward.plan(chunks, chunks, bands, rooms)
    assert plan.width <= chunks * part + rooms * ENTRY_CHUNKS
    kept, whole = (schedules_backward.state_bytes(64, count, SIZES, 2) for count in (plan.width, chunks))
    assert whole == 64 * chunks * 3 << 20
    assert kept * chunks == whole * plan.width


@pytest.mark.parametrize("chunks, bands, rooms, lengths", [
    (128, 2, 1, [64, 64]), (512, 2, 1, [256, 256]), (129, 2, 1, [65, 64]), (129, 4, 2, [33, 32, 32, 32]),
    (512, 4, 2, [128] * 4), (160, 4, 2, [32] * 5), (96, 2, 1, [32] * 3), (64, 4, 2, [32, 32]), (48, 2, 1, [16, 32]),
    (42, 2, 1, [42]), (33, 4, 2, [33]),
])  # fmt: skip
def test_lengths(chunks: int, bands: int, rooms: int, lengths: list[int]) -> None:
    """Equal parts, as near as the forward's states allow; all at once where bands would save next to nothing."""
    plan = bands_backward.plan(chunks, chunks, bands, rooms)
    assert [band.chunks for band in plan.bands] == lengths
    assert plan.width == max(lengths) * min(plan.rooms, len(lengths))


@pytest.mark.parametrize("whole, chunks", [(n, n) for n in (1, 31, 32, 33, 64, 65, 127, 128, 200)] + [
    (100, 32), (100, 64), (192, 64), (200, 96), (200, 40), (300, 128),
])  # fmt: skip
def test_plans(whole: int, chunks: int) -> None:
    """Every chunk of a place is in one band, the last band first; what a band still needs is in another's way."""
    for bands, rooms in ((1, 1), (2, 1), (3, 1), (2, 2), (4, 2), (5, 3), (100, 2)):
        plan = bands_backward.plan(whole, chunks, bands, rooms)
        taken = [band.first + i for band in plan.bands[::-1] for i in range(band.chunks)]
        assert taken == list(range(chunks))
        assert all(band.first % ENTRY_CHUNKS == 0 for band in plan.bands)
        assert sum(band.size for band in plan.bands) == whole
        if whole > chunks and chunks % ENTRY_CHUNKS:
            assert len(plan.bands) == 1
        for turn, band in enumerate(plan.bands):
            assert band.at + band.chunks <= plan.width
            for other in plan.bands[max(turn - plan.rooms + 1, 0) : turn]:
                assert band.at + band.chunks <= other.at or other.at + other.chunks <= band.at


class Streams:
    """Streams that run what is launched when it is asked of them, in any order that their events allow."""

    def __init__(self) -> None:
        self.here = self.current = Stream(self)
        self.ahead = Stream(self)

    def on(self, stream: Stream) -> contextlib.AbstractContextManager[None]:
        @contextlib.contextmanager
        def inside() -> Iterator[None]:
            before, self.current = self.current, stream
            yield
            self.current = before

        return inside()

    def run(self, first: Stream, last: Stream) -> None:
        """As much of the first as can run before anything of the last, again and again; ends where ``here`` has."""
        while self.here.queue:
            if not (first.step() or last.step()):
                raise AssertionError("streams wait for each other")


class Stream:
    """A queue of kernels, of events to record, and of events to wait for."""

    def __init__(self, streams: Streams) -> None:
        self.streams, self.queue = streams, collections.deque[Any]()

    def record_event(self) -> SimpleNamespace:
        event = SimpleNamespace(done=False)
        self.queue.append(lambda: setattr(event, "done", True))
        return event

    def wait_event(self, event: SimpleNamespace) -> None:
        self.queue.append(event)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def step(self) -> bool:
        """Run what is next; False where there is nothing, or an event is not done."""
        if not self.queue or not getattr(self.queue[0], "done", True):
            return False
        found = self.queue.popleft()
        if callable(found):
            found()
        return True


class Device:
    """The launches of a dense call; the state before chunk i of sequence n is called 1000 n + i + 1."""

    def __init__(
        self, arithmetic: Any, sequences: int, chunks: int, segment: int, given: bool, full: bool = False
    ) -> None:
        self.full = full  # the forward kept S and x of all chunks
        self.arithmetic, self.sequences, self.whole, self.given = arithmetic, sequences, chunks, given
        self.segment = segment or chunks
        self.per_sequence = -(-chunks // self.segment)
        self.read: Counter[int] = Counter()
        self.rows = chunks * CHUNK - 13  # the last chunk is not full
        self.cuts = (self.rows - 1) // (ENTRY_CHUNKS * CHUNK)
        self.streams = Streams()

    def of_place(self, place: int) -> tuple[int, int, int]:
        n, j = divmod(place, self.per_sequence)
        return n, j * self.segment, min((j + 1) * self.segment, self.whole)

    def name(self, n: int, chunk: int) -> float:
        return 1000.0 * n + chunk + 1

    def launcher(self, run: Any) -> Any:
        return lambda *arguments: self.streams.current.queue.append(functools.partial(run, *arguments))

    def compose(self, *arguments: Any) -> None:
        found = arguments[5]
        for place in range(found.shape[1]):
            n, begin, end = self.of_place(place)
            found[0, place], found[1, place] = self.name(n, begin), self.name(n, end)

    def passes(self, *arguments: Any) -> None:
        initial, d_final, d_initial, states, d_states, x, dr, dv = arguments[8:16]
        places, steps, chunks, width, *band = arguments[16:23]
        cuts, _, has_initial, has_final, has_d_initial, carries, directions = arguments[23:]
        assert directions == 2 - self.full
        assert (places, steps) == (self.sequences * self.per_sequence, self.sequences.bit_length())
        found = torch.zeros(places, 5, dtype=torch.int32)
        none, where = torch.zeros(0, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        self.arithmetic(where, found, none, self.rows, chunks or self.whole, width, *band, 1, cuts)
        for place, (n, start, length, slot, entry) in enumerate(found.tolist()):
            assert n == self.of_place(place)[0]
            first, count = start // CHUNK, -(-length // CHUNK)
            assert 0 <= entry < len(initial) or not has_initial
            state = float(initial[entry].item()) if has_initial else self.name(n, 0)
            d_state = float(d_final[place].item()) if has_final else self.name(n, self.whole)
            if count:
                assert (state, d_state) == (self.name(n, first), self.name(n, first + count))
            for i in range(count):
                if directions == 2:
                    states[slot + i] = x[slot + i] = state + i
                d_states[slot + i] = dr[slot + i] = self.name(n, first + i + 1)
                dv[n, start + i * CHUNK : start + (i + 1) * CHUNK] += 1
            if carries:
                assert has_d_initial
                d_initial[place] = d_state - count
            elif has_d_initial and self.of_place(place)[1] == 0:
                d_initial[n] = d_state - count

    def gradients(self, *arguments: Any) -> None:
        initial, d_final, states, d_states, x, dr = arguments[7:13]
        assert arguments[19] == self.sequences.bit_length()
        chunks, width, *band = arguments[21:27]
        assert tuple(arguments[27:]) == (int(self.given),) * 2
        none, where = torch.zeros(0, 5, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        found = torch.zeros(self.sequences * band[3], 2, dtype=torch.int32)
        self.arithmetic(where, none, found, self.rows, chunks, width, *band, 0)
        for slot, kept in found.tolist():
            n, chunk = divmod(slot, self.whole)
            self.read[slot] += 1
            state, rows = (states[slot], x[n, chunk * CHUNK]) if self.full else (states[kept], x[kept])
            assert state.item() == rows.item() == self.name(n, chunk)
            assert d_states[kept].item() == dr[kept].item() == self.name(n, chunk + 1)
        if self.given:  # the call's own states are as they were
            for n in range(self.sequences):
                assert (initial[n].item(), d_final[n].item()) == (self.name(n, 0), self.name(n, self.whole))


def launched(
    monkeypatch: pytest.MonkeyPatch, device: Device, segment: int, bands: tuple[int, int]
) -> dict[str, Tensor]:
    """The gradients of a call with one head and rows of one number, in so many bands and rooms; nothing has run yet."""
    from chunkwise_tilelang.gated_delta_rule import launch_backward  # imports the toolkit
    from chunkwise_tilelang.toolkit import streams

    def nothing(*arguments: Any) -> None:
        pass

    def room(call: Any, slots: int) -> Any:
        return launch_backward._Kept(*(torch.full((slots, 1, 1, 1), torch.nan) for _ in range(4)))

    launchers = [device.launcher(run) for run in (device.gradients, device.passes, nothing, device.compose)]
    monkeypatch.setattr(launch_backward, "_launchers", lambda *constants: launchers[: 4 if segment else 2])
    monkeypatch.setattr(launch_backward, "_multiprocessors", lambda index: 4)
    monkeypatch.setattr(launch_backward._Call, "_room", room)
    monkeypatch.setattr(launch_backward, "_rows", lambda like, offsets, dtype=None: torch.zeros_like(like, dtype=dtype))
    monkeypatch.setattr(schedules_backward, "layout", lambda *facts: (1, segment))
    monkeypatch.setattr(schedules_backward, "bands", lambda *facts: bands)
    monkeypatch.setattr(streams, "_ahead_of", lambda index: device.streams.ahead)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: device.streams.here)
    monkeypatch.setattr(torch.cuda, "stream", device.streams.on)
    n = device.sequences
    v = torch.zeros(n, device.rows, 1, 1)
    g, beta = (torch.zeros(n, device.rows, 1) for _ in range(2))
    initial, d_final = (
        torch.tensor([device.name(i, chunk) for i in range(n)]).view(n, 1, 1, 1) if device.given else None
        for chunk in (0, device.whole)
    )
    cuts = torch.tensor([[device.name(i, ENTRY_CHUNKS * (j + 1)) for j in range(device.cuts)] for i in range(n)])
    named = {"q": v, "k": v, "v": v, "g": g, "beta": beta, "initial_state": initial, "cu_seqlens": None}
    inputs = SimpleNamespace(**named, scale=1.0, use_qk_l2norm_in_kernel=False)
    entries = cuts.view(n, device.cuts, 1, 1, 1)
    saved = {"inverse": v, "g_cumsum": g, "entry_states": entries}
    if device.full:
        chunks = [[device.name(i, chunk) for chunk in range(device.whole)] for i in range(n)]
        rows = torch.tensor(chunks).repeat_interleave(CHUNK, 1)[:, : device.rows]
        saved |= {"v_new": rows.view(n, device.rows, 1, 1), "states": torch.tensor(chunks).view(-1, 1, 1, 1)}
        del saved["entry_states"]
    residuals = SimpleNamespace(tensors=saved)
    schedule: Any = None
    return launch_backward.backward(schedule, inputs, residuals, (v, d_final), NEEDS)


def check(monkeypatch: pytest.MonkeyPatch, device: Device, segment: int, bands: tuple[int, int], late: bool) -> None:
    found = launched(monkeypatch, device, segment, bands)
    streams = device.streams
    streams.run(*((streams.here, streams.ahead) if late else (streams.ahead, streams.here)))
    assert not streams.ahead.queue  # what the caller launches next comes behind all of it
    assert set(found) == NEEDS
    assert device.read == Counter(range(device.sequences * device.whole))
    assert (found["v"] == 1).all()
    for n in range(device.sequences):
        assert found["initial_state"][n].item() == device.name(n, 0)


BANDS = ((1, 1), (2, 1), (3, 1), (2, 2), (3, 2), (4, 2), (5, 3))


@pytest.mark.compiler
@pytest.mark.parametrize("late", [False, True], ids=["passes-first", "passes-last"])
@pytest.mark.parametrize("given", [False, True], ids=["zero", "given"])
@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("chunks", [1, 33, 48, 64, 100, 129, 161])
def test_sequences(
    arithmetic: Any, monkeypatch: pytest.MonkeyPatch, chunks: int, sequences: int, given: bool, late: bool
) -> None:
    """However far the passes get ahead of the gradients, or stay behind, nobody's states are overwritten."""
    for bands in BANDS:
        check(monkeypatch, Device(arithmetic, sequences, chunks, 0, given), 0, bands, late)


@pytest.mark.compiler
@pytest.mark.parametrize("given", [False, True], ids=["zero", "given"])
@pytest.mark.parametrize("chunks, segment", [(1, 0), (33, 0), (129, 0), (65, 32)])
def test_states_that_the_forward_kept(
    arithmetic: Any, monkeypatch: pytest.MonkeyPatch, chunks: int, segment: int, given: bool
) -> None:
    """The passes go backwards alone, and the gradients read what was kept."""
    for bands in BANDS:
        check(monkeypatch, Device(arithmetic, 2, chunks, segment, given, full=True), segment, bands, False)


@pytest.mark.parametrize(
    "offsets", [(0, 0, 63, 64, 129, 129, 300), (0, 64, 128), (0, 0, 0), (5, 70, 3, 400), (-3, 64, 900)]
)
def test_first_slots_of_kept_states(offsets: tuple[int, ...]) -> None:
    """As core counts the chunks of sequences; of bad offsets they stay within the room for them."""
    from chunkwise_tilelang.gated_delta_rule import launch  # imports the toolkit

    rows, where = 320, torch.tensor(offsets, dtype=torch.int32)
    v = torch.zeros(1, rows)
    found = launch.first_slots({"states": v}, where, v, CHUNK)
    assert found.dtype == torch.int32
    if list(offsets) == sorted(offsets) and offsets[0] == 0:
        counts = [-(-(b - a) // CHUNK) for a, b in itertools.pairwise(offsets)]
        assert found.tolist() == [0, *itertools.accumulate(counts)][:-1]
    most = chunk_slots({"B": 1, "T": rows, "C": CHUNK, "N": len(offsets) - 1}, True)["slots"]
    assert 0 <= int(found.min()) <= int(found.max()) <= most
    assert launch.first_slots({}, where, v, CHUNK) is launch.first_slots({"states": v}, None, v, CHUNK)  # not read


@pytest.mark.compiler
@pytest.mark.parametrize("late", [False, True], ids=["passes-first", "passes-last"])
@pytest.mark.parametrize("given", [False, True], ids=["zero", "given"])
@pytest.mark.parametrize("chunks, segment", [(1, 1), (33, 1), (65, 32), (96, 32), (200, 64), (225, 96), (200, 40)])
def test_segments(
    arithmetic: Any, monkeypatch: pytest.MonkeyPatch, chunks: int, segment: int, given: bool, late: bool
) -> None:
    """Also such that the last of a sequence has fewer chunks than the others, or none of a band."""
    for bands in BANDS:
        check(monkeypatch, Device(arithmetic, 2, chunks, segment, given), segment, bands, late)


@pytest.mark.parametrize("rooms", [1, 2])
@pytest.mark.parametrize("bands", [1, 2])
def test_when_entry_states_are_given_back(monkeypatch: pytest.MonkeyPatch, bands: int, rooms: int) -> None:
    """To dq and dk, where one stream runs all: beside other kernels they would be overwritten while they are read."""
    from chunkwise_tilelang.gated_delta_rule import launch_backward  # imports the toolkit

    held: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []
    device = Device(None, 1, 128, 64, True)
    allocate = launch_backward._gradients_of

    def ends(call: Any, split: Any) -> tuple[Tensor, Tensor]:
        found = torch.zeros(2, 1, 1, 1), torch.zeros(2, 1, 1, 1)
        held.extend(weakref.ref(x) for x in found)
        return found

    def gradients_of(*arguments: Any) -> Any:
        alive.extend(x() is not None for x in held)
        return allocate(*arguments)

    monkeypatch.setattr(device, "launcher", lambda run: lambda *arguments: None)
    monkeypatch.setattr(launch_backward._Call, "_segment_ends", ends)
    monkeypatch.setattr(launch_backward, "_gradients_of", gradients_of)
    launched(monkeypatch, device, 64, (bands, rooms))
    assert alive == [bands > 1] * 2


def case(rows: int, sequences: int = 2) -> tuple[Tensor, ...]:
    """q, k, v, g, beta, the gradient of o, an initial state and the gradient of the final one."""
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    q, k = (torch.nn.functional.normalize(drawn(sequences, rows, 2, 64), dim=-1).bfloat16() for _ in range(2))
    v, d_o = (drawn(sequences, rows, 4, 128).bfloat16() for _ in range(2))
    g = torch.nn.functional.logsigmoid(drawn(sequences, rows, 4)) * 0.05
    beta = torch.sigmoid(drawn(sequences, rows, 4))
    # Weak: <S, dS'> of a last chunk with few rows would be an eighth of dg, and its error that of one rounded state.
    initial, d_final = (drawn(sequences, 4, 64, 128) * 0.1 for _ in range(2))
    return q, k, v, g, beta, d_o, initial, d_final


def gradients(tensors: tuple[Tensor, ...], ends: bool, backend: str) -> tuple[Tensor, ...]:
    *inputs, d_o, initial, d_final = tensors
    wanted = [x.detach().clone().requires_grad_() for x in (*inputs, *((initial,) if ends else ()))]
    options = {"initial_state": wanted[5] if ends else None, "output_final_state": ends}
    o, final = chunkwise.chunk_gated_delta_rule(*wanted[:5], backend=backend, **options)
    outputs = ([o, final], [d_o, d_final]) if ends else ([o], [d_o])
    return torch.autograd.grad(outputs[0], wanted, outputs[1])


@pytest.mark.gpu
@pytest.mark.parametrize("ends", [False, True], ids=["zero", "ends"])
@pytest.mark.parametrize("groups, segment", [(1, 0), (2, 0), (1, 64), (1, 96)])
@pytest.mark.parametrize("rows", [8200, 9000])
def test_bands_on_a_gpu(rows: int, groups: int, segment: int, ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """129 and 141 chunks, the last of which is not full; a place's last band may have none of them.

    The rooms and the turns change no bit, only where bands begin does: there the forward's state takes the place of the
    replayed one, which is rounded elsewhere.
    """
    tensors = case(rows)
    monkeypatch.setattr(schedules_backward, "layout", lambda *facts: (groups, segment))

    def taken(bands: int, rooms: int) -> tuple[Tensor, ...]:
        monkeypatch.setattr(schedules_backward, "bands", lambda *facts: (bands, rooms))
        return gradients(tensors, ends, "tilelang")

    exact = gradients(tuple(x.float() for x in tensors), ends, "torch")
    at_once = taken(1, 1)
    for bands, rooms in ((2, 1), (4, 1), (2, 2), (4, 2), (5, 3)):
        for _ in range(3 if rooms > 1 else 1):
            found = taken(bands, rooms)
            for got, same, whole, want in zip(found, taken(bands, 1), at_once, exact, strict=True):
                assert torch.equal(got, same)
                error, before = ((x.float() - want).norm() / want.norm() for x in (got, whole))
                assert error <= 1.05 * before
