"""What measures on a device: a timer, graph capture, peak memory, kernels. CUDA's own, and a CPU's."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chunkwise_testing.scorer.timing import Run, Timer

Outputs = Callable[[], Sequence[Tensor]]
"""One call of one side, with the outputs and gradients that it returns."""


class ClockTimer:
    """A host clock, for devices whose calls return when they are done."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock

    def mark(self) -> float:
        """Seconds."""
        return self.clock()

    def read_ms(self, spans: Sequence[tuple[Any, Any]]) -> list[float]:
        """The differences in milliseconds."""
        return [(end - start) * 1e3 for start, end in spans]


class EventTimer:
    """CUDA events on the current stream. Where the device outruns the host, a span holds the host's time too."""

    def mark(self) -> torch.cuda.Event:
        """An event, recorded now."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read_ms(self, spans: Sequence[tuple[Any, Any]]) -> list[float]:
        """Waits for the device, once."""
        torch.cuda.synchronize()
        return [float(start.elapsed_time(end)) for start, end in spans]


class Graph:
    """A call captured into a CUDA graph.

    Args:
        run: the call; it must have run before, so that everything is compiled.
        pool: the memory pool of all graphs of one side. They share their memory, as eager calls do: none of them needs
            what another one left.
    """

    def __init__(self, run: Outputs, pool: Any) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # workspaces that belong to a stream are made before the capture
            run()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        # The outer block sets the stream back: torch's own does not where the capture breaks.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(self._graph, pool=pool):
            self.outputs: Sequence[Tensor] = run()

    def replay(self) -> None:
        """Run it again; refills ``outputs``."""
        self._graph.replay()


class KernelTime(NamedTuple):
    """What a call runs under one name: microseconds and launches of a call."""

    name: str
    us: float
    launches: float


@dataclass(frozen=True)
class Instruments:
    """The instruments of a device, exchangeable for tests.

    Args:
        timer: times a call.
        timing: the name of that timing in the results.
        synchronize: waits for the device.
        release: gives memory that nothing uses back to the device.
        new_pool: makes what the graphs of one side share.
        capture: captures a call, given the pool; or the reason why there are no graphs.
        peak_bytes: the most memory that a call takes over what is there when it starts; or the reason why not.
        kernels: what a call runs on the device, the longest first; or the reason why that is not known.
        clock: seconds, for first calls.
        free_bytes: memory that inputs may take from.
        cache_bytes: of the last cache in front of memory, 0 where it is not known.
    """

    timer: Timer
    timing: str
    synchronize: Callable[[], None]
    release: Callable[[], None]
    new_pool: Callable[[], Any]
    capture: Callable[[Outputs, Any], Any] | str
    peak_bytes: Callable[[Run], int] | str
    kernels: Callable[[Run], Sequence[KernelTime]] | str
    clock: Callable[[], float]
    free_bytes: Callable[[], int]
    cache_bytes: int


def _nothing() -> None:
    return None


def of_cpu() -> Instruments:
    """A host clock, and the reasons for what a CPU lacks."""
    return Instruments(
        timer=ClockTimer(),
        timing="clock",
        synchronize=_nothing,
        release=_nothing,
        new_pool=_nothing,
        capture="not available on cpu",
        peak_bytes="not measured on cpu",
        kernels="not measured on cpu",
        clock=time.perf_counter,
        free_bytes=lambda: 2 << 30,
        cache_bytes=0,
    )


def of_cuda() -> Instruments:
    """CUDA's instruments, for the current device."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Instruments(
        timer=EventTimer(),
        timing="events",
        synchronize=torch.cuda.synchronize,
        release=_release,
        new_pool=torch.cuda.graph_pool_handle,
        capture=Graph,
        peak_bytes=cuda_peak_bytes,
        kernels=cuda_kernels,
        clock=time.perf_counter,
        free_bytes=lambda: torch.cuda.mem_get_info()[0],
        cache_bytes=int(properties.L2_cache_size),
    )


def _release() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def cuda_peak_bytes(run: Run) -> int:
    """Peak of torch's allocator during a call, over what was allocated before it (the inputs)."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated()) - before


PROFILED_CALLS = 10


def cuda_kernels(run: Run) -> list[KernelTime]:
    """What torch's profiler sees on the device, the mean of several calls: each kernel alone, gaps between them not."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_CALLS):
            run()
        torch.cuda.synchronize()
    return kernel_times(profiler.key_averages(), PROFILED_CALLS)


def kernel_times(averages: Iterable[Any], calls: int) -> list[KernelTime]:
    """The profiler's entries that took time on the device, a call of ``calls``; the longest first."""
    found = [KernelTime(e.key, e.device_time_total / calls, e.count / calls) for e in averages if e.device_time_total]
    return sorted(found, key=lambda kernel: -kernel.us)
