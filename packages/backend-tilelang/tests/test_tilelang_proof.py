"""Kernels compiled for their architectures with no GPU: what a compiler says of each, held to its schedule."""

from __future__ import annotations

import importlib.util
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from chunkwise_testing.compiled import Compiled, compile_kernel, overlays, stray_syncs
from chunkwise_tilelang.backend import BACKEND
from chunkwise_tilelang.toolkit import compile as compiling
from chunkwise_tilelang.toolkit import discover
from chunkwise_tilelang.toolkit.stubs import compile_flags
from chunkwise_tilelang.toolkit.variants import Variant, variants

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="tilelang is published for Linux")

NVCC = discover._in_wheel() or next((found.path for found in discover.discover() if found.version), None)
RACE = "Data race detected"
PRODUCT_BYTES = 2 * (64 * 64 + 64 * 128) * 2  # two stages of a tile of A and one of B, bf16


@pytest.fixture(scope="module")
def samples() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_samples", Path(__file__).with_name("kernel_samples.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiled(function: object, arch: str = "sm_90a") -> Compiled:
    assert NVCC is not None
    (one,) = compile_kernel(function, arch, NVCC, compile_flags("nvcc"), compiling.PASS_CONFIGS)
    return one


@pytest.mark.compiler
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_kernel_with_nothing_wrong(samples: ModuleType, arch: str, dtype: str) -> None:
    kernel = compiled(samples.product(rows=64, dtype=dtype), arch)
    need = PRODUCT_BYTES // (1 if dtype == "bfloat16" else 2) + 1024  # TMA's barriers, rounded up
    assert kernel.problems(need) == []
    assert kernel.problems(need - 16) == [
        f"product_kernel_kernel: takes {need} bytes of shared memory, its schedule says {need - 16}"
    ]
    assert kernel.threads >= 128
    assert 32 < kernel.registers <= 255
    assert kernel.barriers >= 1


@pytest.mark.compiler
def test_spills(samples: ModuleType) -> None:
    kernel = compiled(samples.spilling(width=320))
    assert kernel.registers == 255
    assert kernel.spill_bytes > 500
    said = f"spilling_kernel_kernel: spills {kernel.spill_bytes} bytes a thread, 0 are allowed for"
    assert kernel.problems(kernel.shared_memory_bytes) == [said]
    assert kernel.problems(kernel.shared_memory_bytes, spill_bytes=kernel.spill_bytes) == []


@pytest.mark.compiler
def test_notes_on_asynchronous_products(samples: ModuleType) -> None:
    assert compiled(samples.chained(early=False)).notes == ()
    kernel = compiled(samples.chained(early=True))
    (problem,) = kernel.problems(kernel.shared_memory_bytes)
    assert problem.startswith("chained_kernel_kernel: (C75")


@pytest.mark.compiler
def test_a_barrier_between_producer_and_consumer(samples: ModuleType) -> None:
    good = compiled(samples.producer(siblings=False))
    assert good.source.count("__syncthreads()") == 1  # after the barriers are made, before threads part
    assert good.problems(2048) == []  # a ring of 1,024, and 32 bytes of barriers that are rounded up
    bad = compiled(samples.producer(siblings=True))
    (problem,) = bad.problems(2048)
    assert problem.endswith("a barrier of all threads where they have parted: __syncthreads();")


