"""Write docs/ops.md from the declarations of the ops; with --check, fail where the file is stale."""

from __future__ import annotations

import argparse
import difflib
import inspect
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from _scaffold import ROOT

TARGET = ROOT / "docs" / "ops.md"
HEADER = """# The ops

Generated from the declarations by `python tools/gen_docs.py`; do not edit.
"""


def render() -> str:
    """The whole file."""
    from chunkwise.ops import OPS

    parts = [HEADER]
    parts += ["\n".join(_lines(name)) for name in OPS]
    return "\n".join(parts).rstrip() + "\n"


def _lines(name: str) -> Iterator[str]:
    from chunkwise.ops import OPS

    declaration = OPS[name].declaration
    promises = declaration.promises
    yield f"## `{name}`\n"
    yield "```text\n" + inspect.cleandoc(declaration.reference.__doc__ or "") + "\n```\n"
    yield from _argument_table(name)
    yield "\n| output | axes | dtype | returned |\n|---|---|---|---|"
    for output in promises.outputs:
        dtype = f"that of `{output.dtype}`" if output.dtype in declaration.signature.parameters else output.dtype
        returned = f"if `{output.when}`" if output.when else "always"
        yield f"| `{output.name}` | `{output.axes_text}` | {dtype} | {returned} |"
    yield ""
    yield f"- **Gradients** flow to {', '.join(f'`{n}`' for n in promises.differentiable)}."
    if promises.constraints:
        yield (
            "- **Axes**: " + "; ".join(f"{c.multiple} is a multiple of {c.divisor}" for c in promises.constraints) + "."
        )
    if promises.contracts:
        yield (
            "- **Contract on values** (`CHUNKWISE_CHECK=values`): "
            + "; ".join(f"`{c}`" for c in promises.contracts)
            + "."
        )
    budget = promises.budget
    yield (
        f"- **Accuracy**: within {budget.half:g} times the loss that no implementation can avoid, "
        f"{budget.full:g} times with fp32 activations."
    )
    yield ""
    yield from _format_tables(name)


def _argument_table(name: str) -> Iterator[str]:
    from chunkwise.ops import OPS
    from chunkwise.protocol.axes import tensor_spec

    declaration = OPS[name].declaration
    tensors = {spec.name: spec for spec in declaration.tensors}
    options = {spec.name: spec for spec in declaration.options}
    yield "| argument | axes | types | default |\n|---|---|---|---|"
    for argument, parameter in declaration.signature.parameters.items():
        spec = tensors.get(argument) or tensor_spec(argument, parameter.annotation)
        default = "" if parameter.default is parameter.empty else f"`{parameter.default}`"
        axes = f"`{spec.axes_text}`" if spec else ""
        expected = options[argument].expected if argument in options else "bool"
        yield f"| `{argument}` | {axes} | {', '.join(spec.dtypes) if spec else expected} | {default} |"


def _format_tables(name: str) -> Iterator[str]:
    from chunkwise.ops import OPS

    declaration = OPS[name].declaration
    for residual_format in declaration.promises.formats:
        chunks = f", chunks of {residual_format.chunk_size}" if residual_format.chunk_size else ""
        yield f"Residual format `{residual_format.name}` ({residual_format.policy}{chunks}):\n"
        yield "| field | axes | dtype | meaning |\n|---|---|---|---|"
        for field in residual_format.fields:
            dtype = f"that of `{field.dtype}`" if field.dtype in declaration.tensor_names else field.dtype
            yield f"| `{field.name}` | `{field.axes_text}` | {dtype} | {field.meaning} |"
        yield ""
        if residual_format.outputs:
            yield f"Its backward reads {' and '.join(f'`{n}`' for n in residual_format.outputs)} as well.\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file is stale")
    parser.add_argument("--target", type=Path, default=TARGET, help="the file (default: docs/ops.md)")
    args = parser.parse_args(argv)
    fresh = render()
    there = args.target.read_text(encoding="utf-8") if args.target.is_file() else ""
    if not args.check:
        args.target.parent.mkdir(parents=True, exist_ok=True)
        args.target.write_text(fresh, encoding="utf-8")
        print(f"wrote {args.target}")
        return 0
    if there == fresh:
        return 0
    sys.stdout.writelines(difflib.unified_diff(there.splitlines(True), fresh.splitlines(True), "stored", "declared"))
    print(f"{args.target} is stale: run python tools/gen_docs.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
