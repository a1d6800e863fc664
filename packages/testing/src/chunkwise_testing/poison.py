"""Poison: NaN in fresh memory and around inputs, so that what is never written, or read beside the mark, shows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from chunkwise_testing.sampling import Call

GUARD = 64
"""Elements of guard band before and behind a tensor."""


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within the block, memory that torch hands out uninitialised holds NaN (the largest value, for integers)."""
    enabled, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def poison_of(dtype: torch.dtype) -> float | int:
    """NaN, or for integers a value that no offset can have."""
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min // 2


class Guarded:
    """A copy of a tensor inside poisoned storage: bands before and behind it and, unless packed, beside each row."""

    def __init__(self, tensor: Tensor, *, packed: bool = False) -> None:
        self.expected = tensor.detach().clone()
        width = tensor.shape[-1] if tensor.dim() else 1
        beside = 0 if packed else 8
        rows = tensor.numel() // max(1, width)
        poison = poison_of(tensor.dtype)
        self.storage = torch.full(
            (2 * GUARD + rows * (width + beside),), poison, dtype=tensor.dtype, device=tensor.device
        )
        body = self.storage[GUARD : self.storage.numel() - GUARD].view(rows, width + beside)[:, :width]
        self.view = body.view(tensor.shape) if packed else body.unflatten(0, tensor.shape[:-1] or (1,))
        self.view = self.view.reshape(tensor.shape) if not tensor.dim() else self.view.view(tensor.shape)
        self.view.copy_(tensor)
        self._before = self.storage.clone()

    def untouched(self) -> bool:
        """Whether neither the values nor the guard bands were written."""
        same = (self.storage == self._before) | (self.storage != self.storage) & (self._before != self._before)
        return bool(same.all())


def guard_inputs(call: Call, *, packed: bool = False) -> tuple[Call, Callable[[], list[str]]]:
    """The call on guarded copies of its tensors, and a function that names the arguments that were written to.

    Empty tensors, and offsets (whose rows must be dense), are packed.
    """
    guarded = {
        name: Guarded(t, packed=packed or t.dim() < 2 or t.numel() == 0 or not t.is_floating_point())
        for name, t in call.tensors.items()
    }
    inside = call.replaced({name: g.view for name, g in guarded.items()})
    return inside, lambda: sorted(name for name, g in guarded.items() if not g.untouched())


class GuardedAllocations(TorchFunctionMode):
    """Puts guard bands around every tensor that Python code allocates in the block; see :meth:`overrun`.

    Sees ``torch.empty``, ``zeros``, their ``_like`` and ``new_`` forms; on a GPU, those of the calling thread only.
    """

    _BY_SHAPE = frozenset((torch.empty, torch.zeros))
    _LIKE = frozenset((torch.empty_like, torch.zeros_like))
    _NEW = frozenset((Tensor.new_empty, Tensor.new_zeros))

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        watched = func in self._BY_SHAPE or func in self._LIKE or func in self._NEW
        if not watched or made.is_meta:
            return made
        if not made.is_floating_point() or not made.is_contiguous() or made.requires_grad:
            return made
        storage = made.new_full((made.numel() + 2 * GUARD,), float("nan"))
        inside = storage[GUARD : GUARD + made.numel()]
        inside.copy_(made.view(-1))
        self.storages.append(storage)
        return inside.view(made.shape)

    def overrun(self) -> int:
        """How many tensors had their guard bands written to."""
        return sum(1 for s in self.storages if not bool(s[:GUARD].isnan().all() and s[-GUARD:].isnan().all()))
