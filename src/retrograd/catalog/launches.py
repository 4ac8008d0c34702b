"""Targets of `retrograd codegen`: shipped ops, op specs, kernels and functions of a person's own, as something to call.

Resolving needs a GPU architecture, because modules ask Triton's driver for a device while they are imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from retrograd import codegen
from retrograd.catalog import SHIPPED, msda_names, resolve
from retrograd.check import sizes
from retrograd.check.spec import OpSpec, SizeSpec, TensorSpec, dtype_name
from retrograd.codegen import compile as compiling
from retrograd.codegen import signatures
from retrograd.compat.triton_compile import absent_gpu
from retrograd.core.loading import guard, is_path, load, near
from retrograd.errors import RetrogradError, UsageError
from retrograd.runtime.gpu_targets import Target
from retrograd.runtime.triton import fake_gpu

_FORMS = "a shipped name (rms_norm), 'path/file.py:name' or 'package.module:name'"
# Sizes of shipped ops as they are trained with; a spec's own sweep for `verify` is of small ones.
_TYPICAL = dict(M=4096, N=4096, H=8, B=2, Q=300, C=32, P=4, W=64)
_PLANNING = ("retrograd.ops", "retrograd.runtime")  # plan for the GPU that they are told of


@dataclass(frozen=True)
class LaunchArguments:
    """What a command line says of the arguments; each fits one kind of target only."""

    signature: str | None = None  # of a kernel, see `signatures.launch`
    case: str | None = None  # of an op spec, sizes and parameters as `verify` writes them
    dtype: str | None = None  # of an op spec


def launches(target: str, options: LaunchArguments, architecture: str) -> Callable[[Target], object]:
    """What launches the kernels of a target, to be called for a GPU while launches are recorded.

    Args:
        target: a shipped name, or the place of a name that is an op spec, a `@triton.jit` function (perhaps under
            `@triton.autotune` or `@triton.heuristics`), or a function without arguments that launches kernels.
        options: for its arguments.
        architecture: what the module is imported for.

    Raises:
        UsageError: there is no such name, or an option does not fit it.
        SpecError: the module raises while it is imported, or the function while it is called.
        MissingExtraError: Triton is not installed.
    """
    gpu = codegen.target_named(architecture)
    compiling.require_triton()
    with absent_gpu(gpu), fake_gpu.gpu(gpu):
        subject = resolve(target) if target in SHIPPED else _find(target)
    if isinstance(subject, OpSpec):
        function, inputs, params = _of_spec(subject, target, options)
        work = partial(_forward_and_backward, function, inputs, params)
        return partial(_without_executing, partial(_guarded, work, target))
    _refuse("--case", options.case, target, "a function or kernel")
    _refuse("--dtype", options.dtype, target, "a function or kernel")
    if hasattr(subject, "arg_names") and hasattr(subject, "run"):
        if options.signature is None:
            expected = ", ".join(f"{name}=..." for name in signatures.needed(subject))
            raise UsageError(f"{target!r} is a kernel; give its arguments: --signature '{expected}'")
        work = partial(signatures.launch, subject, options.signature)
        return lambda _: _guarded(work, target)
    _refuse("--signature", options.signature, target, "a function")
    return partial(_without_executing, partial(_run, subject, target))


def runs(target: str, options: LaunchArguments) -> Callable[[], object]:
    """The same on the GPU of this machine: an op spec, or a function of a person's own, called as it is.

    Raises:
        UsageError: the target is a kernel, which cannot be run without tensors.
    """
    subject = resolve(target) if target in SHIPPED else _find(target)
    if isinstance(subject, OpSpec):
        function, inputs, params = _of_spec(subject, target, options)
        inputs = {name: value.to("cuda") if hasattr(value, "to") else value for name, value in inputs.items()}
        return partial(_guarded, partial(_forward_and_backward, function, inputs, params), target)
    if hasattr(subject, "arg_names"):
        raise UsageError(
            f"`--run` and `--profile` need a function that makes its inputs on the GPU; {target!r} is a kernel"
        )
    for option, value in (("--signature", options.signature), ("--case", options.case), ("--dtype", options.dtype)):
        _refuse(option, value, target, "a function")
    return partial(_run, subject, target)


def _find(target: str) -> Any:
    place, _, name = target.rpartition(":")
    if not place or not name:
        hint = f" (add the name: {target.rstrip(':')}:NAME)" if is_path(target.rstrip(":")) else near(target, SHIPPED)
        raise UsageError(f"unknown target {target!r}{hint}; expected {_FORMS}")
    module = load(place, target, _FORMS)
    if not hasattr(module, name):
        public = [k for k, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        listed = f"; it has {', '.join(public)}" if public else ""
        raise UsageError(f"{place!r} has no {name!r}{near(name, public)}{listed}")
    subject = getattr(module, name)
    if type(subject).__name__ == "InterpretedFunction":
        raise UsageError(
            f"{target!r} is interpreted: the module sets TRITON_INTERPRET; it must not while it is compiled"
        )
    if not callable(subject) and not isinstance(subject, OpSpec) and not hasattr(subject, "arg_names"):
        raise UsageError(f"{target!r} is {type(subject).__name__}, expected a kernel, an op spec or a function")
    return subject


def _without_executing(work: Callable[[], object], gpu: Target) -> None:
    """Launchers are told of a GPU; ops of ours, where they are used, plan for it by themselves."""
    from retrograd.runtime.triton import planned_gpu

    with planned_gpu.planning(gpu), fake_gpu.gpu(gpu, knowing=_PLANNING):
        work()


def _run(function: Callable[[], object], target: str) -> None:
    needed = [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        name = target.rpartition(":")[2]
        raise UsageError(
            f"{target!r} takes {', '.join(needed)}; expected a function without arguments that makes its inputs and "
            f"launches, such as: def launch(): {name}({', '.join('torch.empty(...)' for _ in needed)})"
        )
    _guarded(function, target)


def _guarded(action: Callable[[], object], target: str) -> None:
    """What a person's code raises is told with its line; what is wrong with the call, as it is."""
    place = target.rpartition(":")[0]
    guard(action, target, Path(place).resolve() if is_path(place) else None, untold=RetrogradError)


