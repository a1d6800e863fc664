"""Calls captured into graphs: one for each side and input set, or the reason why a side has none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from chunkwise_testing.scorer.accuracy import relative_l2
from chunkwise_testing.scorer.instruments import Instruments
from chunkwise_testing.scorer.sides import failures, in_words

REPLAY_MAY_DIFFER = 0.02
"""Relative L2 between a replay and the call that was captured: atomic sums differ in the last bits, no more."""

Runs = Mapping[str, Sequence[Callable[[], list[Tensor]]]]
"""Side name to its call on each input set."""


def captured(runs: Runs, instruments: Instruments) -> tuple[dict[str, list[Callable[[], object]]], dict[str, str]]:
    """The replays of the sides that can be captured, and why the others cannot."""
    capture = instruments.capture
    if isinstance(capture, str):
        return {}, dict.fromkeys(runs, capture)
    replays: dict[str, list[Callable[[], object]]] = {}
    reasons: dict[str, str] = {}
    for name, own in runs.items():
        try:
            pool = instruments.new_pool()
            replays[name] = [_replay(capture, run, pool, instruments.synchronize) for run in own]
        except failures() as error:
            reasons[name] = f"not captured: {in_words(error)}"
    return replays, reasons


def _replay(
    capture: Callable[[Callable[[], list[Tensor]], Any], Any],
    run: Callable[[], list[Tensor]],
    pool: Any,
    synchronize: Callable[[], None],
) -> Callable[[], object]:
    """Capture a call and see that its replay writes what the call returned: a launch may have escaped it."""
    expected = run()
    graph = capture(run, pool)
    for output in graph.outputs:
        output.zero_()
    graph.replay()
    synchronize()
    # In fp32: the largest outputs in fp64 would take several GiB.
    pairs = zip(graph.outputs, expected, strict=True)
    worst = max(relative_l2(replayed, wanted, torch.float32) for replayed, wanted in pairs)
    if not worst <= REPLAY_MAY_DIFFER:
        raise RuntimeError(
            f"a replay differs from the call by {worst:.3g} (relative L2): the graph does not hold all of it"
        )
    graph.outputs = ()  # so that the next graph of the pool takes the same memory
    replay: Callable[[], object] = graph.replay
    return replay
