"""Launches that Triton has made and triton/launch.py holds, told to C++: when they fit, and what they pass.

The order of a key's numbers and of the tensors is that of host.cpp.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from retrograd.compat.triton_relaunch import has_plain_arguments
from retrograd.ops import tensor_subclasses
from retrograd.ops.norm.autograd import ONCE_ONLY, gradients
from retrograd.ops.norm.dispatch import choose, functions
from retrograd.ops.norm.spec import NormSpec
from retrograd.ops.types import Impl

FORWARD_TENSORS, BACKWARD_TENSORS, FINALIZER_TENSORS = 8, 10, 4
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_FLOATS = {"fp16": "<e", "fp32": "<f", "f32": "<f", "fp64": "<d"}
# (function, grid, threads, bytes of shared memory, parameters, whether it begins while the kernel ahead of it ends); a
# parameter is (tensor, 0) or (-1, value).
Described = tuple[int, tuple[int, int, int], int, int, tuple[tuple[int, int], ...], bool]


def connect(module: Any, backward: Callable[..., Any] | None = None) -> None:
    """Tell the extension of every launch that is held, now and later.

    Args:
        module: the extension.
        backward: what runs where no launch fits; None is that of impl="triton".
    """
    import triton

    from retrograd.ops.norm.triton import launch

    codes = {dtype: module.dtype_code(dtype) for dtype in _DTYPES}
    fallback = partial(by_python, backward or functions(Impl.TRITON)[1], {code: dtype for dtype, code in codes.items()})
    default = choose(None, torch.bfloat16, torch.device("cuda", 0)) is Impl.TRITON
    module.tell(fallback, triton.knobs.runtime, Impl.TRITON, default, ONCE_ONLY)

    def keep(held: dict[Any, Any], key: Any, entry: Any) -> None:
        made = (forward_recipe if held is launch._FORWARD else backward_recipe)(key, entry, codes)
        if made is not None:
            module.add(held is not launch._FORWARD, *made)

    for held in (launch._FORWARD, launch._BACKWARD):
        for key, entry in held.items():
            keep(held, key, entry)
    launch.on_keep = keep


def disconnect() -> None:
    """Tell of no more launches."""
    from retrograd.ops.norm.triton import launch

    launch.on_keep = None


def forward_recipe(key: Any, entry: Any, codes: dict[Any, int]) -> tuple[Any, ...] | None:
    """(key, launch, None, 0) of a forward in triton/launch.py; None where it stays in Python."""
    device, x, residual, weight, bias, out_dtype, s_dtype, own_s, store_stats, spec = key
    handle, rest = entry
    described = describe(handle, FORWARD_TENSORS, rest)
    if described is None or not spec.deterministic:
        return None
    words = [-1 if device is None else device]
    for given in (x, residual, weight, bias):
        words += _layout(given, codes)
    words += [codes[out_dtype], codes[s_dtype], int(own_s), int(store_stats), *_spec(spec)]
    return tuple(words), described, None, 0


def backward_recipe(key: Any, entry: Any, codes: dict[Any, int]) -> tuple[Any, ...] | None:
    """(key, launch, finalizer or None, parts) of a backward in triton/launch.py; None where it stays in Python."""
    device, s, grad_out, weight, grad_s, into_weight, into_bias, *dtypes, heads, spec = key
    handle, rest, parts, finalizer = entry
    rows = describe(handle, BACKWARD_TENSORS, rest)
    last = None if finalizer is None else describe(finalizer[0], FINALIZER_TENSORS, finalizer[1])
    if rows is None or (finalizer is not None and last is None) or not spec.deterministic:
        return None
    if into_weight is not None or into_bias is not None or (finalizer is not None and parts < 1):
        return None
    words = [-1 if device is None else device]
    for given in (s, grad_out, weight, grad_s):
        words += _layout(given, codes)
    words += [-1 if dtype is None else codes[dtype] for dtype in dtypes]
    return (*words, heads, *_spec(spec)), rows, last, parts


def _layout(given: Any, codes: dict[Any, int]) -> list[int]:
    if given is None:
        return [0]
    dtype, shape, stride = given
    return [(codes[dtype] + 1) << 8 | len(shape), *shape, *stride]


def _spec(spec: NormSpec) -> tuple[int, int, int, int]:
    eps, offset = (struct.unpack("<q", struct.pack("<d", number))[0] for number in (spec.eps, spec.weight_offset))
    return int(spec.centered), eps, offset, -1 if spec.parts is None else spec.parts


def describe(handle: Any, tensors: int, rest: Iterable[Any]) -> Described | None:
    """What a launch passes to the driver, its first `tensors` arguments being tensors; None for unusual launches.

    Triton passes all arguments that are not constexprs, in their order; None and 1 are constexprs to it. Behind them
    come two addresses of scratch memory, null unless a kernel asks for some.
    """
    compiled = getattr(handle, "compiled", None)
    if compiled is None:
        return None
    warps, ctas, shared = handle.metadata
    meta = compiled.metadata
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
    return handle.function, handle.grid, 32 * warps, shared, tuple(params), bool(getattr(meta, "launch_pdl", False))


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
        dtypes=(x, residual, weight, bias),
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
