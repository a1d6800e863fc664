"""Attention with sinks compiled for its architectures with no GPU: shared memory, spills, matrix instructions."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from chunkwise.protocol.axes import DTYPES
from chunkwise.verifier.device import FAKE_DEVICES
from chunkwise.verifier.facts import Facts
from chunkwise.verifier.refusal import DoesNotFit
from chunkwise_testing.hopper_descriptors import disassemble, wrong_descriptors
from chunkwise_testing.refilled_tiles import refilled_tiles
from chunkwise_triton.common.call import meta_inputs
from chunkwise_triton.sink_attention import kernels, launch, schedules

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
DOT = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
KERNELS = {
    "forward": kernels.forward_kernel,
    "query_gradient": kernels.query_gradient_kernel,
    "key_gradient": kernels.key_gradient_kernel,
}
KINDS = {
    **dict.fromkeys(("sinks", "lse", "statistics", "scale"), "fp32"),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "table", "T", "S", "per_row", "window"), "i32"),
}
SCALARS = ("scale", "T", "S", "per_row", "window")


def facts(device, dtype, width, window=None, heads=(16, 2)):
    sizes = {"B": 1, "T": 4096, "S": 4096, "HQ": heads[0], "HK": heads[1], "D": width, "N": 1}
    flags = {"window_size": window, "causal": True}
    return Facts("sink_attention", FAKE_DEVICES[device], sizes, dict.fromkeys("qkv", dtype), flags)


def compiled(name, call, schedule, ragged):
    """The kernel of one tile, compiled for the device of the facts."""
    kernel, tile = KERNELS[name], getattr(schedule, name)
    values = {
        **{axis: call.size(axis) for axis in ("HQ", "HK", "D")},
        **{"BM": tile.queries, "BN": tile.keys, "BD": schedule.width, "PACK": tile.pack, "DOT": DOT[schedule.dot]},
        **{"RAGGED": ragged, "CAUSAL": True, "WINDOWED": schedule.windowed, "KEEP": True},
        **{"DK": True, "DV": not schedule.apart},
    }
    signature = {}
    for argument in kernel.arg_names:
        kind = KINDS.get(argument, schedule.dot)
        signature[argument] = "constexpr" if argument in values else kind if argument in SCALARS else f"*{kind}"
    constexprs = {(i,): values[a] for i, (a, kind) in enumerate(signature.items()) if kind == "constexpr"}
    attributes = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] == "*"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    target = GPUTarget("cuda", int(call.device.arch.removeprefix("sm")), 32)
    return triton.compile(source, target=target, options={"num_warps": tile.warps, "num_stages": tile.stages})


def stack_bytes(kernel, folder):
    """What a thread keeps in local memory."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    usage = subprocess.run([BIN / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage)[1])


# device, dtype, D, window, ragged, and the most bytes that a thread may spill
CASES = [
    ("H200", "bf16", 128, None, False, 200),
    ("H200", "bf16", 64, 128, True, 160),
    ("H200", "bf16", 256, None, False, 160),
    ("H200", "fp32", 24, None, True, 160),
    ("H200", "fp32", 64, None, False, 160),
    ("H200", "fp32", 256, None, False, 700),
    ("A100", "bf16", 128, 128, True, 160),
    ("B200", "bf16", 128, None, False, 600),
    ("RTX 5090", "bf16", 128, None, False, 160),
]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("device", "dtype", "width", "window", "ragged", "spilled"), CASES)
def test_compiled_kernels(name, device, dtype, width, window, ragged, spilled, tmp_path):
    """A tile takes no more shared memory than its schedule says, spills little, and reads the right tiles."""
    call = facts(device, dtype, width, window)
    schedule = schedules.schedule(call)
    kernel = compiled(name, call, schedule, ragged)
    promised = getattr(schedule, name).shared_memory_bytes
    assert kernel.metadata.shared <= promised <= call.device.shared_memory_bytes
    assert stack_bytes(kernel, tmp_path) <= spilled
    if call.device.arch == "sm90":
        assert not wrong_descriptors(disassemble(kernel.asm["cubin"], BIN / "nvdisasm"))
        assert not refilled_tiles(kernel.asm["ttgir"])


@pytest.mark.parametrize("device", ["A100", "RTX 4090", "H200", "B200", "RTX 5090", "GB10"])
@pytest.mark.parametrize("dtype", sorted(DOT))
@pytest.mark.parametrize("width", [16, 64, 80, 96, 128, 256])
def test_every_width_has_a_schedule_everywhere(device, dtype, width):
    found = schedules.schedule(facts(device, dtype, width))
    assert isinstance(found, schedules.Schedule)
    assert found.width >= max(width, 128 // schedules.BYTES[dtype])


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
def test_kernels_are_built_for_sinks_of_any_dtype(dtype):
    call = facts("H200", "bf16", 64).with_dtype("sinks", dtype).with_flag("ragged", True)
    inputs = meta_inputs(schedules.schedule(call), call, launch._AXES, ("causal",), launch._OFFSETS)
    assert inputs.sinks.dtype == DTYPES[dtype]
    assert inputs.q.dtype == torch.bfloat16


def test_a_device_that_is_too_small_is_told_so():
    call = facts("RTX 4090", "bf16", 256)
    found = schedules.schedule(call.on(call.device.__class__("small", "cuda", "sm89", 1, 20_000)))
    assert isinstance(found, DoesNotFit)
    assert found.need_bytes > found.have_bytes == 20_000


def test_only_heads_of_one_group_share_a_block():
    for heads, pack in (((6, 3), 2), ((3, 3), 1), ((12, 1), 4), ((7, 1), 1), ((8, 1), 8)):
        schedule = schedules.schedule(facts("H200", "bf16", 64, 128, heads))
        assert [t.pack for t in (schedule.forward, schedule.query_gradient, schedule.key_gradient)] == [pack] * 3


def test_narrow_windows_take_other_tiles():
    narrow, wide, none = (schedules.schedule(facts("H200", "bf16", 64, window)) for window in (128, 2048, None))
    assert narrow.forward.keys < wide.forward.keys == none.forward.keys
    assert narrow.key_gradient.pack > wide.key_gradient.pack == 1
    assert wide.windowed
    assert not none.windowed