@pytest.mark.compiler
def test_a_data_race(samples: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    compiled(samples.racing(apart=True))
    assert RACE not in capfd.readouterr().err
    compiled(samples.racing(apart=False))
    assert RACE in capfd.readouterr().err


SYNCS = {
    "before threads part": ("__syncthreads();\nif (threadIdx.x < 32) {\nfor (;;) {\nb.wait(0);\n}\n}", []),
    "in a part": ("if (threadIdx.x < 32) {\nfor (;;) {\n__syncthreads();\n}\n}", [3]),
    "in the other part": ("if (threadIdx.x < 32) {\nx;\n} else {\n__syncthreads();\n}", [4]),
    "under another condition": ("if (n < 32) {\n__syncthreads();\n} else {\n__syncthreads();\n}", []),
    "in a loop of all": ("for (int i = threadIdx.x; i < 4; ++i) {\n__syncthreads();\n}", []),
    "after a copy by some": ("if (threadIdx.x < 32) {\nfor (;;) {\nx;\n}\n}\n__syncthreads();", []),
    "after both parts": ("if (threadIdx.x < 32) {\nfor (;;) {\nb.wait(0);\n}\n}\n__syncthreads();", []),
}


@pytest.mark.parametrize("case", SYNCS)
def test_where_a_barrier_is_stray(case: str) -> None:
    body, lines = SYNCS[case]
    head = 'extern "C" __global__ void kernel() {\n'
    assert list(stray_syncs(f"{head}{body}\n}}\n{head}__syncthreads();\n}}\n")) == [line + 1 for line in lines]


SYNC = "__syncthreads();"
PLACES = {
    "with a barrier between": (["early[i] = x;", SYNC, "y = early[j];", SYNC, "late[i] = y;"], ""),
    "with none": (["early[i] = x;", SYNC, "y = early[j];", "late[i] = y;"], "late takes the place of early"),
    "on a line with the other": (["late[i] = early[j];"], "late takes the place of early"),
    "in the other part of a condition": (["if (t) {", "early[i] = x;", "} else {", "late[i] = x;", "}"], "late takes"),
    "from turn to turn": (
        ["for (;;) {", "early[i] = x;", SYNC, "late[i] = early_too;", SYNC, "y = late[j];", "}"],
        "early takes the place of late",
    ),
    "in the next turn, behind a barrier": (["for (;;) {", "early[i] = x;", SYNC, "late[i] = x;", SYNC, "}"], ""),
    "somewhere else": (["early[i] = x;", "behind[i] = x;"], ""),
}


@pytest.mark.parametrize("case", PLACES)
def test_where_a_tile_takes_anothers_place(case: str) -> None:
    body, wanted = PLACES[case]
    sizes, places = {"early": 64, "late": 32, "behind": 32}, {"early": 0, "late": 32, "behind": 64}
    head = [f"  void* {name} = ((void*)((char*)buf_dyn_shmem + {at}));" for name, at in places.items()]
    found = list(overlays("\n".join([*head, *body]), sizes))
    assert [text.startswith(wanted) for text in found] == ([True] if wanted else [])


@pytest.mark.compiler
def test_a_tile_in_another_ones_place(samples: ModuleType) -> None:
    kernel = compiled(samples.overlaid(barrier=True))
    assert kernel.shared_memory_bytes == 1024  # of two tiles of 1,024
    assert kernel.problems(1024) == []
    (problem,) = compiled(samples.overlaid(barrier=False)).problems(1024)
    assert problem.endswith("late takes the place of early, with no barrier of all threads between")


# --- the backend's own -----------------------------------------------------------------------------------


def problems(variant: Variant) -> list[str]:
    assert NVCC is not None
    function = variant.builder(**variant.constants)
    kernels = compile_kernel(function, variant.arch, NVCC, compile_flags("nvcc"), compiling.PASS_CONFIGS)
    return [
        f"{variant.name}: {text}"
        for kernel in kernels
        for text in kernel.problems(variant.shared_memory_bytes, variant.spill_bytes)
    ]


def prove(chosen: list[Variant], capfd: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = [text for texts in pool.map(problems, chosen) for text in texts]
    assert not found, "\n".join(found)
    said = capfd.readouterr().err
    assert RACE not in said, said


@pytest.mark.compiler
def test_the_table(capfd: pytest.CaptureFixture[str]) -> None:
    """A set that covers the kernels of the table, small enough for a machine of two cores."""
    chosen = variants()
    assert len(chosen) <= 60
    assert bool(chosen) == bool(BACKEND.tables)  # what can be called is proved
    prove(chosen, capfd)


@pytest.mark.compiler
@pytest.mark.gpu
def test_the_whole_table(capfd: pytest.CaptureFixture[str]) -> None:
    """Every kernel; on a GPU host for its cores, not for its GPU."""
    prove(variants(whole=True), capfd)
