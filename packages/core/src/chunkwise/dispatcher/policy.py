"""Policy: what the user asks of the dispatcher beside the call itself.

Three environment variables, read once at import: CHUNKWISE_BACKEND names a backend or an implementation,
CHUNKWISE_CHECK=values holds values against the contracts in every call, CHUNKWISE_LOG=routes logs each new route.
The active policy is one module global: the guards of torch.compile see it, as they would not see a context variable.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass

from chunkwise import errors
from chunkwise.dispatcher.registry import registry

logger = logging.getLogger("chunkwise")


@dataclass(frozen=True, eq=False)
class Policy:
    """The overrides in force. Made by :func:`_policy` only, so that equal ones are one object (a cheap cache key).

    Args:
        backend: a backend, an implementation, ``forward+backward`` implementations, or None.
        source: who named the backend, for messages.
        residuals: ``lean``, ``full``, a format's name, or None for the op's default.
        check_values: hold values against the contracts; syncs with the device.
    """

    backend: str | None = None
    source: str = ""
    residuals: str | None = None
    check_values: bool = False


_policy = functools.lru_cache(maxsize=256)(Policy)


def _from_environment() -> Policy:
    check = os.environ.get("CHUNKWISE_CHECK", "")
    if check not in ("", "values"):
        raise errors.unknown_choice("CHUNKWISE_CHECK", check, ["values"])
    log = os.environ.get("CHUNKWISE_LOG", "")
    if log not in ("", "routes"):
        raise errors.unknown_choice("CHUNKWISE_LOG", log, ["routes"])
    if log:
        logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.INFO)
    backend = os.environ.get("CHUNKWISE_BACKEND") or None
    return _policy(backend, "CHUNKWISE_BACKEND" if backend else "", None, check == "values")


ACTIVE: Policy = _from_environment()


@contextlib.contextmanager
def prefer(
    backend: str | None = None, *, residuals: str | None = None, check_values: bool | None = None
) -> Iterator[None]:
    """Within the block, calls run on ``backend`` and save ``residuals``; inner blocks override outer ones.

    The override is the process's, not the thread's: it holds for calls of other threads too.

    Args:
        backend: a backend (``triton``), an implementation (``triton/gated_delta_rule/split``), or two joined by
            ``+`` (the forward's and the backward's). A call that it cannot run raises.
        residuals: ``lean`` (the backward recomputes what is cheap), ``full`` (nothing is recomputed), or the
            name of a residual format.
        check_values: hold values against the contracts, as ``CHUNKWISE_CHECK=values`` does.

    Raises:
        UnknownNameError: no such backend or implementation; the message lists the known ones.
    """
    global ACTIVE
    if backend is not None:
        registry().check_name(backend, "prefer")
    before = ACTIVE
    ACTIVE = _policy(
        before.backend if backend is None else backend,
        before.source if backend is None else "prefer",
        before.residuals if residuals is None else residuals,
        before.check_values if check_values is None else check_values,
    )
    try:
        yield
    finally:
        ACTIVE = before
