"""What the commands have in common: how they write, and what their arguments mean. Importing it imports no torch."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from chunkwise.errors import ChunkwiseError, UnknownNameError

if TYPE_CHECKING:
    from chunkwise.dispatcher.described import DescribedCall
    from chunkwise.protocol.declaration import Declaration
    from chunkwise.verifier.device import DeviceFacts


class UsageError(ChunkwiseError):
    """An argument of the command line that means nothing."""


def say(line: str = "") -> None:
    """Write a line of output."""
    sys.stdout.write(f"{line}\n")


def complain(line: str) -> None:
    """Write a line of errors."""
    sys.stderr.write(f"chunkwise: {line}\n")


def parser_of(name: str, description: str) -> argparse.ArgumentParser:
    """A parser of a command's arguments."""
    return argparse.ArgumentParser(prog=f"chunkwise {name}", description=description, allow_abbrev=False)


def add_how_it_is_called(parser: argparse.ArgumentParser, dtypes: str) -> None:
    """Add the arguments that describe a call beside its sizes; ``dtypes`` says what those of activations mean."""
    parser.add_argument(
        "--dtype",
        action="append",
        default=[],
        metavar="bf16|g=fp32",
        help=f"of the activations (default bf16){dtypes}, or of one argument; may be repeated",
    )
    parser.add_argument("--ragged", action="store_true", help="packed sequences; N in --sizes is how many")
    parser.add_argument(
        "--given", action="append", default=[], metavar="ARGUMENT", help="an optional tensor that is given"
    )
    parser.add_argument("--no-grad", action="store_true", help="no gradient is needed")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the op")
    parser.add_argument("--residuals", help="lean, full, or the name of a residual format")


def as_called(call: DescribedCall, declaration: Declaration, args: argparse.Namespace) -> DescribedCall:
    """The call, changed as those arguments say, but for the dtype of the activations."""
    return dataclasses.replace(
        call,
        dtypes=dict(_pair(text, "--dtype", "g=fp32") for text in args.dtype if "=" in text),
        options={**call.options, **_parse_options(declaration, args.option)},
        given=(*call.given, *args.given),
        ragged=call.ragged or args.ragged,
        gradients=not args.no_grad,
    )


def activation_dtypes(args: argparse.Namespace) -> list[str]:
    """Those that ``--dtype`` names, or the usual one."""
    return [text for text in args.dtype if "=" not in text] or ["bf16"]


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


def parse_sizes(text: str) -> dict[str, int]:
    """Axis to size, from ``B=1,T=8192``."""
    sizes = {}
    for part in text.split(","):
        axis, value = _pair(part, "--sizes", "B=1,T=8192,H=16")
        try:
            sizes[axis] = int(value)
        except ValueError:
            raise UsageError(f"--sizes: {axis} = {value!r} is no whole number") from None
    return sizes


def _parse_options(declaration: Declaration, given: Sequence[str]) -> dict[str, Any]:
    """Option to value, from ``output_final_state=true``."""
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
