"""The command line: ``chunkwise doctor | ops | explain | warm``.

Other packages add commands by the entry-point group ``chunkwise.commands``: ``module:function``, which takes the
arguments behind the command's name and returns the exit code. Importing this module imports no torch.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import chunkwise
from chunkwise.errors import ChunkwiseError, UnknownNameError

if TYPE_CHECKING:
    from chunkwise.dispatcher.registry import Registry
    from chunkwise.protocol.declaration import Declaration
    from chunkwise.verifier.device import DeviceFacts
    from chunkwise.verifier.facts import Facts
    from chunkwise.verifier.implementation import Implementation

GROUP = "chunkwise.commands"
VARIABLES = ("CHUNKWISE_BACKEND", "CHUNKWISE_CHECK", "CHUNKWISE_LOG")


class UsageError(ChunkwiseError):
    """An argument of the command line that means nothing."""


@dataclass(frozen=True)
class Command:
    """A command: what it does in a line, and the function that takes its arguments and returns the exit code."""

    summary: str
    run: Callable[[list[str]], int]


def say(line: str = "") -> None:
    """Write a line of output."""
    sys.stdout.write(f"{line}\n")


def complain(line: str) -> None:
    """Write a line of errors."""
    sys.stderr.write(f"chunkwise: {line}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 1 done with a bad result, 2 not understood."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        say(_usage())
        return 0 if arguments else 2
    name, rest = arguments[0], arguments[1:]
    if name == "--version":
        say(f"chunkwise {chunkwise.__version__}")
        return 0
    try:
        return _find(name)(rest)
    except SystemExit as stop:  # argparse has printed help, or what is wrong
        return stop.code if isinstance(stop.code, int) else 2
    except ChunkwiseError as error:
        complain(str(error))
        return 2


def _added() -> dict[str, importlib.metadata.EntryPoint]:
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}


def _find(name: str) -> Callable[[list[str]], int]:
    if name in COMMANDS:
        return COMMANDS[name].run
    added = _added()
    if name not in added:
        known = ", ".join([*COMMANDS, *sorted(added)])
        raise UnknownNameError(f"no command is called {name!r}; known commands: {known}")
    try:
        command: Callable[[list[str]], int] = added[name].load()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"the command {name} ({added[name].value}) failed to load: {error}") from error
    return command


def _usage() -> str:
    lines = ["usage: chunkwise COMMAND ...", "", "commands:"]
    lines += [f"  {name:<10}{command.summary}" for name, command in COMMANDS.items()]
    lines += [f"  {name:<10}from {entry.value.partition(':')[0]}" for name, entry in sorted(_added().items())]
    return "\n".join([*lines, "", "chunkwise COMMAND --help says more; chunkwise --version names the version"])


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"chunkwise {name}", description=description, allow_abbrev=False)


# --- doctor ----------------------------------------------------------------------------------------------


def _doctor(argv: list[str]) -> int:
    _parser("doctor", "Say what is installed, what this machine has, and what each backend lacks.").parse_args(argv)
    from chunkwise.dispatcher.registry import registry

    for title, lines in (
        ("versions", _version_lines()),
        ("devices", _device_lines()),
        ("environment", _environment_lines()),
        ("backends", _backend_lines(registry())),
    ):
        say(title)
        for line in lines:
            say(f"  {line}")
    usable = [name for name, loaded in registry().loaded.items() if loaded.usable]
    say(f"usable: {', '.join(usable) or 'no backend'}")
    return 0 if usable else 1


def _version_lines() -> Iterator[str]:
    import torch

    yield f"chunkwise {chunkwise.__version__}"
    yield f"python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if torch.version.hip is not None:
        built = f"built for ROCm {torch.version.hip}"
    else:
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    yield f"torch {torch.__version__}, {built}"


def _device_lines() -> Iterator[str]:
    from chunkwise.dispatcher import probes
    from chunkwise.verifier.device import device_facts

    yield f"cpu     {device_facts('cpu', None).name}"
    try:
        for index in range(probes.gpu_count()):
            yield f"cuda:{index}  {_describe_device(device_facts('cuda', index))}"
    except (RuntimeError, AssertionError) as error:
        yield f"cuda    does not start: {error}"


def _describe_device(device: DeviceFacts) -> str:
    return (
        f"{device.name}, {device.arch}, {device.sm_count} SMs, "
        f"{device.shared_memory_bytes:,} bytes of shared memory a block"
    )


def _environment_lines() -> Iterator[str]:
    from chunkwise.dispatcher.registry import registry

    for variable in VARIABLES:
        value = os.environ.get(variable, "")
        yield f"{variable} = {value}" if value else f"{variable} is not set"
    try:
        from chunkwise.dispatcher import policy

        if policy.ACTIVE.backend is not None:
            registry().check_name(policy.ACTIVE.backend, policy.ACTIVE.source)
    except ChunkwiseError as error:
        yield f"wrong: {error}"


def _backend_lines(found: Registry) -> Iterator[str]:
    for name, loaded in sorted(found.loaded.items()):
        count = len(loaded.implementations)
        state = "usable" if loaded.usable else "not usable"
        yield f"{name} {loaded.version}: {state}, {count} implementation{'' if count == 1 else 's'}"
        for need, finding in loaded.findings:
            yield f"  {'ok     ' if finding.ok else 'missing'}  {need.name}: {finding.found}"
            if not finding.ok:
                yield f"           fix: {finding.fix}"
    for name, failure in sorted(found.failures.items()):
        yield f"{name}: {failure}"


# --- ops -------------------------------------------------------------------------------------------------


def _ops(argv: list[str]) -> int:
    parser = _parser("ops", "List the ops, one a line, or print the documentation of one.")
    parser.add_argument("op", nargs="?", help="the op whose documentation to print")
    args = parser.parse_args(argv)
    from chunkwise.ops import OPS
    from chunkwise.protocol import describe

    if args.op is None:
        for op in OPS.values():
            say(describe.one_line(op.declaration))
        return 0
    op = OPS[args.op]
    say(describe.one_line(op.declaration))
    say()
    say((op.declaration.reference.__doc__ or "").rstrip())
    return 0


# --- explain ---------------------------------------------------------------------------------------------


def _explain_parser() -> argparse.ArgumentParser:
    parser = _parser("explain", "Say which implementation a call would take, and why each other one would not be it.")
    parser.epilog = "Exit code: 0 if the call has a route, 1 if nothing can run it, 2 if it was not understood."
    parser.add_argument("op", help="as `chunkwise ops` lists them")
    parser.add_argument("--sizes", required=True, metavar="B=1,T=8192,...", help="the size of each axis")
    parser.add_argument("--device", help="a known GPU (H200), cpu, cuda or cuda:1; default: this machine's first GPU")
    parser.add_argument(
        "--dtype",
        action="append",
        default=[],
        metavar="bf16|g=fp32",
        help="of the activations (default bf16), or of one argument; may be repeated",
    )
    _add_how_it_is_called(parser)
    parser.add_argument("--backend", help="the backend or implementation that must run it")
    return parser


def _add_how_it_is_called(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ragged", action="store_true", help="packed sequences; N in --sizes is how many")
    parser.add_argument(
        "--given", action="append", default=[], metavar="ARGUMENT", help="an optional tensor that is given"
    )
    parser.add_argument("--no-grad", action="store_true", help="no gradient is needed")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the op")
    parser.add_argument("--residuals", help="lean, full, or the name of a residual format")


def _explain(argv: list[str]) -> int:
    args = _explain_parser().parse_args(argv)
    from chunkwise.dispatcher import policy
    from chunkwise.dispatcher.described import DescribedCall, facts_of
    from chunkwise.dispatcher.explain import explain_facts
    from chunkwise.dispatcher.registry import registry
    from chunkwise.dispatcher.select import Request
    from chunkwise.ops import OPS

    declaration = OPS[args.op].declaration
    device, here = find_device(args.device)
    dtype, dtypes = _dtypes(args.dtype)
    call = DescribedCall(
        device=device,
        sizes=_parse_sizes(args.sizes),
        dtype=dtype,
        dtypes=dtypes,
        options=_parse_options(declaration, args.option),
        given=tuple(args.given),
        ragged=args.ragged,
        gradients=not args.no_grad,
    )
    active = policy.ACTIVE
    forced, source = (args.backend, "--backend") if args.backend else (active.backend, active.source)
    if forced is not None:
        registry().check_name(forced, source)
    request = Request(
        declaration,
        facts_of(declaration, call),
        forced,
        source,
        args.residuals or active.residuals,
        on_this_machine=here,
    )
    explanation = explain_facts(request)
    say(str(explanation))
    return 0 if explanation.route else 1


def find_device(name: str | None) -> tuple[DeviceFacts, bool]:
    """The facts of a device, and whether it is one of this machine's.

    Args:
        name: a known device (any case; spaces and hyphens may be left out), ``cpu``, ``cuda``, ``cuda:1``; None for
            this machine's first GPU, or its CPU.

    Raises:
        UnknownNameError: no such device; the message lists the known ones.
    """
    from chunkwise.dispatcher import probes
    from chunkwise.verifier.device import FAKE_DEVICES, device_facts

    count = probes.gpu_count()
    if name is None:
        return (device_facts("cuda", 0) if count else device_facts("cpu", None)), True
    kind, _, index = name.lower().partition(":")
    if kind == "cpu":
        return device_facts("cpu", None), True
    if kind == "cuda" and (index or "0").isdecimal():
        if int(index or 0) >= count:
            raise UsageError(
                f"--device {name}: this machine has {count} CUDA devices; name a known one to ask about it"
            )
        return device_facts("cuda", int(index or 0)), True
    known = {_squeezed(fake): facts for fake, facts in FAKE_DEVICES.items()}
    if _squeezed(name) not in known:
        raise UnknownNameError(f"--device {name!r} is not known; known: cuda, cuda:INDEX, {', '.join(FAKE_DEVICES)}")
    return known[_squeezed(name)], False


def _squeezed(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _pair(text: str, flag: str, example: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise UsageError(f"{flag} {text!r} is not understood; write {flag} {example}")
    return name.strip(), value.strip()


def _parse_sizes(text: str) -> dict[str, int]:
    sizes = {}
    for part in text.split(","):
        axis, value = _pair(part, "--sizes", "B=1,T=8192,H=16")
        try:
            sizes[axis] = int(value)
        except ValueError:
            raise UsageError(f"--sizes: {axis} = {value!r} is no whole number") from None
    return sizes


def _dtypes(given: Sequence[str]) -> tuple[str, dict[str, str]]:
    dtypes = dict(_pair(text, "--dtype", "g=fp32") for text in given if "=" in text)
    plain = [text for text in given if "=" not in text]
    return plain[-1] if plain else "bf16", dtypes


def _parse_options(declaration: Declaration, given: Sequence[str]) -> dict[str, Any]:
    prologue = declaration.promises.prologue
    options: dict[str, Any] = {}
    for text in given:
        name, value = _pair(text, "--option", "output_final_state=true")
        if prologue is not None and name in prologue.arguments:
            raise UsageError(f"--option {name}: it is applied in front of the op and does not change the route")
        words: Mapping[str, Any] = {"true": True, "false": False, "none": None}
        try:
            options[name] = words[value.lower()] if value.lower() in words else ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value
    return options


# --- warm ------------------------------------------------------------------------------------------------


def _warm_parser() -> argparse.ArgumentParser:
    parser = _parser("warm", "Compile ahead of time what the backends need for calls of these widths and heads.")
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
    _add_how_it_is_called(parser)
    return parser


def _warm(argv: list[str]) -> int:
    args = _warm_parser().parse_args(argv)
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

    given = _parse_sizes(args.sizes) if args.sizes else {}
    for case in declaration.promises.benchmarks:
        call = of_case(case, device, dtype, gradients=not args.no_grad)
        sizes = {**call.sizes, **given}
        if args.ragged and case.offsets is None:
            for offsets in declaration.promises.offsets:
                sizes = {**sizes, offsets.batch: 1, offsets.sequences: given.get(offsets.sequences, 1)}
        described = dataclasses.replace(
            call,
            sizes=sizes,
            dtypes=_dtypes(args.dtype)[1],
            options={**call.options, **_parse_options(declaration, args.option)},
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


COMMANDS: dict[str, Command] = {
    "doctor": Command("what is installed, what this machine has, what each backend lacks", _doctor),
    "ops": Command("the ops with their arguments, outputs, gradients and residual formats", _ops),
    "explain": Command("which implementation a call would take, and why not the others", _explain),
    "warm": Command("compile ahead of time what the backends need", _warm),
}


if __name__ == "__main__":
    sys.exit(main())
