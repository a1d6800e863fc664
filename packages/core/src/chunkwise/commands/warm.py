"""``chunkwise warm``: compiles ahead of time what the backends need."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from chunkwise.commands.arguments import (
    UsageError,
    add_how_it_is_called,
    find_device,
    parse_dtypes,
    parse_options,
    parse_sizes,
    parser_of,
    say,
)

if TYPE_CHECKING:
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
    parser.add_argument(
        "--dtype",
        action="append",
        default=[],
        metavar="bf16|g=fp32",
        help="of the activations (default bf16): each of those named; or of one argument; may be repeated",
    )
    parser.add_argument("--sizes", metavar="H=16,K=128,...", help="in place of those of the ops' benchmark shapes")
    add_how_it_is_called(parser)
    return parser


def warm(argv: list[str]) -> int:
    """Compile, and print what was compiled; 1 if something was not."""
    args = _parser().parse_args(argv)
    from chunkwise.dispatcher.registry import registry
    from chunkwise.ops import OPS

    if args.backend is not None:
        registry().check_name(args.backend, "--backend")
    declarations = [OPS[name].declaration for name in args.op or OPS]
    device, here = find_device(args.device)
    if not here:
        raise UsageError(f"--device {args.device}: kernels are compiled for this machine's devices only")
    work = [
        item
        for declaration in declarations
        for dtype in [text for text in args.dtype if "=" not in text] or ["bf16"]
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
    for implementation in _compiled_implementations(declaration.name, args.backend):
        known: list[tuple[Any, ...]] = []
        for described in _warmed_calls(declaration, device, dtype, args):
            facts = _facts_for(implementation, declaration, described, args.residuals)
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
) -> Iterator[Facts]:
    """The facts of the benchmark shapes, changed as the arguments say."""
    from chunkwise.dispatcher.described import facts_of, of_case

    given = parse_sizes(args.sizes) if args.sizes else {}
    for case in declaration.promises.benchmarks:
        call = of_case(case, device, dtype, gradients=not args.no_grad)
        sizes = {**call.sizes, **given}
        if args.ragged and case.offsets is None:
            for offsets in declaration.promises.offsets:
                sizes = {**sizes, offsets.batch: 1, offsets.sequences: given.get(offsets.sequences, 1)}
        described = dataclasses.replace(
            call,
            sizes=sizes,
            dtypes=parse_dtypes(args.dtype)[1],
            options={**call.options, **parse_options(declaration, args.option)},
            given=(*call.given, *args.given),
            ragged=call.ragged or args.ragged,
        )
        yield facts_of(declaration, described)


def _facts_for(
    implementation: Implementation, declaration: Declaration, facts: Facts, residuals: str | None
) -> Facts | None:
    """What the implementation is told of a call that it runs; None where it has no residuals of the wanted format."""
    from chunkwise.dispatcher import policy
    from chunkwise.dispatcher.select import Request, choose_format

    request = Request(declaration, facts, implementation.name, "warm", residuals or policy.ACTIVE.residuals)
    wanted = choose_format(request)
    if wanted is not None and wanted.name not in implementation.residuals:
        return None
    return dataclasses.replace(request.facts, residuals=wanted.name if wanted else None)


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
