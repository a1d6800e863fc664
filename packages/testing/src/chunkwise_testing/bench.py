"""Host-side figures of core and of the built-in backend, each printed beside its limit: ``chunkwise bench host``.

Every figure is taken in this process on this machine's CPU, except the import times, which take fresh processes.
Times are the median of interleaved repeats, so that a drift of the machine hits both sides of a comparison.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import chunkwise
from chunkwise.dispatcher.cache import ROUTES
from chunkwise.verifier.implementation import Implementation
from chunkwise_testing.fakes import installed


@dataclass(frozen=True)
class Figure:
    """One measured number with its unit and, where one is set, its limit (``<`` or ``>=`` a value)."""

    name: str
    value: float
    unit: str
    limit: str = ""

    @property
    def holds(self) -> bool:
        """Whether the limit is kept; a figure without one always holds."""
        if not self.limit:
            return True
        relation, _, bound = self.limit.partition(" ")
        return self.value < float(bound) if relation == "<" else self.value >= float(bound)


def interleaved_us(*sides: Callable[[], object], calls: int | Sequence[int], repeats: int) -> list[float]:
    """Median microseconds a call of each side, taken in turn; a sample is so many calls (of all, or of each side)."""
    counts = [calls] * len(sides) if isinstance(calls, int) else calls
    for side in sides:
        side()
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(repeats):
        for side, count, found in zip(sides, counts, times, strict=True):
            start = time.perf_counter()
            for _ in range(count):
                side()
            found.append((time.perf_counter() - start) / count * 1e6)
    return [statistics.median(found) for found in times]


# --- dispatch ------------------------------------------------------------------------------------------------

_OUTPUT = torch.zeros(1, 8, 2, 4)


def _noop_forward(schedule: None, inputs: Any, save: str | None) -> tuple[tuple[Tensor, None], dict[str, Tensor]]:
    return (_OUTPUT.detach(), None), ({"g_cumsum": _OUTPUT, "inverse": _OUTPUT} if save else {})


class _Bare(torch.autograd.Function):
    """An autograd function of the op's arity that does nothing: the floor for a call with gradients."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, None]:
        return _OUTPUT.detach(), None

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None,) * 9


_NOOP = Implementation(
    "noop/gated_delta_rule/constant",
    op="chunk_gated_delta_rule",
    rank=0,
    archs=("any",),
    schedule=lambda facts: None,
    forward="chunkwise_testing.bench:_noop_forward",
    backward="chunkwise_testing.bench:_noop_forward",
    residuals=("gdn-wy64@2",),
)


def dispatch_figures(calls: int = 2000, repeats: int = 15) -> list[Figure]:
    """What core costs a call, against an implementation that does nothing."""
    q, k, v = (torch.randn(1, 8, 2, 4) for _ in range(3))
    g, beta = -torch.rand(1, 8, 2), torch.rand(1, 8, 2)
    recorded = q.clone().requires_grad_()
    op = chunkwise.chunk_gated_delta_rule

    def miss() -> None:
        ROUTES.clear()
        op(q, k, v, g, beta)

    def miss_recorded() -> None:
        ROUTES.clear()
        op(recorded, k, v, g, beta)

    with installed("noop", [_NOOP]):
        hit, hit_recorded, bare = interleaved_us(
            lambda: op(q, k, v, g, beta),
            lambda: op(recorded, k, v, g, beta),
            lambda: _Bare.apply(None, recorded, k, v, g, beta, None, None, None),
            calls=calls,
            repeats=repeats,
        )
        misses = interleaved_us(miss, miss_recorded, calls=calls // 10, repeats=repeats)
    return [
        Figure("dispatch hit, no gradient", hit, "us", "< 12"),
        Figure("dispatch hit, gradient", hit_recorded, "us"),
        Figure("bare autograd.Function.apply", bare, "us"),
        Figure("dispatch hit, gradient, over bare apply", hit_recorded - bare, "us", "< 15"),
        Figure("dispatch miss, no gradient", misses[0], "us", "< 300"),
        Figure("dispatch miss, gradient", misses[1], "us", "< 300"),
    ]


# --- import --------------------------------------------------------------------------------------------------


def import_figures(repeats: int = 7) -> list[Figure]:
    """What ``import chunkwise``, and then the first use of an op's name, add to ``import torch``."""
    code = (
        "import time, torch; a = time.perf_counter(); import chunkwise; b = time.perf_counter(); "
        "chunkwise.chunk_gated_delta_rule; c = time.perf_counter(); print((b - a) * 1e3, (c - b) * 1e3)"
    )
    found = []
    for _ in range(repeats):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        found.append([float(x) for x in done.stdout.split()])
    imported, first_use = (statistics.median(column) for column in zip(*found, strict=True))
    return [
        Figure("import chunkwise, over import torch", imported, "ms", "< 50"),
        Figure("first use of an op's name", first_use, "ms"),
    ]


# --- the backend torch -----------------------------------------------------------------------------------------


def _inputs(tokens: int, heads: int = 4, width: int = 64) -> dict[str, Any]:
    shape = (1, tokens, heads, width)
    q, k, v = (torch.randn(shape) for _ in range(3))
    g, beta = -torch.rand(shape[:-1]), torch.rand(shape[:-1])
    return {"q": q, "k": torch.nn.functional.normalize(k, dim=-1), "v": v, "g": g, "beta": beta}


def speed_figures(tokens: int = 4096, repeats: int = 5) -> list[Figure]:
    """The chunkwise backend against the token-by-token oracle, B1 T4096 H4 K=V=64, fp32."""
    inputs, op = _inputs(tokens), chunkwise.chunk_gated_delta_rule
    with torch.no_grad():
        oracle, forward = interleaved_us(
            lambda: op.reference(**inputs),
            lambda: op(**inputs, backend="torch"),
            calls=(1, 10),
            repeats=repeats,
        )
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name].requires_grad_()

    def train() -> None:
        op(**inputs, backend="torch")[0].sum().backward()

    (both,) = interleaved_us(train, calls=5, repeats=repeats)
    return [
        Figure(f"oracle forward, T {tokens}", oracle / 1e3, "ms"),
        Figure(f"torch forward, T {tokens}", forward / 1e3, "ms"),
        Figure(f"torch forward+backward, T {tokens}", both / 1e3, "ms"),
        Figure("torch forward, times faster than the oracle", oracle / forward, "x", ">= 20"),
    ]


