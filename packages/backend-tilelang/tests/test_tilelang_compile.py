"""The one place that compiles: once under many threads and processes, whole after a kill, apart for each toolkit.

The nvcc is a script that notes each call and writes a few bytes: no GPU looks at them here. TileLang, its cache on disk
and the C compiler are real.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="tilelang is published for Linux")

HERE = Path(__file__).parent
PRELUDE = """
import os, sys
os.environ["TILELANG_CACHE_DIR"] = {cache!r}
sys.stdout = sys.stderr = open({out!r}, "a", buffering=1)
import kernel_samples as samples
from chunkwise.errors import CompileFailure
from chunkwise_tilelang.toolkit import compile, nvrtc
"""
COMPILE = "compile.function(samples.add, 'sm_90a', width=64)\n"


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    yield
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all toolkits of these tests are, one after the other: TileLang looks for one when it is imported."""
    folder = tmp_path_factory.mktemp("toolkit")
    (folder / "bin").mkdir()
    (folder / "bin" / "nvcc").touch()
    return folder


@pytest.fixture(scope="module")
def processes(home: Path) -> multiprocessing.context.ForkServerContext:
    """Processes that have TileLang imported and nothing compiled."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tilelang", "kernel_samples", "chunkwise_tilelang.toolkit.compile"])
    with environment(CUDA_HOME=str(home), PYTHONPATH=str(HERE), TILELANG_DISABLE_CACHE="0"):
        context.Process(target=exec, args=("pass", {})).start()
    return context


class Host:
    """A cache, and the toolkit whose nvcc is a script."""

    def __init__(
        self,
        folder: Path,
        home: Path,
        processes: multiprocessing.context.ForkServerContext,
        put_nvcc: Callable[..., None],
    ) -> None:
        self.folder, self.home, self.processes, self._put_nvcc = folder, home, processes, put_nvcc
        self.log, self.out = folder / "log", folder / "out"
        self.toolkit()

    def toolkit(self, release: str = "13.0", first: str = "") -> None:
        """Puts a toolkit in its place; ``first`` runs in each compilation."""
        self._put_nvcc(self.home, self.log, release, first)

    def start(self, script: str) -> BaseProcess:
        prelude = PRELUDE.format(cache=str(self.folder / "cache"), out=str(self.out))
        process = self.processes.Process(target=exec, args=(prelude + script, {}))
        process.start()
        return process

    def end(self, process: BaseProcess, code: int = 0) -> str:
        process.join(240)
        said = self.out.read_text() if self.out.exists() else ""
        assert process.exitcode == code, said
        return said

    def run(self, script: str) -> str:
        return self.end(self.start(script))

    @property
    def compilations(self) -> int:
        return len(self.log.read_text().split()) if self.log.exists() else 0

    def published(self) -> list[Path]:
        return sorted((self.folder / "cache").glob("*/*/kernels/*/executable.so"))


@pytest.fixture
def host(
    tmp_path: Path, home: Path, processes: multiprocessing.context.ForkServerContext, put_nvcc: Callable[..., None]
) -> Host:
    return Host(tmp_path, home, processes, put_nvcc)


@pytest.mark.compiler
def test_threads_compile_a_kernel_once(host: Host) -> None:
    script = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(8) as pool:\n"
        "    found = list(pool.map(lambda _: compile.function(samples.add, 'sm_90a', width=64), range(8)))\n"
        "assert all(f is found[0] for f in found)\n"
        "assert compile.function(samples.add, 'sm_120a', width=64) is not found[0]\n"
    )
    host.run(script)
    assert host.compilations == 2


@pytest.mark.compiler
def test_processes_compile_a_kernel_once(host: Host) -> None:
    host.toolkit(first="sleep 3")  # so that all of them want it while one builds it
    for process in [host.start(COMPILE) for _ in range(3)]:
        host.end(process)
    assert host.compilations == 1
    assert len(host.published()) == 1


KILLED = """
import os, signal
from tilelang.cache.kernel_cache import KernelCache
def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
"""
KILLS = {
    "in the compiler": "",
    "before the library is written": "KernelCache._safe_write_executable = staticmethod(die)\n",
    "with the library half written": (
        "def die_late(executable, path, export_kwargs=None):\n"
        "    open(path, 'wb').write(b'\\x7fELF half')\n"
        "    die()\n"
        "KernelCache._safe_write_executable = staticmethod(die_late)\n"
    ),
    "before the entry is published": "os.rename = die\n",
}


@pytest.mark.compiler
@pytest.mark.parametrize("moment", KILLS)
def test_a_process_killed_half_way_leaves_nothing_behind(host: Host, moment: str) -> None:
    if moment == "in the compiler":
        host.toolkit(first="kill -9 $PPID; exit 1")
    host.end(host.start(KILLED + KILLS[moment] + COMPILE), -signal.SIGKILL)
    assert host.published() == []
    host.toolkit()
    ask = COMPILE + (
        "try:\n    compile.function(samples.add, 'sm_90a', width=64)(1)\n"
        "except RuntimeError as error:\n    print('loaded:', error)\n"
    )
    assert "loaded: add_kernel: num_args should be 3" in host.run(ask)
    assert len(host.published()) == 1


@pytest.mark.compiler
def test_a_damaged_entry_is_built_again(host: Host) -> None:
    host.run(COMPILE)
    (library,) = host.published()
    whole = library.stat().st_size
    library.write_bytes(b"\x7fELF cut off")
    host.run(COMPILE)
    (library,) = host.published()
    assert abs(library.stat().st_size - whole) < whole // 10


@pytest.mark.compiler
def test_each_toolkit_has_entries_of_its_own(host: Host) -> None:
    for release, compilations in (("13.0", 1), ("13.1", 2), ("13.0", 2)):
        host.toolkit(release)
        host.run(COMPILE)
        assert host.compilations == compilations
    contents = {path.read_text().strip() for path in (host.folder / "cache").glob("*/cuda-binaries/*/kernel.cubin")}
    assert contents == {"cubin of 13.0", "cubin of 13.1"}


def test_what_tells_one_nvcc_from_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its release, its build, its place, the headers beside it, and flags that a user adds."""
    from chunkwise_tilelang.toolkit.compile import _identity
    from chunkwise_tilelang.toolkit.discover import Candidate

    def identity(name: str = "cuda", build: int = 1, headers: int = 13000, added: str = "") -> str:
        nvcc, header = tmp_path / name / "bin" / "nvcc", tmp_path / name / "include" / "cuda_runtime_api.h"
        for file, text in ((nvcc, f"#!/bin/sh\necho V13.0.{build}\n"), (header, f"#define CUDART_VERSION {headers}\n")):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        nvcc.chmod(0o755)
        monkeypatch.setenv("NVCC_APPEND_FLAGS", added)
        return _identity(Candidate(nvcc, "PATH", (13, 0)))

    told = [identity(), identity("other"), identity(build=2), identity(headers=12060), identity(added="-DNDEBUG")]
    assert len(set(told)) == 5
    assert identity() == told[0]
    assert all(text.startswith("13_0_") and text.replace("_", "").isalnum() for text in told)


