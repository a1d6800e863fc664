"""The backward's chunks piece by piece: its launches on the CPU, by the kernels' arithmetic of places.

In place of each kernel stands one that writes what a chunk's state is called instead of the state.
"""

from __future__ import annotations

from collections import Counter
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import chunkwise
from chunkwise_tilelang.gated_delta_rule import bands_backward, schedules_backward
from chunkwise_tilelang.gated_delta_rule.schedules import CHUNK

SIZES = (32, 128, 128)
NEEDS = frozenset({"q", "k", "v", "g", "beta", "initial_state"})


@pytest.fixture(scope="module")
def arithmetic(samples: ModuleType) -> Any:
    import tilelang

    return tilelang.compile(samples.bands(CHUNK), target="c", execution_backend="cython")


def test_when_chunks_are_taken_piece_by_piece() -> None:
    """One chunk of these sizes has 1.5 MiB for each value head of 16, 3 MiB for 32."""
    first_piece = schedules_backward.first_piece
    assert first_piece(1, 512, SIZES, 2) == 37
    assert first_piece(8, 64, SIZES, 2) == 5
    assert first_piece(32, 16, SIZES, 2) == 2
    assert first_piece(35, 15, SIZES, 2) == 0  # short places
    assert first_piece(1, 341, SIZES, 2) == 0  # 1,023 MiB
    assert first_piece(1, 342, SIZES, 2) == 25
    assert first_piece(8, 64, (4, 128, 128), 2) == 0


@pytest.mark.parametrize("chunks", [16, 17, 22, 64, 127, 128, 513])
def test_what_is_kept(chunks: int) -> None:
    plan = bands_backward.plan(chunks, chunks, schedules_backward.first_piece(64, chunks, SIZES, 2))
    assert len(plan.steps) <= 4
    assert plan.width <= chunks * 4 / 7 + 2
    kept, whole = (schedules_backward.state_bytes(64, count, SIZES, 2) for count in (plan.width, chunks))
    assert whole == 64 * chunks * 3 << 20
    assert kept * chunks == whole * plan.width


@pytest.mark.parametrize("chunks", range(1, 41))
def test_steps(chunks: int) -> None:
    """Each direction takes every chunk once, in its order; the gradients do, when both have been there."""
    for piece in range(0, chunks + 1):
        plan = bands_backward.plan(chunks, chunks, piece)
        forwards = [walk.first + i for walk, _, _ in plan.steps for i in range(walk.chunks)]
        backwards = [walk.first + i for _, walk, _ in plan.steps for i in reversed(range(walk.chunks))]
        assert forwards == list(range(chunks))
        assert backwards == forwards[::-1]
        bands = [band for step in plan.steps for band in step.bands]
        assert sorted(band.first + i for band in bands for i in range(band.chunks)) == forwards
        for replay, reverse, both in plan.steps:
            for at, count in [(w.at, w.chunks) for w in (replay, reverse)] + [
                (at, b.chunks) for b in both for at in (b.states_at, b.d_states_at)
            ]:
                assert at >= 0
                assert at + count <= plan.width


