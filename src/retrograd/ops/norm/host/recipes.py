"""Recipes of the norms: kept launches as C++ takes them, and when they fit.

A key becomes numbers in the order of its fields, which is that of host.cpp.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from retrograd.ops import tensor_subclasses
from retrograd.ops.norm import launch_cache
from retrograd.ops.norm.autograd import ONCE_ONLY, gradients
from retrograd.ops.norm.dispatch import FAMILY, functions
from retrograd.ops.norm.launch_cache import BackwardKey, CompiledLaunch, ForwardKey, KeptBackward, Layout
from retrograd.ops.norm.spec import NormSpec
from retrograd.ops.types import Impl
from retrograd.runtime.cpp.recipe import Buffer, Recipe, driver_call, key_bytes

# Slots of tensors in the order of the kernels' arguments; those of the kernel that adds up parts begin at the parts.
FORWARD_SLOTS, BACKWARD_SLOTS, FINALIZER_SLOTS = range(8), range(10), range(8, 12)
FEW_SLOTS = (*range(8), 10, 11)  # gradients instead of parts
_WEIGHT_PARTS, _BIAS_PARTS = FINALIZER_SLOTS[:2]
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def connect(module: Any, backward: Callable[..., Any] | None = None) -> None:
    """Tell the extension of every launch that is held, now and later.

    Args:
        module: the extension.
        backward: what runs where no launch fits; None is that of impl="triton".
    """
    from triton import knobs

    codes = {dtype: module.dtype_code(dtype) for dtype in _DTYPES}
    fallback = partial(by_python, backward or functions(Impl.TRITON)[1], {code: dtype for dtype, code in codes.items()})
    impls: dict[Any, int] = {Impl.TRITON: 0, Impl.TRITON.value: 0}
    if FAMILY.choose(None, torch.bfloat16, torch.device("cuda", 0)) is Impl.TRITON:
        impls[None] = 0
    module.tell(fallback, knobs.runtime, impls, ONCE_ONLY)

    def tell(key: Any, launch: Any) -> None:
        is_backward = isinstance(key, BackwardKey)
        recipe = (backward_recipe if is_backward else forward_recipe)(key, launch)
        if recipe is not None:
            module.add(is_backward, key_bytes(key_numbers(key, codes)), *recipe)

    launch_cache.on_keep = tell
    for cache in (launch_cache.FORWARD, launch_cache.BACKWARD):
        for key, launch in list(cache.items()):  # a copy: other threads keep launches meanwhile
            tell(key, launch)


def disconnect() -> None:
    """Tell of no more launches."""
    launch_cache.on_keep = None


def forward_recipe(key: ForwardKey, launch: CompiledLaunch) -> Recipe | None:
    """None where the launch stays in Python."""
    call = driver_call(launch.handle, FORWARD_SLOTS, launch.rest)
    return None if call is None or not key.spec.deterministic else Recipe((call,))


def backward_recipe(key: BackwardKey, launch: KeptBackward) -> Recipe | None:
    """None where the launch stays in Python."""
    if not key.spec.deterministic or key.into_weight is not None or key.into_bias is not None:
        return None
    if launch.parts is None:
        call = driver_call(launch.handle, FEW_SLOTS, launch.rest)
        return None if call is None else Recipe((call,))
    calls = [driver_call(launch.handle, BACKWARD_SLOTS, launch.rest)]
    if launch.finalizer is not None:
        calls.append(driver_call(launch.finalizer.handle, FINALIZER_SLOTS, launch.finalizer.rest))
    known = tuple(call for call in calls if call is not None)
    if len(known) < len(calls):
        return None
    assert key.s is not None
    dtypes = {_WEIGHT_PARTS: key.weight_dtype, _BIAS_PARTS: key.bias_dtype}
    slots = [slot for slot, dtype in dtypes.items() if dtype is not None]
    # In one allocation, each of a multiple of 16 bytes.
    size = -(-launch.parts * key.heads * key.s[1][1] // 4) * 4
    return Recipe(known, tuple(Buffer(slot, torch.float32, (len(slots), size)) for slot in slots[:1]))


def key_numbers(key: ForwardKey | BackwardKey, codes: dict[Any, int]) -> tuple[int, ...]:
    """The fields of a key one after the other as host.cpp writes them; not the buffers, which it does not know."""
    numbers: list[Any] = []
    for name, value in key._asdict().items():
        if name in ("into_weight", "into_bias"):
            continue
        if name in ("x", "residual", "weight", "bias", "s", "grad_out", "grad_s"):
            numbers += _layout(value, codes)
        elif isinstance(value, NormSpec):
            numbers += _spec(value)
        else:
            numbers.append(-1 if value is None else codes.get(value, value))
    return tuple(int(number) for number in numbers)


def _layout(layout: Layout | None, codes: dict[Any, int]) -> list[int]:
    if layout is None:
        return [0]
    dtype, shape, stride = layout
    return [(codes[dtype] + 1) << 8 | len(shape), *shape, *stride]


def _spec(spec: NormSpec) -> tuple[int, int, int, int]:
    eps, offset = (struct.unpack("<q", struct.pack("<d", number))[0] for number in (spec.eps, spec.weight_offset))
    return int(spec.centered), eps, offset, -1 if spec.parts is None else spec.parts


def by_python(
    backward: Callable[..., Any],
    dtypes: dict[int, torch.dtype],
    grads: tuple[Any, Any],
    saved: tuple[Any, ...],
    needs: tuple[bool, ...],
    codes: tuple[int, int, int, int],
    shape: tuple[int, ...],
    vector_shape: tuple[int, ...] | None,
    heads: int,
    spec: tuple[bool, float, float, int],
) -> tuple[Any, ...]:
    """The gradients of a node in C++ for which it has no recipe: of x, weight, bias and residual."""
    centered, eps, offset, parts = spec
    x, weight, bias, residual = (dtypes.get(code) for code in codes)
    ctx = SimpleNamespace(
        needs_input_grad=needs,
        dtypes=(x, weight, bias, residual),
        parameters=None,
        shape=torch.Size(shape),
        vector_shape=None if vector_shape is None else torch.Size(vector_shape),
        heads=heads,
        spec=NormSpec(centered, eps, offset, True, None if parts < 0 else parts),
        saved_tensors=saved,
    )
    grad_y, grad_s = map(tensor_subclasses.finished, grads)
    with torch.no_grad():
        return gradients(ctx, backward, grad_y, grad_s)
