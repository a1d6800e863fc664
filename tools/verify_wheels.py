"""Look into the wheels of all packages: each holds only its own package, its licence, py.typed, and fitting metadata.

Without a folder the wheels are built first, into a temporary one.
"""

from __future__ import annotations

import argparse
import email
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from pathlib import Path

from _scaffold import PACKAGES
from packaging.requirements import Requirement
from packaging.version import Version


@dataclass(frozen=True)
class Wheel:
    """What is looked at in a wheel.

    Args:
        path: the file.
        files: the names of its files.
        metadata: its METADATA.
        stated: ``__version__`` where its package states one.
    """

    path: Path
    files: tuple[str, ...]
    metadata: Message
    stated: str | None

    @property
    def name(self) -> str:
        """The distribution's name."""
        return str(self.metadata["Name"])

    @property
    def version(self) -> str:
        """The distribution's version."""
        return str(self.metadata["Version"])

    @property
    def package(self) -> str:
        """The one package that it should hold."""
        return self.name.replace("-", "_")


def read(path: Path) -> Wheel:
    """Open a wheel."""
    with zipfile.ZipFile(path) as archive:
        files = tuple(archive.namelist())
        metadata_name = next(name for name in files if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(metadata_name))
        init = f"{str(metadata['Name']).replace('-', '_')}/__init__.py"
        text = archive.read(init).decode() if init in files else ""
    stated = re.search(r'^__version__ = "(.+)"', text, re.MULTILINE)
    return Wheel(path, files, metadata, stated[1] if stated else None)


def build(packages: Path, folder: Path) -> None:
    """Build the wheel of every package into ``folder``."""
    for project in sorted(packages.glob("*/pyproject.toml")):
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        done = subprocess.run(command, cwd=project.parent, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{project.parent.name} does not build:\n{done.stdout}{done.stderr}")


def declared_versions(packages: Path) -> dict[str, str]:
    """Name to version, as the packages' pyproject.toml say."""
    found = {}
    for project in sorted(packages.glob("*/pyproject.toml")):
        text = project.read_text(encoding="utf-8")
        values = {key: re.search(rf'^{key} = "(.+)"', text, re.MULTILINE) for key in ("name", "version")}
        found[_value(values["name"], project)] = _value(values["version"], project)
    return found


def _value(match: re.Match[str] | None, project: Path) -> str:
    if match is None:
        raise ValueError(f"{project}: no static name and version")
    return match[1]


def content_problems(wheel: Wheel) -> Iterator[str]:
    """What is wrong with the files of a wheel."""
    info = f"{wheel.package}-{wheel.version}.dist-info"
    for name in wheel.files:
        if not name.startswith((f"{wheel.package}/", f"{info}/")):
            yield f"holds {name}, which is not of {wheel.package}"
        if name.endswith((".pyc", "~")) or "/tests/" in name:
            yield f"holds {name}, which is not for users"
    for needed in (f"{wheel.package}/__init__.py", f"{wheel.package}/py.typed", f"{info}/licenses/LICENSE"):
        if needed not in wheel.files:
            yield f"lacks {needed}"


def metadata_problems(wheel: Wheel, versions: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with the metadata of a wheel, given the versions of all packages."""
    if wheel.version != versions.get(wheel.name):
        yield f"is version {wheel.version}, but pyproject.toml says {versions.get(wheel.name)}"
    if wheel.stated is not None and wheel.stated != wheel.version:
        yield f"is version {wheel.version}, but __version__ is {wheel.stated}"
    if wheel.metadata["License-Expression"] != "MIT":
        yield f"has the licence {wheel.metadata['License-Expression']}"
    if not wheel.metadata["Requires-Python"]:
        yield "does not say which Python it requires"
    for text in wheel.metadata.get_all("Requires-Dist") or []:
        requirement = Requirement(text)
        if "/" in text.split(";")[0]:
            yield f"requires {text}: a path is of this machine only"
        sibling = versions.get(requirement.name)
        if sibling is not None and Version(sibling) not in requirement.specifier:
            yield f"requires {text}, but {requirement.name} is {sibling}"
        if sibling is not None and "<" not in str(requirement.specifier):
            yield f"requires {text} without an upper bound"


def problems(folder: Path, packages: Path) -> list[str]:
    """Everything that is wrong with the wheels in a folder."""
    versions = declared_versions(packages)
    wheels = [read(path) for path in sorted(folder.glob("*.whl"))]
    found = [f"{name} has no wheel in {folder}" for name in versions if name not in {w.name for w in wheels}]
    for wheel in wheels:
        found += [f"{wheel.path.name} {p}" for p in (*content_problems(wheel), *metadata_problems(wheel, versions))]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Verify, and print every problem; 1 if there is any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="the folder of the wheels; built afresh if left out")
    parser.add_argument("--packages", type=Path, default=PACKAGES, help="the folder of the packages")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as fresh:
        folder = args.folder or Path(fresh)
        if args.folder is None:
            build(args.packages, folder)
        found = problems(folder, args.packages)
        names = ", ".join(path.name for path in sorted(folder.glob("*.whl")))
    for problem in found:
        print(problem, file=sys.stderr)
    print(f"{'wrong' if found else 'good'}: {names or 'no wheel'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