class Device:
    """The launches of a dense call; the state before chunk i of sequence n is called 1000 n + i + 1."""

    def __init__(self, arithmetic: Any, sequences: int, chunks: int, segment: int, given: bool) -> None:
        self.arithmetic, self.sequences, self.whole, self.given = arithmetic, sequences, chunks, given
        self.segment = segment or chunks
        self.per_sequence = -(-chunks // self.segment)
        self.read: Counter[int] = Counter()
        self.written_dv: Counter[int] = Counter()
        self.rows = chunks * CHUNK - 13  # the last chunk is not full

    def of_place(self, place: int) -> tuple[int, int, int]:
        n, j = divmod(place, self.per_sequence)
        return n, j * self.segment, min((j + 1) * self.segment, self.whole)

    def name(self, n: int, chunk: int) -> float:
        return 1000.0 * n + chunk + 1

    def places(self, chunks: int, width: int, walk: tuple[int, ...]) -> list[list[int]]:
        found = torch.zeros(self.sequences * self.per_sequence, 4, dtype=torch.int32)
        none, where = torch.zeros(0, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        self.arithmetic(where, found, none, self.rows, self.sequences, chunks, width, *walk, *(0,) * 10)
        listed: list[list[int]] = found.tolist()
        return listed

    def compose(self, *arguments: Any) -> None:
        found = arguments[5]
        for place in range(found.shape[1]):
            n, begin, end = self.of_place(place)
            found[0, place], found[1, place] = self.name(n, begin), self.name(n, end)

    def passes(self, *arguments: Any) -> None:
        initial, d_final, exits, d_initial, states, d_states, x, dr, dv = arguments[8:17]
        places, steps, chunks, width, *walks = arguments[17:27]
        _, has_initial, has_final, has_d_initial, carries = arguments[27:]
        assert (places, steps) == (self.sequences * self.per_sequence, self.sequences.bit_length())
        chunks = chunks or self.whole
        for place, (n, start, length, slot) in enumerate(self.places(chunks, width, tuple(walks[:3]))):
            assert n == self.of_place(place)[0]
            first = min(start // CHUNK, self.of_place(place)[2])
            state = float(initial[place].item()) if has_initial else self.name(n, 0)
            assert state == self.name(n, first) or length == 0
            for i in range(-(-length // CHUNK)):
                states[slot + i] = x[slot + i] = state + i
            if carries:
                exits[place] = state + -(-length // CHUNK)
        for place, (n, start, length, slot) in enumerate(self.places(chunks, width, tuple(walks[3:]))):
            count = -(-length // CHUNK)
            state = float(d_final[place].item()) if has_final else self.name(n, self.whole)
            assert state == self.name(n, start // CHUNK + count) or length == 0
            for i in range(count):
                d_states[slot + i] = dr[slot + i] = self.name(n, start // CHUNK + i + 1)
                dv[n, start + i * CHUNK : start + (i + 1) * CHUNK] += 1
            if carries:
                d_initial[place] = state - count
            elif has_d_initial and self.of_place(place)[1] == 0:
                d_initial[n] = state - count

    def gradients(self, *arguments: Any) -> None:
        initial, d_final, states, d_states, x, dr = arguments[7:13]
        assert arguments[18] == self.sequences.bit_length()
        chunks, width, *bands = arguments[20:32]
        assert tuple(arguments[32:]) == (int(self.given),) * 2
        none, where = torch.zeros(0, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        found = torch.zeros(self.sequences * (bands[0] + bands[5]), 3, dtype=torch.int32)
        self.arithmetic(where, none, found, self.rows, self.sequences, chunks, width, 0, 0, 0, *bands)
        for slot, here, there in found.tolist():
            n, chunk = divmod(slot, self.whole)
            self.read[slot] += 1
            assert states[here].item() == x[here].item() == self.name(n, chunk)
            assert d_states[there].item() == dr[there].item() == self.name(n, chunk + 1)
        if self.given:  # the call's own states are as they were
            for n in range(self.sequences):
                assert (initial[n].item(), d_final[n].item()) == (self.name(n, 0), self.name(n, self.whole))


def launched(monkeypatch: pytest.MonkeyPatch, device: Device, segment: int, piece: int) -> dict[str, Tensor]:
    """The gradients of a call with one head and rows of one number; the first piece has so many chunks."""
    from chunkwise_tilelang.gated_delta_rule import launch_backward  # imports the toolkit

    def nothing(*arguments: Any) -> None:
        pass

    def room(v: Tensor, key_width: int, slots: int) -> Any:
        return launch_backward._Kept(*(torch.full((slots, 1, 1, 1), torch.nan) for _ in range(4)))

    launchers = [device.gradients, device.passes, nothing, device.compose]
    monkeypatch.setattr(launch_backward, "_launchers", lambda *constants: launchers[: 4 if segment else 2])
    monkeypatch.setattr(launch_backward, "_multiprocessors", lambda index: 4)
    monkeypatch.setattr(launch_backward, "_room", room)
    monkeypatch.setattr(launch_backward, "_rows", lambda like, offsets, dtype=None: torch.zeros_like(like, dtype=dtype))
    monkeypatch.setattr(schedules_backward, "layout", lambda *facts: (1, segment))
    monkeypatch.setattr(schedules_backward, "first_piece", lambda *facts: piece)
    n = device.sequences
    v = torch.zeros(n, device.rows, 1, 1)
    g, beta = (torch.zeros(n, device.rows, 1) for _ in range(2))
    initial, d_final = (
        torch.tensor([device.name(i, chunk) for i in range(n)]).view(n, 1, 1, 1) if device.given else None
        for chunk in (0, device.whole)
    )
    named = {"q": v, "k": v, "v": v, "g": g, "beta": beta, "initial_state": initial, "cu_seqlens": None}
    inputs = SimpleNamespace(**named, scale=1.0, use_qk_l2norm_in_kernel=False)
    residuals = SimpleNamespace(tensors={"inverse": v, "g_cumsum": g})
    schedule: Any = None
    return launch_backward.backward(schedule, inputs, residuals, (v, d_final), NEEDS)


def check(monkeypatch: pytest.MonkeyPatch, device: Device, segment: int, piece: int) -> None:
    found = launched(monkeypatch, device, segment, piece)
    assert set(found) == NEEDS
    assert device.read == Counter(range(device.sequences * device.whole))
    assert (found["v"] == 1).all()
    for n in range(device.sequences):
        assert found["initial_state"][n].item() == device.name(n, 0)


@pytest.mark.parametrize("given", [False, True], ids=["zero", "given"])
@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("chunks", range(1, 41))
def test_sequences(arithmetic: Any, monkeypatch: pytest.MonkeyPatch, chunks: int, sequences: int, given: bool) -> None:
    for piece in {0, 1, 2, 3, -(-chunks // 16), -(-chunks // 2)}:
        check(monkeypatch, Device(arithmetic, sequences, chunks, 0, given), 0, piece)


@pytest.mark.parametrize("given", [False, True], ids=["zero", "given"])
@pytest.mark.parametrize("segment", [1, 2, 3, 5, 8, 16, 17, 50])
@pytest.mark.parametrize("chunks", [1, 2, 5, 16, 17, 18, 24, 33, 40])
def test_segments(arithmetic: Any, monkeypatch: pytest.MonkeyPatch, chunks: int, segment: int, given: bool) -> None:
    """Also such that the last of a sequence has fewer chunks than the others, or than their first half."""
    for piece in {0, 1, 2, -(-segment // 16), -(-segment // 2)}:
        check(monkeypatch, Device(arithmetic, 2, chunks, segment, given), segment, piece)


@pytest.mark.gpu
@pytest.mark.parametrize("ends", [False, True], ids=["zero", "ends"])
@pytest.mark.parametrize("groups, segment", [(1, 0), (2, 0), (1, 5), (1, 6)])
@pytest.mark.parametrize("rows", [1000, 1088])
def test_pieces_give_the_same_bits(
    rows: int, groups: int, segment: int, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 chunks of which the last is not full, and 17; with 5 in a segment the last one has 1 or 2."""
    torch.manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(2, rows, 2, 64, device="cuda"), dim=-1) for _ in range(2))
    v, d_o = (torch.randn(2, rows, 4, 128, device="cuda").bfloat16() for _ in range(2))
    g = torch.nn.functional.logsigmoid(torch.randn(2, rows, 4, device="cuda")) * 0.05
    beta = torch.rand(2, rows, 4, device="cuda")
    initial, d_final = (torch.randn(2, 4, 64, 128, device="cuda") for _ in range(2))
    monkeypatch.setattr(schedules_backward, "layout", lambda *facts: (groups, segment))

    def gradients(piece: int) -> tuple[Tensor, ...]:
        monkeypatch.setattr(schedules_backward, "first_piece", lambda *facts: piece)
        tensors = (q.bfloat16(), k.bfloat16(), v, g, beta, *((initial,) if ends else ()))
        wanted = [x.detach().clone().requires_grad_() for x in tensors]
        options = {"initial_state": wanted[5] if ends else None, "output_final_state": ends}
        o, final = chunkwise.chunk_gated_delta_rule(*wanted[:5], backend="tilelang", **options)
        outputs = ([o, final], [d_o, d_final]) if ends else ([o], [d_o])
        return torch.autograd.grad(outputs[0], wanted, outputs[1])

    want = gradients(0)
    for piece in (1, 2, 3):
        for got, expected in zip(gradients(piece), want, strict=True):
            assert torch.equal(got, expected)
