"""Peers that tune themselves with ``triton.autotune``: nothing that they choose on a busy device reaches a score.

At the first call with a new key a tuner times its candidates, and keeps the choice in memory and, where it is told to,
on disk. While benches compile side by side such times mean nothing. So candidates are only compiled and run then; what
was chosen is forgotten before this process has the device for itself, where the tuner times them anew, as it always
does; the disk is neither read nor written; and a call whose kernels did not choose there is an error, not a figure.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from chunkwise.errors import ChunkwiseError

_ABSENT = object()


class TuningError(ChunkwiseError):
    """A tuner did not choose where it had to, or is not built as expected."""


def _tritons() -> type[Any] | None:
    """Triton's class, where somebody has imported it."""
    return getattr(sys.modules.get("triton.runtime.autotuner"), "Autotuner", None)


def _nothing() -> None:
    return None


class Tuners:
    """All tuners of this process, for the length of a block: untimed until :meth:`time_anew`.

    Args:
        synchronize: waits for the device.
        find: the class of the tuners, or None while it is not imported.
        candidate_ms: how long a candidate is timed; None: as its tuner does, by default 125 ms with the warm-up.
    """

    def __init__(
        self,
        synchronize: Callable[[], None] = _nothing,
        find: Callable[[], type[Any] | None] = _tritons,
        candidate_ms: int | None = None,
    ) -> None:
        self._synchronize, self._find, self._candidate_ms = synchronize, find, candidate_ms
        self._kind: type[Any] | None = None
        self._before: dict[str, Any] = {}
        self._timing = False
        self._untimed: dict[Hashable, list[tuple[Any, Any]]] = {}  # call to (tuner, key)
        self._checked: dict[Any, set[Any]] = {}  # tuner to keys that it chose for in time
        self._rounds: dict[Any, set[int]] = {}  # tuner to how many choices it had when it timed, since it was checked
        self._candidates = 0

    def __enter__(self) -> Tuners:
        self.take_over()
        return self

    def __exit__(self, *exc: object) -> None:
        for name, value in self._before.items():
            if value is _ABSENT:
                delattr(self._kind, name)
            else:
                setattr(self._kind, name, value)
        self._before, self._kind = {}, None

    # --- the class -----------------------------------------------------------------------------------------------

    def take_over(self) -> None:
        """Take the tuners' timing and their disk away, if their class has been imported by now.

        Raises:
            TuningError: the class does not look up ``do_bench`` as it used to.
        """
        kind = self._find()
        if self._kind is not None or kind is None:
            return
        times = vars(kind).get("do_bench")
        if not hasattr(times, "__get__"):
            raise TuningError(f"bench: {kind.__name__} of this Triton has no do_bench to take over; leave out --queue")
        self._kind = kind
        # Properties of the class go before what its instances hold, those too that are made later.
        self._replace("do_bench", lambda tuner: self._benchmark(tuner, times))
        self._replace("cache_results", lambda tuner: False)

    def _replace(self, name: str, get: Callable[[Any], Any]) -> None:
        assert self._kind is not None  # noqa: S101  # for the type checker
        self._before[name] = vars(self._kind).get(name, _ABSENT)
        setattr(self._kind, name, property(get, lambda tuner, value: vars(tuner).__setitem__(name, value)))

    def _benchmark(self, tuner: Any, times: Any) -> Any:
        if not self._timing:
            return self._once
        self._rounds.setdefault(tuner, set()).add(len(tuner.cache))
        self._candidates += 1
        return times.__get__(tuner, type(tuner)) if self._candidate_ms is None else self._briefly

    def _briefly(self, call: Callable[[], object], quantiles: Sequence[float] | None = None, **_: Any) -> Any:
        """Triton's own benchmark for so many milliseconds, and a quarter of them before."""
        milliseconds = self._candidate_ms or 1
        do_bench = sys.modules["triton.testing"].do_bench
        return do_bench(call, warmup=-(-milliseconds // 4), rep=milliseconds, quantiles=quantiles)

    def _once(self, call: Callable[[], object], quantiles: Sequence[float] | None = None, **_: Any) -> Any:
        """In place of a benchmark: all candidates are equally quick."""
        call()
        self._synchronize()
        return 1.0 if quantiles is None else [1.0] * len(quantiles)

    def _all(self) -> list[Any]:
        kind = self._kind
        return [] if kind is None else [o for o in gc.get_objects() if issubclass(type(o), kind)]

    # --- what was chosen -----------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Forget every choice."""
        self.take_over()
        for tuner in self._all():
            tuner.cache.clear()

    def time_anew(self) -> None:
        """Forget every choice; from now on tuners time their candidates."""
        self.forget()
        self._timing = True

    @contextlib.contextmanager
    def call(self, name: Hashable) -> Iterator[None]:
        """Around a call: before :meth:`time_anew`, note what it chose; behind it, see that it has chosen that anew.

        Raises:
            TuningError: a choice was not made here and now.
        """
        self.take_over()
        known = {tuner: set(tuner.cache) for tuner in self._all()}
        try:
            yield
        finally:
            self.take_over()  # the call may be what imports Triton
            if not self._timing:
                chosen = [(tuner, key) for tuner in self._all() for key in set(tuner.cache) - known.get(tuner, set())]
                self._untimed.setdefault(name, []).extend(chosen)
        if self._timing:
            self.check(name)

    def check(self, name: Hashable = None) -> None:
        """See that every choice was timed, and that the call of this name has made those that it made untimed.

        Raises:
            TuningError: a choice was not made here and now.
        """
        for tuner in self._all():
            new = set(tuner.cache) - self._checked.get(tuner, set())
            if len(new) > len(self._rounds.pop(tuner, ())):
                raise TuningError(
                    f"bench: {_named(tuner)} has a choice that it did not time in this turn; find where it keeps its "
                    f"choices and switch that off, or leave out --queue"
                )
            self._checked.setdefault(tuner, set()).update(new)
        for tuner, key in self._untimed.get(name, ()):
            if key not in tuner.cache:
                raise TuningError(
                    f"bench: {_named(tuner)} chose untimed while this process warmed up, and did not choose again in "
                    f"its turn; find where the choice is kept, or leave out --queue"
                )

    def __str__(self) -> str:
        """What was timed so far."""
        words = f"{self._candidates} candidates for {sum(map(len, self._checked.values()))} choices, timed in the turn"
        return words if self._candidate_ms is None else f"{words}, {self._candidate_ms} ms each"


def _named(tuner: Any) -> str:
    return f"the tuner of {getattr(getattr(tuner, 'base_fn', None), '__name__', type(tuner).__name__)}"
