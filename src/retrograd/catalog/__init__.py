"""Op specs by name: those shipped with retrograd, and those in a person's own module or file."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from retrograd.check import cpu_kernels
from retrograd.check.spec import OpSpec
from retrograd.core.loading import guard, is_path, load, near
from retrograd.errors import SpecError, UsageError

__all__ = ["SHIPPED", "msda_names", "norm_names", "resolve", "spec_names"]

_NORM_VARIANTS = (
    "",
    "bias",
    "residual",
    "mixed",
    "no_weight",
    "bias_alone",
    "offset",
    "heads",
    "float32_out",
    "parts",
    "atomic",
)
_TRITON_ONLY = ("parts", "atomic")


def norm_names() -> dict[str, tuple[str, str, str]]:
    """(norm, variant, implementation) by shipped name: rms_norm_heads_cpu is ("rms_norm", "heads", "cpu")."""
    return {
        "_".join(filter(None, parts)): parts
        for parts in itertools.product(("rms_norm", "layer_norm"), _NORM_VARIANTS, ("", "cpu", "torch"))
        if not (parts[1] in _TRITON_ONLY and parts[2])
    }


_MSDA_VARIANTS = ("", "border", "aligned", "border_aligned", "points", "mixed", "deterministic", "fused", "fused_boxes")


def msda_names() -> dict[str, tuple[str, str]]:
    """(variant, implementation) by shipped name: ms_deform_attn_border_cpu is ("border", "cpu")."""
    return {
        "_".join(filter(None, ("ms_deform_attn", *parts))): parts
        for parts in itertools.product(_MSDA_VARIANTS, ("", "cpu", "torch"))
        if not (parts[0] == "deterministic" and parts[1])
    }


SHIPPED = {name: f"retrograd.catalog.norm:{name}" for name in norm_names()} | {
    name: f"retrograd.catalog.msda:{name}" for name in msda_names()
}

_FORMS = "a shipped name, 'package.module:name' or 'path/file.py:name'"


def resolve(target: str) -> OpSpec:
    """The op spec that a target names.

    Args:
        target: a shipped name ("rms_norm"), "package.module:name", "path/file.py:name" or "path/file.py" with one
            spec in it. The name is an OpSpec, or a function without arguments that returns one.

    Raises:
        UsageError: there is no such shipped name, module, file or name in it.
        SpecError: the module raises while it is imported, or the name is something else.
        MissingExtraError: the module needs torch, which is not installed.
    """
    place, _, name = SHIPPED.get(target, target).rpartition(":")
    module = None
    if not place and target.endswith(".py"):
        module = load_module(target, target)
        specs = _specs_of(module)
        if len(specs) != 1:
            none = f"it has no op spec; write one with: retrograd init {target}"
            listed = f"it has the specs {', '.join(specs)}" if specs else none
            raise UsageError(f"{target!r} names no spec, expected {target}:{specs[0] if specs else 'NAME'}; {listed}")
        place, name = target, specs[0]
    if not place or not name:
        raise UsageError(f"unknown target {target!r}{near(target, SHIPPED) or _colon(target)}; expected {_FORMS}")
    module = module or load_module(place, target)
    if not hasattr(module, name):
        # Ready specs first, since one of them is most likely meant.
        public = [k for k in vars(module) if not k.startswith("_")]
        specs = [k for k in public if isinstance(getattr(module, k), OpSpec)]
        listed = f"; it has the specs {', '.join(specs)}" if specs else ""
        raise UsageError(f"{place!r} has no {name!r}{near(name, specs or public)}{listed}")
    return _as_spec(getattr(module, name), name, place)


def spec_names(path: str) -> list[str]:
    """Names of the op specs in a file of Python; errors as of `resolve`."""
    return _specs_of(load_module(path, path))


def _specs_of(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if isinstance(value, OpSpec)]


def load_module(place: str, target: str, expected: str = _FORMS) -> ModuleType:
    """The module at a place; arguments and errors as of `core.loading.load`.

    What it imports may ask Triton what it runs on and catch the refusal (fla then takes a device that has no kernels):
    Triton answers as in a call. One that asks torch for a GPU where there is none is imported once more with one
    pretended. An error of its own, after torch has told it that there is none, may be about something else: then it
    stands, if it is there with a GPU too.
    """
    try:
        with cpu_kernels.driven(), cpu_kernels.questions_noted() as questions:
            return load(place, target, expected)
    except SpecError as error:
        refused = cpu_kernels.asks_for_gpu(error.__context__)
        if not refused and not questions:
            raise
        with suppress(*(() if refused else (SpecError,))), cpu_kernels.as_on_gpu(devices=False):
            return load(place, target, expected)
        raise


def _colon(target: str) -> str:
    if is_path(target.rstrip(":")) or "." in target:
        return f" (add the name of the spec: {target.rstrip(':')}:NAME)"
    names = [name for name in SHIPPED if not name.endswith(("_cpu", "_torch"))]
    return f"; shipped: {', '.join(names)}, most of them also as NAME_cpu and NAME_torch"


def _as_spec(value: Any, name: str, place: str) -> OpSpec:
    if isinstance(value, OpSpec):
        return value
    wrap = f"wrap it: rg.op({name}, inputs=...), which `retrograd init {place}:{name}` writes"
    if not callable(value):
        raise SpecError(f"{name!r} in {place!r} is {type(value).__name__}, expected an op spec; make one with rg.op")
    if isinstance(value, type) or not _takes_nothing(value):
        raise SpecError(f"{name!r} in {place!r} is a {_kind(value)}, not an op spec; {wrap}")
    spec = guard(value, f"{place}:{name}", Path(place).resolve() if is_path(place) else None)
    if not isinstance(spec, OpSpec):
        raise SpecError(f"{name!r} in {place!r} returned {type(spec).__name__}, expected an op spec; {wrap}")
    return spec


def _kind(value: Any) -> str:
    if isinstance(value, type):
        return "class"
    return "function" if inspect.isroutine(value) else type(value).__name__


def _takes_nothing(value: Callable[..., Any]) -> bool:
    try:
        return not inspect.signature(value).parameters
    except (TypeError, ValueError):
        return False
