"""Calls of an op whose arguments are not simply its inputs in a row: nested ones, keywords, a module's state, arguments
that are written to, and ops that draw random numbers. Ordinary ops are called as they are.

Free of torch until an op is called.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrograd.check.input_specs import SizeSpec, TensorSpec, tensor
from retrograd.check.own_mistakes import calls_theirs
from retrograd.errors import SpecError

_SEED = 0  # of every call of an op that draws


@dataclass(frozen=True)
class InputPlace:
    """Where an input stands among the arguments."""

    name: str


@dataclass(frozen=True)
class Returned:
    """What a call returned, and its arguments that may have been written to, as they are afterwards.

    `in_place` says whether they were, rather than returned as new values, the last of what is returned.
    """

    value: Any
    after: dict[str, Any]
    in_place: bool = True


@dataclass
class Call:
    """A function that takes inputs in a row and calls another with the arguments that are made of them.

    Attributes:
        fn: what is called.
        names: of the inputs, in the order in which they come.
        arguments: with `InputPlace` where an input stands; None for the inputs in a row.
        keywords: likewise by keyword.
        state: names of a module's parameters and buffers: replaced in a module, keywords of any other function.
        written: names of the inputs that it may write to.
        returns_new: whether, as references may, it may return their new values instead.
        seed: of torch's generators at every call; None leaves them alone.
    """

    fn: Callable[..., Any]
    names: tuple[str, ...] = ()
    arguments: tuple[Any, ...] | None = None
    keywords: Mapping[str, Any] = field(default_factory=dict)
    state: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    returns_new: bool = False
    seed: int | None = None
    _writes: bool = False  # what returns_new leaves open, once it is seen

    @property
    def __name__(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    @calls_theirs
    def __call__(self, *values: Any, **params: Any) -> Any:
        """The result; `Returned` where inputs may be written to."""
        with nullcontext() if self.seed is None else _forked(self.seed, values):
            if self.arguments is None:
                return self.fn(*values, **params)
            inputs = dict(zip(self.names, values, strict=True))
            inputs |= {name: _copy(inputs[name]) for name in self.written}
            args = [_rebuilt(argument, inputs) for argument in self.arguments]
            params |= {name: _rebuilt(value, inputs) for name, value in self.keywords.items()}
            state = {name: inputs[name] for name in self.state}
            if state and _is_module(self.fn):
                from torch.func import functional_call

                result = functional_call(self.fn, state, tuple(args), params)  # type: ignore[arg-type]
            else:
                result = self.fn(*args, **params, **state)
        if not self.written:
            return result
        # A module's state is no result that gradients flow from.
        after = {name: inputs[name].detach() if name in self.state else inputs[name] for name in self.written}
        if self.returns_new and not self._writes:
            before = dict(zip(self.names, values, strict=True))
            self._writes = result is None or any(_differs(before[name], after[name]) for name in self.written)
        return Returned(result, after, not self.returns_new or self._writes)


def seeded(fn: Any) -> Any:
    """The same function under one seed of torch's generators at every call; None stays None."""
    if isinstance(fn, Call):
        return dataclasses.replace(fn, seed=_SEED)
    return None if fn is None else Call(fn, seed=_SEED)


def source_place(fn: Any) -> str:
    """File and line of an op's source, seen from the working folder; "" for what lies elsewhere or has no source."""
    fn = fn.fn if isinstance(fn, Call) else fn
    fn = inspect.unwrap(fn.func if isinstance(fn, functools.partial) else fn)
    owner = getattr(fn, "__self__", None)  # the class, of an autograd.Function's `apply`
    fn = owner if isinstance(owner, type) else fn
    try:
        fn = fn if inspect.isroutine(fn) or inspect.isclass(fn) else type(fn)
        file, line = inspect.getsourcefile(fn), inspect.getsourcelines(fn)[1]
    except (TypeError, OSError):
        return ""
    path = Path(file or "").resolve()
    return f"{path.relative_to(Path.cwd()).as_posix()}:{line}" if path.is_relative_to(Path.cwd()) else ""


