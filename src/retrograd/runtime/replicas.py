"""Replicas: which ranks hold a copy of a parameter, and a checksum by which copies are compared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """The parameters that an optimizer updates, with the names that it was given; "" without."""
    for group in optimizer.param_groups:
        names = group.get("param_names") or [""] * len(group["params"])
        yield from zip(names, group["params"], strict=True)


def ranks_with_copies(parameter: Any) -> tuple[int, ...]:
    """The ranks that hold the same part of a DTensor as this one."""
    mesh, at = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    if at is None:
        return ()
    place = tuple(
        slice(None) if placement.is_replicate() else k for placement, k in zip(parameter.placements, at, strict=True)
    )
    return tuple(sorted(mesh.mesh[place].reshape(-1).tolist()))


def checksum(tensor: torch.Tensor) -> str:
    """The sum of the bits, as whole numbers: exact in any order, 64 bits. Waits for the device."""
    flat = tensor.detach().reshape(-1)
    return str(flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64).item())
