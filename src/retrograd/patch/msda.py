"""Deformable attention of a model, replaced in place where its layers call a function that samples."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cache
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch

from retrograd.patch.handle import Handle, Swap, own_forward
from retrograd.patch.sampling import Sampler, differs, sampler


class _Call(NamedTuple):
    """A function that samples, as a forward reaches it: a "global" name, an "attribute" of self, or the "forward"."""

    place: str
    name: str
    theirs: Sampler


class _Patched(torch.nn.Module):
    """Mark of classes that are made here."""


def msda(model: torch.nn.Module) -> Handle:
    """Replace multi-scale deformable attention of a model by `retrograd.ops.ms_deform_attn`, in place.

    Looked for are functions that take value, spatial shapes, sampling locations and attention weights by the names
    that transformers (Deformable DETR, RT-DETR, GroundingDINO, Mask2Former, OneFormer, D-FINE, ...), mmcv and
    Deformable-DETR use: a module's forward, a function or autograd function that a forward calls, one kept as an
    attribute. Each is run beside ours on the device of the model, forward and backward, at random points in float32
    and bfloat16, and replaced if both agree within the attainable error of float64. Parameters, hooks and the modules
    themselves stay the same objects; other models of the same classes are not touched.

    Args:
        model: any module, itself included, on the device where it will run.

    Returns:
        A handle as of `norms`: `names` are the layers that sample by ours, `left` has the layers of whose classes the
        names say "deformable attention" and the functions that stay as they are, with the reason.

    Numerics: as `ms_deform_attn`. At points exactly on pixel centres, where layers of Deformable DETR begin, the
    derivative jumps; grid_sample takes that of either side, by rounding, ours always that to the right. Both are
    right, and there gradients of offsets may differ by as much as the derivative jumps. Calls with an option that has
    no counterpart (method="discrete") are left to the model's own function.
    """
    swaps: list[Swap] = []
    left: dict[str, str] = {}
    known: dict[Sampler, str] = {}
    for name, module in model.named_modules():
        calls = _calls(module)
        if calls and "forward" in module.__dict__:
            left[name] = own_forward(name, module)
            continue
        reasons = {call: _difference(call, module, _device(model), known) for call in calls}
        left |= {f"{name}.{call.name}".lstrip("."): reason for call, reason in reasons.items() if reason}
        if same := tuple(call for call, reason in reasons.items() if not reason):
            swaps.append(Swap(name, module, type(module), _replaced(type(module), same)))
    left |= _unseen(model, {id(swap.module) for swap in swaps}, left)
    return Handle("layers of deformable attention", swaps, left)


def _calls(module: torch.nn.Module) -> list[_Call]:
    forward = inspect.unwrap(type(module).forward)
    if not inspect.isfunction(forward) or isinstance(module, _Patched):
        return []
    reached = [("global", name, sampler(forward.__globals__.get(name))) for name in forward.__code__.co_names]
    reached += [("attribute", name, sampler(value)) for name, value in vars(module).items()]
    if not any(True for _ in module.parameters()) and not any(True for _ in module.children()):
        reached.append(("forward", "forward", sampler(forward, skip=1)))
    return [_Call(place, name, theirs) for place, name, theirs in reached if theirs is not None]


def _difference(call: _Call, module: torch.nn.Module, device: torch.device, known: dict[Sampler, str]) -> str:
    """Why a function is not replaced, or "". `known` has those that were compared before."""
    if call.theirs not in known:
        bound = MethodType(call.theirs.call, module) if call.place == "forward" else call.theirs.call
        known[call.theirs] = differs(replace(call.theirs, call=bound), device)
    return known[call.theirs]


def _device(model: torch.nn.Module) -> torch.device:
    """Where functions are tried: where the model's parameters are, and on the CPU if they are nowhere yet."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device


def _unseen(model: torch.nn.Module, replaced: set[int], left: dict[str, str]) -> dict[str, str]:
    """Modules that a person would expect to be replaced, by their classes' names, and nothing is known of."""
    missing: dict[str, str] = {}
    for name, module in model.named_modules():
        word = type(module).__name__.lower()
        inside = [m for m in module.modules() if id(m) in replaced or isinstance(m, _Patched)]
        told = any(other.startswith(name) for other in left)
        if ("deformableattention" in word or "deformattn" in word) and not inside and not told:
            missing[name] = "it calls nothing that takes maps, points and weights by names that are known here"
    return missing


@cache
def _replaced(kind: type[torch.nn.Module], calls: tuple[_Call, ...]) -> type[torch.nn.Module]:
    """A subclass of `kind` of the same name that calls ours; one per class, so that compiled code is shared."""
    body: dict[str, Any] = {"__module__": kind.__module__}
    names: dict[str, Any] = {}
    for place, name, theirs in calls:
        if place == "global":
            is_node = getattr(theirs.call, "__name__", "") == "apply"
            names[name] = type(name, (), {"apply": staticmethod(theirs.ours)}) if is_node else theirs.ours
        elif place == "attribute":  # a property goes before what is in the module's __dict__
            body[name] = property(lambda self, theirs=theirs: theirs.ours)
        else:
            body["forward"] = lambda self, *args, theirs=theirs, **named: theirs.ours(*args, **named)
    if names:
        body["forward"] = _with_globals(kind.forward, names)
    return type(kind.__name__, (_Patched, kind), body)


def _with_globals(function: Any, names: dict[str, Any]) -> Any:
    """A copy of a function, and of what it wraps, that sees other objects under these global names."""
    inner = getattr(function, "__wrapped__", None)
    cells = function.__closure__ or ()
    if inner is not None:
        changed = _with_globals(inner, names)
        cells = tuple(CellType(changed) if cell.cell_contents is inner else cell for cell in cells)
    seen = {**function.__globals__, **({} if inner else names)}
    # Under this name torch.compile would look for the module whose globals these are no more.
    seen.pop("__name__", None)
    copy = FunctionType(function.__code__, seen, function.__name__, function.__defaults__, cells or None)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
