"""The Triton backend as a backend: its probes on faked machines, its import, its compile errors."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from chunkwise.dispatcher.described import DescribedCall, facts_of
from chunkwise.dispatcher.registry import Registry
from chunkwise.ops import OPS
from chunkwise.verifier.device import FAKE_DEVICES
from chunkwise.verifier.facts import Facts
from chunkwise_testing import declared
from chunkwise_triton import backend
from chunkwise_triton.gated_delta_rule import schedules

LINUX_ONLY = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="triton is published for Linux")


class Machine:
    """A machine whose GPUs, torch build and packages a test chooses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        self.gpus()

    def gpus(self, *capabilities: tuple[int, int]) -> None:
        """A CUDA build of torch that sees GPUs of these capabilities."""
        self.build(cuda="13.0", hip=None)
        self.patch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        self.patch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        self.patch.setattr(torch.cuda, "get_device_capability", lambda i: capabilities[i])
        self.patch.setattr(torch.cuda, "get_device_name", lambda i: f"GPU {i}")

    def build(self, cuda: str | None, hip: str | None) -> None:
        """What torch was built for."""
        self.patch.setattr(torch.version, "cuda", cuda)
        self.patch.setattr(torch.version, "hip", hip)

    def without_module(self, absent: str) -> None:
        """A machine on which one module cannot be found."""
        self.patch.setattr(
            "importlib.util.find_spec", lambda name: None if name == absent else SimpleNamespace(name=name)
        )

    def with_version(self, version: str | None) -> None:
        """An installed triton of this version, or one that no package accounts for."""

        def lookup(name: str) -> str:
            if version is None or name != "triton":
                raise importlib.metadata.PackageNotFoundError(name)
            return version

        self.patch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(name=name))
        self.patch.setattr("importlib.metadata.version", lookup)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1)])
def test_newer_gpus_will_do(machine: Machine, capability: tuple[int, int]) -> None:
    machine.gpus(capability)
    finding = backend.probe_device()
    assert finding.ok
    assert f"sm_{capability[0]}{capability[1]}" in finding.found


def test_older_gpu_is_named_and_refused(machine: Machine) -> None:
    machine.gpus((7, 5))
    finding = backend.probe_device()
    assert not finding.ok
    assert "GPU 0 (sm_75)" in finding.found
    assert "sm_80 or newer" in finding.fix


def test_one_suitable_gpu_of_two_is_enough(machine: Machine) -> None:
    machine.gpus((7, 5), (9, 0))
    assert backend.probe_device().ok


def test_no_gpu(machine: Machine) -> None:
    finding = backend.probe_device()
    assert not finding.ok
    assert finding.found == "torch sees no GPU"
    assert "CUDA_VISIBLE_DEVICES" in finding.fix


def test_cpu_build_of_torch(machine: Machine) -> None:
    machine.build(cuda=None, hip=None)
    finding = backend.probe_device()
    assert not finding.ok
    assert "built without CUDA" in finding.found


def test_amd_gpu_is_not_nvidia(machine: Machine) -> None:
    machine.gpus((9, 0))
    machine.build(cuda=None, hip="6.4")
    finding = backend.probe_device()
    assert not finding.ok
    assert "AMD" in finding.found
    assert "ROCm 6.4" in finding.found


def test_broken_driver_is_a_finding(machine: Machine) -> None:
    def broken(index: int) -> tuple[int, int]:
        raise RuntimeError("CUDA unknown error")

    machine.gpus((9, 0))
    machine.patch.setattr(torch.cuda, "get_device_capability", broken)
    finding = backend.probe_device()
    assert not finding.ok
    assert "CUDA unknown error" in finding.found


def test_interpreter_stands_in_for_the_gpu(machine: Machine) -> None:
    machine.patch.setenv("TRITON_INTERPRET", "1")
    machine.patch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(name=name))
    assert backend.probe_device().ok


