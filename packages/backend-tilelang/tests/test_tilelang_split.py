"""Long sequences in segments: when they are split, and that the parts give what the whole does."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

import chunkwise
from chunkwise.verifier.device import FAKE_DEVICES
from chunkwise.verifier.facts import Facts
from chunkwise_tilelang.gated_delta_rule import schedules, schedules_backward

HOPPER = FAKE_DEVICES["H200"]
KEYS = 64  # of the calls on a GPU


def layout(sequences: int, tokens: int, value_heads: int, width: int = 128) -> tuple[int, int, int]:
    sizes = {"B": sequences, "T": tokens, "H": value_heads, "HV": value_heads, "K": 128, "V": width, "N": sequences}
    return schedules.layout(Facts("chunk_gated_delta_rule", HOPPER, sizes, dict.fromkeys("qkv", "bf16")))


@pytest.mark.parametrize("sequences, tokens, value_heads", [(1, 8192, 8), (1, 32768, 8), (1, 32768, 32), (4, 8192, 8)])
def test_few_states_are_split(sequences: int, tokens: int, value_heads: int) -> None:
    groups, segment, _ = layout(sequences, tokens, value_heads)
    chunks = tokens // schedules.CHUNK
    segments = -(-chunks // segment)
    assert groups == 1
    assert 2 <= segment < chunks
    assert segments * sequences * value_heads * 2 <= 2 * HOPPER.sm_count  # no more parts than keep it busy


@pytest.mark.parametrize("sequences, tokens, value_heads", [(8, 4096, 32), (1, 32768, 64), (64, 1024, 8), (1, 128, 4)])
def test_enough_states_and_short_sequences_are_not(sequences: int, tokens: int, value_heads: int) -> None:
    assert layout(sequences, tokens, value_heads)[1] == 0


def test_two_groups_need_their_columns() -> None:
    assert layout(8, 4096, 32)[0] == 2
    assert layout(8, 4096, 32, width=192)[0] == 1


def test_no_sequences() -> None:
    sizes = {"B": 1, "T": 0, "H": 2, "HV": 4, "K": 64, "V": 64, "N": 0}
    facts = Facts("chunk_gated_delta_rule", HOPPER, sizes, dict.fromkeys("qkv", "bf16"), {"ragged": True})
    assert schedules.layout(facts)[1] == 0


def backward_layout(sequences: int, tokens: int, value_heads: int, width: int = 128) -> tuple[int, int]:
    return schedules_backward.layout(sequences, sequences * tokens, (value_heads, 128, width), HOPPER.sm_count)


@pytest.mark.parametrize("sequences, tokens, value_heads", [(1, 8192, 4), (1, 32768, 4), (2, 8192, 2), (1, 8192, 8)])
def test_few_states_are_split_backwards(sequences: int, tokens: int, value_heads: int) -> None:
    groups, segment = backward_layout(sequences, tokens, value_heads)
    chunks = tokens // schedules.CHUNK
    segments = -(-chunks // segment)
    assert groups == 1
    assert 2 <= segment <= chunks // 2
    assert segments == 32 // (sequences * value_heads)  # as measured; both passes fill one round


@pytest.mark.parametrize("sequences, tokens, value_heads", [(8, 4096, 32), (1, 32768, 64), (1, 32768, 16), (1, 512, 4)])
def test_enough_states_and_short_sequences_are_not_split_backwards(
    sequences: int, tokens: int, value_heads: int
) -> None:
    groups = schedules_backward.groups(sequences, value_heads, 128, HOPPER.sm_count)
    assert backward_layout(sequences, tokens, value_heads) == (groups, 0)


def test_no_sequences_backwards() -> None:
    assert schedules_backward.layout(0, 0, (4, 128, 128), HOPPER.sm_count)[1] == 0


def test_blocks_take_the_first_free_multiprocessor() -> None:
    """Against going through them one by one."""
    for long, short, multiprocessors in ((3, 5, 4), (4, 9, 4), (7, 1, 5), (0, 6, 4), (12, 30, 8)):
        free = [0.0] * multiprocessors
        for blocks, time in ((long, 2.0), (short, 1.25)):
            for _ in range(blocks):
                free.sort()
                free[0] += time
        assert schedules_backward._rounds_us((long, 2.0), (short, 1.25), multiprocessors) == pytest.approx(max(free))


def drawn(
    offsets: tuple[int, ...] | None,
) -> tuple[list[torch.Tensor], Callable[[], torch.Tensor], torch.Tensor | None, int]:
    """q, k, v, g and beta on the GPU, what draws their states, the offsets there, and how many rows are not padding."""
    torch.manual_seed(0)
    batch, rows = (2 if offsets is None else 1), 1000
    q, k = (torch.nn.functional.normalize(torch.randn(batch, rows, 2, KEYS, device="cuda"), dim=-1) for _ in "qk")
    v = torch.randn(batch, rows, 4, 128, device="cuda")
    g = torch.nn.functional.logsigmoid(torch.randn(batch, rows, 4, device="cuda")) * 0.05
    beta = torch.rand(batch, rows, 4, device="cuda")
    sequences = batch if offsets is None else len(offsets) - 1
    cu_seqlens = None if offsets is None else torch.tensor(offsets, dtype=torch.int32, device="cuda")
    live = rows if offsets is None else offsets[-1]
    return [q, k, v, g, beta], lambda: torch.randn(sequences, 4, KEYS, 128, device="cuda"), cu_seqlens, live


@pytest.mark.gpu
@pytest.mark.parametrize("initial", [False, True], ids=["zero", "initial"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("segment", [1, 2, 3, 100])
@pytest.mark.parametrize("offsets", [None, (0, 0, 63, 64, 65, 300, 300, 801, 960)], ids=["dense", "ragged"])
def test_segments_equal_the_whole(offsets: tuple[int, ...] | None, segment: int, groups: int, initial: bool) -> None:
    """Padding holds NaN; one segment for all chunks goes through the same kernels."""
    from chunkwise_tilelang.gated_delta_rule import launch  # imports tilelang

    (q, k, v, g, beta), states, cu_seqlens, live = drawn(offsets)
    tensors = [x.bfloat16() for x in (q, k, v)]
    state = states() if initial else None
    options = {"initial_state": state, "output_final_state": True, "cu_seqlens": cu_seqlens}
    want = chunkwise.chunk_gated_delta_rule(*(x.float() for x in tensors), g, beta, backend="torch", **options)
    for x in (*tensors, g, beta):
        x[:, live:] = torch.nan
    named = dict(zip(("q", "k", "v"), tensors, strict=True), g=g, beta=beta, use_qk_l2norm_in_kernel=False)
    inputs = SimpleNamespace(**named, scale=KEYS**-0.5, **options)
    tiles = (schedules.STAGES, schedules.REGISTERS[groups], schedules.fused_bytes(KEYS, groups))
    schedule = schedules.Schedule(schedules.CHUNK, groups, *tiles, segment, groups)
    (o, final), _ = launch.forward(schedule, inputs, None)
    assert not bool(o[:, live:].any())
    for got, expected in ((o[:, :live], want[0][:, :live]), (final, want[1])):
        assert (got.float() - expected).norm() <= 6e-3 * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("ends", [False, True], ids=["zero", "ends"])
@pytest.mark.parametrize("segment", [1, 2, 3, 100])
@pytest.mark.parametrize("offsets", [None, (0, 0, 63, 64, 65, 300, 300, 801, 960)], ids=["dense", "ragged"])
def test_gradients_of_segments_equal_those_of_the_whole(
    offsets: tuple[int, ...] | None, segment: int, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an initial state and a gradient of the final one, or without; padding holds NaN."""
    (q, k, v, g, beta), states, cu_seqlens, live = drawn(offsets)
    state, d_final = states(), states()
    q, k, v, d_o = (x.half() for x in (q, k, v, torch.randn_like(v)))

    def gradients(backend: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wanted = [x.detach().clone().requires_grad_() for x in (*tensors, *((state,) if ends else ()))]
        options = {"initial_state": wanted[5] if ends else None, "output_final_state": ends, "cu_seqlens": cu_seqlens}
        o, final = chunkwise.chunk_gated_delta_rule(*wanted[:5], backend=backend, **options)
        given = torch.nan_to_num(d_o).to(o.dtype) if backend == "torch" else d_o
        outputs = ([o, final], [given, d_final]) if ends else ([o], [given])
        return torch.autograd.grad(outputs[0], wanted, outputs[1])

    want = gradients("torch", *(x.float() for x in (q, k, v)), g, beta)
    for x in (q, k, v, g, beta, d_o):
        x[:, live:] = torch.nan
    monkeypatch.setattr(schedules_backward, "layout", lambda *facts: (1, segment))
    got = gradients("tilelang", q, k, v, g, beta)
    for ours, expected in zip(got[:5], want[:5], strict=True):
        assert not bool(ours[:, live:].any())
        assert (ours.float() - expected)[:, :live].norm() <= 6e-3 * expected[:, :live].norm()
    for ours, expected in zip(got[5:], want[5:], strict=True):
        assert (ours - expected).norm() <= 6e-3 * expected.norm()
