"""Recipes of deformable attention: launches of calls that C++ did not know, told to it after Python has run them."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from retrograd.ops.msda.arguments import Levels, MsdaInputs, MsdaSpec, NeededGrads
from retrograd.ops.msda.autograd import MsdaFunction
from retrograd.ops.msda.dispatch import MsdaCall, resolve
from retrograd.ops.msda.shapes import flat
from retrograd.ops.types import Impl

_IMPLS = (None, Impl.TRITON, Impl.CUDA)  # by the number that C++ has for them


def connect(module: Any) -> None:
    """Tell the extension what it needs to know of this module."""
    from triton import knobs

    numbers = {key: i for i, impl in enumerate(_IMPLS) for key in (impl, getattr(impl, "value", impl))}
    module.tell(partial(by_python, module), knobs.runtime, numbers, "")


def learn(module: Any, key: bytes, inputs: MsdaInputs, call: MsdaCall, needed: NeededGrads | None = None) -> None:
    """Tell the extension the launches of a call that has run, under the key by which it asked for them."""
    recipe = call.functions.recipe(flat(inputs), call.spec, needed)
    if recipe is not None:
        module.add(needed is not None, key, *recipe)


def by_python(
    module: Any,
    grad_out: torch.Tensor,
    saved: tuple[Any, ...],
    sizes: tuple[int, ...],
    points: tuple[int, ...],
    options: tuple[bool, bool, bool],
    impl: int,
    needs: tuple[bool, ...],
    key: bytes | None,
) -> tuple[Any, ...]:
    """The gradients of a node in C++ for which it has no recipe, or of which further derivatives are wanted."""
    *tensors, shapes = saved
    value, locations, weights, references = tensors
    levels = Levels(None if shapes is not None else tuple(zip(sizes[::2], sizes[1::2], strict=True)), shapes)
    call = resolve(MsdaSpec(points, *options), _IMPLS[impl], value.dtype, value.device)
    ctx = SimpleNamespace(saved_tensors=saved, sizes=levels.sizes, call=call, needs_input_grad=needs)
    grads = MsdaFunction.backward(ctx, grad_out)[:4]
    if key is not None:
        inputs = MsdaInputs(value, levels, locations, weights, references)
        learn(module, key, inputs, call, NeededGrads(*needs))
    return grads