class PeakResident:
    """Samples this process's resident memory from a thread while the block runs (Linux)."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    @staticmethod
    def resident_bytes() -> int:
        """Resident memory now, from /proc."""
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * 4096

    def _sample(self) -> None:
        while not self._done.wait(0.002):
            self.peak_bytes = max(self.peak_bytes, self.resident_bytes())

    def __enter__(self) -> PeakResident:
        self.start_bytes = self.resident_bytes()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def grown_bytes(self) -> int:
        """Peak over what was resident at the start."""
        return max(0, self.peak_bytes - self.start_bytes)


_MEMORY_CODE = (
    "import sys, torch; from chunkwise_testing import bench; torch.set_num_threads(2); "
    "print(bench.peak_of_training(int(sys.argv[1])))"
)


def peak_of_training(tokens: int) -> int:
    """Peak bytes of one forward and backward on ``torch``, over the inputs; meant for a fresh process."""
    op = chunkwise.chunk_gated_delta_rule

    def train(inputs: dict[str, Any]) -> None:
        op(**inputs, backend="torch")[0].sum().backward()

    train({name: t.requires_grad_() for name, t in _inputs(64).items()})
    inputs = {name: t.requires_grad_() for name, t in _inputs(tokens).items()}
    with PeakResident() as peak:
        train(inputs)
    return peak.grown_bytes


def memory_figures(lengths: Sequence[int] = (2048, 8192, 32768)) -> list[Figure]:
    """Peak memory of forward+backward over T; linear growth keeps bytes a token constant."""
    figures = []
    for tokens in lengths:
        command = [sys.executable, "-c", _MEMORY_CODE, str(tokens)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        figures.append(Figure(f"torch peak of forward+backward, T {tokens}", int(done.stdout) / 2**20, "MiB"))
    growth = figures[-1].value / figures[-2].value / (lengths[-1] / lengths[-2])
    figures.append(Figure("torch peak, growth over growth of T", growth, "x", "< 1.15"))
    return figures


PARTS: dict[str, Callable[[], list[Figure]]] = {
    "dispatch": dispatch_figures,
    "import": import_figures,
    "speed": speed_figures,
    "memory": memory_figures,
}


def main(argv: Sequence[str] | None = None) -> int:
    """``chunkwise bench host [PART ...]``: print the figures; 1 if one breaks its limit."""
    parser = argparse.ArgumentParser("chunkwise bench host", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)}; all by default")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args(argv)
    unknown = sorted(set(arguments.parts) - set(PARTS))
    if unknown:
        parser.error(f"unknown parts {unknown}; known: {', '.join(PARTS)}")
    torch.set_num_threads(min(2, torch.get_num_threads()))
    figures = [figure for part in arguments.parts or PARTS for figure in PARTS[part]()]
    for figure in figures:
        verdict = "" if figure.holds else "  BROKEN"
        sys.stdout.write(f"{figure.name:48} {figure.value:12.2f} {figure.unit:4} {figure.limit}{verdict}\n")
    if arguments.json:
        versions = {"python": platform.python_version(), "torch": torch.__version__, "chunkwise": chunkwise.__version__}
        record = {"versions": versions, "figures": [asdict(figure) for figure in figures]}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0 if all(figure.holds for figure in figures) else 1
