"""Kernels compiled for their architectures with no GPU: what a tile takes on chip is what its schedule says at most."""

import dataclasses

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from chunkwise.verifier.device import FAKE_DEVICES
from chunkwise.verifier.facts import Facts
from chunkwise.verifier.refusal import DoesNotFit
from chunkwise_triton.common import state_scan
from chunkwise_triton.gated_delta_rule import kernels, schedules

DOT = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
FP32 = ["g", "g_cumsum", "to_end", "whole", "beta", "dg", "d_beta", "sums", "state_sums", "state_dq", "state_dk"]
FP32 += ["initial_state", "final_state", "d_initial", "d_final"]
INT32 = ["cu_seqlens", "table", "first_slots"]
SCALARS = {"T": "i32", "per_row": "i32", "plane": "i32", "scale": "fp32"}
SCAN = {"HAS_INITIAL": True, "HAS_FINAL": True}
KERNELS = {
    "wy": (kernels.wy_kernel, {"INVERT": True}),
    "scan": (state_scan.scan_kernel, SCAN),
    "output": (kernels.output_kernel, {}),
    "local": (kernels.local_gradient_kernel, {}),
    "scan_backward": (state_scan.scan_backward_kernel, {**SCAN, "HAS_DO": True}),
    "state_gradient": (kernels.state_gradient_kernel, {"HAS_DO": True}),
    "pair_gradient": (kernels.pair_gradient_kernel, {"HAS_DO": True}),
}


def facts(device, dtype, key_width, value_width, sequences):
    sizes = {"B": sequences, "T": 4096, "H": 4, "HV": 8, "K": key_width, "V": value_width, "N": sequences}
    return Facts("chunk_gated_delta_rule", FAKE_DEVICES[device], sizes, dict.fromkeys("qkv", dtype))


def compiled(name, call, schedule):
    """The kernel of one tile, compiled for the device of the facts."""
    kernel, constants = KERNELS[name]
    tile = getattr(schedule, name)
    values = {
        **{axis: call.size(axis) for axis in ("H", "HV", "K", "V")},
        **{"C": 64, "BK": schedule.block_k, "BV": tile.block_v, "DOT": DOT[schedule.dot], "RAGGED": True},
        **{"INVERSE_DOT": DOT[schedule.inverse_dot], "STAGES": tile.stages, "BLOCK_K": schedule.gradient_block_k},
        **{"PARTS": schedule.block_k // schedule.gradient_block_k, **constants},
    }
    activations = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32"}[schedule.dot]
    signature = {}
    for argument in kernel.arg_names:
        kinds = {**SCALARS, **dict.fromkeys(FP32, "*fp32"), **dict.fromkeys(INT32, "*i32")}
        kinds |= dict.fromkeys(values, "constexpr")
        if name == "state_gradient":
            kinds |= {"dq": "*fp32", "dk": "*fp32"}
        signature[argument] = kinds.get(argument, activations)
    constexprs = {argument: values[argument] for argument, kind in signature.items() if kind == "constexpr"}
    attributes = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] == "*"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    stages = 1 if "STAGES" in constexprs else tile.stages
    target = GPUTarget("cuda", int(call.device.arch.removeprefix("sm")), 32)
    return triton.compile(source, target=target, options={"num_warps": tile.warps, "num_stages": stages})


COVERING = [
    ("H200", "bf16", 128, 128, 1),
    ("RTX 4090", "fp16", 64, 128, 64),
]


@pytest.mark.parametrize(("device", "dtype", "key_width", "value_width", "sequences"), COVERING)
@pytest.mark.parametrize("name", sorted(KERNELS))
def test_shared_memory_is_within_the_schedule(name, device, dtype, key_width, value_width, sequences):
    call = facts(device, dtype, key_width, value_width, sequences)
    schedule = schedules.schedule(call)
    taken = compiled(name, call, schedule).metadata.shared
    promised = getattr(schedule, name).shared_memory_bytes
    assert taken <= promised <= call.device.shared_memory_bytes


def test_a_device_that_is_too_small_is_told_so():
    call = facts("RTX 4090", "fp32", 256, 256, 1)
    tiny = dataclasses.replace(call.device, shared_memory_bytes=20_000)
    found = schedules.schedule(call.on(tiny))
    assert isinstance(found, DoesNotFit)
    assert found.need_bytes > found.have_bytes == 20_000


def test_few_and_many_states_take_other_tiles():
    few, many = (schedules.schedule(facts("H200", "bf16", 128, 128, n)) for n in (1, 64))
    assert few.scan.block_v < many.scan.block_v
