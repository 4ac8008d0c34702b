"""Dispatch of operators: their schemas, who looks on below autograd, and tensors that are not numbers in memory."""

# The stubs do not have private names, or not as they are.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch, _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from retrograd.compat.registry import in_fresh_thread, part, require, works

# Where the recorder's tape stands. Looked up once: a question by name takes 4 us, by key 0.3, and each eager call asks.
_TAPE_KEY = torch._C._dispatch_key_parse("Fake") if hasattr(torch._C, "_dispatch_key_parse") else None

# Operators that call others, and kernels of torch.library.wrap_triton: torch asks a mode which says that it knows them,
# and raises NotImplementedError below any other.
HigherOrderOperator: type = getattr(torch._ops, "HigherOrderOperator", type(None))

# Where torch's wrapper of a mode's method keeps what it calls, which runs the method past Dynamo.
KEPT_OUT = "__dynamo_disable"

# What tensors of classes without operators of their own have as __torch_dispatch__.
_NO_OPERATORS = (torch.Tensor.__torch_dispatch__, getattr(torch._C, "_disabled_torch_dispatch_impl", None))

tree_flatten: Callable[..., Any] = _pytree.tree_flatten
tree_unflatten: Callable[..., Any] = _pytree.tree_unflatten
tree_leaves: Callable[..., Any] = _pytree.tree_leaves
tree_map: Callable[..., Any] = _pytree.tree_map
tree_map_only: Callable[..., Any] = _pytree.tree_map_only


# The schema of an overload: its name with namespace, arguments and results with what they alias.
schema: Callable[[Any], Any] = attrgetter("_schema")
# The name of an overload: "out" of aten::add.out, "default" where it has none.
overload: Callable[[Any], str] = attrgetter("_overloadname")


def eagerly() -> AbstractContextManager[Any]:
    """From now on until the context is left, functions that torch.compile has compiled run as they are written.

    Where nobody has imported Dynamo nothing is compiled, and the import would take 1 s.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


class UnwrappedMode(TorchDispatchMode):
    """A mode that torch does not wrap to keep Dynamo out, for code that Dynamo never sees.

    The wrapper loads Dynamo for the first operator, which takes 1 s, and takes 3 us of the 15 of each.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class EagerMode(UnwrappedMode):
    """A mode that sees the operators of compiled functions too: they run eagerly inside.

    Without it Dynamo compiles nothing below a mode either, and raises where fullgraph=True was asked for. Not to be
    entered inside of itself. Entering takes 0.1 ms.
    """

    def __enter__(self) -> Any:
        self._stance = eagerly()
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        self._stance.__exit__(*error)
        return super().__exit__(*error)


def without_modes() -> AbstractContextManager[Any]:
    """Inside, no dispatch mode sees operators."""
    require(WITHOUT_MODES)
    return _python_dispatch._disable_current_modes()


def without_functions() -> AbstractContextManager[Any]:
    """Inside, no function mode is told of calls of torch."""
    return torch._C.DisableTorchFunction() if works(WITHOUT_FUNCTIONS) else nullcontext()


def resolving() -> AbstractContextManager[Any]:
    """Inside the call of a dispatch mode: operators may again read tensors whose conjugation or sign is only marked.

    torch leaves these keys out while a mode looks on, and then kernels that mark tensors themselves, as pinv does, read
    the numbers below the mark.
    """
    return _resolving() if works(RESOLVING) else nullcontext()