def test_interpreter_needs_numpy(machine: Machine) -> None:
    machine.patch.setenv("TRITON_INTERPRET", "1")
    machine.without_module("numpy")
    finding = backend.probe_device()
    assert not finding.ok
    assert "numpy" in finding.found
    assert "TRITON_INTERPRET" in finding.fix


def test_triton_is_not_installed(machine: Machine) -> None:
    machine.without_module("triton")
    finding = backend.probe_triton()
    assert not finding.ok
    assert finding.found == "triton is not installed"


@LINUX_ONLY
def test_missing_triton_is_a_pip_install_away(machine: Machine) -> None:
    machine.without_module("triton")
    assert backend.probe_triton().fix == "pip install 'triton>=3.6'"


def test_other_systems_are_told_to_use_torch(machine: Machine) -> None:
    machine.without_module("triton")
    machine.patch.setattr(sys, "platform", "darwin")
    assert "Linux" in backend.probe_triton().fix


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "4.0", "3.6.0+git1234", "3.8.0.dev20260101"])
def test_supported_versions(machine: Machine, version: str) -> None:
    machine.with_version(version)
    finding = backend.probe_triton()
    assert finding.ok
    assert version in finding.found


@pytest.mark.parametrize("version", ["3.5.1", "3.4.0", "2.1.0", "unknown"])
def test_old_or_odd_versions(machine: Machine, version: str) -> None:
    machine.with_version(version)
    finding = backend.probe_triton()
    assert not finding.ok
    assert finding.found == f"triton {version}, not >=3.6"


def test_triton_of_no_known_package(machine: Machine) -> None:
    machine.with_version(None)
    assert "no installed package" in backend.probe_triton().found


def test_metadata_asks_for_the_same_triton() -> None:
    assert declared.dependencies(Path(__file__).parents[1])["triton"] == backend.VERSIONS


def test_import_is_light() -> None:
    script = (
        "import sys, torch\n"
        "languages = {'triton', 'tilelang'}\n"
        "before = languages & set(sys.modules)\n"
        "import chunkwise_triton.backend as b\n"
        "assert languages & set(sys.modules) == before\n"
        "assert not torch.cuda.is_initialized()\n"
        "[need.probe() for need in b.BACKEND.needs]\n"
        "assert languages & set(sys.modules) == before\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_registry_loads_it() -> None:
    entries = [e for e in importlib.metadata.entry_points(group="chunkwise.backends") if e.name == "triton"]
    registry = Registry(entries)
    assert not registry.failures
    assert registry.loaded["triton"].backend is backend.BACKEND


def test_lacks_names_each_unmet_need(machine: Machine) -> None:
    machine.without_module("triton")
    registry = Registry(())
    registry.add(backend.BACKEND)
    lacks = registry.loaded["triton"].lacks()
    assert not registry.loaded["triton"].usable
    assert "lacks an NVIDIA GPU of sm_80 or newer: torch sees no GPU" in lacks
    assert "lacks triton: triton is not installed" in lacks


def _error(module: str, name: str, base: type[Exception] = Exception) -> Exception:
    """An error of a class as Triton names it, without Triton."""
    return type(name, (base,), {"__module__": module, "__qualname__": name})("boom")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("triton.compiler.errors", "CompilationError"),
        ("triton.runtime.errors", "OutOfResources"),
        ("triton.runtime.errors", "PTXASError"),
    ],
)
def test_compile_errors_are_recognised(module: str, name: str) -> None:
    error = _error(module, name)
    assert backend.is_compile_failure(error)
    assert backend.is_compile_failure(_error("elsewhere", "Derived", type(error)))


@pytest.mark.parametrize("text", ["PassManager::run failed", "Failed to find C compiler. Please specify via CC"])
def test_compile_errors_without_a_class_of_their_own(text: str) -> None:
    assert backend.is_compile_failure(RuntimeError(text))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: device-side assert triggered"),
        torch.OutOfMemoryError("out of memory: PassManager::run failed"),
        ValueError("PassManager::run failed"),
        _error("triton.runtime.errors", "InterpreterError"),
        _error("elsewhere", "CompilationError"),
    ],
)
def test_other_errors_are_not_compile_failures(error: Exception) -> None:
    assert not backend.is_compile_failure(error)


