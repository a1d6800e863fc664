"""``chunkwise explain``: which implementation a call would take, and why not the others."""

from __future__ import annotations

import argparse

from chunkwise.commands import arguments
from chunkwise.commands.arguments import parser_of, say


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("explain", "Say which implementation a call would take, and why each other one would not be it.")
    parser.epilog = "Exit code: 0 if the call has a route, 1 if nothing can run it, 2 if it was not understood."
    parser.add_argument("op", help="as `chunkwise ops` lists them")
    parser.add_argument("--sizes", required=True, metavar="B=1,T=8192,...", help="the size of each axis")
    parser.add_argument("--device", help="a known GPU (H200), cpu, cuda or cuda:1; default: this machine's first GPU")
    arguments.add_how_it_is_called(parser, dtypes="")
    parser.add_argument("--backend", help="the backend or implementation that must run it")
    return parser


def explain(argv: list[str]) -> int:
    """Print the explanation of a described call; 1 if nothing can run it."""
    args = _parser().parse_args(argv)
    from chunkwise.dispatcher import policy
    from chunkwise.dispatcher.described import DescribedCall, facts_of
    from chunkwise.dispatcher.explain import explain_facts
    from chunkwise.dispatcher.registry import registry
    from chunkwise.dispatcher.select import Request
    from chunkwise.ops import OPS

    declaration = OPS[args.op].declaration
    device, here = arguments.find_device(args.device)
    call = DescribedCall(device, arguments.parse_sizes(args.sizes), arguments.activation_dtypes(args)[-1])
    active = policy.ACTIVE
    forced, source = (args.backend, "--backend") if args.backend else (active.backend, active.source)
    if forced is not None:
        registry().check_name(forced, source)
    request = Request(
        declaration,
        facts_of(declaration, arguments.as_called(call, declaration, args)),
        forced,
        source,
        args.residuals or active.residuals,
        on_this_machine=here,
    )
    explanation = explain_facts(request)
    say(str(explanation))
    return 0 if explanation.route else 1
