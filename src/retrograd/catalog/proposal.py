"""Proposals of specs: what an op of somebody's file takes is tried, so that what is written runs as it stands."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from retrograd.catalog import load_module
from retrograd.catalog.documented_shapes import documented_shapes
from retrograd.catalog.input_trials import Dims, Fit, ProposedOp, device, fitting, has_backward, kernels
from retrograd.check.spec import is_kernel
from retrograd.compat.torch_library import parameters_of
from retrograd.core.loading import guard, is_path, near, on_path, require_torch
from retrograd.errors import UndecidedError, UsageError

_FORMS = "'path/file.py', 'path/file.py:name' or 'package.module:name'"
_FEATURES = 16  # what constructors of modules get for a number that they ask for
_ROW_NAMES = {"w", "weight", "weights", "gamma", "beta", "b", "bias", "gain", "shift"}
_ROWS = (("N",), ("M", "N"), ("N", "K"), ("K", "N"))
_SHAPES = (("M", "N"), ("N", "K"), ("B", "M", "N"), ("N",), ("B", "M", "H", "N"), ("B", "C", "H", "W"))
_FEATURE_SHAPES = (("M", _FEATURES), ("B", "M", _FEATURES), (_FEATURES,), ("B", _FEATURES, "H", "W"))
# Sizes of dimensions in which an op takes no odd ones.
_EVENS = [16, 32]
_INDICES = {"target", "targets", "label", "labels", "index", "indices", "idx", "ids", "input_ids"}
_INDEX_SHAPES = (("M",), ("B", "M"), ("B", "M", "H"))
_NUMBERS = {"eps": 1e-6, "epsilon": 1e-6}
_BY_ANNOTATION = {"int": 1, "float": 1.0, "bool": False}
_WORDS = ("reference", "ref", "naive", "torch", "pytorch", "eager", "golden")


@dataclass(frozen=True)
class Proposal:
    """A spec as it could stand in a file.

    Attributes:
        op: what it is of.
        module: to import it from.
        reference: name of the reference, "" if there is none beside the op.
        fit: what it takes.
        indices: what bounds inputs of whole numbers.
        backward: whether results have gradients.
    """

    op: ProposedOp
    module: str
    reference: str
    fit: Fit
    indices: Mapping[str, str | int]
    backward: bool = True

    def text(self) -> str:
        """The file."""
        op, fit = self.op, self.fit
        imported = ", ".join(filter(None, (op.name, self.reference)))
        lines = [f'"""What {op.name} promises, for `retrograd verify`; written by `retrograd init`."""', ""]
        lines += ["import retrograd as rg", f"from {self.module} import {imported}", ""]
        if op.wrapped:
            words = ", ".join(op.wrapped)
            lines += ["", f"def {op.call}({words}):", f"    return {op.applied}({words})", "", ""]
        lines += ["spec = rg.op(", f"    {op.call},"]
        if self.reference:
            lines += [f"    reference={self.reference},"]
        else:
            lines += ["    # reference=...,  the same in PyTorch, as slow as you like: values are compared then"]
        if not self.backward:
            lines += ["    # results have no gradient: values alone are compared"]
        lines += ["    inputs=dict("]
        lines += [f"        {name}=rg.tensor({self._tensor(name, dims)})," for name, dims in fit.inputs.items()]
        lines += ["    ),"]
        if op.params:
            lines += [f"    params=dict({', '.join(f'{k}=[{v!r}]' for k, v in op.params.items())}),"]
        if fit.even:
            lines += [f"    sizes=dict({', '.join(f'{name}={_EVENS}' for name in fit.even)}),"]
        lines += [f'    dtypes=["{fit.dtype}"],', ")"]
        return "\n".join(lines) + "\n"

    def _tensor(self, name: str, dims: Dims) -> str:
        arguments = ", ".join(map(repr, dims))
        if name in self.indices:
            arguments += f", dtype='int64', high={self.indices[name]!r}"
        return (arguments if self.backward or name in self.indices else f"{arguments}, grad=False").replace("'", '"')


def propose(target: str) -> tuple[Proposal, Path]:
    """A spec for the op that a target names, and the folder from which its module is imported.

    Shapes are those of its own words, else the plainest, with which the op and the reference beside it run and agree.

    Raises:
        UsageError: there is no such file or name, or several ops and none is named.
        SpecError: the file raises.
        UndecidedError: the op ran with no shapes that were tried.
    """
    require_torch("retrograd init")
    place, _, name = target.rpartition(":") if ":" in target else (target, "", "")
    folder, dotted = _import_of(place)
    with on_path(folder):  # a checkout that nobody has installed
        module = load_module(place if folder == Path(place).parent or not is_path(place) else dotted, target, _FORMS)
        op = _read(*_chosen(module, name, place))
        if hasattr(op.run, "named_parameters"):
            op.run.to(device())
        reference = _reference(module, op)
        try:
            fit = fitting(op, getattr(module, reference, None))
        except UndecidedError:
            if not reference:
                raise
            reference = ""  # it takes something else
            fit = fitting(op, None)
        indices = {name: op.high(fit.inputs) for name in op.indices}
        return Proposal(op, dotted, reference, fit, indices, has_backward(op, fit)), folder


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
        names = f"the ops {', '.join(ops)}; name the one that is meant, as {place}:{next(iter(ops), '')}"
        nothing = "no op; expected an autograd function, a module or a function"
        raise UsageError(f"{place!r} has {names if ops else nothing}")
    return next(iter(ops.items()))


def _read(name: str, value: Any) -> ProposedOp:
    """What a function, an autograd function or a module takes."""
    import torch

    if is_kernel(value):
        raise UsageError(f"{name!r} is a Triton kernel, expected the function that launches it")
    bound: Any = getattr(value, "__self__", None)  # `layer_norm = LayerNorm.apply`, as Triton's tutorial has it
    if _is_node(node := bound if value == getattr(bound, "apply", None) else value):
        parameters = list(inspect.signature(node.forward).parameters.values())
        taken = parameters[1:] if parameters and parameters[0].name == "ctx" else parameters
        call, applied = (name.lower(), f"{name}.apply") if node is value else (f"{name}_op", name)
        op = ProposedOp(name, call, node.apply, wrapped=tuple(p.name for p in taken), applied=applied)
    elif isinstance(value, type) and issubclass(value, torch.nn.Module):
        asked = [p for p in inspect.signature(value).parameters.values() if p.default is p.empty and p.kind < 2]
        sizes = [_FEATURES] * len(asked)
        with kernels(devices=True):  # it may make its parameters on "cuda"
            run = guard(lambda: value(*sizes), name, None)
        taken = list(inspect.signature(run.forward).parameters.values())
        op = ProposedOp(name, f"{name}({', '.join(map(str, sizes))})", run)
    elif callable(value):
        taken = parameters_of(value)
        op = ProposedOp(name, name, value)
    else:
        raise UsageError(f"{name!r} is {type(value).__name__}, expected an autograd function, a module or a function")
    for parameter in taken:
        # b stands for a bias, and beside a for a matrix.
        row = parameter.name.lower() in _ROW_NAMES and not (parameter.name == "b" and taken[0].name == "a")
        _take(op, parameter, _ROWS if row else _SHAPES)
    op.indices = tuple(name for name in op.choices if name in _INDICES)
    if not op.choices:
        raise UsageError(f"{name!r} takes no tensor, expected an op of tensors")
    forward = getattr(node if op.wrapped else value, "forward", None)
    op.documented = documented_shapes([value, forward], [p.name for p in taken])
    return op


def _take(op: ProposedOp, parameter: inspect.Parameter, shapes: tuple[Dims, ...]) -> None:
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
        index = name in _INDICES
        op.choices[name] = _INDEX_SHAPES if index else _FEATURE_SHAPES if hasattr(op.run, "forward") else shapes


def _reference(module: ModuleType, op: ProposedOp) -> str:
    """The name of the function, or module's class, that computes the same by its name; "" if there is none."""
    base = op.name.lower()
    wanted = {form for word in _WORDS for form in (word, f"{base}_{word}", f"{word}_{base}", f"{base}{word}")}
    named = {name.lower(): name for name, value in vars(module).items() if inspect.isfunction(value)}
    return next((named[form] for form in sorted(wanted, key=len, reverse=True) if form in named), "")
