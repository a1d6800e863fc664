"""Time both sides of every evidence row again, in one process and in turn, on the GPU that the row names.

A row's `facts` hold `sizes`, `dtypes` and `flags` as the dispatcher sees them, `needs` (the arguments whose gradient is
taken: the time is that of forward and backward then, of the forward alone without) and, for a ragged call, `offsets`.
Rows of GPUs that this machine does not have, and rows against a peer library, are named and left alone.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _scaffold import PACKAGES, ROOT

if TYPE_CHECKING:
    from chunkwise.verifier.evidence import Row
    from chunkwise_testing.sampling import Call

WARM_UPS = 3


def evidence_files(packages: Path) -> list[Path]:
    """Every evidence.json of every backend."""
    return sorted(packages.glob("*/src/**/evidence.json"))


def torch_device(row: Row) -> str | None:
    """Where the row can be measured on this machine, or None."""
    from chunkwise.dispatcher.probes import gpu_count
    from chunkwise.verifier.device import CPU, device_facts

    for index in range(gpu_count()):
        facts = device_facts("cuda", index)
        if (facts.name, facts.sm_count) == (row.gpu, row.sm_count):
            return f"cuda:{index}"
    return "cpu" if row.gpu == CPU.name else None


def call_of(row: Row, device: str) -> Call:
    """The call that the row's facts describe, with drawn inputs."""
    from chunkwise.ops import OPS
    from chunkwise.protocol.axes import DTYPES
    from chunkwise.protocol.cases import Case
    from chunkwise_testing import sampling

    facts, op = row.facts, OPS[_op_of(row.implementation)]
    offsets = facts.get("offsets")
    flags = {name: value for name, value in facts.get("flags", {}).items() if name != "ragged"}
    optional = {spec.name for spec in op.declaration.tensors if spec.optional}
    case = Case(
        row.name,
        {axis: size for axis, size in facts["sizes"].items() if axis != "N"},
        offsets=tuple(offsets) if offsets is not None else None,
        options=flags,
        present=tuple(name for name in facts["dtypes"] if name in optional),
    )
    dtypes = {name: DTYPES[dtype] for name, dtype in facts["dtypes"].items()}
    return sampling.draw(op, case, device=device).mapped(lambda name, t: t.to(dtypes.get(name, t.dtype)))


def _op_of(implementation: str) -> str:
    from chunkwise.dispatcher.registry import registry
    from chunkwise.errors import UnknownNameError

    for _, known in registry().implementations():
        if known.name == implementation:
            return known.op
    raise UnknownNameError(f"no implementation is called {implementation!r}")


def _is_ours(name: str) -> bool:
    from chunkwise.dispatcher.registry import registry

    return any(known.name == name for _, known in registry().implementations())


def runner(name: str, call: Call, needs: Sequence[str]) -> Callable[[], Any]:
    """A function that runs the call on one implementation, with its backward where gradients are needed."""
    import torch

    import chunkwise
    from chunkwise_testing.sampling import draw_gradients

    leaves = {key: t.detach().requires_grad_(key in needs) for key, t in call.tensors.items()}
    gradients = draw_gradients(call) if needs else {}
    names = [output.name for output in call.declaration.promises.outputs]

    def run() -> None:
        with chunkwise.prefer(name), contextlib.nullcontext() if needs else torch.no_grad():
            outputs = dict(zip(names, call.op(**leaves, **call.options), strict=True))
            if needs:
                torch.autograd.grad(
                    [outputs[n] for n in gradients], [leaves[n] for n in needs], list(gradients.values())
                )

    return run


def interleaved_us(sides: Sequence[Callable[[], Any]], device: str, repeats: int) -> list[float]:
    """The median time of each side in microseconds; the sides take turns."""
    for side in sides:
        for _ in range(WARM_UPS):
            side()
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(repeats):
        for side, found in zip(sides, times, strict=True):
            found.append(_timed_us(side, device))
    return [statistics.median(found) for found in times]


def _timed_us(side: Callable[[], Any], device: str) -> float:
    import torch

    if device == "cpu":
        begin = time.perf_counter()
        side()
        return (time.perf_counter() - begin) * 1e6
    with torch.cuda.device(device):
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin_event.record()
        side()
        end_event.record()
        torch.cuda.synchronize()
    return float(begin_event.elapsed_time(end_event)) * 1e3


def measure(row: Row, device: str, repeats: int) -> Row:
    """The row with the times, versions, date and commit of now."""
    call = call_of(row, device)
    needs = tuple(row.facts.get("needs", ()))
    sides = [runner(name, call, needs) for name in (row.implementation, row.against)]
    time_us, against_us = interleaved_us(sides, device, repeats)
    return dataclasses.replace(
        row,
        time_us=round(time_us, 1),
        against_us=round(against_us, 1),
        versions=_versions(),
        date=datetime.date.today().isoformat(),
        commit=_commit(),
    )


def _versions() -> dict[str, str]:
    import torch

    from chunkwise.dispatcher.probes import version_of

    found = {name: version_of([name]) for name in ("torch", "triton", "tilelang")}
    found["cuda"] = torch.version.cuda
    return {name: version for name, version in found.items() if version is not None}


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def report(old: Row, new: Row) -> str:
    """One line on a row that was measured again."""
    claim = "still slower" if new.time_us > new.against_us else "NO LONGER SLOWER"
    return (
        f"{old.name}: {new.implementation} {new.time_us:g} us (was {old.time_us:g}), "
        f"{new.against} {new.against_us:g} us (was {old.against_us:g}): {claim}"
    )


def remeasure(path: Path, repeats: int, write: bool) -> bool:
    """Measure the rows of one file again; whether every claim that could be measured still holds."""
    from chunkwise.verifier import evidence

    rows = evidence.load(path)
    holds = True
    for name, row in rows.items():
        device = torch_device(row)
        if not _is_ours(row.against):
            print(f"{name}: not measured, {row.against} is a peer and no implementation")
            continue
        if device is None:
            print(f"{name}: not measured, this machine has no {row.gpu} of {row.sm_count} SMs")
            continue
        rows[name] = measure(row, device, repeats)
        print(report(row, rows[name]))
        holds = holds and rows[name].time_us > rows[name].against_us
    if write and any(torch_device(row) for row in rows.values()):
        text = json.dumps([dataclasses.asdict(row) for row in rows.values()], indent=2)
        path.write_text(text + "\n", encoding="utf-8")
    return holds


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every row that this machine can; 1 if an implementation is no longer slower where a row says so."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="evidence.json files; default: those of all packages")
    parser.add_argument("--write", action="store_true", help="store the new times in the files")
    parser.add_argument("--repeats", type=int, default=20, help="runs of each side (default 20)")
    parser.add_argument("--packages", type=Path, default=PACKAGES, help="the folder of the packages")
    args = parser.parse_args(argv)
    files = args.files or evidence_files(args.packages)
    results = [remeasure(path, args.repeats, args.write) for path in files]
    if not files:
        print("no evidence.json anywhere: nothing to measure")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
