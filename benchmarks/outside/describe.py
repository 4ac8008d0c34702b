"""Specs of functions and modules of other libraries, in few words: `alone` and `module`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.func import functional_call

import retrograd as rg
from retrograd.check.spec import OpSpec

SPECS: dict[str, OpSpec] = {}
_t = rg.tensor


def add(name: str, fn: Callable[..., Any], reference: Callable[..., Any], inputs: Any, **options: Any) -> None:
    """Add a spec with a reference of its own.

    Args:
        name: after the library's: "torchvision.ops.box_iou", with a dot and a word behind it for a variant.
        fn: what the library has, called with the inputs.
        reference: a formula in plain PyTorch.
        inputs: as of `retrograd.op`.
        options: of `retrograd.op`.

    Raises:
        ValueError: there is one of this name.
    """
    if name in SPECS:
        raise ValueError(f"`name` is {name!r}, which another spec has")
    SPECS[name] = rg.op(fn, reference, inputs, name=name, **options)


def alone(name: str, fn: Callable[..., Any], inputs: Any, **options: Any) -> None:
    """Add a spec whose reference is the function itself, which `verify` runs in float64; arguments as of `add`."""
    add(name, fn, fn, inputs, **options)


def module(name: str, make: Callable[[], torch.nn.Module], inputs: Mapping[str, Any], **options: Any) -> None:
    """Add a spec of a module: its parameters are inputs too, and its reference is itself.

    Args:
        name: as of `add`.
        make: returns the module; called once, with the generator seeded.
        inputs: of its forward.
        options: of `retrograd.op`.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        template = make()
    by_dtype: dict[torch.dtype, torch.nn.Module] = {}
    names = [key for key, _ in template.named_parameters()]
    count = len(inputs)

    def call(*tensors: torch.Tensor, **params: Any) -> Any:
        dtype = next(t.dtype for t in tensors if t.is_floating_point())
        if dtype not in by_dtype:
            by_dtype[dtype] = copy.deepcopy(template).to(dtype)
        weights = dict(zip(names, tensors[count:], strict=True))
        return functional_call(by_dtype[dtype], weights, tensors[:count], params)

    weights = {key.replace(".", "_"): _t(*value.shape, scale=0.5) for key, value in template.named_parameters()}
    alone(name, call, {**inputs, **weights}, **options)
