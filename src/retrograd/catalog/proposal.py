"""Proposals of specs: what an op of somebody's file takes is tried, so that what is written runs as it stands."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from retrograd import config
from retrograd.catalog import load_module
from retrograd.check import cpu_kernels
from retrograd.check.spec import is_kernel
from retrograd.compat.torch_library import parameters_of
from retrograd.core.loading import guard, is_path, near, require_torch
from retrograd.errors import UndecidedError, UsageError

_FORMS = "'path/file.py', 'path/file.py:name' or 'package.module:name'"
_SIZES = {"M": 3, "N": 5, "K": 4, "B": 2, "C": 4, "H": 6, "W": 7}
_FEATURES = 16  # what constructors of modules get for a number that they ask for
_ROW_NAMES = {"w", "weight", "weights", "gamma", "beta", "b", "bias", "gain", "shift"}
_ROWS = (("N",), ("M", "N"), ("N", "K"), ("K", "N"))
_SHAPES = (("M", "N"), ("N", "K"), ("B", "M", "N"), ("N",), ("B", "M", "H", "N"), ("B", "C", "H", "W"))
_FEATURE_SHAPES = (("M", _FEATURES), ("B", "M", _FEATURES), (_FEATURES,), ("B", _FEATURES, "H", "W"))
_NUMBERS = {"eps": 1e-6, "epsilon": 1e-6}
_BY_ANNOTATION = {"int": 1, "float": 1.0, "bool": False}
_TRIES = 500
_WORDS = ("reference", "ref", "naive", "torch", "pytorch", "eager", "golden")

Dims = tuple["str | int", ...]


@dataclass(frozen=True)
class Proposal:
    """A spec as it could stand in a file.

    Attributes:
        name: of the op in its module.
        module: to import it from.
        call: what is called, as Python writes it.
        reference: name of the reference, "" if there is none beside the op.
        inputs: dimensions by name, in the order of the arguments.
        params: numbers by name.
        dtype: in which it runs.
        wrapped: parameters of an autograd function, which takes no keywords; empty for everything else.
        applied: what takes them, as Python writes it.
        backward: whether results have gradients.
    """

    name: str
    module: str
    call: str
    reference: str
    inputs: Mapping[str, Dims]
    params: Mapping[str, Any]
    dtype: str = "float32"
    wrapped: tuple[str, ...] = ()
    applied: str = ""
    backward: bool = True

    def text(self) -> str:
        """The file."""
        imported = ", ".join(filter(None, (self.name, self.reference)))
        lines = [f'"""What {self.name} promises, for `retrograd verify`; written by `retrograd init`."""', ""]
        lines += ["import retrograd as rg", f"from {self.module} import {imported}", ""]
        if self.wrapped:
            words = ", ".join(self.wrapped)
            lines += ["", f"def {self.call}({words}):", f"    return {self.applied}({words})", "", ""]
        last = "" if self.backward else ", grad=False"
        described = ", ".join(f"{k}=rg.tensor({', '.join(map(repr, v))}{last})" for k, v in self.inputs.items())
        lines += ["spec = rg.op(", f"    {self.call},"]
        if self.reference:
            lines += [f"    reference={self.reference},"]
        else:
            lines += ["    # reference=...,  the same in PyTorch, as slow as you like: values are compared then"]
        if not self.backward:
            lines += ["    # results have no gradient: values alone are compared"]
        lines += [f"    inputs=dict({described}),".replace("'", '"')]
        if self.params:
            lines += [f"    params=dict({', '.join(f'{k}=[{v!r}]' for k, v in self.params.items())}),"]
        lines += [f'    dtypes=["{self.dtype}"],', ")"]
        return "\n".join(lines) + "\n"


@dataclass
class _Op:
    """A candidate: what is called, and what it takes; `devices`: whether its tensors are said to be on a GPU."""

    name: str
    value: Any
    call: str
    run: Any
    choices: dict[str, tuple[Dims, ...]] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    wrapped: tuple[str, ...] = ()
    applied: str = ""
    devices: bool = True


def propose(target: str) -> tuple[Proposal, Path]:
    """A spec for the op that a target names, and the folder from which its module is imported.

    Shapes are those, the plainest first, with which the op and the reference beside it run and agree in shape.

    Raises:
        UsageError: there is no such file or name, or several ops and none is named.
        SpecError: the file raises.
        UndecidedError: the op ran with no shapes that were tried.
    """
    require_torch("retrograd init")
    place, _, name = target.rpartition(":") if ":" in target else (target, "", "")
    folder, dotted = _import_of(place)
    module = load_module(place if folder == Path(place).parent or not is_path(place) else dotted, target, _FORMS)
    op = _read(*_chosen(module, name, place))
    if hasattr(op.run, "named_parameters"):
        op.run.to(_device())
    reference = _reference(module, op)
    try:
        inputs, dtype = _fitting(op, getattr(module, reference, None))
    except UndecidedError:
        if not reference:
            raise
        reference = ""  # it takes something else
        inputs, dtype = _fitting(op, None)
    backward = _has_backward(op, inputs, dtype)
    words = (op.wrapped, op.applied, backward)
    return Proposal(op.name, dotted, op.call, reference, inputs, op.params, dtype, *words), folder


def _import_of(place: str) -> tuple[Path, str]:
    """Folder and dotted name under which the module of a place is imported; packages are climbed out of."""
    if not is_path(place):
        return Path.cwd(), place
    path = Path(place)
    folder, parts = path.parent, [path.stem]
    while (folder / "__init__.py").is_file():
        folder, parts = folder.parent, [folder.name, *parts]
    return folder, ".".join(parts)


def ops_of(module: ModuleType) -> dict[str, Any]:
    """Ops of a module by name: what calls an autograd function, or modules, or what launches Triton kernels, or all."""
    import torch

    own = {k: v for k, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__ and k[0] != "_"}
    classes = {k: v for k, v in own.items() if isinstance(v, type)}
    functions = {k: v for k, v in own.items() if inspect.isfunction(v) and not _is_reference(k)}
    nodes = {k: v for k, v in classes.items() if issubclass(v, torch.autograd.Function)}
    callers = {k: v for k, v in functions.items() if any(_is_node(used) for used in _used(v))}
    called = {id(used) for caller in callers.values() for used in _used(caller)}
    modules = {k: v for k, v in classes.items() if issubclass(v, torch.nn.Module) and not _is_reference(k)}
    launchers = {k: v for k, v in functions.items() if any(is_kernel(used) for used in _used(v))}
    tiers = ({**callers, **{k: v for k, v in nodes.items() if id(v) not in called}}, modules, launchers, functions)
    return next((tier for tier in tiers if tier), {})


def _is_node(value: Any) -> bool:
    import torch

    return isinstance(value, type) and issubclass(value, torch.autograd.Function)


def _is_reference(name: str) -> bool:
    return any(word in _WORDS for word in name.lower().split("_")) or "reference" in name.lower()


def _used(function: Any) -> list[Any]:
    """Globals and closed-over values that a function names."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
    return [*(function.__globals__.get(name) for name in function.__code__.co_names), *cells]


