"""The header stubs, proved with a real compiler and real headers of CUDA 12.6 (NVRTC; no GPU, no nvcc)."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from chunkwise_tilelang.toolkit import stubs
from chunkwise_tilelang.toolkit.variants import variants

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="tilelang is published for Linux")

HEADERS = ("nvidia-cuda-runtime-cu12", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-cccl-cu12")
# A compiler of 12.8 or newer beside headers of 12.6: TileLang's templates ask the compiler, and this is what it says.
NEWER_COMPILER = ("-U__CUDACC_VER_MINOR__", "-D__CUDACC_VER_MINOR__=8")
STUB = tuple(stubs.compile_flags("nvrtc"))
DTYPES = ("bfloat16", "float8_e4m3fn")


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One include folder of CUDA 12.6, merged from its wheels."""
    tree = tmp_path_factory.mktemp("cuda-12.6") / "include"
    for name in HEADERS:
        distribution = importlib.metadata.distribution(name)
        assert distribution.version.startswith("12.6."), f"{name} {distribution.version}"
        for file in distribution.files or ():
            package, _, inside = str(file).partition("/include/")
            top = package.count("/") == 1  # nvidia/cuda_runtime, not the folders within
            if top and inside and not inside.endswith(".py"):
                target = tree / inside
                target.parent.mkdir(parents=True, exist_ok=True)
                os.symlink(str(file.locate()), target)
    return tree


Compile = Callable[..., str]


@pytest.fixture(scope="module")
def compile_(headers: Path) -> Compile:
    """Compiles a TileLang kernel; returns the errors, an empty text where there are none."""
    import tilelang

    root = Path(tilelang.__file__).parent
    folders = (root / "src", root / "3rdparty" / "cutlass" / "include", headers)

    def run(source: str, target: str, *flags: str, before: tuple[Path, ...] = ()) -> str:
        code = "#include <tl_templates/cuda/nvrtc_std.h>\n" + source
        options = ["-default-device", f"--gpu-architecture={target}", *(f"-I{p}" for p in (*before, *folders)), *flags]
        asked = json.dumps({"source": code, "options": options})
        command = [sys.executable, str(Path(__file__).with_name("cuda_12_6.py"))]
        ran = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=400, check=False)
        assert ran.returncode == 0, ran.stderr
        return str(json.loads(ran.stdout))

    return run


def lower(function: Any) -> str:
    """Its CUDA C++ for sm_90a."""
    import tilelang
    from tilelang import tvm

    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
    with target:
        return str(tilelang.lower(function, target=target).kernel_source)


@pytest.fixture(scope="module", params=DTYPES)
def source(request: pytest.FixtureRequest, samples: ModuleType) -> str:
    """The CUDA C++ of a matrix product for sm_90a."""
    return lower(samples.product(rows=128, dtype=request.param))


def test_cuda_12_6_compiles_kernels_behind_the_stub(compile_: Compile, source: str) -> None:
    assert compile_(source, "sm_90a", *STUB) == ""


def test_cuda_12_6_compiles_our_kernels_behind_the_stub(compile_: Compile) -> None:
    """The kernels that between them use every header of TileLang's templates that the others use."""
    chosen = {v.builder.__name__: v for v in variants() if v.builder.__name__ in ("solve", "fused")}
    assert len(chosen) == 2
    for variant in chosen.values():
        assert variant.arch == "sm_90a"  # the others need a newer compiler
        assert compile_(lower(variant.builder(**variant.constants)), "sm_90a", *STUB) == "", variant.name


def test_a_newer_compiler_with_older_headers_needs_the_stub(compile_: Compile, source: str) -> None:
    """Every kernel, with fp8 or without: red without the stub, green with it."""
    errors = compile_(source, "compute_90a", *NEWER_COMPILER)
    assert 'identifier "__nv_fp8_e8m0" is undefined' in errors
    assert 'identifier "__nv_cvt_bfloat162raw_to_e8m0x2" is undefined' in errors
    assert compile_(source, "compute_90a", *NEWER_COMPILER, *STUB) == ""


PROBE = """
#include <cuda_fp8.h>
extern "C" __global__ void kernel(unsigned char *x) { %s }
"""
DECLARED = "__nv_fp8_e8m0 y; y.__x = x[0]; x[1] = y.__x;"


def test_the_stub_declares_what_it_says(compile_: Compile) -> None:
    assert "__nv_fp8_e8m0" in compile_(PROBE % DECLARED, "sm_90a")
    assert compile_(PROBE % DECLARED, "sm_90a", *STUB) == ""


def test_e8m0_in_earnest_is_not_computed_wrongly(compile_: Compile) -> None:
    """The conversions are declared and not defined: a kernel that calls one does not assemble."""
    used = PROBE % "x[0] = __nv_cvt_float_to_e8m0(1.0f, __NV_SATFINITE, cudaRoundPosInf);"
    errors = compile_(used, "sm_90a", *STUB)
    assert "Unresolved extern function" in errors
    assert "__nv_cvt_float_to_e8m0" in errors


def test_the_stub_is_inert_where_the_headers_are_of_12_8(compile_: Compile, tmp_path: Path) -> None:
    """NVRTC knows them by cuda_fp4.h; then nothing is declared, so that nothing is declared twice."""
    (tmp_path / "cuda_fp4.h").touch()
    errors = compile_(PROBE % DECLARED, "sm_90a", *STUB, before=(tmp_path,))
    assert "__nv_fp8_e8m0" in errors


def test_flags_of_both_compilers() -> None:
    assert (stubs.INCLUDE / "cuda_fp8.h").is_file()
    assert stubs.compile_flags("nvcc") == [f"-I{stubs.INCLUDE}"]
    assert stubs.compile_flags("nvrtc") == [f"--pre-include={stubs.INCLUDE}/cuda_fp8.h"]
