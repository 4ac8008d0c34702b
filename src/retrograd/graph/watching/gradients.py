"""After backward: has every sharded parameter a sharded gradient that was reduced? By attributes; loads no torch."""

# pyright: basic

from __future__ import annotations

from typing import Any

from retrograd.compat.fsdp2 import module_parameters, parameter_groups
from retrograd.errors import UsageError, VerificationError

_MOST = 8  # parameters named one by one


def check_gradients(model: Any, *, missing: str = "raise") -> None:
    """Check that each sharded parameter that needs a gradient has one of its own sharding; call it after backward.

    FSDP2 under compiled autograd (torch 2.13, gloo) skips reduce-scatter without an exception: the parameters that the
    optimizer holds stay without gradient, and the gradients that exist are local and of full size.

    Args:
        model: a module with parameters that are DTensors (FSDP2, tensor parallelism), or were sharded until forward.
        missing: what a parameter without gradient is: "raise" or "allow" (unused parameters).

    Raises:
        VerificationError: a parameter is named that was left unsharded, has no gradient, or one that is unsharded, of
            another placement, shape or mesh, or still a partial sum.
        UsageError: an argument makes no sense.
    """
    if missing not in ("raise", "allow"):
        raise UsageError(f"`missing` is {missing!r}, expected 'raise' or 'allow'")
    if not hasattr(model, "named_parameters"):
        raise UsageError(f"`model` is {type(model).__name__}, expected a torch.nn.Module, after backward")
    wrong = []
    managed = _managed(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (fault := _wrong(parameter, name in managed, missing)):
            wrong.append(f"{name}: {fault}")
    if wrong:
        more = f"\n  and {len(wrong) - _MOST} more" if len(wrong) > _MOST else ""
        lines = "".join(f"\n  {line}" for line in wrong[:_MOST])
        raise VerificationError(f"{len(wrong)} sharded parameters have no sharded, reduced gradient:{lines}{more}")


def _managed(model: Any) -> set[str]:
    """Names of the parameters that FSDP2 shards: between forward and backward they are plain tensors."""
    names = set()
    for prefix, module in model.named_modules():
        state = getattr(module, "_get_fsdp_state", None)
        if state is None:
            continue
        owned = {id(held) for group in parameter_groups(state()) for held in module_parameters(group)}
        for name, parameter in module.named_parameters():
            if id(parameter) in owned:
                names.add(f"{prefix}.{name}" if prefix else name)
    return names


def _wrong(parameter: Any, managed: bool, missing: str) -> str:
    """What is wrong with one parameter, "" if nothing or if it is not sharded at all."""
    gradient = parameter.grad
    placed = getattr(parameter, "placements", None)
    if placed is None:
        if not managed:
            return ""
        kind = "no gradient" if gradient is None else f"a gradient of shape {tuple(gradient.shape)}"
        return (
            f"FSDP left it unsharded after backward, shape {tuple(parameter.shape)}, with {kind}: its gradient was "
            "never reduced over the ranks and the optimizer's sharded parameter has none; under compiled autograd "
            "compile the forward alone"
        )
    if gradient is None:
        return "" if missing == "allow" else "no gradient; an unused parameter, or backward did not reduce it"
    placements = getattr(gradient, "placements", None)
    if placements is None:
        shape = tuple(gradient.shape)
        return f"the gradient is a plain tensor of shape {shape}, expected a DTensor {placed}: it was not reduced"
    if any(p.is_partial() for p in placements):
        return f"the gradient has placements {placements}, expected {placed}: it is still a partial sum of each rank"
    if tuple(placements) != tuple(placed):
        return f"the gradient has placements {placements}, expected {placed} as the parameter"
    if gradient.device_mesh != parameter.device_mesh:
        return f"the gradient lies on {gradient.device_mesh}, expected {parameter.device_mesh} as the parameter"
    if tuple(gradient.shape) != tuple(parameter.shape):
        return f"the gradient has shape {tuple(gradient.shape)}, expected {tuple(parameter.shape)} as the parameter"
    return ""
