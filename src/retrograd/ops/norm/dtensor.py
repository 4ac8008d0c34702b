"""DTensors: rows are normalised where they lie, and the gradients of vectors are partial sums over the mesh."""

# Every tensor here is a DTensor, which is checked first; the types of the family say Tensor.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from retrograd.ops.norm.arguments import NormArguments, NormTensors
from retrograd.ops.tensor_subclasses import finished

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def is_needed(tensors: tuple[Any, ...]) -> bool:
    """Whether any of the tensors is a DTensor; the distributed package is not imported to find out."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(t, module.DTensor) for t in tensors)


def run_locally(
    norm: Callable[..., Result], tensors: NormTensors, arguments: NormArguments, prenorm: bool, accumulate: bool
) -> Result:
    """Run `norm` on the local parts of DTensors and give its results the placements of x.

    Args:
        norm: called with local tensors and the other arguments.
        tensors: DTensors of one mesh.
        arguments: passed on.
        prenorm: passed on.
        accumulate: must be False.

    Raises:
        TypeError: plain tensors among DTensors.
        ValueError: rows are not whole on every device, meshes or placements differ, or accumulate is True.
    """
    from torch.distributed.tensor import DTensor

    for name, t in tensors._asdict().items():
        if t is not None and not isinstance(t, DTensor):
            raise TypeError(
                f"`{name}` is a plain {type(t).__name__} among DTensors; place it on their mesh with "
                "torch.distributed.tensor.distribute_tensor(..., [Replicate()] * mesh.ndim)"
            )
    if accumulate:
        raise ValueError("accumulate_main_grad=True is for plain tensors, expected no DTensor; pass False")
    x, weight, bias, residual = tensors
    for placement in x.placements:
        _check_rows_whole(placement, x)
    if residual is not None and (residual.device_mesh, residual.placements) != (x.device_mesh, x.placements):
        raise ValueError(
            f"`residual` has placements {residual.placements}, expected {x.placements} like x on the same mesh; "
            "use residual.redistribute(x.device_mesh, x.placements)"
        )
    local = NormTensors(
        x=finished(x.to_local()),
        weight=None if weight is None else _local_vector(weight, x),
        bias=None if bias is None else _local_vector(bias, x),
        residual=None if residual is None else finished(residual.to_local()),
    )
    out = norm(local, arguments, prenorm, accumulate)
    if not prenorm:
        return _placed_as(x, out)
    y, s = out
    return _placed_as(x, y), x if s is local.x else _placed_as(x, s)


def _check_rows_whole(placement: Any, x: Any) -> None:
    if placement.is_partial():
        raise ValueError(f"`x` has placement {placement}, expected whole values; use x.redistribute(...) to sum it")
    if placement.is_shard() and placement.dim % x.dim() == x.dim() - 1:
        raise ValueError(
            f"`x` has placement {placement}, which splits the rows of shape {tuple(x.shape)} that are normalised; "
            "expected Shard of another dimension or Replicate: use x.redistribute(...)"
        )


def _local_vector(vector: Any, x: Any) -> torch.Tensor:
    """The weights of the local rows; their gradient sums local rows only, so it is Partial where rows are split."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    wanted, gradient = [], []
    for placement in x.placements:
        head_split = placement.is_shard() and vector.dim() == 2 and placement.dim % x.dim() == x.dim() - 2
        wanted.append(Shard(0) if head_split else Replicate())
        gradient.append(wanted[-1] if head_split or not placement.is_shard() else Partial())
    if vector.device_mesh != x.device_mesh or list(vector.placements) != wanted:
        vector = vector.redistribute(x.device_mesh, wanted)
    return finished(vector.to_local(grad_placements=gradient))


def _placed_as(x: Any, local: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    contiguous = torch.empty(x.shape, device="meta").stride()
    return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=contiguous)
