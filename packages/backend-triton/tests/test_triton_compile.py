"""Kernels compiled for their architectures with no GPU: what a tile takes on chip is what its schedule says at most."""

import dataclasses
import subprocess
from pathlib import Path

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from chunkwise.autograd.residuals import ENTRY_CHUNKS
from chunkwise.verifier.device import FAKE_DEVICES
from chunkwise.verifier.facts import Facts
from chunkwise.verifier.refusal import DoesNotFit
from chunkwise_testing.hopper_descriptors import disassemble, wrong_descriptors
from chunkwise_testing.refilled_tiles import refilled_tiles
from chunkwise_triton.common import channel_gates, chunk_products, state_scan
from chunkwise_triton.dplr_delta_rule import kernels as dplr_kernels
from chunkwise_triton.dplr_delta_rule import schedules as dplr_schedules
from chunkwise_triton.gated_delta_rule import kernels, schedules
from chunkwise_triton.gla import kernels as gla_kernels
from chunkwise_triton.gla import schedules as gla_schedules
from chunkwise_triton.simple_gla import kernels as simple_gla_kernels
from chunkwise_triton.simple_gla import schedules as simple_gla_schedules

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
NVDISASM = BIN / "nvdisasm"
DOT = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
FP32 = ["g", "g_cumsum", "g_low", "to_end", "whole", "beta", "dg", "d_beta", "sums", "state_sums", "entry_states"]
FP32 += ["state_dq", "state_dk", "initial_state", "final_state", "d_initial", "d_final"]
WIDENED = ["q_k", "q_b", "a_k", "q_in", "k_out", "b_out", "d_u", "d_rhs", "states", "d_states"]
WIDENED += ["d_qk", "d_qb", "d_ak", "d_ab"]
INT32 = ["cu_seqlens", "table", "first_slots"]
SCALARS = {"T": "i32", "per_row": "i32", "scale": "fp32", "unscale": "fp32"}
FLAGS = {"INVERT": True, "KEEP": True, "HAS_INITIAL": True, "HAS_FINAL": True, "HAS_DO": True}
DELTA_RULE = {
    "wy": kernels.wy_kernel,
    "scan": state_scan.scan_kernel,
    "output": chunk_products.output_kernel,
    "local": kernels.local_gradient_kernel,
    "scan_backward": state_scan.scan_backward_kernel,
    "solve": kernels.solve_gradient_kernel,
    "state_gradient": kernels.state_gradient_kernel,
    "pair_gradient": kernels.pair_gradient_kernel,
}
SIMPLE_GLA = {
    "fused": simple_gla_kernels.fused_kernel,
    "scan": state_scan.scan_kernel,
    "output": chunk_products.output_kernel,
    "scan_backward": state_scan.scan_backward_kernel,
    "gradient": simple_gla_kernels.gradient_kernel,
}
GLA = {
    "decay": gla_kernels.decay_kernel,
    "scan": state_scan.scan_kernel,
    "steep_pairs": gla_kernels.steep_pairs_kernel,
    "output": gla_kernels.output_kernel,
    "scan_backward": state_scan.scan_backward_kernel,
    "value_gradient": gla_kernels.value_gradient_kernel,
    "gradient": gla_kernels.gradient_kernel,
    "steep_gradient": gla_kernels.steep_gradient_kernel,
}
DPLR = {
    "gates": channel_gates.channel_gate_kernel,
    "prepare": dplr_kernels.prepare_kernel,
    "prepare_backward": dplr_kernels.prepare_kernel,
    "scan": state_scan.scan_kernel,
    "output": dplr_kernels.low_rank_output_kernel,
    "scan_backward": state_scan.scan_backward_kernel,
    "value_gradient": dplr_kernels.value_gradient_kernel,
    "key_gradient": dplr_kernels.key_gradient_kernel,
}
KERNELS = {"gated_delta_rule": DELTA_RULE, "delta_rule": DELTA_RULE, "simple_gla": SIMPLE_GLA, "no_gate": SIMPLE_GLA}
KERNELS["gla"] = GLA
KERNELS |= {f"{scheme}{chunk}": DPLR for scheme in ("centred", "robust") for chunk in (16, 32, 64)}
KERNELS["fp32_states_gla"] = {"gradient": gla_kernels.gradient_kernel}
KERNELS["fp32_states"] = {name: SIMPLE_GLA[name] for name in ("scan", "output", "gradient")}  # of the full format
OF_GLA = ("gla", "fp32_states_gla")
UNGATED = ("delta_rule", "no_gate")


