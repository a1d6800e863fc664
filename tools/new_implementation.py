"""Write a new implementation of an op into a backend's package, as CONTRIBUTING.md describes it.

    python tools/new_implementation.py triton chunk_gated_delta_rule split

What it writes is right and slow: forward and backward run the chunkwise PyTorch functions of the built-in backend, so
that the parity suite is green before the first kernel. Replace them piece by piece. Nothing is overwritten.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from _scaffold import PACKAGES, ScaffoldError, add_table, check_name, tables_of, write_new

ARCHS = {
    "triton": ("sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120", "sm121", "interpreter"),
    "tilelang": ("sm90", "sm120", "sm121"),
}
"""Where the implementations of a backend can run at all; ``any`` for a backend that is not listed."""

RANK = 2000
"""Behind the built-in backend's 1000: nobody gets it unasked before it is faster."""


@dataclass(frozen=True)
class Plan:
    """What to write.

    Args:
        backend: the backend's name.
        op: the op's name.
        variant: the last part of the implementation's name.
        starting_point: ``module`` of the chunkwise PyTorch functions that it begins with.
        residuals: the op's residual formats, of its first chunk size.
        chunk_size: rows of a chunk of those formats; of a block, where they have no chunks.
    """

    backend: str
    op: str
    variant: str
    starting_point: str
    residuals: tuple[str, ...]
    chunk_size: int

    @property
    def package(self) -> str:
        """The backend's import name."""
        return f"chunkwise_{self.backend}"

    @property
    def folder(self) -> str:
        """The op's folder inside the package."""
        return self.op.removeprefix("chunk_")

    @property
    def name(self) -> str:
        """The implementation's full name."""
        return f"{self.backend}/{self.folder}/{self.variant}"

    @property
    def module(self) -> str:
        """The import name of the op's folder."""
        return f"{self.package}.{self.folder}"

    @property
    def table(self) -> str:
        """The table, as ``backend.py`` names it."""
        return f"{self.module}.implementations:IMPLEMENTATIONS"


def plan_for(backend: str, op: str, variant: str) -> Plan:
    """Look up what the built-in backend runs for the op."""
    from chunkwise.dispatcher.registry import registry
    from chunkwise.errors import UnknownNameError
    from chunkwise.ops import OPS

    try:
        formats = OPS[op].declaration.promises.formats
    except UnknownNameError as error:
        raise ScaffoldError(str(error)) from None
    built_in = [i for _, i in registry().implementations(op) if i.backend == "torch" and i.forward and i.backward]
    if not built_in:
        raise ScaffoldError(f"the built-in backend has no forward and backward of {op} to start from")
    module = str(built_in[0].forward).partition(":")[0]
    return Plan(
        check_name("backend", backend),
        op,
        check_name("variant", variant),
        module,
        tuple(f.name for f in formats if f.name in built_in[0].residuals and f.chunk_size == formats[0].chunk_size),
        formats[0].chunk_size or 64,
    )


def _tuple(names: Sequence[str]) -> str:
    return f"({', '.join(repr(n).replace(chr(39), chr(34)) for n in names)}{',' if len(names) == 1 else ''})"


def files_of(plan: Plan) -> dict[str, str]:
    """Every file of the implementation, by its place inside the package."""
    texts = {
        "__init__.py": f'"""{plan.op} on the backend {plan.backend}."""\n',
        "implementations.py": _implementations(plan),
        "schedules.py": _schedules(plan),
        "launch.py": _launch(plan),
        "evidence.json": "[]\n",
        "NOTES.md": _notes(plan),
    }
    return {f"{plan.folder}/{name}": text for name, text in texts.items()}


def _implementations(plan: Plan) -> str:
    return f'''"""The table of the backend {plan.backend} for {plan.op}. Imports no kernel language."""

from __future__ import annotations

from chunkwise.verifier.implementation import Implementation
from {plan.module} import schedules

{plan.variant.upper()} = Implementation(
    "{plan.name}",
    op="{plan.op}",
    rank={RANK},  # behind the built-in backend until it is faster
    archs={_tuple(ARCHS.get(plan.backend, ("any",)))},
    schedule=schedules.{plan.variant},
    forward="{plan.module}.launch:forward",
    backward="{plan.module}.launch:backward",
    residuals={_tuple(plan.residuals)},
)

IMPLEMENTATIONS = ({plan.variant.upper()},)
'''


