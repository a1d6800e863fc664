"""Launches on a GPU: the right stream and device, within graphs, by either compiler, and what one costs the host."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from chunkwise_tilelang.toolkit import compile as compiling
from chunkwise_tilelang.toolkit import discover, nvrtc
from chunkwise_tilelang.toolkit.arch import target

pytestmark = pytest.mark.gpu

LAUNCH_US = 15.0
"""What one launch of three arguments may cost the host at most, on any host that has such a GPU."""


def rows(device: str | torch.device = "cuda:0", width: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(1000, width, device=device)
    return x, torch.full_like(x, torch.nan)


def test_the_current_stream(samples: ModuleType) -> None:
    x, y = rows()
    launch = compiling.kernel(samples.add, x.device, width=64)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
        x.fill_(1.0)
        launch(x, y, 2.0)
        torch.cuda.current_stream().synchronize()
    assert (y == 3.0).all()


def test_every_device_while_the_first_is_current(samples: ModuleType) -> None:
    """Each GPU on a stream of its own; TVM leaves its device current, the launcher must not."""
    for index in range(torch.cuda.device_count()):
        x, y = rows(f"cuda:{index}")
        launch = compiling.kernel(samples.add, x.device, width=64)
        with torch.cuda.device(0), torch.cuda.stream(torch.cuda.Stream(index)), torch.cuda.device(0):
            torch.cuda.synchronize(index)
            launch(x, y, 1.0)
            assert torch.cuda.current_device() == 0
        torch.cuda.synchronize(index)
        torch.testing.assert_close(y, x + 1.0, rtol=0, atol=0)


def test_tensors_that_require_gradients(samples: ModuleType) -> None:
    x, y = rows()
    compiling.kernel(samples.add, x.device, width=64)(x.requires_grad_(), y, 1.0)
    torch.testing.assert_close(y, x.detach() + 1.0, rtol=0, atol=0)


def test_a_graph(samples: ModuleType) -> None:
    x, y = rows()
    launch = compiling.kernel(samples.add, x.device, width=64)
    launch(x, y, 1.0)  # the first launch loads the binary, which a capture does not allow
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(x, y, 2.0)
    x.fill_(5.0)
    graph.replay()
    torch.cuda.synchronize()
    assert (y == 7.0).all()


def test_a_kernel_by_nvrtc(samples: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    found = nvrtc.discover()
    assert found.rejected is None
    monkeypatch.setattr(discover, "choose", lambda arch: found)
    x, y = rows(width=96)
    forget_compilers()
    try:
        compiling.kernel(samples.add, x.device, width=96)(x, y, 1.0)
    finally:
        forget_compilers()
    torch.testing.assert_close(y, x + 1.0, rtol=0, atol=0)


def forget_compilers() -> None:
    compiling.flags_for.cache_clear()
    compiling._flags_without_tilelang.cache_clear()


EARLIER = """
import sys
import torch
from chunkwise_tilelang.toolkit import compile
A, B = torch.randn(100, 256, device="cuda").bfloat16(), torch.randn(256, 256, device="cuda").bfloat16()
C = torch.full((100, 256), torch.nan, device="cuda")
compile.kernel("kernel_samples:product", A.device, rows=64)(A, B, C)
torch.testing.assert_close(C, A.float() @ B.float(), rtol=1e-3, atol=1e-3)
print("tilelang imported:", "tilelang" in sys.modules)
"""


def test_a_kernel_of_an_earlier_process(tmp_path: Path) -> None:
    """Loaded without TileLang it gives what it should."""
    path = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "TILELANG_CACHE_DIR": str(tmp_path), "TILELANG_DISABLE_CACHE": "0", "PYTHONPATH": path}
    for imported in (True, False):
        ran = subprocess.run(
            [sys.executable, "-c", EARLIER], capture_output=True, text=True, env=environment, check=False
        )
        assert ran.returncode == 0, ran.stderr
        assert f"tilelang imported: {imported}" in ran.stdout


def cost_us(call: Callable[[], object], launches: int = 200, repeats: int = 20) -> float:
    """Of one call on the host, the least of some repeats, each shorter than the queue of launches."""
    best = float("inf")
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(launches):
            call()
        best = min(best, time.perf_counter() - start)
    return best / launches * 1e6


def test_what_a_launch_costs_the_host(samples: ModuleType) -> None:
    """Also with TMA descriptors, and beside TileLang's own way in; ``-s`` shows the figures."""
    import tilelang

    x, y = rows()
    launch = compiling.kernel(samples.add, x.device, width=64)
    ours = cost_us(lambda: launch(x, y, 1.0))
    arch = target(torch.cuda.get_device_capability(0))
    theirs = tilelang.compile(
        samples.add(width=64), target={"kind": "cuda", "arch": arch}, execution_backend="tvm_ffi",
        compile_flags=list(compiling.flags_for(arch)),
    )  # fmt: skip
    beside = cost_us(lambda: theirs(x, y, 1.0))
    a, b = (torch.zeros(n, 256, device="cuda", dtype=torch.bfloat16) for n in (512, 256))
    c = torch.empty(512, 256, device="cuda")
    product = compiling.kernel(samples.product, a.device, rows=64)
    described = cost_us(lambda: product(a, b, c))
    torch_add = cost_us(lambda: torch.add(x, 1.0, out=y))
    print(f"add {ours:.1f} us, with two TMA descriptors {described:.1f} us, by JITKernel {beside:.1f} us")
    print(f"torch.add {torch_add:.1f} us")
    assert ours < LAUNCH_US
    assert ours < beside