def facts(device, dtype, key_width, value_width, sequences=1, heads=(4, 8), chunk=64):
    sizes = {"B": sequences, "T": 4096, "H": heads[0], "HV": heads[1], "K": key_width, "V": value_width, "N": sequences}
    dtypes, flags = dict.fromkeys("qkv", dtype), {"chunk_size": chunk}
    return Facts("chunk_gated_delta_rule", FAKE_DEVICES[device], sizes, dtypes, flags)


def schedule_of(op, name, call):
    if KERNELS[op] is DELTA_RULE:
        return schedules.schedule(call)
    if KERNELS[op] is DPLR:
        return (dplr_schedules.centred if op.startswith("centred") else dplr_schedules.robust)(call)
    if op in OF_GLA:
        return gla_schedules.split(call)
    return simple_gla_schedules.fused(call) if name == "fused" else simple_gla_schedules.split(call)


def tile_of(name):
    """The field of a schedule that holds a kernel's tile."""
    return "prepare" if name == "prepare_backward" else name


def compiled(op, name, call, schedule, ragged=True, **flags):
    """The kernel of one tile, compiled for the device of the facts."""
    kernel = KERNELS[op][name]
    dplr, channels = KERNELS[op] is DPLR, KERNELS[op] is DPLR or op in OF_GLA
    delta, gated = KERNELS[op] is DELTA_RULE or dplr, op not in UNGATED
    tile = getattr(schedule, tile_of(name))
    values = {
        **{axis: call.size(axis) for axis in ("H", "HV", "K", "V")},
        **{"BK": tile.block_k, "BLOCK_K": tile.block_k, "BV": tile.block_v, "ROWS": tile.rows, "STAGES": tile.stages},
        **{"C": schedule.chunk_size, "DOT": DOT[schedule.dot], "RAGGED": ragged, "DELTA": delta, "GATED": gated},
        **{"HAS_DG": gated, "DECAYED": channels, "LOW_RANK": dplr, **FLAGS},
        **{"ENTRY_CHUNKS": ENTRY_CHUNKS if KERNELS[op] is DELTA_RULE else 0},
        **{"ASYNC": schedule.asynchronous, "SUMMED": False, "WIDTH": triton.next_power_of_2(call.size("K"))},
    }
    if dplr:
        values |= {"HV": call.size("H"), "CENTRED": schedule.centred, "SOLVE": True}
        values["INVERT"] = not name.endswith("_backward")
    elif delta:
        values["INVERSE_DOT"] = DOT[schedule.inverse_dot]
        values["PARTS"] = -(-call.size("K") // schedule.state_gradient.block_k)
    else:
        values["HV"] = call.size("H")
    activations = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32"}[call.dtype("v")]
    signature = {}
    for argument in kernel.arg_names:
        kinds = {**SCALARS, **dict.fromkeys(FP32, "*fp32"), **dict.fromkeys(INT32, "*i32")}
        kinds |= dict.fromkeys(values, "constexpr")
        if name == "state_gradient":
            kinds |= {"dq": "*fp32", "dk": "*fp32"}
        if dplr and schedule.dot == "fp32":
            kinds |= dict.fromkeys(WIDENED, "*fp32")
        if op.startswith("fp32_states"):
            kinds["states"] = "*fp32"
        signature[argument] = kinds.get(argument, activations)
    values |= flags
    constexprs = {(i,): values[a] for i, (a, kind) in enumerate(signature.items()) if kind == "constexpr"}
    attributes = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] == "*"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    stages = 1 if "STAGES" in signature else tile.stages
    target = GPUTarget("cuda", int(call.device.arch.removeprefix("sm")), 32)
    return triton.compile(source, target=target, options={"num_warps": tile.warps, "num_stages": stages})