def _filled(cell: Any) -> bool:
    with contextlib.suppress(ValueError):
        return cell.cell_contents is not None
    return False


def _chosen(module: ModuleType, name: str, place: str) -> tuple[str, Any]:
    if name:
        if not hasattr(module, name):
            raise UsageError(f"{place!r} has no {name!r}{near(name, vars(module))}")
        return name, getattr(module, name)
    ops = ops_of(module)
    if len(ops) != 1:
        listed = f"the ops {', '.join(f'{place}:{k}' for k in ops)}; name the one that is meant" if ops else "no op"
        raise UsageError(f"{place!r} has {listed}; expected an autograd function, a module or a function")
    return next(iter(ops.items()))


def _read(name: str, value: Any) -> _Op:
    """What a function, an autograd function or a module takes."""
    import torch

    if is_kernel(value):
        raise UsageError(f"{name!r} is a Triton kernel, expected the function that launches it")
    bound: Any = getattr(value, "__self__", None)  # `layer_norm = LayerNorm.apply`, as Triton's tutorial has it
    if _is_node(node := bound if value == getattr(bound, "apply", None) else value):
        parameters = list(inspect.signature(node.forward).parameters.values())
        taken = parameters[1:] if parameters and parameters[0].name == "ctx" else parameters
        call, applied = (name.lower(), f"{name}.apply") if node is value else (f"{name}_op", name)
        op = _Op(name, value, call, node.apply, wrapped=tuple(p.name for p in taken), applied=applied)
    elif isinstance(value, type) and issubclass(value, torch.nn.Module):
        asked = [p for p in inspect.signature(value).parameters.values() if p.default is p.empty and p.kind < 2]
        sizes = [_FEATURES] * len(asked)
        with _kernels(devices=True):  # it may make its parameters on "cuda"
            run = guard(lambda: value(*sizes), name, None)
        taken = list(inspect.signature(run.forward).parameters.values())
        op = _Op(name, value, f"{name}({', '.join(map(str, sizes))})", run)
    elif callable(value):
        taken = parameters_of(value)
        op = _Op(name, value, name, value)
    else:
        raise UsageError(f"{name!r} is {type(value).__name__}, expected an autograd function, a module or a function")
    for parameter in taken:
        # b stands for a bias, and beside a for a matrix.
        row = parameter.name.lower() in _ROW_NAMES and not (parameter.name == "b" and taken[0].name == "a")
        _take(op, parameter, _ROWS if row else _SHAPES)
    if not op.choices:
        raise UsageError(f"{name!r} takes no tensor, expected an op of tensors")
    return op


