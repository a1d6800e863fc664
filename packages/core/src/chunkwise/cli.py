"""The command line: ``chunkwise doctor | ops | explain | warm``.

Other packages add commands by the entry-point group ``chunkwise.commands``: ``module:function``, which takes the
arguments behind the command's name and returns the exit code. Importing this module imports no torch.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import chunkwise
from chunkwise.commands.arguments import UsageError, complain, say
from chunkwise.commands.doctor import doctor
from chunkwise.commands.explain import explain
from chunkwise.commands.ops import ops
from chunkwise.commands.warm import warm
from chunkwise.errors import ChunkwiseError, UnknownNameError

GROUP = "chunkwise.commands"


@dataclass(frozen=True)
class Command:
    """A command: what it does in a line, and the function that takes its arguments and returns the exit code."""

    summary: str
    run: Callable[[list[str]], int]


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


COMMANDS: dict[str, Command] = {
    "doctor": Command("what is installed, what this machine has, what each backend lacks", doctor),
    "ops": Command("the ops with their arguments, outputs, gradients and residual formats", ops),
    "explain": Command("which implementation a call would take, and why not the others", explain),
    "warm": Command("compile ahead of time what the backends need", warm),
}


if __name__ == "__main__":
    sys.exit(main())