@pytest.mark.compiler
def test_several_kernels_are_built_side_by_side(host: Host) -> None:
    """Two compilations that each wait for the other to begin end only if they overlap."""
    host.toolkit(first=f'for i in $(seq 600); do [ "$(wc -l < {host.log})" -ge 2 ] && break; sleep 0.1; done')
    script = (
        "import time, torch\n"
        "torch.cuda.get_device_capability = lambda index: (9, 0)\n"
        "compile.build([(samples.add, {'width': w}) for w in (64, 128)], 0)\n"
        "first, second = (compile.kernel(samples.add, index, width=64) for index in (0, 1))\n"
        "assert compile.kernel(samples.add, torch.device('cuda', 0), width=64) is first is not second\n"
    )
    host.run(script)
    assert host.compilations == 2


@pytest.mark.compiler
def test_what_is_a_refusal(host: Host) -> None:
    """What the compiler says, without the source; a fault in a builder is none and raises as it is."""
    host.toolkit(first="echo 'kernel.cu(7): error: no such thing'; exit 2")
    script = (
        "try:\n    compile.function(samples.add, 'sm_90a', width=64)\n"
        "except CompileFailure as error:\n    print('refusal:', error)\n"
        "try:\n    compile.function(samples.add, 'sm_90a', widht=64)\n"
        "except TypeError as error:\n    print('fault:', error)\n"
        "compile.flags_for.cache_clear()\n"
        "compile.discover.choose = lambda arch: None\n"
        "compile.discover.nvrtc.discover = lambda: nvrtc.Nvrtc(rejected='cuda-python is not installed')\n"
        "os.unlink(compile.discover.discover()[0].path)\n"
        "try:\n    compile.function(samples.add, 'sm_90a', width=8)\n"
        "except CompileFailure as error:\n    print('refusal:', error)\n"
    )
    said = host.run(script).splitlines()
    refused, fault, nothing = [line for line in said if line.startswith(("refusal:", "fault:"))]
    assert refused == "refusal: kernel_samples.add(width=64) for sm_90a: kernel.cu(7): error: no such thing"
    assert "widht" in fault
    assert nothing.startswith("refusal: nothing compiles for sm_90a: ")
    assert "bin/nvcc (from tilelang, which took it when it was imported): rejected: no such file" in nothing
    assert "NVRTC: rejected: cuda-python is not installed" in nothing
    assert nothing.endswith("or, for NVRTC, pip install 'chunkwise-tilelang[nvrtc]'")
    assert host.published() == []


Events = list[object]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    """A machine of two GPUs, the first one current; notes which is current when."""
    import torch

    from chunkwise_tilelang.toolkit import compile as compiling

    state: Events = [0]

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            self.before, state[0] = state[0], self.index

        def __exit__(self, *_: object) -> None:
            state[0] = self.before

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(compiling, "_current_device", lambda: state[0])
    return state


@pytest.mark.parametrize("index", [0, 1])
def test_the_current_device_is_left_as_it_was(events: Events, index: int) -> None:
    from chunkwise_tilelang.toolkit import compile as compiling

    def compiled(*arguments: object) -> None:
        events.append((events[0], arguments))

    launch: Callable[..., None] = compiling._on_device(compiled, index)
    launch("q", 3)
    assert events == [0, (index, ("q", 3))]


def test_the_target_is_the_tensors_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from chunkwise_tilelang.toolkit import compile as compiling

    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: ((9, 0), (12, 1))[index])
    monkeypatch.setattr(compiling, "_launchers", {})
    monkeypatch.setattr(compiling, "function", lambda builder, arch, **c: asked.append((arch, c["width"])))
    for index in (0, 1, 0):
        compiling.kernel(len, torch.device("cuda", index), width=8)
    assert asked == [("sm_90a", 8), ("sm_121a", 8)]
