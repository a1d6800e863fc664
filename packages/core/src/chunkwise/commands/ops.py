"""``chunkwise ops``: the ops with their arguments, outputs, gradients and residual formats."""

from __future__ import annotations

from chunkwise.commands.arguments import parser_of, say


def ops(argv: list[str]) -> int:
    """Print all ops, or one of them."""
    parser = parser_of("ops", "List the ops, one a line, or print the documentation of one.")
    parser.add_argument("op", nargs="?", help="the op whose documentation to print")
    args = parser.parse_args(argv)
    from chunkwise.ops import OPS
    from chunkwise.protocol import describe

    if args.op is None:
        for op in OPS.values():
            say(describe.one_line(op.declaration))
        return 0
    op = OPS[args.op]
    say(describe.one_line(op.declaration))
    say()
    say((op.declaration.reference.__doc__ or "").rstrip())
    return 0
