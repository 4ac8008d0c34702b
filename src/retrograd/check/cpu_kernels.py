"""Triton kernels of an op: executed on CPU tensors as a GPU would run them, where the process does not interpret them;
of those that a GPU runs it is noted in what precision they multiply.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from retrograd import config
from retrograd.compat import versions
from retrograd.compat.torch_dispatch import without_functions, without_modes
from retrograd.compat.triton_launch import KernelLaunch, Proceed, around_launches
from retrograd.core.import_hook import AfterImport

if TYPE_CHECKING:
    from retrograd.ttir.session import Session

_SESSIONS: list[Session] = []
_ON_GPU: list[dict[str, bool]] = []  # of kernels that a GPU runs by their hash: whether they multiply in tf32
_HONEST: list[None] = []  # one for each `without_pretending` that is entered
_KEPT: list[dict[str, Any] | None] = []
_AWAITED: list[None] = []  # one for each `executed` that waits for somebody to import Triton
_DEVICES: list[Callable[..., Any]] = []  # functions that refuse tensors which are not on a GPU, or launch less for them
_TYPES: list[Callable[..., Any]] = []  # functions that look at the type of a device
_POISONED: list[None] = []  # one for each `own_filling` that is entered
# What a library asks torch to learn whether there is a GPU, beside what raises where there is none.
_QUESTIONS = ((torch.cuda, "is_available"), (torch.cuda, "device_count"), (torch.accelerator, "is_available"))
_KNOWING = ("retrograd.ops.", "retrograd.catalog.")  # modules of launchers that ask for no GPU


def current() -> Session | None:
    """The session that executes kernels now; None where none does."""
    return _SESSIONS[-1] if _SESSIONS else None


def awaited() -> bool:
    """Whether kernels would be executed, once somebody has imported Triton."""
    return bool(_AWAITED) and not _SESSIONS


@contextmanager
def executed(device: str, kept: dict[str, Any] | None = None) -> Iterator[None]:
    """Have Triton kernels that are launched inside executed on CPU tensors.

    Triton is not imported for it. On other devices kernels run as they are, and `tf32` knows of them. Nothing happens
    without Triton, and where it interprets kernels.

    Args:
        device: of the tensors.
        kept: has launches that need not be executed again, empty at first; None where each is executed.
    """
    if config.interpreting() or not versions.installed("triton"):
        yield
        return
    if torch.device(device).type != "cpu":
        _ON_GPU.append({})
        try:
            with around_launches(partial(_noted, _ON_GPU[-1])):
                yield
        finally:
            _ON_GPU.pop()
        return
    with ExitStack() as stack:
        _KEPT.append(kept)
        stack.callback(_KEPT.pop)
        if "triton" in sys.modules:
            stack.enter_context(session())
        else:

            def enter(name: str) -> None:
                # A reference may be what imports it: self-tests are not run in float64 for that.
                with without_modes(), without_functions():
                    stack.enter_context(session())

            finder = AfterImport(["triton"], enter)
            sys.meta_path.insert(0, finder)
            _AWAITED.append(None)
            stack.callback(_AWAITED.pop)
            stack.callback(lambda: finder in sys.meta_path and sys.meta_path.remove(finder))
        yield


@contextmanager
def session(
    seed: int = 0,
    multiprocessors: int | None = None,
    configuration: int = 0,
    tuned_kernel: str = "",
    trials: bool = False,
) -> Iterator[Session]:
    """Kernels launched inside are executed by a session of their own; arguments as of `retrograd.cpu_triton`.

    `trials`: whether those launches of an autotuner are executed too that a GPU times.
    """
    from retrograd.ttir.kept_launches import KeptLaunches
    from retrograd.ttir.launch import cpu_triton

    with cpu_triton(
        seed, multiprocessors, pretend=False, follow_undefined=False, configuration=configuration,
        tuned_kernel=tuned_kernel,
    ) as run:  # fmt: skip
        run.trials = trials
        if _KEPT and (kept := _KEPT[-1]) is not None:
            run.keep(kept.setdefault("launches", KeptLaunches()))
        _SESSIONS.append(run)
        try:
            yield run
        finally:
            _SESSIONS.remove(run)


def driven() -> AbstractContextManager[object]:
    """Inside, Triton has a driver where there is no GPU: the one that kernels of a call will have."""
    return nullcontext() if torch.cuda.is_available() else executed("cpu")


def asks_for_gpu(error: BaseException | None) -> bool:
    """Whether torch or Triton raised an error on a machine without a GPU on which kernels can be executed."""
    if error is None or error.__traceback__ is None or torch.cuda.is_available() or config.interpreting():
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return "triton" in sys.modules and frame.f_globals.get("__name__", "").startswith(("torch.", "triton."))


@contextmanager
def questions_noted() -> Iterator[list[str]]:
    """Note who asks torch inside whether it has a GPU, and is told that it has none, where kernels can be executed."""
    asked: list[str] = []
    if torch.cuda.is_available() or config.interpreting() or not versions.installed("triton"):
        yield asked
        return

    def noting(stock: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(stock)
        def answer(*args: Any, **kwargs: Any) -> Any:
            asker = sys._getframe(1).f_globals.get("__name__", "")
            if not asker.startswith(("torch.", "triton.")):
                asked.append(asker)
            return stock(*args, **kwargs)

        return answer

    with ExitStack() as stack:
        for owner, name in _QUESTIONS:
            stack.enter_context(patch.object(owner, name, noting(getattr(owner, name))))
        yield asked


@contextmanager
def as_on_gpu(devices: bool) -> Iterator[None]:
    """Inside, code of somebody's runs as if Triton and torch had a GPU; `devices`: as of `fake_gpu.gpu`."""
    from retrograd.ttir.launch import pretended

    with session(), pretended(devices=devices):
        yield


