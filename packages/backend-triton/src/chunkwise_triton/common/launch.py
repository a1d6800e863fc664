"""Launches: Triton's own dispatch for the first launch of a kernel, a table of compiled kernels for the next ones.

Triton looks at every argument and every constant again in each launch, which takes longer than many of these kernels
run. What it decides by are the dtypes, the alignment of the addresses, the constants and the options; where the caller
vouches, by a key, that all of them are those of an earlier launch, the compiled kernel is called directly.

On ``meta`` tensors a launch compiles and runs nothing; inside :func:`warm` the compilers work side by side.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from triton.runtime import JITFunction

Key = tuple[Hashable, ...]

_COMPILED: dict[Key, tuple[Any, tuple[Any, ...]]] = {}
_COMPILERS = min(16, os.cpu_count() or 1)


class _Warming(threading.local):
    submit: Callable[..., Any] | None = None


_WARMING = _Warming()


def aligned(*tensors: Tensor | None) -> bool:
    """Whether all addresses are multiples of 16, as those of whole allocations are."""
    bits = 0
    for x in tensors:
        if x is not None:
            bits |= x.data_ptr()
    return bits % 16 == 0


def launch(
    kernel: Any,
    programs: int,
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    warps: int = 4,
    stages: int = 1,
    key: Key | None = None,
) -> None:
    """Run ``programs`` programs of a kernel, or none.

    Args:
        kernel: a ``triton.jit`` function whose constants come last.
        programs: the grid.
        arguments: what comes before the constants: tensors, ints that are not specialised, floats.
        constants: the ``constexpr`` parameters by name.
        warps, stages: Triton's options.
        key: what :func:`launch_again` will find the kernel by; None leaves every launch to Triton.
    """
    if programs == 0:
        return
    if arguments[0].is_meta:
        _compile(kernel, arguments, constants, warps, stages)
        return
    compiled = kernel[(programs,)](*arguments, **constants, num_warps=warps, num_stages=stages)
    if key is not None and isinstance(kernel, JITFunction):  # not interpreted
        tail = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
        _COMPILED[_with_dtypes(kernel, key, arguments)] = compiled, tail


def launch_again(kernel: Any, programs: int, arguments: tuple[Any, ...], key: Key | None) -> bool:
    """Run a kernel that was launched before; False if none is known by this key, which None never is.

    Args:
        kernel, programs, arguments: as for :func:`launch`; on a GPU, and at least one program.
        key: equal for equal devices, constants and options, and given only where all tensors are aligned and all ints
            fit 32 bits. The dtypes are looked at here.
    """
    found = None if key is None else _COMPILED.get(_with_dtypes(kernel, key, arguments))
    if found is None:
        return False
    compiled, tail = found
    # An address is taken as it is; of a tensor the launcher asks the driver whether the GPU can reach it.
    addresses = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
    compiled[(programs, 1, 1)](*addresses, *tail)
    return True


def _with_dtypes(kernel: Any, key: Key, arguments: tuple[Any, ...]) -> Key:
    return (kernel, *key, *[x.dtype for x in arguments if isinstance(x, Tensor)])


def _compile(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], warps: int, stages: int) -> None:
    stand_ins = [x.dtype if isinstance(x, Tensor) else x for x in arguments]

    def work() -> None:
        kernel.warmup(*stand_ins, **constants, num_warps=warps, num_stages=stages, grid=(1,))

    if _WARMING.submit is None:
        work()
    else:
        _WARMING.submit(work)


def warm(run: Callable[[], object]) -> None:
    """Compile what a call on ``meta`` tensors launches, for the current device; raises what a compiler raises."""
    device = torch.cuda.current_device()
    futures: list[Future[None]] = []

    def on_device(work: Callable[[], None]) -> None:
        with torch.cuda.device(device):
            work()

    with ThreadPoolExecutor(_COMPILERS) as pool:
        _WARMING.submit = lambda work: futures.append(pool.submit(on_device, work))
        try:
            run()
        finally:
            _WARMING.submit = None
    for future in futures:
        future.result()
