"""Compile Triton kernels for a GPU that is not there.

`recording` lets ordinary launchers run while nothing is executed: every `kernel[grid](...)` inside becomes a `Launch`,
which holds exactly what Triton would have compiled - types, alignment, constexprs, warps. `Launch.compile` then builds
it. What the machine code says is in `facts`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrograd import config
from retrograd.codegen import tuning
from retrograd.codegen.schema import Tuning
from retrograd.codegen.targets import Target, target_named
from retrograd.errors import MissingExtraError, RetrogradError

_LABELS = itertools.count()


@dataclass(frozen=True)
class Launch:
    """One launch that was recorded, not executed.

    Attributes:
        kernel: name of the kernel function.
        target: what it is to be compiled for.
        grid: numbers of programs; not part of the identity.
        key: Triton's own cache key: types, alignment, constexprs and options. Equal (kernel, target, key) compile to
            the same code.
        fn: the JITFunction.
        specialization: Triton's JSON of all that, which `JITFunction.preload` takes.
        tuning: what `@triton.autotune` adds, None where the kernel is launched without it.
    """

    kernel: str
    target: Target
    grid: tuple[int, ...]
    key: str
    fn: Any
    specialization: str
    tuning: Tuning | None = field(default=None, compare=False)

    @property
    def identity(self) -> tuple[str, str, str]:
        """Equal for launches that run the same machine code."""
        return self.fn.__module__ + ":" + self.kernel, self.target.name, self.key

    @property
    def place(self) -> str:
        """ "path/file.py:12", where the kernel is defined."""
        return place_of(self.fn)

    @property
    def arguments(self) -> dict[str, str]:
        """Argument name -> its type as Triton writes it ("*bf16", "i32"), without constexprs."""
        return {
            name: kind for name, kind in json.loads(self.specialization)["signature"].items() if kind != "constexpr"
        }

    @property
    def constants(self) -> dict[str, Any]:
        """Argument name -> value, of constexprs and of arguments that are None or 1."""
        data = json.loads(self.specialization)
        names = self.fn.arg_names
        pairs = zip(data["constant_keys"], data["constant_vals"], strict=True)
        return {names[path[0]]: _plain(value) for path, value in pairs if len(path) == 1}

    @property
    def aligned(self) -> tuple[str, ...]:
        """Arguments known to be divisible by 16."""
        data = json.loads(self.specialization)
        pairs = zip(data["attrs_keys"], data["attrs_vals"], strict=True)
        return tuple(self.fn.arg_names[path[0]] for path, attrs in pairs if ["tt.divisibility", 16] in attrs)

    @property
    def options(self) -> dict[str, Any]:
        """Options of the compiler: num_warps, num_stages and the rest."""
        return json.loads(self.specialization)["options"]

    def compile(self) -> Any:
        """Triton's CompiledKernel of this launch, from Triton's cache directory where it is there already."""
        with driver(self.target):
            return self.fn.preload(self.specialization)


@contextmanager
def recording(target: str) -> Iterator[list[Launch]]:
    """Record what is launched inside instead of launching it; the list fills as launchers run.

    Tensors may be on the CPU; their values are not read. An autotuned kernel is recorded with every configuration.
    Launchers that look for a GPU themselves must be told that there is none
    (`retrograd.runtime.triton.launch.dry`).

    Args:
        target: name of the target, see `targets`.

    Raises:
        UsageError: There is no such target.
        MissingExtraError: Triton is not installed.
        RetrogradError: This process interprets kernels, so that there is nothing to compile.
    """
    wanted = target_named(target)
    triton = require_triton()
    jit = triton.runtime.jit.JITFunction
    knobs = triton.knobs.runtime
    launches: list[Launch] = []
    grid: Any = None

    def note(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        found = (fn.name, wanted, _numbers(grid), key, fn.jit_function, compile["specialization_data"])
        launches.append(Launch(*found, tuning.current()))
        return True  # tells Triton that this launch needs no code

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal grid
        grid = kwargs["grid"]
        return stock_run(self, *args, **(kwargs | {"warmup": True}))

    stock_run, stock_hook = jit.run, knobs.jit_cache_hook
    with driver(wanted), tuning.every_configuration():
        jit.run, knobs.jit_cache_hook = run, note
        try:
            yield launches
        finally:
            jit.run, knobs.jit_cache_hook = stock_run, stock_hook


def record(kernel: Any, *args: Any, target: str, grid: tuple[int, ...] = (1,), **kwargs: Any) -> Launch:
    """The launch `kernel[grid](*args, **kwargs)` for a target.

    A torch dtype stands for an aligned tensor of that dtype.
    """
    mock = require_triton().runtime.jit.MockTensor
    with recording(target) as launches:
        kernel[grid](*map(mock.wrap_dtype, args), **{name: mock.wrap_dtype(value) for name, value in kwargs.items()})
    return launches[-1]


def place_of(fn: Any) -> str:
    """ "path/file.py:12" of a JITFunction, from the current folder if it is in there."""
    path = Path(fn.fn.__code__.co_filename)
    here = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{here}:{fn.starting_line_number}"


def distinct(launches: list[Launch]) -> list[Launch]:
    """The launches with equal ones named once, in their order."""
    return list({launch.identity: launch for launch in reversed(launches)}.values())[::-1]


def require_triton() -> Any:
    """The triton module.

    Raises:
        MissingExtraError: Triton is not installed.
        RetrogradError: This process interprets kernels.
    """
    try:
        import triton
    except ImportError as error:
        raise MissingExtraError("triton", "triton", "generating code for a GPU") from error
    if config.interpreting():
        raise RetrogradError(
            "this process interprets Triton kernels (TRITON_INTERPRET=1), so there is nothing to compile; unset the "
            "variable before triton is imported, in a shell: env -u TRITON_INTERPRET COMMAND"
        )
    return triton


@contextmanager
def driver(target: Target) -> Iterator[None]:
    """Make a driver for `target` Triton's active one, under a device name of its own so that no cache is shared."""
    holder = require_triton().runtime.driver
    previous = holder._active
    holder.set_active(_dry_driver(target, f"dry:{target.name}:{next(_LABELS)}"))
    try:
        yield
    finally:
        holder.set_active(previous)


