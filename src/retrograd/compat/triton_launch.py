"""Hook on Triton's launches: callbacks around `kernel[grid](...)`, compiled or interpreted, and around autotuning.

Triton's classes are replaced once for all callbacks, and put back when the last one has gone. Triton is not imported
for it: where a program imports it later, it is hooked then.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

from retrograd.compat.registry import part, works
from retrograd.core.import_hook import AfterImport

_INTERPRETER = "triton.runtime.interpreter"
_SILENT = threading.local()  # `now`: whether launches of this thread pass by no callback


@dataclass(slots=True, eq=False)
class KernelLaunch:
    """A call of a `run` of Triton's. Frozen it would take 2 us more to make, at each launch; nobody changes one."""

    function: Any  # the JITFunction or InterpretedFunction that is launched; for `around_autotuning` the Autotuner
    # As Triton has them, `grid` and `warmup` among the latter
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    interpreted: bool  # whether it runs in Triton's interpreter
    caller: FrameType  # the frame that calls `run`

    @property
    def name(self) -> str:
        return getattr(getattr(self.function, "fn", self.function), "__name__", type(self.function).__name__)

    @property
    def warmup(self) -> bool:
        """Whether it is only compiled."""
        return bool(self.kwargs.get("warmup"))

    @property
    def grid(self) -> tuple[int, ...]:
        """Numbers of programs; () where a function is to compute them."""
        grid = self.kwargs.get("grid", ())
        return () if callable(grid) else tuple(grid) if isinstance(grid, (tuple, list)) else (grid,)

    @property
    def blocks(self) -> set[int]:
        """Whole numbers above 1 among the compile-time constants; none where Triton does not tell which these are."""
        params = getattr(self.function, "params", ())
        names = [getattr(param, "name", "") for param in params]
        bound = dict(zip(names, self.args, strict=False)) | self.kwargs
        values = [bound.get(name) for name, p in zip(names, params, strict=True) if getattr(p, "is_constexpr", False)]
        return {value for value in values if isinstance(value, int) and value > 1}


# A callback decides what becomes of the launch: `proceed(**changes)` makes it, with other keyword arguments if wanted.
Proceed = Callable[..., Any]
Callback = Callable[[KernelLaunch, Proceed], Any]


class _Hook:
    """Callbacks around a method of some classes, by module and name; `below`: of their subclasses too."""

    def __init__(self, classes: Mapping[str, str], method: str = "run", *, below: bool = False) -> None:
        self._classes, self._method, self._below = classes, method, below
        self._callbacks: list[list[Callback]] = []  # each in a list of its own: one may be there twice
        self._replaced: dict[type, tuple[Any, Any]] = {}
        self._after_import: AfterImport | None = None
        self._told: list[Any] = []  # classes that tell of new subclasses
        self._local = threading.local()  # `running`: whose method this thread is in, where subclasses call it again

    @contextmanager
    def around(self, callback: Callback) -> Iterator[None]:
        entry = [callback]
        self._callbacks.append(entry)
        if len(self._callbacks) == 1:
            self._install()
        try:
            yield
        finally:
            self._callbacks[:] = [other for other in self._callbacks if other is not entry]
            if not self._callbacks:
                self._uninstall()

    def _install(self) -> None:
        later = [name for name in self._classes if name not in sys.modules]
        for module in self._classes:
            self._replace(module)
        if later:
            # To import Triton here would be too early for a program that sets TRITON_INTERPRET itself.
            self._after_import = AfterImport(later, self._replace)
            sys.meta_path.insert(0, self._after_import)

    def _uninstall(self) -> None:
        with suppress(ValueError):
            sys.meta_path.remove(self._after_import)  # type: ignore[arg-type]
        for owner, (stock, ours) in list(self._replaced.items()):
            # Somebody else's replacement over ours stays; without callbacks ours only passes on.
            if owner.__dict__.get(self._method) is ours:
                setattr(owner, self._method, stock)
                del self._replaced[owner]
        while self._told:
            del self._told.pop().__init_subclass__

    def _replace(self, module: str) -> None:
        owner = getattr(sys.modules.get(module), self._classes[module], None)
        if owner is None or not hasattr(owner, self._method) or not self._callbacks:
            return
        self._replace_in(owner, module, getattr(owner, self._method))
        if not self._below:
            return
        for below in _subclasses(owner):
            self._replace_in(below, module, below.__dict__.get(self._method))

        def begin(cls: Any, **named: Any) -> None:
            super(owner, cls).__init_subclass__(**named)
            if self._callbacks:
                self._replace_in(cls, module, cls.__dict__.get(self._method))

        if "__init_subclass__" not in owner.__dict__:
            owner.__init_subclass__ = classmethod(begin)
            self._told.append(owner)

    def _replace_in(self, owner: type, module: str, stock: Any) -> None:
        if stock is None or (owner in self._replaced and stock is not self._replaced[owner][0]):
            return  # what it inherits is replaced there; or ours is still below somebody else's

        def run(function: Any, *args: Any, **kwargs: Any) -> Any:
            # A subclass that overrides `run` calls the one above.
            if is_unheard() or function is getattr(self._local, "running", None):
                return stock(function, *args, **kwargs)
            launch = KernelLaunch(function, args, kwargs, module == _INTERPRETER, sys._getframe(1))
            if not self._below:
                return _proceed([callback for (callback,) in self._callbacks], launch, stock)
            before, self._local.running = getattr(self._local, "running", None), function
            try:
                return _proceed([callback for (callback,) in self._callbacks], launch, stock)
            finally:
                self._local.running = before

        setattr(owner, self._method, run)
        self._replaced[owner] = stock, run


