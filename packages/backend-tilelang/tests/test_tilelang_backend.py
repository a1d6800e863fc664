"""The TileLang backend as a backend: its needs on faked machines, its import, its metadata."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from chunkwise.dispatcher.registry import Finding, Registry
from chunkwise_testing import declared
from chunkwise_tilelang import backend
from chunkwise_tilelang.toolkit import discover, nvrtc

Capability = tuple[int, int]


def see_gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: Capability, hip: str | None = None) -> None:
    """A torch that sees GPUs of these capabilities."""
    monkeypatch.setattr(torch.version, "cuda", None if hip else "13.0")
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capabilities[i])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"GPU {i}")


def install(monkeypatch: pytest.MonkeyPatch, requires: list[str], **versions: str) -> None:
    """Packages of these versions (``_`` for ``-``), each with a module; nothing else is installed."""
    known = {name.replace("_", "-"): version for name, version in versions.items()}
    modules = {"tilelang": "tilelang", "tvm_ffi": "apache-tvm-ffi"}

    def version(name: str) -> str:
        if name not in known:
            raise importlib.metadata.PackageNotFoundError(name)
        return known[name]

    def find_spec(name: str) -> SimpleNamespace | None:
        return SimpleNamespace(name=name) if modules[name] in known else None

    monkeypatch.setattr("importlib.metadata.version", version)
    monkeypatch.setattr("importlib.metadata.requires", lambda name: requires)
    monkeypatch.setattr("importlib.util.find_spec", find_spec)


def nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discover, "discover", lambda: ())
    monkeypatch.setattr(nvrtc, "discover", lambda: nvrtc.Nvrtc(rejected="cuda-python is not installed"))


PIN = ["torch", "apache-tvm-ffi<0.1.13,>=0.1.11"]


@pytest.mark.parametrize("capability", [(9, 0), (12, 0), (12, 1)])
def test_supported_gpus(monkeypatch: pytest.MonkeyPatch, capability: Capability) -> None:
    see_gpus(monkeypatch, capability)
    assert backend.probe_device().ok


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (10, 0), (10, 3), (11, 0), (13, 0)])
def test_no_other_capability_is_taken_for_one_of_them(monkeypatch: pytest.MonkeyPatch, capability: Capability) -> None:
    see_gpus(monkeypatch, capability)
    finding = backend.probe_device()
    assert not finding.ok
    assert f"sm_{capability[0]}{capability[1]}" in finding.found
    assert "sm_90, sm_120 or sm_121" in finding.fix


def test_two_gpus_of_different_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, (8, 0), (12, 1))
    assert backend.probe_device().ok


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch)
    assert backend.probe_device().found == "torch sees no GPU"


def test_amd_gpu_of_the_same_number(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, (9, 0), hip="6.4")
    finding = backend.probe_device()
    assert not finding.ok
    assert "AMD" in finding.found


def test_nvcc_is_asked_for_the_visible_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def probe(archs: list[str]) -> Finding:
        asked.append(archs)
        return Finding(True, "")

    monkeypatch.setattr(discover, "probe_compiler", probe)
    see_gpus(monkeypatch, (8, 0), (12, 1), (9, 0))
    backend.probe_compiler()
    see_gpus(monkeypatch)
    backend.probe_compiler()
    assert asked == [["sm90", "sm121"], []]


def test_nvcc_probe_survives_a_broken_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> bool:
        raise RuntimeError("driver/library mismatch")

    see_gpus(monkeypatch, (9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", broken)
    nothing_compiles(monkeypatch)
    assert not backend.probe_compiler().ok
    assert "driver/library mismatch" in backend.probe_device().found


def test_tilelang_and_its_partner(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, PIN, tilelang="0.1.15", apache_tvm_ffi="0.1.12")
    finding = discover.probe_tilelang()
    assert finding == Finding(True, "tilelang 0.1.15, tvm_ffi 0.1.12")


@pytest.mark.parametrize("version", ["0.1.9", "0.1.14", "0.1.16", "1.0"])
def test_other_tilelang(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    install(monkeypatch, PIN, tilelang=version, apache_tvm_ffi="0.1.12")
    finding = discover.probe_tilelang()
    assert not finding.ok
    assert finding.found == f"tilelang {version}, not ==0.1.15"
    assert finding.fix == "pip install 'tilelang==0.1.15'"


def test_no_tilelang(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, PIN)
    assert discover.probe_tilelang().found == "tilelang is not installed"


def test_no_partner(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, PIN, tilelang="0.1.15")
    assert discover.probe_tilelang().found == "tvm_ffi is not installed"


@pytest.mark.parametrize("version", ["0.1.10", "0.1.13", "0.2.0"])
def test_wrong_partner(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    install(monkeypatch, PIN, tilelang="0.1.15", apache_tvm_ffi=version)
    finding = discover.probe_tilelang()
    assert not finding.ok
    assert finding.found.startswith(f"tvm_ffi {version}, not ")


def test_local_version_of_tilelang(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, PIN, tilelang="0.1.15+cu128", apache_tvm_ffi="0.1.11")
    assert discover.probe_tilelang().ok


def test_metadata_pins_the_same_tilelang() -> None:
    assert declared.dependencies(Path(__file__).parents[1])["tilelang"] == discover.TILELANG


def test_import_is_light() -> None:
    script = (
        "import sys, torch\n"
        "languages = {'triton', 'tilelang', 'tvm', 'tvm_ffi'}\n"
        "before = languages & set(sys.modules)\n"
        "import chunkwise_tilelang.backend as b\n"
        "assert languages & set(sys.modules) == before\n"
        "assert not torch.cuda.is_initialized()\n"
        "[need.probe() for need in b.BACKEND.needs]\n"
        "assert languages & set(sys.modules) == before\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_registry_loads_it() -> None:
    entries = [e for e in importlib.metadata.entry_points(group="chunkwise.backends") if e.name == "tilelang"]
    registry = Registry(entries)
    assert not registry.failures
    assert registry.loaded["tilelang"].backend is backend.BACKEND


def test_tilelang_without_a_gpu_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch)
    install(monkeypatch, PIN, tilelang="0.1.15", apache_tvm_ffi="0.1.12", chunkwise_tilelang="0.1.0")
    nothing_compiles(monkeypatch)
    registry = Registry(())
    registry.add(backend.BACKEND)
    loaded = registry.loaded["tilelang"]
    assert not loaded.usable
    assert "lacks an NVIDIA GPU of sm_90, sm_120 or sm_121: torch sees no GPU" in loaded.lacks()
    assert "lacks a CUDA compiler: no nvcc" in loaded.lacks()
    assert "lacks tilelang" not in loaded.lacks()
