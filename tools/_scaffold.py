"""What the scaffolding tools share: names, files that are never overwritten, a backend's list of tables."""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ROOT / "packages"
_LINE_LENGTH = 120
_TABLES = re.compile(r"^(?P<indent> +)tables=(?P<value>\(.*?\)),$", re.DOTALL | re.MULTILINE)


class ScaffoldError(Exception):
    """Something that is in the way; the message says what, and what to do."""


def check_name(what: str, name: str) -> str:
    """The name, if it can be a Python name in lower case."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ScaffoldError(f"{what} {name!r} cannot be used: write lower-case letters, digits and underscores")
    return name


def write_new(folder: Path, files: Mapping[str, str]) -> list[Path]:
    """Write files below ``folder``; nothing is written if any of them is there already."""
    paths = {folder / name: text for name, text in files.items()}
    if there := [str(path) for path in paths if path.exists()]:
        raise ScaffoldError(f"already there, and never overwritten: {', '.join(there)}")
    for path, text in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(paths)


def tables_of(backend_file: Path) -> list[str]:
    """The tables that a backend's ``backend.py`` names."""
    return list(ast.literal_eval(_found(backend_file)["value"]))


def add_table(backend_file: Path, table: str) -> None:
    """Enter a table in the ``tables=`` of a backend's ``backend.py``."""
    found = _found(backend_file)
    tables = list(ast.literal_eval(found["value"]))
    if table in tables:
        raise ScaffoldError(f"{backend_file} names {table} already")
    indent = found["indent"]
    quoted = [f'"{name}"' for name in [*tables, table]]
    line = f"{indent}tables=({', '.join(quoted)}{',' if len(quoted) == 1 else ''}),"
    if len(line) > _LINE_LENGTH:
        line = "\n".join([f"{indent}tables=(", *(f"{indent}    {name}," for name in quoted), f"{indent}),"])
    text = backend_file.read_text(encoding="utf-8")
    backend_file.write_text(text[: found.start()] + line + text[found.end() :], encoding="utf-8")


def _found(backend_file: Path) -> re.Match[str]:
    found = _TABLES.search(backend_file.read_text(encoding="utf-8"))
    if found is None:
        raise ScaffoldError(f"{backend_file}: no line `tables=(...),` to enter a table in")
    return found
