"""NVRTC in nvcc's place: found or not on faked machines, then kernels compiled by it, with no nvcc and no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from chunkwise_testing import declared
from chunkwise_tilelang.toolkit import discover, nvrtc, nvrtc_build
from chunkwise_tilelang.toolkit.discover import Candidate
from chunkwise_tilelang.toolkit.nvrtc import Nvrtc

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="tilelang is published for Linux")

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def looked_for_anew() -> None:
    nvrtc.discover.cache_clear()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """NVRTC 12.9 and no headers; returns a folder for toolkits, ``cuda`` being the default one."""
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(nvrtc, "DEFAULT_HOME", tmp_path / "cuda")
    monkeypatch.setattr(nvrtc, "_library_version", lambda: (12, 9))
    monkeypatch.setattr(nvrtc, "_in_wheel", lambda name, header: None)
    return tmp_path


def headers(folder: Path, version: int | None = None, cxx: str | None = None) -> Path:
    """The runtime's headers of a version, and the C++ headers in a folder within."""
    folder.mkdir(parents=True, exist_ok=True)
    if version is not None:
        (folder / "cuda_fp8.h").touch()
        (folder / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {version}\n")
    if cxx is not None:
        header = folder / cxx / "cuda" / "std" / "cassert"
        header.parent.mkdir(parents=True)
        header.touch()
    return folder


def test_a_toolkit_has_all_headers(machine: Path) -> None:
    include = headers(machine / "cuda" / "include", 12080, "cccl")
    assert nvrtc.discover() == Nvrtc((12, 9), (include, include / "cccl"))
    assert nvrtc.discover().describe() == f"NVRTC 12.9 with the headers in {include}, {include}/cccl"


def test_a_toolkit_with_a_folder_for_each_target(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    include = headers(machine / "sdk" / "targets" / "sbsa-linux" / "include", 12080, ".")
    monkeypatch.setenv("CUDA_HOME", str(machine / "sdk"))
    assert nvrtc.discover() == Nvrtc((12, 9), (include,))


def test_headers_of_wheels(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch brings those of the runtime, the extra those of C++, which may be of another release."""
    wheels = {"nvidia-cuda-runtime-cu12": headers(machine / "runtime", 12090)}
    wheels["nvidia-cuda-cccl"] = headers(machine / "cxx", cxx=".")
    monkeypatch.setattr(nvrtc, "_in_wheel", lambda name, header: wheels.get(name))
    headers(machine / "cuda" / "include", 12060, "cccl")
    assert nvrtc.discover().includes == (machine / "runtime", machine / "cxx")


def test_cxx_headers_of_another_folder_are_found_by_both_of_their_names(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TileLang's templates include ``cccl/cuda/std/cstdint`` from CUDA 13 on; the runtime's headers lie in a wheel."""
    monkeypatch.setattr(nvrtc, "_library_version", lambda: (13, 0))
    wheels = {"nvidia-cuda-runtime": headers(machine / "runtime", 13000)}
    monkeypatch.setattr(nvrtc, "_in_wheel", lambda name, header: wheels.get(name))
    include = headers(machine / "cuda" / "include", 13000, "cccl")
    assert nvrtc.discover().includes == (machine / "runtime", include, include / "cccl")


@pytest.mark.parametrize(
    ("release", "fits"), [(12060, True), (12090, True), (12100, False), (13000, False), (11080, False)]
)
def test_headers_may_be_older_and_not_newer(machine: Path, release: int, fits: bool) -> None:
    include = headers(machine / "cuda" / "include", release, "cccl")
    found = nvrtc.discover()
    if fits:
        assert found.rejected is None
    else:
        said = f"{include} is of {release // 1000}.{release % 1000 // 10}"
        assert found.rejected == f"no headers of the CUDA runtime 12.0 to 12.9: {said}"


def test_newer_headers_are_passed_over(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers(machine / "newer" / "include", 13000, "cccl")
    monkeypatch.setenv("CUDA_HOME", str(machine / "newer"))
    include = headers(machine / "cuda" / "include", 12090, "cccl")
    assert nvrtc.discover().includes[0] == include


def test_no_runtime_headers(machine: Path) -> None:
    assert nvrtc.discover().rejected == "no headers of the CUDA runtime 12.0 to 12.9"


def test_no_cxx_headers(machine: Path) -> None:
    headers(machine / "cuda" / "include", 12090)
    assert nvrtc.discover().rejected == "no C++ headers of CUDA (cuda/std, the nvidia-cuda-cccl wheel)"


def test_no_cuda_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chunkwise.dispatcher.probes.installed", lambda name: False)
    assert nvrtc.discover().rejected == "cuda-python is not installed"
    assert nvrtc.discover().describe() == "NVRTC: rejected: cuda-python is not installed"


def test_cuda_python_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import nvrtc as bindings

    def missing() -> None:
        raise RuntimeError("Failure finding libnvrtc.so\nsearched in ...")

    monkeypatch.setattr(bindings, "nvrtcVersion", missing)
    assert nvrtc.discover().rejected == "cuda-python finds no NVRTC: Failure finding libnvrtc.so"


# --- the choice ------------------------------------------------------------------------------------------

GOOD = Nvrtc((12, 9), (Path("/include"),))
OLD = Nvrtc((12, 6), (Path("/include"),))
NONE = Nvrtc(rejected="cuda-python is not installed")
NEW_NVCC = Candidate(Path("/cuda/bin/nvcc"), "PATH", (13, 0))
OLD_NVCC = Candidate(Path("/cuda/bin/nvcc"), "PATH", (12, 6))
NO_NVCC = Candidate(Path("/nowhere/bin/nvcc"), "CUDA_HOME", rejected="no such file")


@pytest.mark.parametrize(
    ("nvcc", "library", "arch", "chosen"),
    [
        (NEW_NVCC, GOOD, "sm90", NEW_NVCC),
        (OLD_NVCC, GOOD, "sm90", OLD_NVCC),
        (OLD_NVCC, GOOD, "sm120", GOOD),
        (OLD_NVCC, OLD, "sm120", None),
        (NO_NVCC, GOOD, "sm121", GOOD),
        (NO_NVCC, OLD, "sm90", OLD),
        (NO_NVCC, NONE, "sm90", None),
        (None, GOOD, "sm90", GOOD),
        (None, NONE, "sm90", None),
    ],
)
def test_nvcc_else_nvrtc(
    monkeypatch: pytest.MonkeyPatch, nvcc: Candidate | None, library: Nvrtc, arch: str, chosen: object
) -> None:
    monkeypatch.setattr(discover, "discover", lambda: () if nvcc is None else (nvcc,))
    monkeypatch.setattr(nvrtc, "discover", lambda: library)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert discover.choose(arch) == chosen
    finding = discover.probe_compiler([arch])
    assert finding.ok is (chosen is not None)
    if nvcc is not None:
        assert nvcc.describe() in finding.found
    if not isinstance(chosen, Candidate):  # nvcc and what is in its place, each with its reason
        assert library.describe() in finding.found
    if chosen is None:
        assert finding.fix.endswith("; or, for NVRTC, pip install 'chunkwise-tilelang[nvrtc]'")
    if library is OLD and chosen is None:
        assert "12.6 is too old for sm120, which needs 12.8 or newer" in finding.found


def test_nvcc_wants_a_cxx_compiler_and_nvrtc_a_c_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(discover, "discover", lambda: (NEW_NVCC,))
    monkeypatch.setattr(nvrtc, "discover", lambda: GOOD)
    monkeypatch.setattr("shutil.which", lambda name: {"gcc": "/usr/bin/gcc"}.get(name))
    assert discover.choose("sm90") == GOOD
    assert "it needs one of g++, clang++, c++ on PATH; NVRTC 12.9" in discover.probe_compiler(["sm90"]).found
    assert discover.probe_host_compiler().found == "/usr/bin/gcc"
    monkeypatch.setenv("CXX", "icpx")
    assert discover.probe_host_compiler().found == "CXX or CC is icpx, which is no program"
    monkeypatch.delenv("CXX")
    monkeypatch.setattr("shutil.which", lambda name: None)
    finding = discover.probe_host_compiler()
    assert not finding.ok
    assert finding.found == "none of g++, clang++, c++, gcc, clang, cc is on PATH"


# --- compiling -------------------------------------------------------------------------------------------


def test_the_extra_names_what_is_missing() -> None:
    assert list(declared.dependencies(HERE.parent, extra="nvrtc")) == ["cuda-python", "nvidia-cuda-cccl"]


COMPILE = """
import subprocess, sys
sys.path.insert(0, {tests!r})
import cuda_12_6
cuda_12_6.nvrtc()  # before torch loads its own
import kernel_samples as samples
from chunkwise.errors import CompileFailure
from chunkwise_tilelang.toolkit import compile, discover, nvrtc

real = subprocess.Popen
def popen(command, *args, **kwargs):
    assert "nvcc" not in str(command) or "--version" in command, command
    return real(command, *args, **kwargs)
subprocess.Popen = popen
for dtype in ("bfloat16", "float8_e4m3fn"):
    try:
        compile.function(samples.product, "sm_90a", rows=64, dtype=dtype)(1)
    except RuntimeError as error:
        print("compiled:", error)
try:
    compile.function(samples.product, "sm_120a", rows=64)
except CompileFailure as error:
    print("refused:", error)
try:
    compile.function(samples.unknown, "sm_90a")
except CompileFailure as error:
    print("refused:", error)
"""


@pytest.mark.compiler
def test_kernels_compile_with_no_nvcc(tmp_path: Path) -> None:
    """12.6 for library and headers, with fp8 or without, where CUDA_HOME points nowhere and gcc alone is there."""
    environment = {**os.environ, "CUDA_HOME": str(tmp_path / "nowhere"), "TILELANG_CACHE_DIR": str(tmp_path / "cache")}
    environment |= {"CC": "gcc", "TILELANG_DISABLE_CACHE": "0"}
    environment.pop("CUDA_PATH", None)
    script = COMPILE.replace("{tests!r}", repr(str(HERE)))
    ran = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = [line for line in ran.stdout.splitlines() if line.startswith(("compiled:", "refused:"))]
    assert said[:2] == ["compiled: product_kernel: num_args should be 3; expected: 1, got: 3"] * 2
    assert "12.6 is too old for sm120, which needs 12.8 or newer" in said[2]
    assert said[3].startswith("refused: kernel_samples.unknown() for sm_90a: ")
    assert 'identifier "no_such_function" is undefined' in said[3]
    assert len(list((tmp_path / "cache").glob("*/*/kernels/*/executable.so"))) == 2


def test_kernels_of_others_go_the_way_they_went(monkeypatch: pytest.MonkeyPatch) -> None:
    import tilelang  # noqa: F401 - it registers what is asked for here
    import tvm_ffi

    name = "tilelang_callback_cuda_compile"
    before = tvm_ffi.get_global_func(name)
    asked: list[str] = []
    try:
        tvm_ffi.register_global_func(name, f=lambda code, target, config=None: asked.append(str(code)), override=True)
        nvrtc_build.install.cache_clear()
        nvrtc_build.install()
        compile_cuda = tvm_ffi.get_global_func(name)
        monkeypatch.setattr(nvrtc_build, "compile_source", lambda source, arch, flags: " ".join(flags).encode())
        target = type("Target", (), {"attrs": {"arch": "sm_90a"}})()
        compile_cuda("theirs", target, {"tl.device_compile_flags": ["-DX=1"]})
        compile_cuda("theirs too", target)
        assert asked == ["theirs", "theirs too"]
        flags = ["'--pre-include=/a b/cuda_fp8.h'", f"{nvrtc_build.MARK}_12_6"]
        config = {"tl.device_compile_flags": flags, "tl.enable_fast_math": True, "tl.ptxas_register_usage_level": 5}
        made = bytes(compile_cuda("ours", target, config)).decode()
        assert made.startswith(f"--pre-include=/a b/cuda_fp8.h {nvrtc_build.MARK}_12_6 --use_fast_math")
        assert made.endswith("--ptxas-options=--register-usage-level=5")
        assert len(asked) == 2
    finally:
        nvrtc_build.install.cache_clear()
        tvm_ffi.register_global_func(name, f=before, override=True)