def _resolving() -> AbstractContextManager[Any]:
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative):
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def resolved(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """A mode's `__torch_dispatch__` that runs operators of complex numbers `resolving`, which takes them 10 us."""

    @functools.wraps(dispatch)
    def asked(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in args:
            if isinstance(value, torch.Tensor) and value.is_complex():
                with resolving():
                    return dispatch(self, func, types, args, kwargs)
        return dispatch(self, func, types, args, kwargs)

    return asked


def until_dynamo_is_loaded(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """A mode's `__torch_dispatch__` as it is; once somebody has loaded Dynamo, torch keeps that out of it.

    Torch's wrapper loads Dynamo for that at the first operator, which takes 1 s and more.
    """

    def passing(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return dispatch(*args, **kwargs)
        delattr(dispatch, KEPT_OUT)
        keep_out = getattr(getattr(torch, "_compile", None), "_disable_dynamo", lambda function: function)
        return keep_out(dispatch)(*args, **kwargs)

    setattr(dispatch, KEPT_OUT, passing)
    return dispatch


def _is_watched() -> bool:
    return torch._C._len_torch_dispatch_stack() > 0 or (
        torch._C._dispatch_tls_is_dispatch_key_included(_TAPE_KEY)
        and not torch._C._dispatch_tls_is_dispatch_key_excluded(_TAPE_KEY)
    )


def entered_modes() -> int | None:
    """How many dispatch modes this thread has entered; None where this torch does not say."""
    return torch._C._len_torch_dispatch_stack() if works(WATCHED) else None


def is_functorch_wrapped(tensor: torch.Tensor) -> bool:
    """Whether torch.func (vmap, vjp) has wrapped the tensor, so that gradients are those of each operator in turn."""
    # The self-test would load vmap, which takes seconds; who has not loaded it has wrapped nothing.
    return "torch._functorch.vmap" in sys.modules and works(FUNCTORCH) and _is_wrapped(tensor)


def _is_wrapped(tensor: torch.Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def async_collective_class() -> Any:
    """The class of tensors that wait for a collective; None while nobody has made such tensors."""
    module = sys.modules.get("torch.distributed._functional_collectives")
    return None if module is None else getattr(module, "AsyncCollectiveTensor", None)


def implements_operators(kind: type) -> bool:
    """Whether a class of tensors says itself what operators do with it."""
    # Compared by identity as attributes of classes: each access of a C function gives the same object.
    return getattr(kind, "__torch_dispatch__", _NO_OPERATORS[0]) not in _NO_OPERATORS


def decompositions(names: Iterable[str]) -> dict[Any, Callable[..., Any]]:
    """What torch takes operators of these names apart into, by overload; {} where it no longer says so.

    Of float64 alone: without what casts 16 bits, which also keeps Dynamo out and imports it for that, 0.9 s.
    """
    if not works(DECOMPOSITIONS):
        return {}
    from torch._decomp import decomposition_table

    table = {}
    for name in names:
        packet = getattr(torch.ops.aten, name, None)
        for each in packet.overloads() if packet is not None else ():
            operator = getattr(packet, each)
            if operator in decomposition_table and not schema(operator).is_mutable:
                table[operator] = inspect.unwrap(decomposition_table[operator])
    return table


class _Seen(UnwrappedMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(schema(func).name)
        return func(*args, **(kwargs or {}))


@part(
    "torch.dispatch.modes",
    "asks whether a dispatch mode or a recorder looks on, which would miss kernels launched beside operators",
    "every call of retrograd's kernels goes through its operators, as if somebody looked on: 10 us more host time",
    names=(
        "torch._C._len_torch_dispatch_stack", "torch._C._dispatch_key_parse",
        "torch._C._dispatch_tls_is_dispatch_key_included", "torch._C._dispatch_tls_is_dispatch_key_excluded",
        "OpOverload._schema",
    ),
)  # fmt: skip
@in_fresh_thread
def WATCHED() -> str:
    """A mode is entered and sees nothing."""
    name, before = schema(torch.ops.aten.add.out).name, _is_watched()
    if (name, overload(torch.ops.aten.add.out)) != ("aten::add", "out"):
        return f"the schema of add.out is called {name}"
    with _Seen():
        inside = _is_watched()
    return "" if inside and _is_watched() == before else "dispatch modes are not noticed, or where there are none"


@part(
    "torch.dispatch.without_modes",
    "draws numbers that a mode which computes in float64 must not see",
    "second derivatives are not checked; leave the stage higher_order out with --skip",
    names=("torch.utils._python_dispatch._disable_current_modes",),
    refuses=True,
)
@in_fresh_thread
def WITHOUT_MODES() -> str:
    mode = _Seen()
    with mode:
        with _python_dispatch._disable_current_modes():
            torch.ones(1, device="cpu")
        torch.zeros(1, device="cpu")
    return "" if mode.names == ["aten::zeros"] else f"a mode that is switched off sees {', '.join(mode.names)}"


class _Resolving(UnwrappedMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _resolving():
            return func(*args, **(kwargs or {}))


@part(
    "torch.dispatch.resolving",
    "runs operators in float64 that mark tensors as conjugated themselves",
    "gradients of pinv, lstsq and their like are not what they should be for complex numbers; leave such ops out",
    names=(
        "torch._C._ForceDispatchKeyGuard", "torch._C._dispatch_tls_local_include_set",
        "torch._C._dispatch_tls_local_exclude_set", "torch._C.DispatchKey",
    ),
)  # fmt: skip
@in_fresh_thread
def RESOLVING() -> str:
    turned = torch.tensor([[1j, 2.0], [0.0, 1.0]], dtype=torch.complex128, device="cpu")
    with _Resolving():
        inverse = torch.linalg.pinv(turned)
    close = torch.allclose(inverse @ turned, torch.eye(2, dtype=turned.dtype, device="cpu"), rtol=0.0, atol=2**-40)
    return "" if close else "the pseudoinverse of a complex matrix is another inside a mode"


@part(
    "torch.dispatch.without_functions",
    "looks at arguments of kernels without the mode that pretends a GPU to other people's launchers",
    "it looks at them through that mode, which takes three times as long",
    names=("torch._C.DisableTorchFunction",),
)
@in_fresh_thread
def WITHOUT_FUNCTIONS() -> str:
    told: list[Any] = []

    class Telling(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            told.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.zeros(2, device="cpu")
    with Telling():
        with torch._C.DisableTorchFunction():
            x.numel()
        before = len(told)
        x.numel()
    return "" if (before, len(told)) == (0, 1) else "function modes are told otherwise than known"


@part(
    "torch.functorch",
    "asks whether torch.func has wrapped a tensor",
    "implementations in plain torch operators are used under torch.func alone where impl='torch' is given",
    names=("torch._C._functorch.is_functorch_wrapped_tensor",),
)
@in_fresh_thread
def FUNCTORCH() -> str:
    wrapped: list[bool] = []
    torch.func.vmap(lambda x: wrapped.append(_is_wrapped(x)) or x)(torch.ones(2, device="cpu"))
    return "" if wrapped == [True] and not _is_wrapped(torch.ones(1, device="cpu")) else "vmap wraps tensors otherwise"


@part(
    "torch.subclasses",
    "asks which classes of tensors consist of others",
    "operators on DTensor and its like are recorded twice",
    names=("torch._C._disabled_torch_dispatch_impl", "torch._C._disabled_torch_function_impl"),
)
@in_fresh_thread
def SUBCLASSES() -> str:
    from torch._subclasses.fake_tensor import FakeTensor

    class Plain(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

    kinds = (torch.Tensor, torch.nn.Parameter, Plain, FakeTensor)
    told = [implements_operators(kind) for kind in kinds]
    return "" if told == [False, False, False, True] else f"{[k.__name__ for k in kinds]} implement operators: {told}"


@part(
    "torch.decompositions",
    "takes fused operators apart, to round each operation within",
    "fused operators are rounded once, as a whole",
    names=("torch._decomp.decomposition_table",),
)
@in_fresh_thread
def DECOMPOSITIONS() -> str:
    from torch._decomp import decomposition_table

    silu = decomposition_table.get(torch.ops.aten.silu.default)
    x = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64, device="cpu")
    if silu is None or not torch.allclose(inspect.unwrap(silu)(x), x * x.sigmoid(), rtol=2**-40, atol=0.0):
        return "silu is not taken apart into what it is"
    return ""


@part(
    "torch.tape",
    "records operators in C++, at the dispatch key Fake",
    "operators are recorded by a dispatch mode in Python, which takes longer and sees the same",
    names=("c10::DispatchKey::Fake", "torch._C._dispatch_has_backend_fallback"),
)
@in_fresh_thread
def TAPE() -> str:
    if torch._C._dispatch_has_backend_fallback(_TAPE_KEY) and "retrograd_trace_tape" not in sys.modules:
        return "torch has kernels of its own at the dispatch key Fake, those of fake tensors in C++"
    return ""


# Asked in each call of an operator of ours, hence decided once.
is_watched: Callable[[], bool] = _is_watched if works(WATCHED) else lambda: True
