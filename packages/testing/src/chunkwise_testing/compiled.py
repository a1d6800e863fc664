"""What TileLang's kernels take on chip and what goes wrong in them, told by nvcc with no GPU.

A kernel is lowered and compiled for its architecture as a user's call would compile it. Read from that: registers,
spills, shared memory (ptxas rounds what is static up to the alignment of what is dynamic: 32 bytes of barriers may take
1,024), the notes of ptxas on asynchronous matrix products that it serialises or waits for (C75xx), barriers of all
threads where threads have parted ways, and tiles that take another one's place with no such barrier between.
"""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Compiled:
    """One device function.

    Args:
        name: of the function in CUDA.
        threads: of a block.
        registers: of a thread.
        spill_bytes: stores and loads of registers that found no room, of a thread.
        shared_memory_bytes: static and dynamic, of a block.
        barriers: named barriers, the one of ``__syncthreads`` included.
        notes: what ptxas says of asynchronous matrix products.
        stray_syncs: lines of ``source`` with a barrier of all threads in or between parts of single warps.
        races: of tiles that lie in one another's place in shared memory, in words.
        source: the CUDA C++ of the whole kernel.
    """

    name: str
    threads: int
    registers: int
    spill_bytes: int
    shared_memory_bytes: int
    barriers: int
    notes: tuple[str, ...]
    stray_syncs: tuple[int, ...]
    races: tuple[str, ...]
    source: str

    def problems(self, shared_memory_bytes: int, spill_bytes: int = 0) -> list[str]:
        """What is not as the schedule says: shared memory exactly, and at most so many bytes of spills."""
        found = []
        if self.shared_memory_bytes != shared_memory_bytes:
            found.append(
                f"takes {self.shared_memory_bytes} bytes of shared memory, its schedule says {shared_memory_bytes}"
            )
        if self.spill_bytes > spill_bytes:
            found.append(f"spills {self.spill_bytes} bytes a thread, {spill_bytes} are allowed for")
        found += [*self.notes, *self.races]
        found += [
            f"line {number}: a barrier of all threads where they have parted: "
            f"{self.source.splitlines()[number - 1].strip()}"
            for number in self.stray_syncs
        ]
        return [f"{self.name}: {text}" for text in found]


def compile_kernel(
    function: Any, arch: str, nvcc: Path, flags: Sequence[str] = (), pass_configs: Mapping[str, Any] | None = None
) -> list[Compiled]:
    """Lower a PrimFunc and compile it; one entry for each of its device functions.

    TileLang's check for data races is on. It writes what it finds to the process's stderr, ``Data race detected``.

    Args:
        function: what a builder returned.
        arch: ``sm_90a``.
        nvcc: the compiler; 12.6 or newer for sm_90a, 12.8 for sm_120a.
        flags, pass_configs: as for ``tilelang.compile``; a function's own pass configuration goes before.
    """
    import tilelang
    from tilelang import tvm

    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    own = (function.attrs or {}).get("tilelang_pass_configs") or {}
    config = {"tl.disable_data_race_check": False, **dict(own), **(pass_configs or {})}
    with tvm.transform.PassContext(opt_level=3, config=config), target:
        lowered = tilelang.lower(function, target=target)
    source = str(lowered.kernel_source)
    log = _ptxas_log(source, arch, nvcc, flags)
    races = tuple(overlays(source, _shared_bytes(function)))
    return [
        _read(str(device.attrs["global_symbol"]), device.attrs, source, log, races)
        for device in lowered.device_mod.functions.values()
    ]


def _ptxas_log(source: str, arch: str, nvcc: Path, flags: Sequence[str]) -> str:
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cu")
        file.write_text(source)
        options = ["-std=c++20", f"-I{TILELANG_TEMPLATE_PATH}", f"-I{CUTLASS_INCLUDE_DIR}", *flags]
        command = [str(nvcc), "--cubin", "-O3", "-lineinfo", f"-arch={arch}", "-Xptxas=-v", *options]
        ran = subprocess.run(
            [*command, "-o", str(file.with_suffix(".cubin")), str(file)], capture_output=True, text=True, check=False
        )
    log = ran.stdout + ran.stderr
    if ran.returncode != 0:
        raise RuntimeError("\n".join(line for line in log.splitlines() if "error" in line) or log)
    return log


def _shared_bytes(function: Any) -> dict[str, int]:
    """Bytes of the tiles that a PrimFunc allocates in shared memory."""
    from tilelang import tvm

    found: dict[str, int] = {}

    def visit(node: Any) -> None:
        for buffer in getattr(node, "alloc_buffers", None) or ():
            if str(buffer.scope()).startswith("shared"):
                elements = math.prod(int(extent) for extent in buffer.shape)
                found[str(buffer.name)] = elements * int(re.sub(r"\D*(\d+).*", r"\1", str(buffer.dtype))) // 8

    tvm.tirx.stmt_functor.post_order_visit(function.body, visit)
    return found