COVERING = [
    ("H200", "bf16", 128, 128, 1),
    ("H200", "bf16", 24, 40, 64),
    ("RTX 4090", "bf16", 256, 256, 1),
    ("A100", "bf16", 128, 128, 1),
    ("B200", "bf16", 128, 128, 1),
    ("RTX 5090", "bf16", 128, 128, 1),
]
MANY_STATES = [
    ("H200", "bf16", 128, 128, 64),
    ("H200", "fp16", 256, 256, 64),
    ("RTX 5090", "bf16", 128, 128, 64),
]
# What ops share is compiled once for every device; of what differs little, the widest tiles are worth the time.
CASES = [
    *[
        ("gated_delta_rule", name, *case)
        for name in DELTA_RULE
        for case in COVERING
        if case[0] != "RTX 4090" or name in ("scan_backward", "state_gradient", "pair_gradient")
    ],
    *[("delta_rule", name, *COVERING[0]) for name in DELTA_RULE if name != "solve"],
    *[
        ("simple_gla", name, *case)
        for name in SIMPLE_GLA
        for case in (*COVERING, *MANY_STATES)
        if name == "gradient" or (case in (COVERING[0], *MANY_STATES[1:]) and (name != "fused" or case[0] == "H200"))
    ],
    *[("gla", name, *case) for name in GLA for case in (COVERING[0], COVERING[3], COVERING[5], MANY_STATES[1])],
    *[("no_gate", name, *case) for name in SIMPLE_GLA for case in (COVERING[0], MANY_STATES[1])],
    *[("fp32_states", name, *case) for name in KERNELS["fp32_states"] for case in MANY_STATES],
    *[("centred32", name, "H200", "bf16", 64, 64, 64) for name in DPLR],
    *[("robust64", name, "H200", "bf16", 128, 128, 64) for name in DPLR if name != "gates"],
    *[("robust64", name, "H200", "fp16", 64, 64, 64) for name in DPLR],  # with operands of fp32
    *[("centred64", name, "A100", "bf16", 128, 128, 1) for name in DPLR if name != "gates"],
    *[("robust16", name, "RTX 5090", "bf16", 256, 256, 1) for name in DPLR if name != "gates"],
]


@pytest.mark.parametrize(("op", "name", "device", "dtype", "key_width", "value_width", "sequences"), CASES)
def test_compiled_kernels(op, name, device, dtype, key_width, value_width, sequences):
    """A tile takes no more shared memory than its schedule says, and its matrix instructions read the right tiles."""
    chunk = int(op[-2:]) if KERNELS[op] is DPLR else 64
    call = facts(device, dtype, key_width, value_width, sequences, chunk=chunk)
    schedule = schedule_of(op, name, call)
    kernel = compiled(op, name, call, schedule)
    promised = getattr(schedule, tile_of(name)).shared_memory_bytes
    assert kernel.metadata.shared <= promised <= call.device.shared_memory_bytes
    if call.device.arch == "sm90":
        assert not wrong_descriptors(disassemble(kernel.asm["cubin"], NVDISASM))
        assert not refilled_tiles(kernel.asm["ttgir"])


@pytest.mark.parametrize(
    ("op", "name"), [("gated_delta_rule", "state_gradient"), ("simple_gla", "gradient"), ("gla", "gradient")]
)
@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_tiles_that_feed_products_are_not_read_beside_them(op, name, is_asynchronous):
    """Triton gives such a tile one place, and refills it too early. When it no longer does, ``ASYNC`` can go."""
    call = facts("H200", "bf16", 64, 128)
    schedule = schedule_of(op, name, call)
    assert schedule.asynchronous
    kernel = compiled(op, name, call, dataclasses.replace(schedule, asynchronous=is_asynchronous))
    assert bool(refilled_tiles(kernel.asm["ttgir"])) != is_asynchronous


@pytest.mark.parametrize("op", ["gla", "simple_gla", "fp32_states", "fp32_states_gla"])
@pytest.mark.parametrize("has_do", [False, True])
def test_tiles_of_gradients_of_the_final_state_alone(op, has_do):
    """Without d_o other products are left in flight; and states in fp32 feed none as they are."""
    call = facts("H200", "bf16", 128, 128, 64)
    kernel = compiled(op, "gradient", call, schedule_of(op, "gradient", call), HAS_DO=has_do)
    assert not refilled_tiles(kernel.asm["ttgir"])


MISCOMPILED = """
        /*1f50*/                   UMOV UR11, 0x80000020 ;
        /*1f70*/                   HGMMA.64x32x16.F32 R24, gdesc[UR8].tnspA.tnspB, RZ, !UPT ;
        /*1f80*/                   UIADD3 UR4, UP0, UR7, 0x40, URZ ;
        /*1f90*/                   UIADD3.64 UR8, UR16, 0x7e, URZ ;
        /*1fa0*/                   UIADD3.X UR5, UR7, -0x7fffffe0, URZ, UP0, !UPT ;
        /*1fb0*/                   UMOV UR10, UR4 ;
        /*1fd0*/                   UMOV UR11, UR5 ;
        /*2040*/                   HGMMA.64x32x16.F32 R24, gdesc[UR8].tnspA.tnspB, R24 ;
"""
BEFORE = "/*0000*/ UMOV UR9, 0x40000040 ;\n/*0010*/ UMOV UR17, 0x40000040 ;\n"


def test_a_register_that_nothing_wrote_is_found():
    """As ptxas 12.8 compiled a 64 x 32 tile behind 64 x 64 ones: UR7 is read, and never written."""
    (found,) = wrong_descriptors(BEFORE + MISCOMPILED)
    assert found.startswith("UR11 is never written")
    assert "/*2040*/" in found


