"""The gated delta rule beyond the parity suite: what its schedules promise, and steps that are zero."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest
import torch

import chunkwise
from chunkwise.verifier.device import FAKE_DEVICES
from chunkwise.verifier.facts import Facts
from chunkwise.verifier.refusal import DoesNotFit
from chunkwise_tilelang.gated_delta_rule import schedules, schedules_backward

NAME = "tilelang/gated_delta_rule/fused"
HOPPER = next(device for device in FAKE_DEVICES.values() if device.arch == "sm90")


def facts(shared_memory_bytes: int, needs: frozenset[str]) -> Facts:
    sizes = {"B": 1, "T": 4096, "H": 4, "HV": 8, "K": 128, "V": 128, "N": 1}
    device = dataclasses.replace(HOPPER, shared_memory_bytes=shared_memory_bytes)
    return Facts("chunk_gated_delta_rule", device, sizes, dict.fromkeys("qkv", "bf16"), needs=needs)


def test_the_backward_must_fit_only_where_it_follows() -> None:
    forward = schedules.fused_bytes(128, 1)
    assert isinstance(schedules_backward.schedule(facts(forward, frozenset())), schedules.Schedule)
    refused = schedules_backward.schedule(facts(forward, frozenset({"q"})))
    assert refused == DoesNotFit(schedules_backward.backward_bytes(128, 128), forward)
    whole = facts(HOPPER.shared_memory_bytes, frozenset({"q"}))
    assert isinstance(schedules_backward.schedule(whole), schedules.Schedule)


@pytest.mark.parametrize("key_width", [64, 128])
def test_what_keeps_all_states_fits_hopper(key_width: int) -> None:
    lean = schedules.schedule(facts(HOPPER.shared_memory_bytes, frozenset({"q"})).with_size("K", key_width))
    assert isinstance(lean, schedules.Schedule)
    kept = schedules.keeping(lean, key_width)
    assert kept.groups == 1
    assert schedules.fused_bytes(key_width, 1) < kept.shared_memory_bytes <= HOPPER.shared_memory_bytes


@pytest.mark.parametrize("op", ["gated_delta_rule", "delta_rule"])
@pytest.mark.parametrize("parts", [("forward",), ("backward",), ("forward", "backward")])
def test_what_a_call_of_each_format_compiles(monkeypatch: pytest.MonkeyPatch, op: str, parts: tuple[str, ...]) -> None:
    """Before it runs: the forward that keeps all states, w, and the gradients from what was kept."""
    from chunkwise_tilelang.gated_delta_rule import launch_backward  # imports the toolkit

    work: list[Any] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch_backward, "_multiprocessors", lambda index: 132)
    monkeypatch.setattr(launch_backward.compiling, "build", lambda found, index: work.extend(found))
    table = importlib.import_module(f"chunkwise_tilelang.{op}.implementations").FUSED
    call = facts(HOPPER.shared_memory_bytes, frozenset({"q"}))
    flags = {"ragged": True, "use_qk_l2norm_in_kernel": False, "output_final_state": True}
    call = dataclasses.replace(call, dtypes={**call.dtypes, "g": "fp32", "beta": "bf16"}, flags=flags)
    found = {}
    for kept in table.residuals:
        given = dataclasses.replace(call, residuals=kept)
        table.function("compile")(table.schedule(given), given, parts)
        found[kept] = {str(builder).rpartition(":")[2]: constants for builder, constants in work}
        work.clear()
    lean, full = found.values()
    own = {"forward": {"weights": {}, "fused": {"kept": True}}, "backward": {"gradients": {"full": True}}}
    expected = {name: constants for part in parts for name, constants in own[part].items()}
    changed = {name for name in full if full[name] != lean.get(name)}
    assert changed == expected.keys()
    assert all(constants.items() <= full[name].items() for name, constants in expected.items())


@pytest.mark.parametrize("groups", [1, 2])
def test_registers_that_change_hands(groups: int) -> None:
    """A block that asks for more than it was started with waits for ever."""
    blocks = [
        (128 * (groups + 2), groups * states + pairs + copies)
        for states, pairs, copies in (schedules.REGISTERS[groups], schedules_backward.PASSES_REGISTERS[groups])
    ]
    both = (schedules.SUMMARY_REGISTERS, schedules_backward.GRADIENTS_REGISTERS)
    blocks += [(384, 2 * computes + loads) for computes, loads in both]
    for threads, of_groups in blocks:
        wanted = 128 * of_groups
        assert wanted <= threads * (65536 // threads // 8 * 8)


@pytest.mark.parametrize("sequences, groups", [(1, 1), (8, 2), (9, 2)])
def test_groups_of_the_passes(sequences: int, groups: int) -> None:
    """Both passes run side by side: 32 heads of one sequence fill an H200 with blocks of one group."""
    assert schedules_backward.groups(sequences, 32, 128, 132) == groups
    assert schedules_backward.groups(sequences, 32, 192, 132) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_of_zero(dtype: torch.dtype) -> None:
    """Nothing divides by beta, which scales what each row adds to the state."""
    torch.manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(1, 200, 2, 64, device="cuda"), dim=-1) for _ in range(2))
    v = torch.randn(1, 200, 4, 64, device="cuda")
    g = torch.nn.functional.logsigmoid(torch.randn(1, 200, 4, device="cuda"))
    beta = torch.rand(1, 200, 4, device="cuda")
    beta[:, ::7], beta[:, 1::11], beta[:, 2::11] = 0.0, 1e-5, -1e-5
    d_o = torch.randn_like(v)

    def gradient(backend: str, wide: bool) -> torch.Tensor:
        cast = [x if wide else x.to(dtype) for x in (q.to(dtype).float(), k.to(dtype).float(), v.to(dtype).float())]
        steps = beta.clone().requires_grad_()
        o, _ = chunkwise.chunk_gated_delta_rule(*cast, g, steps, backend=backend)
        return torch.autograd.grad(o, steps, d_o.to(dtype).to(o.dtype))[0]

    got, want = gradient(NAME, wide=False), gradient("torch", wide=True)
    for rows in (beta == 0.0, (beta != 0.0) & (beta.abs() < 1e-4), beta.abs() >= 1e-4):
        assert (got - want)[rows].norm() <= 8e-3 * want[rows].norm()