def _read(name: str, attributes: Mapping[str, Any], source: str, log: str, races: tuple[str, ...]) -> Compiled:
    part = re.search(rf"Function properties for {re.escape(name)}\n(.*\n.*\n)", log)
    if part is None:
        raise RuntimeError(f"ptxas says nothing of {name}:\n{log}")

    def number(pattern: str) -> int:
        found = re.search(pattern, part.group(1))
        return int(found[1]) if found else 0

    extents = attributes["thread_extent"]
    threads = 1
    for axis in ("threadIdx.x", "threadIdx.y", "threadIdx.z"):
        threads *= int(extents[axis]) if axis in extents else 1
    dynamic = int(attributes["dyn_shared_memory_buf"]) if "dyn_shared_memory_buf" in attributes else 0
    notes = [line.partition(": ")[2] for line in log.splitlines() if "(C75" in line and name in line]
    return Compiled(
        name=name,
        threads=threads,
        registers=number(r"Used (\d+) registers"),
        spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        shared_memory_bytes=number(r"(\d+) bytes smem") + dynamic,
        barriers=number(r"used (\d+) barriers"),
        notes=tuple(notes),
        stray_syncs=tuple(stray_syncs(source)),
        races=races,
        source=source,
    )


# --- barriers --------------------------------------------------------------------------------------------


@dataclass
class _Block:
    """A block of CUDA C++ in braces."""

    first: int
    parts: bool  # threads part ways here, by a condition on their number
    loops: bool = False
    waits: bool = False


def stray_syncs(source: str) -> Iterator[int]:
    """The lines of ``__syncthreads`` inside an ``if`` on the thread's number, or between two that wait in loops.

    Between those it is where each part of a warp-specialised kernel waits for the other: the first one blocks when the
    ring is full, and its partner has not passed the barrier. TileLang writes a statement a line and braces at the ends.
    """
    stack: list[_Block] = []
    roles: list[tuple[int, int]] = []
    syncs: list[tuple[int, bool]] = []
    for number, line in enumerate(source.splitlines(), 1):
        text = line.strip()
        if text.startswith("extern"):
            yield from _strays(roles, syncs)
            stack, roles, syncs = [], [], []
        parting = "threadIdx" in text
        if text.startswith("}") and stack:
            closed = stack.pop()
            parting = parting or ("else" in text and closed.parts)
            if closed.parts and closed.loops and closed.waits:
                roles.append((closed.first, number))
        if text.endswith("{"):
            is_loop = text.startswith(("for ", "while "))
            stack.append(_Block(number, parting and not is_loop))
            for block in stack if is_loop else ():
                block.loops = True
        if ".wait(" in text or "mbarrier_wait" in text:
            for block in stack:
                block.waits = True
        if "__syncthreads()" in text:
            syncs.append((number, any(block.parts for block in stack)))
    yield from _strays(roles, syncs)


def _strays(roles: list[tuple[int, int]], syncs: list[tuple[int, bool]]) -> Iterator[int]:
    first = min((last for _, last in roles), default=None)
    final = max((begin for begin, _ in roles), default=0)
    for number, parted in syncs:
        if parted or (first is not None and first <= number <= final):
            yield number


def overlays(source: str, shared_bytes: Mapping[str, int]) -> Iterator[str]:
    """The tiles that are used where another one was, with no barrier of all threads since; one kernel's source.

    TileLang gives one place to tiles that are not needed together. It puts barriers there itself, unless a kernel says
    that it has its own (``tl.disable_thread_storage_sync``): then a warp may still read what another one overwrites.
    Loops count twice, so that what a turn begins with is held against what the one before ended with.
    """
    places = {
        name: range(int(at), int(at) + shared_bytes.get(name, 1))
        for name, at in re.findall(r"void\* (\w+) = \(\(void\*\)\(\(char\*\)buf_dyn_shmem \+ (\d+)\)\)", source)
    }
    lines = list(_twice_in_loops([line for line in source.splitlines() if "buf_dyn_shmem" not in line]))
    for pair in itertools.combinations(places, 2):
        first, second = (places[name] for name in pair)
        if first.start >= second.stop or second.start >= first.stop:
            continue
        last = ""
        for line in lines:
            used = {name for name in pair if re.search(rf"\b{name}\b", line)}
            if len(used | {last} - {""}) == 2:
                (new,) = used - {last or min(used)}
                yield f"{new} takes the place of {last or min(used)}, with no barrier of all threads between"
                break
            last = "" if "__syncthreads()" in line else min(used, default=last)


def _twice_in_loops(lines: Sequence[str]) -> Iterator[str]:
    """Lines of CUDA C++ in the order in which they run, with two turns of each loop in braces."""
    at = 0
    while at < len(lines):
        text, end = lines[at].strip(), at + 1
        yield lines[at]
        if text.startswith(("for ", "while ")) and text.endswith("{"):
            depth = 1
            while depth and end < len(lines):
                depth += lines[end].count("{") - lines[end].count("}")
                end += 1
            for _ in range(2):
                yield from _twice_in_loops(lines[at + 1 : end])
        at = end
