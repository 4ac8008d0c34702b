"""Recipes: kept launches as C++ takes them, when they fit and what they pass to the driver.

A key becomes numbers in the order of its fields, which is that of host.cpp.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from retrograd.ops import tensor_subclasses
from retrograd.ops.norm import launch_cache
from retrograd.ops.norm.autograd import ONCE_ONLY, gradients
from retrograd.ops.norm.dispatch import FAMILY, functions
from retrograd.ops.norm.launch_cache import BackwardKey, CompiledLaunch, ForwardKey, KeptBackward, Layout
from retrograd.ops.norm.spec import NormSpec
from retrograd.ops.types import Impl

FORWARD_TENSORS, BACKWARD_TENSORS, FINALIZER_TENSORS = 8, 10, 4
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_FLOATS = {"fp16": "<e", "fp32": "<f", "f32": "<f", "fp64": "<d"}


class DriverCall(NamedTuple):
    """What a launch passes to the CUDA driver; host.cpp reads the fields in this order."""

    function: int  # the driver's handle of the kernel
    grid: tuple[int, int, int]  # programs
    threads: int  # of a program
    shared_bytes: int  # of shared memory
    parameters: tuple[tuple[int, int], ...]  # (position of a tensor, 0) or (-1, value)
    pdl: bool  # whether it begins while the kernel ahead of it ends


class Recipe(NamedTuple):
    """A kept launch; host.cpp reads the fields in this order."""

    key: tuple[int, ...]  # the numbers of its key
    rows: DriverCall  # the kernel over the rows
    finalizer: DriverCall | None = None  # the kernel that adds up partial sums, if any
    parts: int = 0  # how many of them


def connect(module: Any, backward: Callable[..., Any] | None = None) -> None:
    """Tell the extension of every launch that is held, now and later.

    Args:
        module: the extension.
        backward: what runs where no launch fits; None is that of impl="triton".
    """
    from triton import knobs

    codes = {dtype: module.dtype_code(dtype) for dtype in _DTYPES}
    fallback = partial(by_python, backward or functions(Impl.TRITON)[1], {code: dtype for dtype, code in codes.items()})
    default = FAMILY.choose(None, torch.bfloat16, torch.device("cuda", 0)) is Impl.TRITON
    module.tell(fallback, knobs.runtime, Impl.TRITON, default, ONCE_ONLY)

    def tell(key: Any, launch: Any) -> None:
        is_backward = isinstance(key, BackwardKey)
        recipe = (backward_recipe if is_backward else forward_recipe)(key, launch, codes)
        if recipe is not None:
            module.add(is_backward, *recipe)

    launch_cache.on_keep = tell
    for cache in (launch_cache.FORWARD, launch_cache.BACKWARD):
        for key, launch in list(cache.items()):  # a copy: other threads keep launches meanwhile
            tell(key, launch)


def disconnect() -> None:
    """Tell of no more launches."""
    launch_cache.on_keep = None


def forward_recipe(key: ForwardKey, launch: CompiledLaunch, codes: dict[Any, int]) -> Recipe | None:
    """None where the launch stays in Python."""
    call = driver_call(launch.handle, FORWARD_TENSORS, launch.rest)
    return None if call is None or not key.spec.deterministic else Recipe(key_numbers(key, codes), call)


def backward_recipe(key: BackwardKey, launch: KeptBackward, codes: dict[Any, int]) -> Recipe | None:
    """None where the launch stays in Python."""
    if not key.spec.deterministic or key.into_weight is not None or key.into_bias is not None:
        return None
    rows, finalizer = driver_call(launch.handle, BACKWARD_TENSORS, launch.rest), None
    if launch.finalizer is not None:
        finalizer = driver_call(launch.finalizer.handle, FINALIZER_TENSORS, launch.finalizer.rest)
        if finalizer is None or launch.parts < 1:
            return None
    return None if rows is None else Recipe(key_numbers(key, codes), rows, finalizer, launch.parts)


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


def driver_call(handle: Any, tensors: int, rest: Iterable[Any]) -> DriverCall | None:
    """What a launch passes to the driver, its first `tensors` arguments being tensors; None for unusual launches.

    Triton passes all arguments that are not constexprs, in their order; None and 1 are constexprs to it. Behind them
    come two addresses of scratch memory, null unless a kernel asks for some.
    """
    compiled = getattr(handle, "compiled", None)
    if compiled is None:
        return None
    warps, ctas, shared = handle.metadata
    meta = compiled.metadata
    from retrograd.compat.triton_relaunch import has_plain_arguments  # a kernel was launched, so Triton is there

    if ctas != 1 or not has_plain_arguments(compiled):
        return None
    kinds = list(compiled.src.signature.values())
    args = [*range(tensors), *rest]
    if len(kinds) != len(args):
        return None
    params = []
    for place, (kind, value) in enumerate(zip(kinds, args, strict=True)):
        if kind == "constexpr":
            continue
        is_address = isinstance(kind, str) and kind.startswith("*")
        if is_address != (place < tensors):
            return None
        bits = 0 if is_address else scalar_bits(kind, value)
        if bits is None:
            return None
        params.append((place, 0) if is_address else (-1, bits))
    return DriverCall(
        function=handle.function,
        grid=handle.grid,
        threads=32 * warps,
        shared_bytes=shared,
        parameters=tuple(params),
        pdl=bool(getattr(meta, "launch_pdl", False)),
    )


def scalar_bits(kind: Any, value: Any) -> int | None:
    """The bytes of a number as Triton's type `kind`, lowest first, in 64 bits; None for other types."""
    if not isinstance(kind, str):
        return None
    if kind in _FLOATS:
        return int.from_bytes(struct.pack(_FLOATS[kind], value), "little")
    if kind == "bf16":
        return int.from_bytes(struct.pack("<f", value), "little") >> 16
    if kind[0] in "iu" and kind[1:].isdigit() and int(kind[1:]) <= 64:
        return int(value) & (2**64 - 1)
    return None


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