def _schedules(plan: Plan) -> str:
    return f'''"""Launch configurations of {plan.op}, computed from facts. Imports no kernel language."""

from __future__ import annotations

from dataclasses import dataclass

from chunkwise.verifier.facts import Facts
from chunkwise.verifier.refusal import DoesNotFit


@dataclass(frozen=True)
class Schedule:
    """A launch configuration.

    Args:
        chunk_size: rows of a chunk; the residual formats fix it.
    """

    chunk_size: int


def {plan.variant}(facts: Facts) -> Schedule | DoesNotFit:
    """The configuration for a call; add tiles, warps and bytes here, and return DoesNotFit where no tile fits."""
    return Schedule(chunk_size={plan.chunk_size})
'''


def _launch(plan: Plan) -> str:
    package, _, module = plan.starting_point.rpartition(".")
    return f'''"""The launchers of {plan.name}.

A starting point, not a kernel: both functions run chunkwise PyTorch, right and slow, so that the parity suite is green
while they are replaced piece by piece. They are done when this file no longer imports {package}.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from {package} import {module} as pytorch
from {plan.module}.schedules import Schedule


def forward(schedule: Schedule, inputs: Any, save: str | None) -> tuple[tuple[Tensor | None, ...], dict[str, Tensor]]:
    """The outputs, and the residuals of the format ``save`` by name (none where it is None)."""
    return pytorch.forward(schedule, inputs, save)


def backward(schedule: Schedule, inputs: Any, residuals: Any, grads: Any, needs: frozenset[str]) -> dict[str, Tensor]:
    """Exactly the gradients named in ``needs``; the gradient of an output that the loss does not use is None."""
    return pytorch.backward(schedule, inputs, residuals, grads, needs)
'''


def _notes(plan: Plan) -> str:
    return f"""# {plan.op} on {plan.backend}

Derivations, measurements and dead ends of `{plan.name}`. Numbers cite a row of `evidence.json`.

## State

`launch.py` runs the chunkwise PyTorch functions; no kernel is written yet.
"""


def scaffold(packages: Path, backend: str, op: str, variant: str) -> Plan:
    """Write the implementation below ``packages`` and enter its table in the backend."""
    plan = plan_for(backend, op, variant)
    package = packages / f"backend-{backend}" / "src" / plan.package
    if not (package / "backend.py").is_file():
        known = sorted(p.name.removeprefix("backend-") for p in packages.glob("backend-*"))
        raise ScaffoldError(f"no backend {backend!r} in {packages}; known: {', '.join(known) or 'none'}")
    if plan.table in tables_of(package / "backend.py") or (package / plan.folder).exists():
        raise ScaffoldError(
            f"{package / plan.folder} is there already: add another Implementation to its IMPLEMENTATIONS by hand"
        )
    write_new(package, files_of(plan))
    add_table(package / "backend.py", plan.table)
    return plan


def next_steps(plan: Plan, packages: Path) -> str:
    """What the author does now."""
    package = packages / f"backend-{plan.backend}"
    folder = package / "src" / plan.package / plan.folder
    return "\n".join(
        [
            f"wrote {plan.name} to {folder}",
            f"and entered {plan.table} in backend.py. Now:",
            f"  1. hatch run test {package}: the suite is green, the implementation is right and slow",
            "  2. replace launch.forward and launch.backward by kernels, piece by piece (kernels.py beside them)",
            "  3. say in implementations.py what it cannot do, and narrow archs to those that you tested",
            "  4. compute tiles and bytes in schedules.py, and return DoesNotFit where no tile fits",
            f"  5. lower rank from {RANK} below its rivals', with a measured(...) rule where one of them wins",
            "  6. write NOTES.md, and a fragment in changelog.d/",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Scaffold, and say what to do next; 2 where something is in the way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", help="the backend's name: triton, tilelang, ...")
    parser.add_argument("op", help="the op's name, as `chunkwise ops` lists it")
    parser.add_argument("variant", help="the last part of the implementation's name: split, fused, ...")
    parser.add_argument("--packages", type=Path, default=PACKAGES, help="the folder of the packages")
    args = parser.parse_args(argv)
    try:
        plan = scaffold(args.packages, args.backend, args.op, args.variant)
    except ScaffoldError as error:
        print(f"new_implementation: {error}", file=sys.stderr)
        return 2
    print(next_steps(plan, args.packages))
    return 0


if __name__ == "__main__":
    sys.exit(main())