def _of_spec(
    spec: OpSpec, target: str, options: LaunchArguments
) -> tuple[Callable[..., Any], Mapping[str, Any], Mapping[str, Any]]:
    """(function, inputs, parameters) of one case."""
    from retrograd.check.inputs import base_case, draw, parse_case, torch_dtype

    _refuse("--signature", options.signature, target, "an op")
    dtype = dtype_name(options.dtype, "--dtype") if options.dtype else spec.dtypes[0]
    case = base_case(spec, dtype)
    if target in SHIPPED:
        sizes = {n: (_TYPICAL[n],) if isinstance(size, tuple) else _TYPICAL[n] for n, size in case.sizes}
        case = case.but(sizes=sizes)
    if options.case is not None:
        requested = parse_case(spec, dtype, options.case)
        words = {word.partition("=")[0] for word in options.case.split()}
        case = requested.but(sizes=dict(case.sizes) | {n: size for n, size in requested.sizes if n in words})
    described = spec.tensor_specs
    if described is None:
        inputs = draw(spec, case, 0)
    else:
        inputs = {name: _empty(s, case, torch_dtype) for name, s in described.items()}
    function = spec.fn
    if target in msda_names() and not target.endswith(("_cpu", "_torch")):
        function = partial(spec.fn, impl="triton")  # on a GPU of NVIDIA's some shapes have CUDA C++ of their own
    return function, inputs, dict(case.params)


def _empty(spec: Any, case: Any, torch_dtype: Callable[[str], Any]) -> Any:
    """A tensor of the right shape; integers are zeros, because launchers may read those."""
    import torch

    if isinstance(spec, SizeSpec):
        return spec.at(case)
    if not isinstance(spec, TensorSpec):
        return spec
    if spec.concrete is not None:
        return spec.concrete
    shape = sizes.shape(spec.dims, case)
    dtype = torch_dtype(spec.dtype or case.dtype)
    return torch.empty(shape, dtype=dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)


def _forward_and_backward(function: Callable[..., Any], inputs: Mapping[str, Any], params: Mapping[str, Any]) -> None:
    """Gradients for every floating input, of all outputs together."""
    import torch

    leaves = [v.detach().requires_grad_(v.is_floating_point()) if hasattr(v, "detach") else v for v in inputs.values()]
    result = function(*leaves, **params)
    outs = result if isinstance(result, (tuple, list)) else (result,)
    outs = [out for out in outs if getattr(out, "requires_grad", False)]
    differentiable = [v for v in leaves if getattr(v, "requires_grad", False)]
    if outs and differentiable:
        torch.autograd.grad(outs, differentiable, [torch.empty_like(out) for out in outs], allow_unused=True)


def _refuse(option: str, value: str | None, target: str, kind: str) -> None:
    if value is not None:
        raise UsageError(f"`{option}` is given, but {target!r} is {kind}, which takes none")
