"""Where and with what a score was measured: device, versions, date, commit, caches."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

import torch

import chunkwise
from chunkwise.dispatcher import probes
from chunkwise.verifier.device import DeviceFacts
from chunkwise_testing.peers import Peer

PACKAGES = ("triton", "tilelang", "chunkwise", "chunkwise-triton", "chunkwise-tilelang", "chunkwise-testing")
ABSENT = "not installed"


def environment_of(device: DeviceFacts, peers: Iterable[Peer], caches: str) -> dict[str, str]:
    """Everything that a figure depends on and that no row says."""
    found = {
        "device": device.name,
        "arch": device.arch,
        "sm_count": str(device.sm_count),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(Path(chunkwise.__file__)),
        "caches": caches,
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # with its build, which the metadata of its wheel leaves out
        "cuda": torch.version.cuda or "none",
    }
    for name in PACKAGES:
        found[name] = probes.version_of([name]) or ABSENT
    for peer in peers:
        found[f"peer {peer.name}"] = str(peer)
    # What the user may have set for all of ours.
    if forced := os.environ.get("CHUNKWISE_BACKEND"):
        found["CHUNKWISE_BACKEND"] = forced
    return found


def commit(file: Path) -> str:
    """The commit of the checkout that a file belongs to, with ``dirty`` where it has changes; else ``no checkout``.

    An installed file may lie within somebody's checkout, so it must be one that git tracks.
    """
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return "no checkout"
    head = _git(file.parent, "rev-parse", "HEAD") or "no commit"
    return f"{head} dirty" if _git(file.parent, "status", "--porcelain") else head


def _git(folder: Path, *arguments: str) -> str | None:
    """What git says, or None where it fails or is not there."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