def _take(op: _Op, parameter: inspect.Parameter, shapes: tuple[Dims, ...]) -> None:
    """Note what an argument could be; one with a default that is no float keeps it."""
    name, default = parameter.name, parameter.default
    annotation = getattr(parameter.annotation, "__name__", str(parameter.annotation))
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return
    if default is not parameter.empty and not op.wrapped:
        if type(default) is float:
            op.params[name] = default
    elif default is not parameter.empty or name in _NUMBERS or annotation in _BY_ANNOTATION:
        number = _NUMBERS.get(name, _BY_ANNOTATION.get(annotation))
        op.params[name] = number if default is parameter.empty else default
    else:
        op.choices[name] = _FEATURE_SHAPES if op.run is not op.value and not op.wrapped else shapes


def _reference(module: ModuleType, op: _Op) -> str:
    """The name of the function, or module's class, that computes the same by its name; "" if there is none."""
    base = op.name.lower()
    wanted = {form for word in _WORDS for form in (word, f"{base}_{word}", f"{word}_{base}", f"{base}{word}")}
    named = {name.lower(): name for name, value in vars(module).items() if inspect.isfunction(value)}
    return next((named[form] for form in sorted(wanted, key=len, reverse=True) if form in named), "")


def _fitting(op: _Op, reference: Any) -> tuple[dict[str, Dims], str]:
    """The plainest shapes with which op and reference run, and the dtype."""
    names = list(op.choices)
    places = itertools.product(*(range(len(shapes)) for shapes in op.choices.values()))
    combinations = sorted(places, key=lambda each: (sum(each), each))[:_TRIES]
    first = ""
    for dtype in ("float32", "float16"):
        for each in combinations:
            inputs = {name: op.choices[name][place] for name, place in zip(names, each, strict=True)}
            error = _tried(op, reference, inputs, dtype, _SIZES)
            if not error:
                return _any_rank(op, reference, inputs, dtype), dtype
            first = first or f"{signature(inputs)}: {error}"
    raise UndecidedError(
        f"{op.name!r} ran with none of {len(combinations)} combinations of shapes; the plainest was {first}. "
        "Describe its inputs by hand: rg.op(fn, reference, inputs=dict(x=rg.tensor('M', 'N')))"
    )


def signature(inputs: Mapping[str, Dims]) -> str:
    """Inputs in words, as "x [M..., N], w [N]"."""
    return ", ".join(f"{name} [{', '.join(map(str, dims))}]" for name, dims in inputs.items())