def _subclasses(owner: type) -> Iterator[type]:
    for below in owner.__subclasses__():
        yield below
        yield from _subclasses(below)


def _proceed(callbacks: list[Callback], launch: KernelLaunch, stock: Any) -> Any:
    """Let the last callback decide, and those before it if it goes on."""
    if not callbacks:
        return stock(launch.function, *launch.args, **launch.kwargs)

    def proceed(**changes: Any) -> Any:
        changed = replace(launch, kwargs=launch.kwargs | changes) if changes else launch
        return _proceed(callbacks[:-1], changed, stock)

    return callbacks[-1](launch, proceed)


_LAUNCHES = _Hook({"triton.runtime.jit": "JITFunction", _INTERPRETER: "InterpretedFunction"})
# Tuners of libraries mostly keep on disk what was chosen.
_AUTOTUNING = _Hook({"triton.runtime.autotuner": "Autotuner"}, below=True)
_COMPILING = _Hook({"triton.runtime.jit": "JITFunction"}, "_do_compile")


def _probe_kernel(x: Any, N: Any) -> None:
    """What the self-test launches; nothing of it is compiled or run."""


@part(
    "triton.launch_hook",
    "is told of kernel launches",
    "launches are not seen: traces have no Triton kernels and interpreted ones are not counted",
    names=("JITFunction.run", "InterpretedFunction.run", "Autotuner.run"),
)
def HOOK() -> str:
    seen: list[KernelLaunch] = []
    for module, name in _LAUNCHES._classes.items():
        if module not in sys.modules:
            continue
        kernel = getattr(sys.modules[module], name)(_probe_kernel)
        with _LAUNCHES.around(lambda launch, proceed: seen.append(launch)):
            kernel[(2, 3)](7, N=16)
        if not seen:
            return f"{name}.run is not what a launch calls"
        launch = seen.pop()
        told = launch.name, launch.args, launch.kwargs, launch.interpreted
        if told != ("_probe_kernel", (7,), {"N": 16, "grid": (2, 3), "warmup": False}, module == _INTERPRETER):
            return f"{name}.run is called with {told}"
    return ""


@contextmanager
def around_launches(callback: Callback) -> Iterator[None]:
    """Have each launch pass by a callback, the latest one first; an exception of a callback is the launch's.

    Nothing is seen where Triton has another `run` than known (`HOOK`).
    """
    if "triton.runtime.jit" in sys.modules and not works(HOOK):
        yield
        return
    with _LAUNCHES.around(callback):
        yield


def is_unheard() -> bool:
    """Whether launches of this thread pass by no callback."""
    return getattr(_SILENT, "now", False)


@contextmanager
def unheard() -> Iterator[None]:
    """Launches of this thread pass by no callback: those of self-tests are nobody's."""
    before = is_unheard()
    _SILENT.now = True
    try:
        yield
    finally:
        _SILENT.now = before


# Likewise each launch of a kernel under `@triton.autotune`, which launches its configurations in turn.
around_autotuning = _AUTOTUNING.around
# And what is compiled for a launch; the first argument is Triton's key of it.
around_compiling = _COMPILING.around


@contextmanager
def through_triton() -> Iterator[None]:
    """Have launchers that keep compiled kernels launch them through Triton meanwhile."""
    # A launcher that keeps kernels has imported it; where it is not installed, nothing is launched.
    if sys.modules.get("triton") is None:
        yield
        return
    from triton import knobs

    def seen(*_: Any) -> None: ...

    hook: Any = knobs.runtime.launch_enter_hook
    if hasattr(hook, "add"):
        hook.add(seen)
    try:
        yield
    finally:
        with suppress(AttributeError):
            hook.remove(seen)


@dataclass
class LaunchCount:
    """Launches that were made through Triton: all of them, those in its interpreter, and what kernels were built with.

    `blocks` are whole numbers above 1 among the compile-time constants: block sizes, and whatever else is constant.
    """

    total: int = 0
    interpreted: int = 0
    blocks: set[int] = field(default_factory=set)


@contextmanager
def count_launches(*, blocks: bool = True) -> Iterator[LaunchCount]:
    """Count kernel launches; those that `runtime.triton.launch.relaunch` makes past Triton are not counted.

    `blocks`: whether to note their constants too, which takes 10 us a launch.
    """
    count = LaunchCount()

    def note(launch: KernelLaunch, proceed: Proceed) -> Any:
        if not launch.warmup:
            count.total += 1
            count.interpreted += launch.interpreted
            if blocks:
                count.blocks |= launch.blocks
        return proceed()

    with around_launches(note):
        yield count
