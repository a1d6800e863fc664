"""Long sequences in segments: when they are split, and that the parts give what the whole does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import chunkwise
from chunkwise.verifier.device import FAKE_DEVICES
from chunkwise.verifier.facts import Facts
from chunkwise_tilelang.gated_delta_rule import schedules

HOPPER = FAKE_DEVICES["H200"]


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


@pytest.mark.gpu
@pytest.mark.parametrize("initial", [False, True], ids=["zero", "initial"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("segment", [1, 2, 3, 100])
@pytest.mark.parametrize("offsets", [None, (0, 0, 63, 64, 65, 300, 300, 801, 960)], ids=["dense", "ragged"])
def test_segments_equal_the_whole(offsets: tuple[int, ...] | None, segment: int, groups: int, initial: bool) -> None:
    """Padding holds NaN; one segment for all chunks goes through the same kernels."""
    from chunkwise_tilelang.gated_delta_rule import launch  # imports tilelang

    torch.manual_seed(0)
    batch, rows, heads, value_heads, keys, values = (2 if offsets is None else 1), 1000, 2, 4, 64, 128
    q, k = (torch.nn.functional.normalize(torch.randn(batch, rows, heads, keys, device="cuda"), dim=-1) for _ in "qk")
    v = torch.randn(batch, rows, value_heads, values, device="cuda")
    g = torch.nn.functional.logsigmoid(torch.randn(batch, rows, value_heads, device="cuda")) * 0.05
    beta = torch.rand(batch, rows, value_heads, device="cuda")
    sequences = batch if offsets is None else len(offsets) - 1
    state = torch.randn(sequences, value_heads, keys, values, device="cuda") if initial else None
    cu_seqlens = None if offsets is None else torch.tensor(offsets, dtype=torch.int32, device="cuda")
    live = rows if offsets is None else offsets[-1]
    tensors = [x.bfloat16() for x in (q, k, v)]
    options = {"initial_state": state, "output_final_state": True, "cu_seqlens": cu_seqlens}
    want = chunkwise.chunk_gated_delta_rule(*(x.float() for x in tensors), g, beta, backend="torch", **options)
    for x in (*tensors, g, beta):
        x[:, live:] = torch.nan
    named = dict(zip(("q", "k", "v"), tensors, strict=True), g=g, beta=beta, use_qk_l2norm_in_kernel=False)
    inputs = SimpleNamespace(**named, scale=keys**-0.5, **options)
    tiles = (schedules.STAGES, schedules.REGISTERS[groups], schedules.fused_bytes(keys, groups))
    schedule = schedules.Schedule(schedules.CHUNK, groups, *tiles, segment, groups)
    (o, final), _ = launch.forward(schedule, inputs, None)
    assert not bool(o[:, live:].any())
    for got, expected in ((o[:, :live], want[0][:, :live]), (final, want[1])):
        assert (got.float() - expected).norm() <= 6e-3 * expected.norm()
