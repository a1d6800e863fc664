"""Launches: Triton's own dispatch for the first launch of a kernel, a table of compiled kernels for the next ones.

Triton looks at every argument and every constant again in each launch, which takes longer than many of these kernels
run. What it decides by are the dtypes, the alignment of the pointers, the constants and the options; a launch that
agrees in them with an earlier one calls the compiled kernel directly. On ``meta`` tensors a launch compiles and runs
nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.runtime import JITFunction

_COMPILED: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
_INT32_END = 1 << 31


def launch(
    kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any], warps: int = 4, stages: int = 1
) -> None:
    """Run ``programs`` programs of a kernel, or none.

    Args:
        kernel: a ``triton.jit`` function whose constants come last.
        programs: the grid.
        arguments: what comes before the constants: tensors, ints that are not specialised, floats.
        constants: the ``constexpr`` parameters by name.
        warps, stages: Triton's options.
    """
    if programs == 0:
        return
    options = {"num_warps": warps, "num_stages": stages}
    if not isinstance(kernel, JITFunction):  # interpreted
        kernel[(programs,)](*arguments, **constants, **options)
        return
    passed, kinds, aligned = _looked_at(arguments)
    key = (kernel, torch.cuda.current_device(), *kinds, *constants.values(), warps, stages)
    if aligned and (found := _COMPILED.get(key)) is not None:
        compiled, tail = found
        if not arguments[0].is_meta:
            compiled[(programs, 1, 1)](*passed, *tail)
        return
    if arguments[0].is_meta:
        compiled = kernel.warmup(*_for_warmup(arguments), **constants, **options, grid=(programs,))
    else:
        compiled = kernel[(programs,)](*arguments, **constants, **options)
    if aligned:
        tail = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
        _COMPILED[key] = (compiled, tail)


def _for_warmup(arguments: tuple[Any, ...]) -> list[Any]:
    """Arguments as Triton's warm-up wants them: a dtype stands for a tensor."""
    return [x.dtype if isinstance(x, Tensor) else x for x in arguments]


def _looked_at(arguments: tuple[Any, ...]) -> tuple[list[Any], list[Any], bool]:
    """Arguments with addresses for tensors, what Triton decides by, and whether all addresses are multiples of 16.

    The launcher takes an address as it is; of a tensor it asks the driver whether the GPU can reach it.
    """
    passed: list[Any] = []
    kinds: list[Any] = []
    bits = 0
    for x in arguments:
        if isinstance(x, Tensor):
            address = x.data_ptr()  # 0 on meta
            bits |= address
            passed.append(address)
            kinds.append(x.dtype)
        else:
            passed.append(x)
            kinds.append(isinstance(x, int) and x < _INT32_END)
    return passed, kinds, bits % 16 == 0
