"""Write a new backend package: packages/backend-NAME, with its entry point, its licence and its one-line test.

    python tools/new_backend.py pallas

The package loads at once and holds no implementation; `tools/new_implementation.py` adds those. Nothing is overwritten.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from _scaffold import PACKAGES, ROOT, ScaffoldError, check_name, write_new


def core_range() -> str:
    """The versions of core that a backend written today may run with: ``>=0.1,<0.2``."""
    import chunkwise

    major, minor = map(int, chunkwise.__version__.split(".")[:2])
    return f">={major}.{minor},<{major}.{minor + 1}"


def files_of(name: str) -> dict[str, str]:
    """Every file of the package, by its place inside it."""
    source = f"src/chunkwise_{name}"
    return {
        "pyproject.toml": _pyproject(name),
        "README.md": _readme(name),
        "LICENSE": (ROOT / "LICENSE").read_text(encoding="utf-8"),
        f"{source}/__init__.py": _init(name),
        f"{source}/backend.py": _backend(name),
        f"{source}/py.typed": "",
        f"tests/test_parity_{name}.py": _test(name),
    }


def distribution(name: str) -> str:
    """The name under which the backend is published."""
    return f"chunkwise-{name.replace('_', '-')}"


def _pyproject(name: str) -> str:
    return f'''[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "{distribution(name)}"
version = "0.1.0"
description = "The {name} backend of chunkwise"
readme = "README.md"
license = "MIT"
license-files = ["LICENSE"]
requires-python = ">=3.10"
dependencies = ["chunkwise{core_range()}"]
classifiers = ["Programming Language :: Python :: 3", "Typing :: Typed"]

[project.entry-points."chunkwise.backends"]
{name} = "chunkwise_{name}.backend:BACKEND"

[tool.hatch.build.targets.wheel]
packages = ["src/chunkwise_{name}"]
'''


def _readme(name: str) -> str:
    return f"""# {distribution(name)}

The {name} backend of [chunkwise](../core/README.md). Installing it is all that is needed: chunkwise finds it by its
entry point. **This version holds no kernels yet.**

## What it needs

`chunkwise doctor` lists what the backend needs of a machine and what it found.
"""


def _init(name: str) -> str:
    return f'''"""The {name} backend of chunkwise, found by its entry point in ``backend.py``."""
'''


def _backend(name: str) -> str:
    return f'''"""The backend ``{name}``: what it needs of the machine. Imports no kernel language."""

from __future__ import annotations

from chunkwise.dispatcher.registry import Backend

BACKEND = Backend(
    name="{name}",
    distribution="{distribution(name)}",
    core="{core_range()}",
    tables=(),
    needs=(),
)
'''


def _test(name: str) -> str:
    return f'chunkwise_backend = "{name}"\n'


def next_steps(name: str, package: Path) -> str:
    """What the author does now."""
    return "\n".join(
        [
            f"wrote {package}. Now:",
            "  1. say in backend.py what it needs (chunkwise.dispatcher.probes), and how its compile errors look",
            f"  2. add chunkwise_{name} to mypy's packages and import-linter's tables in pyproject.toml, and to",
            "     envs.only in hatch.toml",
            "  3. hatch env remove default, so that the next hatch run installs it",
            f"  4. python tools/new_implementation.py {name} OP VARIANT",
        ]
    )


def scaffold(packages: Path, name: str) -> Path:
    """Write the package below ``packages``."""
    check_name("backend", name)
    package = packages / f"backend-{name}"
    if package.exists():
        raise ScaffoldError(f"{package} is there already")
    write_new(package, files_of(name))
    return package


def main(argv: Sequence[str] | None = None) -> int:
    """Scaffold, and say what to do next; 2 where something is in the way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="the backend's name, as users will write it in backend=")
    parser.add_argument("--packages", type=Path, default=PACKAGES, help="the folder of the packages")
    args = parser.parse_args(argv)
    try:
        package = scaffold(args.packages, args.name)
    except ScaffoldError as error:
        print(f"new_backend: {error}", file=sys.stderr)
        return 2
    print(next_steps(args.name, package))
    return 0


if __name__ == "__main__":
    sys.exit(main())
