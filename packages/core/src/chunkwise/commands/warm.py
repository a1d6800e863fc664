"""``chunkwise warm``: compiles ahead of time what the backends need."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from chunkwise.commands import arguments
from chunkwise.commands.arguments import UsageError, parser_of, say

if TYPE_CHECKING:
    from chunkwise.dispatcher.select import Request
    from chunkwise.protocol.declaration import Declaration
    from chunkwise.verifier.device import DeviceFacts
    from chunkwise.verifier.facts import Facts
    from chunkwise.verifier.implementation import Implementation


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("warm", "Compile ahead of time what the backends need for calls of these widths and heads.")
    parser.epilog = "Exit code: 0 if everything compiled (or nothing had to), 1 if something did not."
    parser.add_argument("op", nargs="*", help="the ops to compile for; default: all")
    parser.add_argument("--device", help="cpu, cuda or cuda:1; default: this machine's first GPU")
    parser.add_argument("--backend", help="the backend to compile for; default: all that are usable")
    parser.add_argument("--sizes", metavar="H=16,K=128,...", help="in place of those of the ops' benchmark shapes")
    arguments.add_how_it_is_called(parser, dtypes=": each of those named")
    return parser


def warm(argv: list[str]) -> int:
    """Compile, and print what was compiled; 1 if something was not."""
    args = _parser().parse_args(argv)
    from chunkwise.dispatcher.registry import registry
    from chunkwise.ops import OPS

    if args.backend is not None:
        registry().check_name(args.backend, "--backend")
    declarations = [OPS[name].declaration for name in args.op or OPS]
    device, here = arguments.find_device(args.device)
    if not here:
        raise UsageError(f"--device {args.device}: kernels are compiled for this machine's devices only")
    work = [
        item
        for declaration in declarations
        for dtype in arguments.activation_dtypes(args)
        for item in _compilations(declaration, device, dtype, args)
    ]
    if not work:
        say(f"nothing to compile: no usable backend has kernels to build ahead of time for {device.name}")
        return 0
    parts = ("forward",) if args.no_grad else ("forward", "backward")
    with _current(args.device, device):
        failed = sum(not _compile(*item, parts) for item in work)
    say(f"{len(work) - failed} compiled, {failed} failed")
    return 1 if failed else 0


def _current(name: str | None, device: DeviceFacts) -> contextlib.AbstractContextManager[Any]:
    """The device that kernels are built for, as the current one."""
    import torch

    if device.kind != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.device(int((name or "").partition(":")[2] or 0))


def _compilations(
    declaration: Declaration, device: DeviceFacts, dtype: str, args: argparse.Namespace
) -> list[tuple[Implementation, Any, Facts]]:
    """Each implementation with a compile hook, with each schedule and kernel-deciding size of the wanted calls."""
    work: list[tuple[Implementation, Any, Facts]] = []
    calls = list(_warmed_calls(declaration, device, dtype, args))  # wrong ones raise, whatever is to be compiled
    for implementation in _compiled_implementations(declaration.name, args.backend):
        known: list[tuple[Any, ...]] = []
        for call in calls:
            facts = _facts_for(implementation, call)
            if facts is None:
                continue
            verdict = implementation.judge(facts)
            sizes = (facts.size(axis) for axis in declaration.promises.static_axes)
            decisive = (verdict.schedule, facts.residuals, *sizes)
            if not verdict.hard and decisive not in known:
                known.append(decisive)
                work.append((implementation, verdict.schedule, facts))
    return work


def _warmed_calls(
    declaration: Declaration, device: DeviceFacts, dtype: str, args: argparse.Namespace
) -> Iterator[Request]:
    """The calls of the benchmark shapes, changed as the arguments say."""
    from chunkwise.dispatcher import policy, select
    from chunkwise.dispatcher.described import facts_of, of_case

    given = arguments.parse_sizes(args.sizes) if args.sizes else {}
    for case in declaration.promises.benchmarks:
        call = of_case(case, device, dtype)
        sizes = {**call.sizes, **given}
        if args.ragged and case.offsets is None:
            for offsets in declaration.promises.offsets:
                sizes = {**sizes, offsets.batch: 1, offsets.sequences: given.get(offsets.sequences, 1)}
        described = arguments.as_called(dataclasses.replace(call, sizes=sizes), declaration, args)
        facts, residuals = facts_of(declaration, described), args.residuals or policy.ACTIVE.residuals
        request = select.Request(declaration, facts, None, "warm", residuals)
        select.choose_format(request)  # raises where there is none of this name
        yield request


def _facts_for(implementation: Implementation, call: Request) -> Facts | None:
    """What the implementation is told of a call that it runs; None where it has no residuals of the wanted format."""
    from chunkwise.dispatcher.select import choose_format

    wanted = choose_format(dataclasses.replace(call, forced=implementation.name))
    if wanted is not None and wanted.name not in implementation.residuals:
        return None
    return dataclasses.replace(call.facts, residuals=wanted.name if wanted else None)


def _compiled_implementations(op: str, backend: str | None) -> Iterator[Implementation]:
    from chunkwise.dispatcher.registry import registry

    for loaded, implementation in registry().implementations(op):
        wanted = backend in (None, implementation.backend, implementation.name)
        if wanted and implementation.compile is not None and loaded.usable:
            yield implementation


def _compile(implementation: Implementation, schedule: Any, facts: Facts, wanted: Sequence[str]) -> bool:
    from chunkwise.dispatcher import failure

    parts = [part for part in wanted if getattr(implementation, part) is not None]
    start = time.perf_counter()
    cause = failure.compile_kernels(implementation, schedule, facts, parts)
    took_s = time.perf_counter() - start
    outcome = "compiled" if cause is None else f"failed: {type(cause).__name__}: {cause}"
    say(f"{implementation.name} {facts.describe()}: {outcome} ({took_s:.1f} s)")
    return cause is None