def test_a_descriptor_that_nothing_wrote_is_found():
    alone = "/*0020*/ HGMMA.64x64x16.F32 R24, R56, gdesc[UR8].tnspB, R24 ;"
    (found,) = wrong_descriptors(BEFORE + alone)  # A is in registers: UR10 and UR11 are read, not UR8 and UR9
    assert found.startswith("UR11 is never written")
    assert not wrong_descriptors(BEFORE + "/*0018*/ UMOV UR11, 0x40000040 ;\n" + alone)


def test_the_same_code_with_the_right_base_is_not():
    right = MISCOMPILED.replace("UIADD3.X UR5, UR7,", "UIADD3.X UR5, URZ,")
    assert not wrong_descriptors(BEFORE + right)
    wrong = MISCOMPILED.replace("UIADD3.X UR5, UR7,", "UIADD3.X UR5, UR11,")
    assert wrong_descriptors(BEFORE + wrong)


def test_narrow_tiles_are_what_ptxas_12_8_compiles_wrongly():
    """The fault itself, in a tile that no schedule has; a newer ptxas without it would let narrow tiles come back."""
    call = facts("H200", "bf16", 128, 32)
    schedule = schedules.schedule(call)
    narrow = dataclasses.replace(schedule, local=dataclasses.replace(schedule.local, block_k=128, block_v=32))
    wrong = wrong_descriptors(disassemble(compiled("gated_delta_rule", "local", call, narrow).asm["cubin"], NVDISASM))
    version = subprocess.run([BIN / "ptxas", "--version"], capture_output=True, text=True, check=True).stdout
    assert bool(wrong) == ("release 12.8" in version), (version, wrong)


def test_16_bit_tiles_are_128_bytes_wide():
    """What keeps ptxas from the fault: one layout for all tiles, but for the states of the scans."""
    for key_width, value_width in ((16, 16), (24, 40), (128, 16)):
        schedule = schedules.schedule(facts("H200", "bf16", key_width, value_width))
        tiles = [getattr(schedule, name) for name in DELTA_RULE if not name.startswith("scan")]
        other = simple_gla_schedules.split(facts("H200", "bf16", key_width, value_width))
        tiles += [other.output, other.gradient]
        assert all(min(tile.block_k, tile.block_v) >= 64 for tile in tiles)


def test_a_device_that_is_too_small_is_told_so():
    call = facts("RTX 4090", "fp32", 256, 256)
    tiny = dataclasses.replace(call.device, shared_memory_bytes=20_000)
    found = schedules.schedule(call.on(tiny))
    assert isinstance(found, DoesNotFit)
    assert found.need_bytes > found.have_bytes == 20_000


@pytest.mark.parametrize("device", ["A100", "RTX 4090", "H200", "B200", "RTX 5090", "GB10"])
@pytest.mark.parametrize("dtype", sorted(DOT))
@pytest.mark.parametrize("widths", [(16, 16), (256, 256), (256, 16), (80, 48)])
def test_every_width_has_a_schedule_everywhere(device, dtype, widths):
    """Whether a rule refuses them is another matter."""
    assert isinstance(schedules.schedule(facts(device, dtype, *widths)), schedules.Schedule)
    assert isinstance(simple_gla_schedules.split(facts(device, dtype, *widths)), simple_gla_schedules.Split)
    assert isinstance(gla_schedules.split(facts(device, dtype, *widths)), gla_schedules.Split)
    for chunk in (16, 32, 64):
        found = dplr_schedules.robust(facts(device, dtype, *widths, chunk=chunk))
        assert isinstance(found, dplr_schedules.Schedule)
        assert found.chunk_size == chunk
    if device == "H200" and dtype != "fp32":
        assert isinstance(simple_gla_schedules.fused(facts(device, dtype, *widths)), simple_gla_schedules.Fused)


def test_few_and_many_states_take_other_tiles():
    few, many = (schedules.schedule(facts("H200", "bf16", 128, 128, n)) for n in (1, 64))
    assert few.scan.block_v < many.scan.block_v


def test_two_scans_share_a_multiprocessor():
    """Deeper pipelines where two programs still fit, shallower ones where they would not."""
    narrow, wide = (simple_gla_schedules.split(facts("H200", "bf16", width, width, 64)).scan for width in (128, 256))
    assert narrow.stages > wide.stages
    assert 2 * wide.shared_memory_bytes < FAKE_DEVICES["H200"].shared_memory_bytes
    assert simple_gla_schedules.fused(facts("H200", "bf16", 256, 256, 64)).fused.stages == 1
