"""C++ paths of eager ops on CUDA: an extension that takes the place of Python once it is there, and why it does not.

When an op first sees a GPU, its extension is compiled in the background (half a minute, needs g++ and Python's headers)
into the user's cache; Python serves until it is there, and from then on every process takes it by itself.
RETROGRAD_HOST=build waits for it, as `build()` does; RETROGRAD_HOST=off leaves it alone. Results are those of the
Python path bit for bit; what C++ does not know goes there.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from retrograd import config
from retrograd.errors import NativeBuildError
from retrograd.runtime.cpp.background import BackgroundBuild
from retrograd.runtime.cpp.extension import Extension

HEADER = Path(__file__).with_name("host.hpp")  # of all extensions
_SWITCH = "RETROGRAD_HOST=off"
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class HostPath:
    """The C++ path of one family of ops in this process.

    Args:
        source: the C++ file.
        ops: what it serves, for messages.
        place: the module that has `build`, `on`, `off` and `why_not` of this path, for messages.
        connect: tells the loaded extension all that it needs to know.
        disconnect: ends that.
    """

    def __init__(
        self,
        source: Path,
        ops: str,
        place: str,
        connect: Callable[[Any], None],
        disconnect: Callable[[], None] = lambda: None,
    ) -> None:
        self.ops, self._place, self._connect, self._disconnect = ops, place, connect, disconnect
        label = f"{source.parent.parent.name}-host"
        module = f"retrograd_{label.replace('-', '_')}"
        self.library = Extension(source, module, label, f"{place}.build(again=True)", (HEADER,))
        self.module: Any = None  # the extension, once it is taken
        self._deciding = threading.Lock()
        self.background: BackgroundBuild | None = None
        # What the ops call first; None where the ordinary path is the only one.
        self.entry: Callable[..., Any] | None = self.first if torch.version.cuda else None
        self.reason: str | None = f"no call of {ops} has seen a CUDA tensor yet"
        if not torch.version.cuda:
            self.reason = "this torch has no CUDA"

    def build(self, *, again: bool = False) -> Path:
        """Compile the library into the cache, unless it is there; with a GPU, take it in this process from now on.

        Args:
            again: Compile it even if it is there.

        Raises:
            NativeBuildError: There is no C++ compiler, headers of torch or Python are missing, or the compiler fails.
        """
        built = self.library.build(again=again)
        if torch.cuda.is_available():
            self.on()
        return built

    def on(self) -> None:
        """Take the C++ path in this process.

        Raises:
            NativeBuildError: It is not built, or cannot run here.
        """
        path = self.library.find()
        if path is None:
            raise NativeBuildError(
                f"{self._title} has not been built for this torch and Python; call {self._place}.build(), or set "
                "RETROGRAD_HOST=build"
            )
        module = self.library.load(path)
        if (refused := module.use_cuda()) is not None:
            raise NativeBuildError(f"{self._title} cannot run here: {refused}; set {_SWITCH}")
        self._connect(module)
        self.module = module
        self._take(module.apply, None)

    def off(self) -> None:
        """Leave the C++ path in this process; `on` takes it again. Backwards of calls that took it still run in C++."""
        self._take(None, "it was switched off")
        self._disconnect()

    def why_not(self) -> str | None:
        """Why this process does not take the C++ path, or None if it does."""
        background = self.background
        return background.reason or None if self.entry == self.first and background is not None else self.reason

    @property
    def _title(self) -> str:
        return f"the C++ path of {self.ops}"

    def first(self, x: Any, *rest: Any) -> Any:
        """Stands for the entry until a tensor on CUDA decides whether there is one, and while that is compiled."""
        if self.background is not None and self.background.running():
            return NotImplemented
        # Loading a library into a capture could break it; calls that a graph replays are no slower by Python.
        if type(x) in _PLAIN and x.is_cuda and not torch.cuda.is_current_stream_capturing():
            self.decide()
            entry = self.entry
            if entry is not None and entry != self.first:
                return entry(x, *rest)
        return NotImplemented

    def decide(self) -> None:
        """Take the C++ path, or none, or have it compiled and be asked again; one thread at a time."""
        with self._deciding:
            if self.entry != self.first or (self.background is not None and self.background.running()):
                return  # another thread was first
            wish = config.host()
            if wish == "off":
                self._take(None, "RETROGRAD_HOST is off")
                return
            if config.interpreting() or torch.version.hip is not None:
                self._take(None, "it launches compiled kernels on NVIDIA GPUs only")
                return
            try:
                if wish == "build":
                    self.library.build()
                if self.library.find() is not None:
                    self.on()
                elif self.background is None:
                    self.background = BackgroundBuild(self.library, self._title, _SWITCH)
                else:
                    self._take(None, self.background.reason)
                    if self.background.tried:
                        self._warn(self.background.reason)
            except (NativeBuildError, ImportError) as error:
                self._take(None, str(error))
                self._warn(str(error))

    def _warn(self, reason: str) -> None:
        warnings.warn(f"{self.ops} go through Python, which is slower: {reason}", stacklevel=5)

    def _take(self, function: Callable[..., Any] | None, reason: str | None) -> None:
        """Make `function` what the ops call first; `reason` says why there is none."""
        self.entry, self.reason = function, reason
