"""``chunkwise doctor``: what is installed, what this machine has, what each backend lacks."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from typing import TYPE_CHECKING

import chunkwise
from chunkwise.commands.arguments import parser_of, say
from chunkwise.errors import ChunkwiseError

if TYPE_CHECKING:
    from chunkwise.dispatcher.registry import Registry
    from chunkwise.verifier.device import DeviceFacts

VARIABLES = ("CHUNKWISE_BACKEND", "CHUNKWISE_CHECK", "CHUNKWISE_LOG")


def doctor(argv: list[str]) -> int:
    """Print what is here; 1 if no backend is usable."""
    parser_of("doctor", "Say what is installed, what this machine has, and what each backend lacks.").parse_args(argv)
    from chunkwise.dispatcher.registry import registry

    for title, lines in (
        ("versions", _version_lines()),
        ("devices", _device_lines()),
        ("environment", _environment_lines()),
        ("backends", _backend_lines(registry())),
    ):
        say(title)
        for line in lines:
            say(f"  {line}")
    usable = [name for name, loaded in registry().loaded.items() if loaded.usable]
    say(f"usable: {', '.join(usable) or 'no backend'}")
    return 0 if usable else 1


def _version_lines() -> Iterator[str]:
    import torch

    yield f"chunkwise {chunkwise.__version__}"
    yield f"python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if torch.version.hip is not None:
        built = f"built for ROCm {torch.version.hip}"
    else:
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    yield f"torch {torch.__version__}, {built}"


def _device_lines() -> Iterator[str]:
    from chunkwise.dispatcher import probes
    from chunkwise.verifier.device import device_facts

    yield f"cpu     {device_facts('cpu', None).name}"
    try:
        for index in range(probes.gpu_count()):
            yield f"cuda:{index}  {_describe_device(device_facts('cuda', index))}"
    except (RuntimeError, AssertionError) as error:
        yield f"cuda    does not start: {error}"


def _describe_device(device: DeviceFacts) -> str:
    return (
        f"{device.name}, {device.arch}, {device.sm_count} SMs, "
        f"{device.shared_memory_bytes:,} bytes of shared memory a block"
    )


def _environment_lines() -> Iterator[str]:
    from chunkwise.dispatcher.registry import registry

    for variable in VARIABLES:
        value = os.environ.get(variable, "")
        yield f"{variable} = {value}" if value else f"{variable} is not set"
    try:
        from chunkwise.dispatcher import policy

        if policy.ACTIVE.backend is not None:
            registry().check_name(policy.ACTIVE.backend, policy.ACTIVE.source)
    except ChunkwiseError as error:
        yield f"wrong: {error}"


def _backend_lines(found: Registry) -> Iterator[str]:
    for name, loaded in sorted(found.loaded.items()):
        count = len(loaded.implementations)
        state = "usable" if loaded.usable else "not usable"
        yield f"{name} {loaded.version}: {state}, {count} implementation{'' if count == 1 else 's'}"
        for need, finding in loaded.findings:
            yield f"  {'ok     ' if finding.ok else 'missing'}  {need.name}: {finding.found}"
            if not finding.ok:
                yield f"           fix: {finding.fix}"
    for name, failure in sorted(found.failures.items()):
        yield f"{name}: {failure}"
