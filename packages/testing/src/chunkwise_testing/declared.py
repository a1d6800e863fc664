"""What a package's ``pyproject.toml`` asks for.

Read from the source and not from what is installed: an environment keeps the metadata of the day it was made.
"""

from __future__ import annotations

import sys
from pathlib import Path

from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it
    import tomli as tomllib


def dependencies(project: Path, extra: str | None = None) -> dict[str, str]:
    """Name to version specifier of what a package needs, or of what one of its extras adds.

    Args:
        project: the package's folder.
        extra: the extra, in place of the package's own needs.
    """
    declared = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = declared["dependencies"] if extra is None else declared["optional-dependencies"][extra]
    return {asked.name: str(asked.specifier) for asked in map(Requirement, texts)}
