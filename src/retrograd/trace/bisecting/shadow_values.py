"""What tensors would hold had they not been rounded: values in higher precision beside those of the step."""

from __future__ import annotations

from typing import Any

import torch

Place = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]


class Shadows:
    """Values in higher precision by the memory of the tensors that they belong to.

    Autograd hands saved tensors back as other objects, so what counts is the memory and the view of it. Each tensor is
    kept, which keeps its memory from being given out again.
    """

    def __init__(self) -> None:
        self._storages: dict[int, dict[Place, tuple[torch.Tensor, torch.Tensor]]] = {}

    def of(self, t: torch.Tensor) -> torch.Tensor | None:
        """The value of a tensor before it was rounded; None if it was never computed in higher precision."""
        found = self._storages.get(t.untyped_storage()._cdata)
        held = found.get(_place(t)) if found else None
        return held[1] if held else None

    def keep(self, t: torch.Tensor, value: torch.Tensor) -> None:
        """`t` is `value` rounded."""
        self._storages.setdefault(t.untyped_storage()._cdata, {})[_place(t)] = (t.detach(), value)

    def forget(self, t: torch.Tensor) -> None:
        """The memory of `t` has been written to."""
        self._storages.pop(t.untyped_storage()._cdata, None)

    def __bool__(self) -> bool:
        return bool(self._storages)


def _place(t: Any) -> Place:
    return t.storage_offset(), tuple(t.shape), tuple(t.stride()), t.dtype
