"""Put what `chunkwise bench OP --json SCORE.json` measured against one peer into an evidence file, a row for each.

A row is called SHAPE-MODE-TIMING, with the suffix where one is given; it takes the place of a row of that name. Rows in
which another implementation ran, or one of the two sides has no time, are named and left out. A score says at which
commit it was measured; one that does not, or whose checkout had changes, needs --commit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chunkwise.verifier.evidence import Row
    from chunkwise_testing.scorer import results

VERSIONS = ("torch", "triton", "tilelang", "cuda")
_SHORT = 7


class ScoreError(Exception):
    """A score that makes no evidence; the message says why, and what to do."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What the rows are of: the two sides, a suffix of their names, and the commit where the score has none."""

    implementation: str
    peer: str
    suffix: str = ""
    commit: str | None = None


def commit_of(environment: Mapping[str, str], given: str | None) -> str:
    """The commit of a score, or the one that is given in its place."""
    found = given or environment.get("commit", "")
    if not re.fullmatch(r"[0-9a-f]{7,40}", found):
        raise ScoreError(f"its commit is {found or 'missing'!r}; name the one that was measured with --commit")
    return found[:_SHORT]


def facts_of(score: results.Score, row: results.Row) -> dict[str, Any]:
    """The facts of a row's call, from the benchmark shape of its name."""
    from chunkwise.ops import OPS
    from chunkwise.verifier.device import CPU
    from chunkwise_testing.sampling import PLANS
    from chunkwise_testing.scorer.inputs import BOTH, facts_of_case

    op = OPS[score.op]
    case = next((case for case in op.declaration.promises.benchmarks if case.name == row.shape), None)
    if case is None or dict(case.sizes) != dict(row.sizes):
        raise ScoreError(f"{row.shape} is no benchmark shape of {score.op} as it is now; score it without --tokens")
    dtypes = dict(facts_of_case(op, case, PLANS[score.plan], CPU, row.mode).dtypes)
    needs = [name for name in dtypes if name in op.declaration.promises.differentiable] if row.mode == BOTH else []
    offsets = {} if case.offsets is None else {"offsets": list(case.offsets)}
    return {"sizes": dict(row.sizes), "dtypes": dtypes, "flags": dict(case.options), "needs": needs, **offsets}


def rows_of(score: results.Score, wanted: Wanted) -> Iterator[Row]:
    """The evidence rows of a score; says which of its rows are left out."""
    from chunkwise.verifier.evidence import Row

    environment, peer = score.environment, wanted.peer
    if peer not in score.peers:
        raise ScoreError(f"it has no times of {peer}, only of {', '.join(score.peers) or 'no peer'}")
    commit = commit_of(environment, wanted.commit)
    version, *settings = environment[f"peer {peer}"].split()
    versions = {name: environment[name] for name in VERSIONS if environment[name][0].isdigit()}
    for row in score.rows:
        ours, theirs = row.ours.ms, next(figure.ms for figure in row.figures if figure.side == peer)
        route = row.route.split(",")[0].removesuffix(" (forward)")
        if route != wanted.implementation or ours is None or theirs is None:
            why = f"{route} ran" if route != wanted.implementation else "one of the sides has no time"
            print(f"left out: {row.shape}, {row.mode}, {row.timing}: {why}")
            continue
        yield Row(
            name=f"{row.shape}-{row.mode}-{row.timing}{wanted.suffix}",
            implementation=route,
            against=f"{peer} {version}",
            gpu=environment["device"],
            capability=re.sub(r"^sm(\d+)(\d)$", r"\1.\2", environment["arch"]),
            sm_count=int(environment["sm_count"]),
            facts=facts_of(score, row),
            time_us=round(ours * 1e3, 1),
            against_us=round(theirs * 1e3, 1),
            versions={**versions, **({peer: " ".join([version, *settings])} if settings else {})},
            date=environment["date"][:10],
            commit=commit,
        )


def merge(path: Path, scores: Sequence[Path], wanted: Wanted) -> int:
    """Put the rows of all scores into the file, or none where a score is refused; how many there were."""
    from chunkwise.verifier import evidence
    from chunkwise_testing.scorer.results import Score

    rows = evidence.load(path) if path.exists() else {}
    found: dict[str, Row] = {}
    for file in scores:
        try:
            for row in rows_of(Score.from_json(file.read_text(encoding="utf-8")), wanted):
                if row.name in found:
                    raise ScoreError(f"another score has a row {row.name} too; put one of them in with a --suffix")
                found[row.name] = row
        except (ScoreError, ValueError) as error:
            raise ScoreError(f"{file}: {error}") from error
    if found:
        text = json.dumps([dataclasses.asdict(row) for row in {**rows, **found}.values()], indent=2)
        path.write_text(text + "\n", encoding="utf-8")
    return len(found)


def main(argv: Sequence[str] | None = None) -> int:
    """0 if rows were written, 1 if there were none, 2 if a score was refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("evidence", type=Path, metavar="EVIDENCE.json", help="the file; made where it is missing")
    parser.add_argument("implementation", metavar="IMPLEMENTATION", help="its full name, as the route has it")
    parser.add_argument("peer", metavar="PEER", help="a peer of the scores")
    parser.add_argument("scores", nargs="+", type=Path, metavar="SCORE.json")
    parser.add_argument("--suffix", default="", help="behind the rows' names, to keep those of that name")
    parser.add_argument("--commit", help="that was measured, where the score does not say it")
    args = parser.parse_args(argv)
    try:
        count = merge(args.evidence, args.scores, Wanted(args.implementation, args.peer, args.suffix, args.commit))
    except (ScoreError, OSError) as error:
        print(f"evidence_rows: {error}", file=sys.stderr)
        return 2
    print(f"{args.evidence}: {count} rows of {args.implementation} against {args.peer}")
    return 0 if count else 1


if __name__ == "__main__":
    sys.exit(main())
