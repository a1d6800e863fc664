"""NVRTC in nvcc's place: takes over TileLang's step from CUDA C++ to a binary, for our kernels alone.

TileLang's own NVRTC backend launches through Python, at many times the cost, and asks the current device's stream.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from functools import cache
from typing import Any

from chunkwise_tilelang.toolkit import nvrtc

MARK = "-DCHUNKWISE_TOOLKIT=nvrtc"
"""How the flags of a kernel that NVRTC is to compile begin."""


@cache
def install() -> None:
    """Let TileLang compile by NVRTC what carries the mark in its flags; anything else goes the way it went before."""
    import tvm_ffi

    name = "tilelang_callback_cuda_compile"
    before = tvm_ffi.get_global_func(name)

    def compile_cuda(code: str, target: Any, pass_config: Mapping[str, Any] | None = None) -> Any:
        config = pass_config or {}
        flags = [token for flag in config.get("tl.device_compile_flags") or () for token in shlex.split(str(flag))]
        if not any(flag.startswith(MARK) for flag in flags):
            return before(code, target, pass_config)
        if config.get("tl.enable_fast_math"):
            flags.append("--use_fast_math")
        level = config.get("tl.ptxas_register_usage_level")
        if level is not None:
            flags.append(f"--ptxas-options=--register-usage-level={int(level)}")
        return bytearray(compile_source(str(code), str(target.attrs["arch"]), flags))

    tvm_ffi.register_global_func(name, f=compile_cuda, override=True)


def compile_source(source: str, arch: str, flags: list[str]) -> bytes:
    """The binary of a kernel's CUDA C++ for ``arch`` (``sm_90a``); raises RuntimeError with the compiler's log."""
    from tilelang.contrib.nvrtc import compile_cuda
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    folders = (TILELANG_TEMPLATE_PATH, CUTLASS_INCLUDE_DIR, *nvrtc.discover().includes)
    number = int(arch.removeprefix("sm_").rstrip("af"))
    return bytes(compile_cuda(source, "cubin", number, [*(f"-I{folder}" for folder in folders), *flags], verbose=True))
