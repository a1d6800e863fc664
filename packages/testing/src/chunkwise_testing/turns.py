"""Tests on one GPU, side by side in many processes, but for those that need most of its memory: these run alone."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_KEPT_BYTES = 1 << 27


@contextlib.contextmanager
def turn(alone: bool, folder: Path | None = None) -> Iterator[None]:
    """Wait until the GPU may be used: beside others, or by nobody else.

    Processes that see other GPUs, or are another user's, have turns of their own. Where there are no locks of files
    (Windows) nobody waits.

    Args:
        alone: whether nobody else may use it meanwhile.
        folder: of the locks' files, the system's for temporary files unless given.
    """
    visible = re.sub(r"[^0-9A-Za-z-]+", "_", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    name = f"chunkwise-gpu-{visible}"
    with _taken((folder or Path(tempfile.gettempdir())), name, alone):
        try:
            yield
        finally:
            _give_back(alone)


if sys.platform == "win32":

    @contextlib.contextmanager
    def _taken(folder: Path, name: str, alone: bool) -> Iterator[None]:
        yield

else:
    import fcntl

    @contextlib.contextmanager
    def _taken(folder: Path, name: str, alone: bool) -> Iterator[None]:
        name = f"{name}-{os.getuid()}"  # nobody may write another user's files
        with (folder / f"{name}.door").open("a") as door, (folder / f"{name}.lock").open("a") as lock:
            # Who waits to be alone stands in the door: nobody comes in before, or it would wait for ever.
            fcntl.flock(door, fcntl.LOCK_EX)
            fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            fcntl.flock(door, fcntl.LOCK_UN)
            yield


def _give_back(alone: bool) -> None:
    """What torch keeps of freed memory would be missing where another process is alone."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized() and (alone or torch.cuda.memory_reserved() > _KEPT_BYTES):
        torch.cuda.empty_cache()
