"""The command ``chunkwise bench OP``. Imports torch only when the caches are where they should be."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chunkwise.errors import ChunkwiseError
from chunkwise_testing.scorer.queueing import WAIT_S, Place

if TYPE_CHECKING:
    from chunkwise_testing.scorer.score import Request, Scorer

CACHES = ("TRITON_CACHE_DIR", "TILELANG_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
"""Where kernels that were compiled once are kept."""

DESCRIPTION = """\
Time an op on its frozen shapes against peers, all in turn in one process, on rotating inputs, forward and
forward+backward, call by call and by CUDA-graph replay. Nothing is timed where parity is red."""

EPILOG = """\
A ratio is the peer's time over ours: more than 1 where ours is quicker. First calls are timed with the caches that the
process finds; --cold starts from empty ones, and so does a fresh TRITON_CACHE_DIR, TILELANG_CACHE_DIR,
TORCHINDUCTOR_CACHE_DIR and CUDA_CACHE_PATH.
`chunkwise bench host [PART ...]` measures what core costs the host instead.
Exit code: 0 done, 1 if ours failed on a shape, 2 if parity is red or the request was not understood."""


class ColdError(ChunkwiseError):
    """A cold start was asked for too late."""


def parser_of() -> argparse.ArgumentParser:
    """The arguments."""
    parser = argparse.ArgumentParser(
        "chunkwise bench",
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("op", help="as `chunkwise ops` lists them")
    parser.add_argument("--shapes", default="", metavar="NAME,...", help="these shapes only; * and ? are patterns")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME", help="compare with it; may be repeated")
    parser.add_argument("--route", help="the backend or implementation(s) of ours, as backend= takes them")
    parser.add_argument("--modes", default="", metavar="MODE,...", help="forward, forward+backward; default: both")
    dtypes = "bf16-mixed (the default: gates and the like in fp32), bf16, fp16 or fp32"
    parser.add_argument("--dtype", default="bf16-mixed", metavar="PLAN", help=dtypes)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: a GPU where there is one")
    parser.add_argument("--tokens", type=_positive, metavar="N", help="in place of the shapes' own, to try things out")
    parser.add_argument("--repeats", type=_positive, default=3, metavar="N", help="medians taken (default 3)")
    parser.add_argument("--calls", type=_positive, metavar="N", help="timed calls a repeat; default: a quarter second")
    accuracy = "whose accuracy is shown; a peer that tunes itself at every new shape takes minutes there"
    parser.add_argument("--accuracy", choices=("all", "ours", "none"), default="all", help=accuracy)
    kernels = "also list the kernels that each side runs in a call, with their times by torch's profiler"
    parser.add_argument("--kernels", action="store_true", help=kernels)
    parser.add_argument("--cold", action="store_true", help="compile everything: all kernel caches in a fresh folder")
    queue = "with --of: share DIR, a fresh local folder, with other benches: all compile at once, then time one by one"
    parser.add_argument("--queue", type=Path, metavar="DIR", help=queue)
    parser.add_argument("--of", type=_positive, metavar="N", help="so many benches share the queue")
    wait = f"how long one that is ready waits for the others; who is late is left out (default {WAIT_S:g})"
    parser.add_argument("--queue-wait", type=float, default=WAIT_S, metavar="S", help=wait)
    tuning = "with --queue: a peer that tunes itself times each candidate so long (default: as it does, 125 ms)"
    parser.add_argument("--candidate-ms", type=_positive, metavar="MS", help=tuning)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the score to FILE, shape by shape")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}, but at least 1 is expected")
    return value


def main(argv: Sequence[str]) -> int:
    """``chunkwise bench OP``: score, print, and write JSON where it is asked for; the exit code.

    Raises:
        ChunkwiseError: what was asked for cannot be scored; the command line makes it exit code 2.
    """
    parser = parser_of()
    arguments = parser.parse_args(list(argv))
    if (arguments.queue is None) != (arguments.of is None):
        parser.error("--queue and --of go together")
    if arguments.candidate_ms is not None and arguments.queue is None:
        parser.error("--candidate-ms goes with --queue; without it peers tune themselves as they do")
    with _place(arguments) as place, _caches(cold=arguments.cold) as caches:
        return _score(arguments, caches, place)


@contextlib.contextmanager
def _place(arguments: argparse.Namespace) -> Iterator[Place | None]:
    """The place in the queue, taken before anything that may fail: the others need not wait for who has ended."""
    if arguments.queue is None:
        yield None
        return
    with Place(arguments.queue, arguments.of, arguments.queue_wait) as place:
        place.watch()
        yield place


@contextlib.contextmanager
def _caches(*, cold: bool) -> Iterator[str]:
    """Within the block, kernel caches are fresh folders if ``cold``; in words where they are."""
    if not cold:
        yield "as the process found them"
        return
    if loaded := [name for name in ("triton", "tilelang") if name in sys.modules]:
        raise ColdError(
            f"--cold: {', '.join(loaded)} was imported before the caches could be moved; "
            f"run `chunkwise bench` in a process of its own"
        )
    before = {name: os.environ.get(name) for name in CACHES}
    with tempfile.TemporaryDirectory(prefix="chunkwise-cold-", ignore_cleanup_errors=True) as folder:
        os.environ.update({name: str(Path(folder) / name.lower()) for name in CACHES})
        try:
            yield "fresh folders (--cold)"
        finally:
            for name in CACHES:
                del os.environ[name]
            os.environ.update({name: value for name, value in before.items() if value is not None})


def _score(arguments: argparse.Namespace, caches: str, place: Place | None) -> int:
    from chunkwise_testing.scorer.provenance import environment_of
    from chunkwise_testing.scorer.render import render

    request = request_of(arguments)
    scorer = scorer_of(request)
    scorer.place, scorer.candidate_ms = place, arguments.candidate_ms
    if arguments.json:
        file: Path = arguments.json
        scorer.keep = lambda so_far: file.write_text(so_far.to_json(), encoding="utf-8")
    score = scorer.run(environment_of(request.facts, request.peers, caches))
    sys.stdout.write(render(score))
    return 0 if score.complete else 1


def request_of(arguments: argparse.Namespace) -> Request:
    """What the arguments ask for.

    Raises:
        ChunkwiseError: an op, shape, peer, route, mode, dtype or device that does not exist; the message lists those
            that do.
    """
    import torch

    from chunkwise.dispatcher.registry import registry
    from chunkwise.ops import OPS
    from chunkwise.verifier.device import device_facts
    from chunkwise_testing.peers import PEERS, find
    from chunkwise_testing.sampling import PLANS
    from chunkwise_testing.scorer.inputs import MODES, shapes_of
    from chunkwise_testing.scorer.score import Request
    from chunkwise_testing.suite.accuracy import DTYPE_PLANS

    if arguments.op not in OPS:
        raise _unknown("op", [arguments.op], [*OPS], "`chunkwise bench host` has the figures of the host")
    modes = _listed(arguments.modes) or list(MODES)
    _refuse_unknown("mode", modes, MODES)
    _refuse_unknown("dtype", [arguments.dtype], DTYPE_PLANS)
    if arguments.route is not None:
        registry().check_name(arguments.route, "--route")
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ChunkwiseError("--device cuda: torch sees no GPU; see `chunkwise doctor`, or take --device cpu")
    op = OPS[arguments.op]
    peers = find(arguments.peer, PEERS)
    for peer in peers:
        peer.adapter_for(arguments.op)
    return Request(
        op=op,
        cases=shapes_of(op.declaration, _listed(arguments.shapes), arguments.tokens),
        plan=PLANS[arguments.dtype],
        device=device,
        facts=device_facts(device, None),
        route=arguments.route,
        peers=peers,
        modes=[mode for mode in MODES if mode in modes],
        repeats=arguments.repeats,
        calls=arguments.calls,
        accuracy=arguments.accuracy,
        kernels=arguments.kernels,
    )


def scorer_of(request: Request) -> Scorer:
    """The scorer with the instruments of the request's device."""
    from chunkwise_testing.scorer import instruments
    from chunkwise_testing.scorer.floors import measure_rates
    from chunkwise_testing.scorer.score import Scorer

    tools = instruments.of_cuda() if request.device == "cuda" else instruments.of_cpu()
    return Scorer(request, tools, lambda: measure_rates(request.device, tools.timer), _progress)


def _progress(line: str) -> None:
    sys.stderr.write(f"chunkwise bench: {line}\n")


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _refuse_unknown(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    if unknown := [name for name in given if name not in known]:
        raise _unknown(what, unknown, known)


def _unknown(what: str, given: Sequence[str], known: Sequence[Any], hint: str = "") -> ChunkwiseError:
    from chunkwise.errors import UnknownNameError

    return UnknownNameError(
        f"bench: no {what} is called {', '.join(given)}; known: {', '.join(known)}{'; ' + hint if hint else ''}"
    )