def _is_module(fn: Any) -> bool:
    return hasattr(fn, "named_parameters") and hasattr(fn, "named_buffers")


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "is_floating_point") and hasattr(value, "detach")


def _copy(t: Any) -> Any:
    """A tensor that may be written to, of the same strides where they do not overlap; gradients flow through it."""
    if 0 in t.stride():
        return t.clone()
    return t.new_empty_strided(t.size(), t.stride()).copy_(t)


def _differs(a: Any, b: Any) -> bool:
    return not bool(((a == b) | ((a != a) & (b != b))).all())


@contextmanager
def _forked(seed: int, values: Sequence[Any]) -> Any:
    import torch

    devices = {v.device.index for v in values if isinstance(v, torch.Tensor) and v.is_cuda}
    with torch.random.fork_rng(sorted(devices)):
        torch.manual_seed(seed)
        yield


def _mapped(name: str, value: Any, leaf: Callable[[str, Any], Any]) -> Any:
    """A nested argument with what `leaf` makes of each part of it, which is called by the path that leads to it."""
    if isinstance(value, dict):
        return {key: _mapped(f"{name}.{key}", item, leaf) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = value._asdict().items()  # type: ignore[attr-defined]
        return type(value)(*(_mapped(f"{name}.{key}", item, leaf) for key, item in fields))
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(f"{name}.{i}", item, leaf) for i, item in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, TensorSpec, SizeSpec, InputPlace)):
        names = [f.name for f in dataclasses.fields(value) if f.init]
        return dataclasses.replace(value, **{key: _mapped(f"{name}.{key}", getattr(value, key), leaf) for key in names})
    return leaf(name, value)


def _rebuilt(value: Any, inputs: Mapping[str, Any]) -> Any:
    """An argument with the inputs in their places."""
    return _mapped("", value, lambda _, part: inputs[part.name] if isinstance(part, InputPlace) else part)


def _taken_apart(name: str, value: Any, inputs: dict[str, Any]) -> Any:
    """An argument with `InputPlace` where an input stands; `inputs` gets these, by the path that leads to them."""

    def take(path: str, part: Any) -> Any:
        if not isinstance(part, (TensorSpec, SizeSpec)) and not _is_tensor(part):
            return part
        inputs[path] = part
        return InputPlace(path)

    return _mapped(name, value, take)


def _keyword_only(fn: Any) -> frozenset[str]:
    """Names of the parameters that a function takes by keyword alone."""
    try:
        parameters = inspect.signature(fn.forward if _is_module(fn) else fn).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    return frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


def mismatched_call(fn: Any, names: Sequence[str], params: Iterable[str]) -> str:
    """ "x, w, eps=..." if a function does not take inputs of these names by place and parameters by name, else ""."""
    keywords = dict.fromkeys(params)
    try:
        inspect.signature(fn).bind(*names, **keywords)
    except TypeError:
        return ", ".join([*names, *(f"{name}=..." for name in keywords)])
    except ValueError:  # a builtin that says nothing of its arguments
        pass
    return ""


@dataclass(frozen=True)
class Arranged:
    """An op and its reference as functions of inputs in a row, those inputs, and the parameters that are none."""

    fn: Callable[..., Any]
    reference: Callable[..., Any] | None
    inputs: Any
    params: dict[str, Any]