def tf32() -> bool:
    """Whether a kernel that was executed, here or on a GPU, multiplied matrices of float32 rounded to tf32."""
    return any(run.tf32 for run in _SESSIONS) or any(any(seen.values()) for seen in _ON_GPU)


@contextmanager
def exact_factors() -> Iterator[bool]:
    """Inside, kernels that are executed here do not round float32 to tf32; False where none are."""
    run = current()
    if run is not None:
        run.exact_factors = True
    try:
        yield run is not None
    finally:
        if run is not None:
            run.exact_factors = False


def factors_are_exact() -> bool:
    """Whether this is inside of `exact_factors`."""
    run = current()
    return run is not None and run.exact_factors


def _noted(seen: dict[str, bool], launch: KernelLaunch, proceed: Proceed) -> Any:
    """Note whether a kernel that a GPU runs multiplies in tf32, by the hash of its code."""
    compiled = proceed()
    code = getattr(compiled, "hash", None)  # None of what is executed here, for the races: its session says
    if code is not None and code not in seen:
        from retrograd.ttir.session import TF32

        seen[code] = TF32.search(str(compiled.asm.get("ttir"))) is not None
    return compiled


@contextmanager
def without_pretending() -> Iterator[None]:
    """Inside, `pretended` is nothing: torch.compile asks a GPU that is said to be there for more than it has."""
    _HONEST.append(None)
    try:
        yield
    finally:
        _HONEST.pop()


@contextmanager
def own_filling() -> Iterator[None]:
    """Inside, memory that nobody has written holds what it holds: somebody else fills it."""
    _POISONED.append(None)
    try:
        yield
    finally:
        _POISONED.pop()


def asked(function: Callable[..., Any], run: Callable[[], Any], again: bool = True) -> Any:
    """What `run` gives inside of `pretended`; if it raises it may be asked `again`, with tensors said to be on a GPU.

    Where that helps it is said of the function from now on.
    """
    try:
        with pretended(function):
            return run()
    except Exception:
        if not again or not ask_for_devices(function):
            raise
        try:
            with pretended(function):
                return run()
        except Exception:
            no_devices(function)
        raise


def ask_for_devices(function: Callable[..., Any]) -> bool:
    """Have `pretended` say from now on that tensors of a function are on a GPU; False where nothing is pretended."""
    function = _bare(function)
    if function in _DEVICES or not _SESSIONS or isinstance(pretended(function), nullcontext):
        return False
    _DEVICES.append(function)
    return True


def no_devices(function: Callable[..., Any]) -> None:
    """Undo `ask_for_devices`."""
    _DEVICES.remove(_bare(function))


def _note_type(function: Callable[..., Any]) -> None:
    if function not in _TYPES:
        _TYPES.append(function)


def looks_at_types(function: Callable[..., Any]) -> bool:
    """Whether a function that runs as it does for tensors on the CPU decides something by that."""
    return _bare(function) in _TYPES and current() is not None


def _bare(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, partial):
        function = function.func
    return function


def pretended(function: Callable[..., Any]) -> AbstractContextManager[object]:
    """Inside, torch says that it has a GPU where kernels are executed without it: other people's launchers ask.

    Args:
        function: what is called; launchers of this library know the truth, and every call of torch takes its time.
    """
    function = _bare(function)
    module = getattr(function, "__module__", None) or ""  # None of what is made by exec or eval
    # Libraries ask for a GPU in the first call, before they import Triton.
    if _HONEST or not (_SESSIONS or _AWAITED) or module.startswith(_KNOWING):
        return nullcontext()
    from retrograd.ttir.launch import pretended

    return pretended(devices=function in _DEVICES, repeats=not _POISONED, by_type=partial(_note_type, function))
