"""torch.compile: what is compiled, when it compiles, and whether it takes the backward over. Loads no Dynamo."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from retrograd.compat.registry import part, works
from retrograd.core.import_hook import with_modules

_CALLBACK = "torch._dynamo.callback"
_COMPILER = re.compile(r"[/\\]torch[/\\]_(?:dynamo|functorch|inductor)[/\\]")


def is_of_compiler(file: str) -> bool:
    """Whether a file of torch is part of torch.compile, whose frames stand above each graph that it calls."""
    return _COMPILER.search(file) is not None


def has_compiled_modules(model: torch.nn.Module) -> bool:
    """Whether a module of a model was given to torch.compile, or compiled itself by Module.compile()."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    kinds = tuple(filter(None, [getattr(dynamo, "OptimizedModule", None)]))
    return any(isinstance(m, kinds) or getattr(m, "_compiled_call_impl", None) is not None for m in model.modules())


@contextmanager
def while_compiling(quiet: Callable[[bool], None]) -> Iterator[None]:
    """Inside, `quiet(True)` is called when torch.compile begins to compile, also if Dynamo is loaded later."""

    def watch(_: str, module: Any) -> Callable[[], None] | None:
        return _call_around(module.callback_handler, quiet) if works(CALLBACKS) else None

    with with_modules([_CALLBACK], watch):
        yield


def _call_around(handler: Any, quiet: Callable[[bool], None]) -> Callable[[], None]:
    begin, end = (lambda *_: quiet(True)), (lambda *_: quiet(False))
    handler.register_start_callback(begin)
    handler.register_end_callback(end)

    def undo() -> None:
        for remove, callback in ((handler.remove_start_callback, begin), (handler.remove_end_callback, end)):
            with suppress(ValueError):  # torch._dynamo.reset() has removed all
                remove(callback)

    return undo


def compiles_backward() -> bool:
    """Whether torch.compile takes over the backward pass as a whole (compiled autograd)."""
    if "torch._dynamo" not in sys.modules:
        return False
    if not works(COMPILED_AUTOGRAD):
        return bool(torch._dynamo.config.compiled_autograd)
    import torch._dynamo.compiled_autograd as compiled

    return bool(
        torch._dynamo.config.compiled_autograd
        or compiled.compiled_autograd_enabled
        or getattr(compiled, "in_compiled_autograd_region", False)
    )


@part(
    "torch.dynamo.callbacks",
    "leaves out of a recording what torch.compile runs to compile",
    "operators on tensors without memory, by which torch.compile traces, are recorded too",
    names=(f"{_CALLBACK}.callback_handler", f"{_CALLBACK}.CallbackArgs", f"{_CALLBACK}.CallbackTrigger"),
)
def CALLBACKS() -> str:
    """Run the callbacks as Dynamo does, with a function that compiles nothing."""
    module, told = sys.modules[_CALLBACK], list[bool]()
    handler = type(module.callback_handler)()
    about = module.CallbackArgs(next(iter(module.CallbackTrigger)), "0")
    undo = _call_around(handler, told.append)
    handler.run_start_callbacks(about)
    handler.run_end_callbacks(about)
    undo()
    handler.run_start_callbacks(about)
    return "" if told == [True, False] else f"callbacks around a compilation are told {told}"


@part(
    "torch.dynamo.autograd",
    "asks whether compiled autograd is on, under which FSDP2 stops reducing gradients",
    "only torch._dynamo.config.compiled_autograd is looked at",
    names=(
        "torch._dynamo.compiled_autograd.compiled_autograd_enabled",
        "torch._dynamo.compiled_autograd.in_compiled_autograd_region",
    ),
)
def COMPILED_AUTOGRAD() -> str:
    """Read where it is switched on; switching it on here would disturb a backward that runs."""
    import torch._dynamo.compiled_autograd as compiled

    switch = inspect.unwrap(compiled._enable).__code__.co_names
    if "compiled_autograd_enabled" not in switch or not isinstance(compiled.compiled_autograd_enabled, bool):
        return "compiled autograd is switched on elsewhere than in compiled_autograd_enabled"
    return ""