class _Utils:
    """What launchers ask Triton's driver about the GPU, to choose a grid."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def get_device_properties(self, device: Any = None) -> dict[str, int]:
        return {
            "max_shared_mem": self._target.shared_limit_bytes,
            "max_num_regs": self._target.registers,
            "multiprocessor_count": self._target.num_sms,
            "warpSize": self._target.warp_size,
        }


def _dry_driver(target: Target, device: str) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class DryDriver(DriverBase):
        """Answers which GPU it is and can do nothing else."""

        launcher_cls = None
        utils = _Utils(target)

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> Any:
            return GPUTarget(target.backend, target.arch, target.warp_size)

        def get_active_torch_device(self) -> Any:
            import torch

            return torch.device("cpu")

        def get_device_capability(self, device: Any = None) -> tuple[int, int]:
            return divmod(target.arch, 10) if isinstance(target.arch, int) else (0, 0)

        def get_current_device(self) -> str:
            return device

        def get_current_stream(self, device: Any = None) -> int:
            return 0

        def get_device_interface(self) -> None:
            return None

        def get_benchmarker(self) -> Any:
            raise RetrogradError("a kernel asked for a benchmark (autotuning?), which needs the GPU it is compiled for")

    return DryDriver()


def _numbers(grid: Any) -> tuple[int, ...]:
    return () if callable(grid) else tuple(grid) if isinstance(grid, (tuple, list)) else (grid,)


def _plain(value: Any) -> Any:
    return value["constexpr"] if isinstance(value, dict) and "constexpr" in value else value