def _any_rank(op: _Op, reference: Any, inputs: dict[str, Dims], dtype: str) -> dict[str, Dims]:
    """The inputs with "M..." for M where rows stand alone and in several dimensions too."""
    free = {k: tuple("M..." if d == "M" and i == 0 else d for i, d in enumerate(v)) for k, v in inputs.items()}
    if free == inputs or any("M" in dims for dims in free.values()):
        return inputs
    works = not any(_tried(op, reference, free, dtype, {**_SIZES, "M...": leading}) for leading in ((), (2, 3)))
    return free if works else inputs


def _tried(op: _Op, reference: Any, inputs: dict[str, Dims], dtype: str, sizes: Mapping[str, Any]) -> str:
    """Why op or reference does not run with these shapes, or ""; as on a GPU and, if Triton is there, as on a CPU."""
    error = _tried_here(op, reference, inputs, dtype, sizes)
    if error and "triton" in sys.modules:
        op.devices = not op.devices
        if not _tried_here(op, reference, inputs, dtype, sizes):
            return ""
        op.devices = not op.devices
    return error


def _tried_here(op: _Op, reference: Any, inputs: dict[str, Dims], dtype: str, sizes: Mapping[str, Any]) -> str:
    import torch

    tensors = _drawn(inputs, dtype, sizes)
    try:
        with torch.no_grad(), _kernels(op.devices):
            shapes = _shapes(_called(op, op.run, tensors))
            if not shapes:
                return "it returns no tensor"
            want = shapes if reference is None else _shapes(_called(op, reference, tensors))
    except Exception as error:
        lines = [type(error).__name__, *filter(None, map(str.strip, str(error).splitlines()))]
        # Triton's compiler says "at 3:24:", shows the code, and gives the reason last.
        reason = f" {lines[-1]}" if len(lines) > 2 and lines[1].endswith(":") else ""
        return ": ".join(lines[:2]) + reason
    return "" if want == shapes else f"results {shapes}, of the reference {want}"


def _has_backward(op: _Op, inputs: Mapping[str, Dims], dtype: str) -> bool:
    """Whether a result depends on the inputs, or a module's parameters, for autograd."""
    import torch

    tensors = {name: t.requires_grad_() for name, t in _drawn(inputs, dtype, {**_SIZES, "M...": (3,)}).items()}
    with torch.enable_grad(), _kernels(op.devices):
        out = _called(op, op.run, tensors)
    return any(t.requires_grad for t in (out if isinstance(out, (tuple, list)) else (out,)) if hasattr(t, "shape"))


def _drawn(inputs: Mapping[str, Dims], dtype: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Normal random tensors of these shapes, on a GPU if there is one."""
    import torch

    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Any] = {}
    for name, dims in inputs.items():
        shape = [n for d in dims for n in _numbers(sizes.get(str(d), d))]
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        tensors[name] = values.to(_device(), getattr(torch, dtype))
    return tensors


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _called(op: _Op, function: Any, tensors: Mapping[str, Any]) -> Any:
    if op.wrapped:  # an autograd function takes no keywords
        return function(*({**tensors, **op.params}[name] for name in op.wrapped))
    parameters = dict(op.run.named_parameters()) if hasattr(op.run, "named_parameters") else {}
    return function(*tensors.values(), **op.params, **({} if function is op.run else parameters))


def _numbers(size: Any) -> Iterator[int]:
    yield from size if isinstance(size, tuple) else (size,)


def _shapes(out: Any) -> list[list[int]]:
    parts = out if isinstance(out, (tuple, list)) else (out,)
    return [list(t.shape) for t in parts if hasattr(t, "shape")]


def _kernels(devices: bool) -> contextlib.AbstractContextManager[Any]:
    """A context in which Triton kernels run: as they are on a GPU, executed on CPU tensors elsewhere."""
    import torch

    if torch.cuda.is_available() or "triton" not in sys.modules or config.interpreting():
        return contextlib.nullcontext()
    return cpu_kernels.as_on_gpu(devices)
