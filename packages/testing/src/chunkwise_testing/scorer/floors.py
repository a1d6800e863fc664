"""The physical floor of a call: its unavoidable bytes and FLOPs over the rates that this device reaches."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from chunkwise.protocol.cases import Cost
from chunkwise_testing.scorer.timing import Run, Timer

_RUNS = 20
_WARM_UPS = 5


@dataclass(frozen=True)
class Rates:
    """What the device was measured to reach.

    Args:
        copy_bytes_per_s: of a large copy on the device, read and written bytes together.
        matmul_flops: FLOP/s of a large bf16 matrix product.
        how: sizes of both, in words.
    """

    copy_bytes_per_s: float
    matmul_flops: float
    how: str


@dataclass(frozen=True)
class Floor:
    """The least time of a call: the larger of the two, in milliseconds."""

    memory_ms: float
    compute_ms: float

    @property
    def ms(self) -> float:
        """The floor."""
        return max(self.memory_ms, self.compute_ms)


def floor_of(cost: Cost, rates: Rates) -> Floor:
    """Bytes over the copy rate, FLOPs over the rate of the matrix product."""
    return Floor(cost.bytes / rates.copy_bytes_per_s * 1e3, cost.flops / rates.matmul_flops * 1e3)


def measure_rates(device: str, timer: Timer) -> Rates:
    """Measure both rates with the timer of the scores; sizes that suit the kind of device."""
    on_gpu = device.startswith("cuda")
    copied_bytes, n = (1 << 30, 8192) if on_gpu else (32 << 20, 256)
    if on_gpu:
        copied_bytes = min(copied_bytes, torch.cuda.mem_get_info()[0] // 4)
    copy_ms = _copy_ms(device, timer, copied_bytes)
    matmul_ms = _matmul_ms(device, timer, n)
    how = f"copy of {copied_bytes / 2**20:.0f} MiB, bf16 matmul of {n} x {n} x {n}"
    return Rates(2 * copied_bytes / (copy_ms * 1e-3), 2 * n**3 / (matmul_ms * 1e-3), how)


def _copy_ms(device: str, timer: Timer, size: int) -> float:
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _median_ms(lambda: target.copy_(source), timer)


def _matmul_ms(device: str, timer: Timer, n: int) -> float:
    # Random numbers: zeros take less power, and a GPU at its power limit multiplies them faster.
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(n, n, generator=generator, device=device).to(torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    return _median_ms(lambda: torch.matmul(a, b, out=product), timer)


def _median_ms(run: Run, timer: Timer) -> float:
    spans = []
    for turn in range(_WARM_UPS + _RUNS):
        start = timer.mark()
        run()
        if turn >= _WARM_UPS:
            spans.append((start, timer.mark()))
    return statistics.median(timer.read_ms(spans))