def arranged(
    fn: Any, reference: Any, inputs: Any, params: Mapping[str, Any], mutates: tuple[str, ...], random: bool
) -> Arranged:
    """What an op takes, flat and by name.

    Raises:
        SpecError: inputs by a callable, for a module or an op that writes to some; `mutates` names what is no tensor;
            the reference of a module is one with another state.
    """
    seed = _SEED if random else None
    if callable(inputs):
        if _is_module(fn) or mutates:
            reason = "a module" if _is_module(fn) else "an op that writes to some (`mutates`)"
            raise SpecError(f"`inputs` is a callable, and `fn` {reason}; expected a dict of retrograd.tensor(...)")
        calls = (seeded(fn), seeded(reference)) if random else (fn, reference)
        return Arranged(*calls, inputs, dict(params))
    row = (inputs,) if _is_tensor(inputs) else inputs
    named = inputs if isinstance(inputs, Mapping) else {f"input{i}": v for i, v in enumerate(row)}
    by_keyword = {k: v for k, v in params.items() if isinstance(v, (TensorSpec, SizeSpec)) or _is_tensor(v)}
    rest = {k: v for k, v in params.items() if k not in by_keyword}
    known, buffers = _state(fn)
    flat: dict[str, Any] = {}
    places = {name: _argument(name, value, flat) for name, value in named.items() if name not in known}
    keywords = {name: _taken_apart(name, value, flat) for name, value in by_keyword.items()}
    if known:
        flat = {name: tensor(v) if _is_tensor(v) and v.is_floating_point() else v for name, v in flat.items()}
        flat |= known | {name: _state_as(named[name], name in buffers) for name in known if name in named}
    written = (*mutates, *(name for name in known if name in buffers))
    tensors = [name for name, value in flat.items() if isinstance(value, TensorSpec) or _is_tensor(value)]
    if unknown := [name for name in mutates if name not in tensors]:
        raise SpecError(f"`mutates` has {unknown}, expected names of inputs that are tensors: {tensors}")
    calls = [
        _call(f, flat, places, keywords, tuple(known), written, seed, returns_new=f is not fn and bool(mutates))
        for f in (fn, reference)
    ]
    _check_reference(reference, tuple(known))
    plain = isinstance(inputs, Mapping) and flat.keys() == inputs.keys()
    return Arranged(calls[0], calls[1], inputs if plain and not known else flat, rest)


def _argument(name: str, value: Any, flat: dict[str, Any]) -> Any:
    """An argument taken apart; what holds no input is passed as it is, under its own name."""
    inside: dict[str, Any] = {}
    place = _taken_apart(name, value, inside)
    flat |= inside or {name: value}
    return place if inside else InputPlace(name)


def _call(
    fn: Any, flat: Mapping[str, Any], places: Mapping[str, Any], keywords: Mapping[str, Any], state: tuple[str, ...],
    written: tuple[str, ...], seed: int | None, *, returns_new: bool,
) -> Any:  # fmt: skip
    """The function itself if it takes the inputs in a row and no more is asked of the call."""
    if fn is None:
        return None
    only = {name: place for name, place in places.items() if name in _keyword_only(fn)}
    simple = all(place == InputPlace(name) for name, place in places.items()) and not only and not keywords
    if simple and not state and not written:
        return fn if seed is None else seeded(fn)
    arguments = tuple(place for name, place in places.items() if name not in only)
    return Call(fn, tuple(flat), arguments, {**keywords, **only}, state, written, returns_new, seed)


def _state(fn: Any) -> tuple[dict[str, TensorSpec], frozenset[str]]:
    """Parameters and buffers of a module by name, and which are buffers; none of a function.

    Parameters vary around what they are: ones and zeros, as they begin, would hide what is done with them.
    """
    if not _is_module(fn):
        return {}, frozenset()
    parameters = {
        name: dataclasses.replace(tensor(p, grad=None if p.requires_grad else False), varied=p.is_floating_point())
        for name, p in fn.named_parameters()
    }
    buffers = {name: tensor(b, grad=False) for name, b in fn.named_buffers()}
    return parameters | buffers, frozenset(buffers)


def _state_as(value: Any, buffer: bool) -> Any:
    """A parameter or buffer as it was described instead; no gradient flows into a buffer."""
    described = tensor(value) if _is_tensor(value) else value
    if not isinstance(described, TensorSpec):
        raise SpecError(
            f"`inputs` has {described!r} for a parameter or buffer, expected a tensor or retrograd.tensor()"
        )
    return dataclasses.replace(described, grad=False) if buffer else described


def _check_reference(reference: Any, state: tuple[str, ...]) -> None:
    if not state or not _is_module(reference):
        return
    own = [name for name, _ in (*reference.named_parameters(), *reference.named_buffers())]
    if set(own) != set(state):
        raise SpecError(
            f"`reference` is a module with parameters and buffers {own}, those of `fn` are {list(state)}; "
            "expected the same names, or a function that takes them as keywords"
        )
