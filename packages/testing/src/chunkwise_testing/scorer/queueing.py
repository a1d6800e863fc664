"""Processes that warm up side by side and time one by one, through a folder that they share. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import filelock

from chunkwise.errors import ChunkwiseError

WAIT_S = 900.0
POLL_S = 0.2
LEAVING_S = 30.0
"""How long those that go on wait for the late ones to be gone: a compiler may keep a process from ending at once."""


class QueueError(ChunkwiseError):
    """The folder belongs to another queue, or the others went on without this process."""


class Place:
    """One process's place in a queue; the number is that of its arrival.

    A file lock holds it, which the system lets go however the process ends. Whoever waits and sees first that all are
    ready or have ended, or that it has waited too long, writes down who is ready, in order: the roster. Nobody joins
    it later. A process of the roster has its turn when those before it have handed on or ended.

    Args:
        folder: shared by the queue and fresh; on a local disk, for the locks.
        of: how many processes the queue has.
        wait_s: how long a process that is ready waits for others to be.

    Raises:
        QueueError: the queue has closed, is full, or was opened for another number of processes.
    """

    def __init__(self, folder: Path, of: int, wait_s: float = WAIT_S) -> None:
        self.folder, self.of, self.wait_s = folder, of, wait_s
        folder.mkdir(parents=True, exist_ok=True)
        self._left = threading.Event()
        # What is decided of the queue is decided behind this door, so that nobody sees half of it.
        self._door = filelock.FileLock(folder / "door.lock", thread_local=False)
        with self._door:
            self.number = self._next_number()
            self._alive = filelock.FileLock(self._file(self.number, "alive"), thread_local=False)
            self._alive.acquire(timeout=0)
            self._file(self.number, "joined").write_text(str(of), encoding="ascii")

    def _next_number(self) -> int:
        joined = self._joined()
        if self._roster() is not None or len(joined) >= self.of:
            raise QueueError(
                f"bench: --queue {self.folder}: {len(joined)} of {self.of} processes have joined it, and it is closed "
                f"or full; name a fresh folder for each queue"
            )
        sizes = {self._file(number, "joined").read_text(encoding="ascii") for number in joined}
        if sizes - {str(self.of)}:
            raise QueueError(f"bench: --of {self.of}: the others in {self.folder} have --of {', '.join(sizes)}")
        return len(joined)

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *exc: object) -> None:
        self._left.set()
        self._alive.release()

    # --- what the folder says ------------------------------------------------------------------------------------

    def _file(self, number: int, what: str) -> Path:
        return self.folder / f"{number}.{what}"

    def _joined(self) -> list[int]:
        return sorted(int(file.stem) for file in self.folder.glob("*.joined"))

    def _roster(self) -> list[int] | None:
        try:
            return [int(number) for number in json.loads((self.folder / "roster").read_text(encoding="ascii"))]
        except FileNotFoundError:
            return None

    def _ended(self, number: int) -> bool:
        if number == self.number:
            return False
        try:
            with filelock.FileLock(self._file(number, "alive"), timeout=0, thread_local=False):
                return True
        except filelock.Timeout:
            return False

    def _over(self, number: int) -> bool:
        return self._file(number, "done").exists() or self._ended(number)

    # --- waiting -------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """From now on end this process as soon as the others go on without it: what it runs would disturb them."""
        threading.Thread(target=self._watch, name="chunkwise-queue", daemon=True).start()

    def _watch(self) -> None:
        while not self._left.wait(POLL_S):
            roster = self._roster()
            if roster is not None and self.number not in roster:
                sys.stderr.write(f"chunkwise: {self._late()}\n")
                sys.stderr.flush()
                os._exit(2)  # the main thread may be in a compiler for minutes
            if roster is not None:
                return

    def _late(self) -> str:
        return (
            f"bench: late: the others of --queue {self.folder} were ready and went on without this process, so "
            f"nothing is timed; run it again, or raise --queue-wait ({self.wait_s:g} s here)"
        )

    def _closed(self) -> list[int]:
        """Be ready, and wait for the roster."""
        deadline = time.monotonic() + self.wait_s
        with self._door:
            if self._roster() is None:
                self._file(self.number, "ready").touch()
        while (roster := self._roster()) is None:
            with self._door:
                if self._roster() is None and (self._all_ready() or time.monotonic() >= deadline):
                    self._close()
                    continue
            time.sleep(POLL_S)
        if self.number not in roster:
            raise QueueError(self._late())
        return roster

    def _all_ready(self) -> bool:
        joined = self._joined()
        return len(joined) == self.of and all(self._file(n, "ready").exists() or self._ended(n) for n in joined)

    def _close(self) -> None:
        ready = [number for number in self._joined() if self._file(number, "ready").exists()]
        draft = self.folder / "roster.draft"
        draft.write_text(json.dumps(ready), encoding="ascii")
        draft.replace(self.folder / "roster")  # at once, for those who read it outside the door

    @contextlib.contextmanager
    def turn(self) -> Iterator[str]:
        """Wait for the turn; in the block no other process of the queue uses the device. In words whose turn it is.

        Raises:
            QueueError: the others have gone on without this process.
        """
        roster = self._closed()
        place = roster.index(self.number)
        while not all(self._over(number) for number in roster[:place]):
            time.sleep(POLL_S)
        late = self._still_there([number for number in self._joined() if number not in roster])
        words = f"turn {place + 1} of {len(roster)}, {self.of - len(roster)} left out"
        try:
            yield f"{words}, {len(late)} of them still running" if late else words
        finally:
            self._file(self.number, "done").touch()

    def _still_there(self, late: list[int]) -> list[int]:
        """Those of the late that do not end in time."""
        deadline = time.monotonic() + LEAVING_S
        while (late := [number for number in late if not self._ended(number)]) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return late
