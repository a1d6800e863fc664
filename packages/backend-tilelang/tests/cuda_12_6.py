"""NVRTC 12.6 by its wheel and through cuda-python, in a process that has loaded no other NVRTC: torch brings its own.

Run as a program it compiles what ``json`` says on its standard input, and prints the errors.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import sys
from typing import Any


def nvrtc() -> Any:
    """``cuda.bindings.nvrtc`` on the library of 12.6, whose builtins must be loaded before it."""
    assert "torch" not in sys.modules, "torch has loaded an NVRTC of its own; call this first"
    files = importlib.metadata.distribution("nvidia-cuda-nvrtc-cu12").files or ()
    libraries = [str(file.locate()) for file in files if file.name.startswith("libnvrtc")]
    for library in sorted(libraries, key=lambda path: "builtins" not in path):
        ctypes.CDLL(library)
    from cuda.bindings import nvrtc as bindings

    assert bindings.nvrtcVersion()[1:] == (12, 6), bindings.nvrtcVersion()
    return bindings


def compile_(source: str, options: list[str]) -> str:
    """The errors, an empty text where there are none."""
    library = nvrtc()
    _, program = library.nvrtcCreateProgram(source.encode(), b"kernel", 0, [], [])
    (done,) = library.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    _, size = library.nvrtcGetProgramLogSize(program)
    log = bytes(size)
    library.nvrtcGetProgramLog(program, log)
    if done == library.nvrtcResult.NVRTC_SUCCESS:
        return ""
    return log.decode(errors="replace") or str(done)


if __name__ == "__main__":
    json.dump(compile_(**json.load(sys.stdin)), sys.stdout)