@LINUX_ONLY
def test_the_names_are_those_of_the_installed_triton() -> None:
    compiler = pytest.importorskip("triton.compiler.errors")
    runtime = pytest.importorskip("triton.runtime.errors")
    assert backend.is_compile_failure(runtime.OutOfResources(300_000, 232_448, "shared memory"))
    assert backend.is_compile_failure(runtime.PTXASError("ptxas died"))
    assert issubclass(compiler.UnsupportedLanguageConstruct, compiler.CompilationError)
    assert backend.is_compile_failure(compiler.CompilationError("", None, "no such thing"))


@LINUX_ONLY
def test_kernels_are_built_once_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new length is a new route and asks again; that must cost next to nothing."""
    launch = importlib.import_module("chunkwise_triton.gated_delta_rule.launch")
    built: list[Facts] = []
    monkeypatch.setattr(launch, "_build", lambda schedule, facts, parts: built.append(facts))
    common = importlib.import_module("chunkwise_triton.common.call")
    monkeypatch.setattr(common, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(common, "_WARM", set())
    call = DescribedCall(FAKE_DEVICES["H200"], {"B": 1, "T": 64, "H": 2, "HV": 4, "K": 64, "V": 64})
    others = [
        dataclasses.replace(call, sizes={**call.sizes, "HV": 8}),
        dataclasses.replace(call, dtypes={"g": "fp32"}),
        dataclasses.replace(call, gradients=False),
        dataclasses.replace(call, options={"output_final_state": True}),
    ]
    for described in (call, dataclasses.replace(call, sizes={**call.sizes, "T": 65}), *others):
        facts = facts_of(OPS["chunk_gated_delta_rule"].declaration, described)
        for _ in range(2):
            launch.compile(schedules.schedule(facts), facts, ("forward", "backward"))
    assert len(built) == 1 + len(others)


class FakeKernel:
    """A kernel that notes each time that Triton would look at its arguments and compile."""

    arg_names = ("x", "y", "n", "C")

    def __init__(self) -> None:
        self.compiled: list[tuple[torch.dtype, ...]] = []
        self.launched: list[tuple[int, tuple[object, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        def first(*arguments: object, **constants: object) -> object:
            self.compiled.append(tuple(a.dtype for a in arguments if isinstance(a, torch.Tensor)))
            return self

        def again(*arguments: object) -> None:
            self.launched.append((len(self.compiled), arguments))

        return again if len(grid) == 3 else first


@LINUX_ONLY
def test_a_compiled_kernel_serves_its_own_dtypes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same call with an output of another dtype, as under the L2 norm, is another kernel."""
    launch = importlib.import_module("chunkwise_triton.common.launch")
    monkeypatch.setattr(launch, "JITFunction", FakeKernel)
    monkeypatch.setattr(launch, "_COMPILED", {})
    kernel, key = FakeKernel(), ("a call",)
    x, narrow, wide = torch.ones(4), torch.ones(4, dtype=torch.bfloat16), torch.ones(4)
    for y in (narrow, wide, narrow, wide):
        if not launch.launch_again(kernel, 2, (x, y, 7), key):
            launch.launch(kernel, 2, (x, y, 7), {"C": 64}, key=key)
    assert kernel.compiled == [(torch.float32, torch.bfloat16), (torch.float32, torch.float32)]
    assert [arguments for _, arguments in kernel.launched] == [
        (x.data_ptr(), narrow.data_ptr(), 7, 64),
        (x.data_ptr(), wide.data_ptr(), 7, 64),
    ]
    assert not launch.launch_again(kernel, 2, (x, narrow, 7), None)
