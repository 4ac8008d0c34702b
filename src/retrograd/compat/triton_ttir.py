"""TTIR of kernels as a GPU would run them: Triton's own frontend and first passes, for each launch, and no GPU.

Binder, heuristics, autotuner and specialisation stay Triton's. What is replaced is what a launch compiles and runs.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import index
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from retrograd.compat.registry import part, require
from retrograd.compat.triton_compile import PROBE_GPU, GpuDescription, _driver
from retrograd.compat.triton_frontend_key import frontend_key
from retrograd.compat.triton_launch import is_unheard, unheard
from retrograd.core import gc_pause
from retrograd.errors import UnsupportedOperationError

# The passes rewrite descriptors to pointers for GPUs before sm_90; nothing else of TTIR depends on the number.
_WITHOUT_DESCRIPTORS, _WITH_DESCRIPTORS = 80, 90
_DESCRIPTOR = re.compile(r"\btt\.descriptor_\w+")
_LATER_OPTIONS = frozenset({"num_warps", "num_stages", "maxnreg"})
# In place of a text, under the key without these options.
_READS_LATER_OPTIONS = "// depends on num_warps, num_stages or maxnreg"


@dataclass(eq=False)
class LaunchedKernel:
    """A kernel of one specialisation, in place of Triton's CompiledKernel."""

    jit_function: Any  # the JITFunction
    text: str  # its TTIR
    signature: dict[str, Any]  # argument -> type as Triton writes it, "constexpr" for those that are part of the code
    options: Any  # of the compiler
    kept: dict[str, Any] = field(default_factory=dict)  # for whoever executes it: what stays with it
    src: Any = None  # of what triton.compile was asked for
    compiled: Callable[[], Any] | None = None  # gives Triton's own kernel

    function = None
    packed_metadata = None
    # No machine code is made. Launchers divide by these to say how many programs fit on a multiprocessor: one program
    # in many registers, so that grids of persistent kernels are no larger than that of a real GPU.
    n_regs, n_spills, _SHARED_BYTES = 128, 0, 1024
    n_max_threads = 1024

    @property
    def name(self) -> str:
        return self.jit_function.__name__

    @property
    def asm(self) -> dict[str, Any]:
        return {"ttir": self.text} if self.compiled is None else _Code(self.text, self.compiled)

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def metadata(self) -> Any:
        options = self.options
        return SimpleNamespace(
            name=self.name, shared=self._SHARED_BYTES, num_warps=options.num_warps, num_ctas=options.num_ctas
        )

    def launch_metadata(self, *call: Any) -> Any:
        """What hooks on launches hear, as Triton has it: a name, and what the kernel's own function says of it."""
        from triton import knobs
        from triton.compiler import CompiledKernel

        if not getattr(knobs.runtime.launch_enter_hook, "calls", ()):
            return None
        return CompiledKernel.launch_metadata(self, *call)  # pyright: ignore[reportArgumentType]

    def result(self) -> LaunchedKernel:
        return self

    def _init_handles(self) -> None:
        threads = self.options.num_warps * getattr(self.options, "warp_size", 32)
        if threads > self.n_max_threads:
            from triton.runtime.errors import OutOfResources

            raise OutOfResources(threads, self.n_max_threads, "threads")

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        """A launch of the kernel that JITFunction.warmup gave, with all its arguments."""
        return lambda *values, **_: self.run(*grid, None, None, None, None, None, None, *values)

    def run(
        self, grid_0: int, grid_1: int, grid_2: int, stream: Any, function: Any, packed: Any, metadata: Any,
        enter: Any, exit: Any, *values: Any,
    ) -> None:  # fmt: skip
        """A launch, as JITFunction.run makes it."""
        self._init_handles()
        execute, names = _EXECUTE[-1], self.jit_function.arg_names
        if len(values) != len(names):  # Triton's launcher does not count, and takes what lies behind
            raise TypeError(
                f"{self.name} was launched with {len(values)} of its {len(names)} arguments ({', '.join(names)}): a "
                "compiled kernel of this Triton takes its constexprs too"
            )
        # As the launcher in C takes them: a tensor of one whole number is one.
        grid = index(grid_0), index(grid_1), index(grid_2)
        if enter is not None:
            enter(metadata)
        execute(self, grid, dict(zip(names, values, strict=True)))
        if exit is not None:
            exit(metadata)


class _Code(dict[str, Any]):
    """The TTIR of a kernel, and what Triton's compiler makes of it where somebody looks at that."""

    def __init__(self, text: str, compiled: Callable[[], Any]) -> None:
        super().__init__(ttir=text)
        self._compiled = compiled

    def __missing__(self, stage: str) -> Any:
        return self._compiled().asm[stage]


Execute = Callable[[LaunchedKernel, tuple[int, int, int], dict[str, Any]], None]
Keep = Callable[[str, Callable[[], str]], str]
_EXECUTE: list[Execute] = []
_TOLD: list[Callable[..., bool]] = []


@contextmanager
def told_of_kernels(callback: Callable[..., bool]) -> Iterator[None]:
    """Tell a callback of kernels that launches inside have compiled; whether no code is needed here is what it returns.

    It is called with the JITFunction, Triton's key, ASTSource, target and options of the compiler, and whether it is
    only to be compiled.
    """
    _TOLD.append(callback)
    try:
        yield
    finally:
        _TOLD.remove(callback)


def library_folder() -> str:
    """Where Triton's own functions on the device are, whose lines are not the user's."""
    import triton.language

    return str(Path(triton.language.__file__).parent)


@contextmanager
def executing(
    gpu: GpuDescription, execute: Execute, tune: Callable[[Callable[[], Any]], None], keep: Keep, device: Any
) -> Iterator[None]:
    """Have launches inside call `execute` with the kernel's TTIR, the grid and the arguments by name.

    Autotuned kernels are launched with their first configuration: nothing can be timed.

    Args:
        gpu: what launchers and compilers are told of the GPU.
        execute: runs the kernel on the arguments' memory.
        tune: is called in place of timing a configuration, with a function that launches it as the autotuner would.
        keep: gives the TTIR of a key, or what a function makes where it has none.
        device: where Triton says that torch makes tensors for it; programs compare it with those of their tensors.

    Raises:
        UnsupportedVersionError: this Triton compiles or launches otherwise.
    """
    require(TTIR)
    with _executing(gpu, execute, tune, keep, device):
        yield


@contextmanager
def _executing(gpu: GpuDescription, execute: Execute, tune: Any, keep: Keep, place: Any = None) -> Iterator[None]:
    from triton.runtime import driver as holder
    from triton.runtime.jit import JITFunction

    device = f"ttir:{gpu.name}"
    previous, compile_stock = holder._active, JITFunction._do_compile
    driver = _driver(gpu, device)
    _tell(driver, tune, place)

    @functools.wraps(compile_stock)
    def compile_ttir(
        self: Any, key: Any, signature: Any, device_: Any, constexprs: Any, options: Any, attrs: Any, *rest: Any,
        **named: Any,
    ) -> Any:  # fmt: skip
        # Not the one of `_for_launchers`: a JITFunction takes what it finds when it is launched first, and keeps it.
        self.compile = getattr(self.compile, "__wrapped__", self.compile)
        if device_ != device:
            return compile_stock(self, key, signature, device_, constexprs, options, attrs, *rest, **named)
        kernels, _, target, backend, _ = self.device_caches[device_]
        source = self.ASTSource(self, signature, constexprs, attrs)
        warmup = bool(named.get("warmup", rest and rest[0]))
        if not is_unheard() and any(told(self, key, source, target, options, warmup) for told in _TOLD):
            return None
        source = self.ASTSource(self, signature, constexprs, _unaligned(attrs))
        _ = self.cache_key  # asking notes which globals it reads: `run` raises where one has changed since
        text = _kept_ttir(source, target, backend, options, keep)
        kernels[key] = LaunchedKernel(self, text, signature, options, src=source)
        return kernels[key]

    holder.set_active(driver)
    JITFunction._do_compile = compile_ttir  # pyright: ignore[reportAttributeAccessIssue]
    _EXECUTE.append(execute)
    try:
        with _for_launchers(gpu, driver, keep):
            yield
    finally:
        _EXECUTE.remove(execute)
        JITFunction._do_compile = compile_stock
        holder.set_active(previous)  # pyright: ignore[reportArgumentType]


def _tell(driver: Any, tune: Callable[[Callable[[], Any]], None], place: Any) -> None:
    """Have a driver say where torch makes tensors, and give a function in place of what times a call."""

    def benchmark(call: Callable[[], Any], quantiles: Any = None, **_: Any) -> Any:
        tune(call)
        return 0.0 if quantiles is None else [0.0] * len(quantiles)

    driver.get_benchmarker = lambda: benchmark
    driver.get_active_torch_device = lambda: place
    # For triton.testing.do_bench in a person's program: the pretended torch.cuda has a clock, and no cache to empty.
    driver.get_device_interface = lambda: sys.modules["torch"].cuda
    driver.get_empty_cache_for_benchmark = lambda: None
    driver.clear_cache = lambda cache: None


@contextmanager
def _for_launchers(gpu: GpuDescription, driver: Any, keep: Keep) -> Iterator[None]:
    """Have those hear of the GPU who compile a source and make a driver by themselves, as what Inductor writes does."""
    import triton
    from triton.backends import backends
    from triton.compiler import ASTSource, make_backend

    stock, name = triton.compile, {"cuda": "nvidia", "hip": "amd"}.get(gpu.backend, gpu.backend)

    class PretendedDriver(type(driver)):
        def __new__(cls) -> Any:
            return driver

    @functools.wraps(stock)
    def compile(src: Any, target: Any = None, options: Any = None, *rest: Any, **named: Any) -> Any:
        make = functools.partial(stock, src, target, options, *rest, **named)
        if not _EXECUTE or not isinstance(src, ASTSource):
            return make()
        target = target or driver.get_current_target()
        backend = make_backend(target)
        parsed = backend.parse_options({**(options or {}), **src.parse_options()})
        text = _kept_ttir(src, target, backend, parsed, keep)
        return LaunchedKernel(src.fn, text, src.signature, parsed, src=src, compiled=functools.cache(make))

    kept = backends.get(name)
    if kept is not None:
        backends[name] = replace(kept, driver=PretendedDriver)
    owners: tuple[Any, ...] = (triton, triton.compiler)
    for owner in owners:
        owner.compile = compile
    try:
        yield
    finally:
        for owner in owners:
            owner.compile = stock
        if kept is not None:
            backends[name] = kept


class _NotedOptions:
    """Options of the compiler that note whether anybody reads one of those that only later passes should need."""

    def __init__(self, options: Any) -> None:
        self.stock, self.read = options, False

    def __getattr__(self, name: str) -> Any:
        self.read |= name in _LATER_OPTIONS
        return getattr(self.stock, name)


def _kept_ttir(source: Any, target: Any, backend: Any, options: Any, keep: Keep) -> str:
    """The text, by a key without _LATER_OPTIONS unless the frontend reads one of them for this kernel.

    Configurations of autotuned kernels often differ in these alone: of 354 texts for ten ops of fla 77 were another's.
    """
    if getattr(source.fn, "is_gluon", bool)():
        raise UnsupportedOperationError(
            f"{source.fn.__name__} is written in Gluon, which places values in registers and shared memory itself, and "
            "cannot be executed without a GPU"
        )

    if override := getattr(options, "ir_override", None):
        return _overriding_ttir(source.fn.__name__, override, backend)

    def make() -> str:
        noted = _NotedOptions(options)
        text = _ttir(source, target, backend, noted)
        return _READS_LATER_OPTIONS if noted.read else text

    name = frontend_key(source, target, options, without=_LATER_OPTIONS)
    text = _READS_LATER_OPTIONS if name is None else keep(name, make)
    if text != _READS_LATER_OPTIONS:
        return text
    name = frontend_key(source, target, options)
    make_for_these = functools.partial(_ttir, source, target, backend, options)
    return make_for_these() if name is None else keep(name, make_for_these)


def _overriding_ttir(name: str, path: str, backend: Any) -> str:
    """The text of a file that a configuration names in place of what the compiler makes; it is kept nowhere."""
    if not path.endswith(".ttir"):
        raise UnsupportedOperationError(f"{name} runs {path} in place of its own code: only TTIR is executed here")
    from triton._C.libtriton import ir

    context = _context(backend)  # has to live as long as the module, which does not hold it: else a segmentation fault
    return ir.parse_mlir_module(path, context).str()


def _context(backend: Any) -> Any:
    """MLIR's context with what a backend's modules are written in."""
    from triton._C.libtriton import ir

    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    return context


def _unaligned(attrs: dict[Any, Any]) -> dict[Any, Any]:
    """Attributes of arguments but for what divides them: it stands in the text and decides nothing before TTGIR.

    With it 488 kernels that `verify` compiled for ten ops of fla were 277 different ones.
    """
    rest = {path: [pair for pair in pairs if pair[0] != "tt.divisibility"] for path, pairs in attrs.items()}
    return {path: pairs for path, pairs in rest.items() if pairs}


def _ttir(source: Any, target: Any, backend: Any, options: Any) -> str:
    module = _module(source, target, backend, options)
    try:
        return _passed(backend, module, options, _WITHOUT_DESCRIPTORS)
    except RuntimeError:
        # A GPU with descriptors compiles it; what has no pointers in their place is no mistake of the kernel's.
        text = _passed(backend, _module(source, target, backend, options), options, _WITH_DESCRIPTORS)
        names = sorted(set(_DESCRIPTOR.findall(text)), key=lambda name: name != "tt.descriptor_reduce")
        if not names:
            raise
        raise UnsupportedOperationError(
            f"{names[0]} of {source.fn.__name__} cannot be executed without a GPU: Triton has no pointers in its place"
        ) from None


def _passed(backend: Any, module: Any, options: Any, capability: int) -> str:
    """The text of a module behind the first passes; those of AMD's backend ask for no capability."""
    of_gpu = (capability,) if backend.target.backend == "cuda" else ()
    return backend.make_ttir(module, {}, options, *of_gpu).str()


def _module(source: Any, target: Any, backend: Any, options: Any) -> Any:
    context = _context(backend)
    implementation = backend.get_codegen_implementation(options)
    with gc_pause.paused():  # which takes 8 % of it, and finds nothing
        return source.make_ir(target, options, implementation, backend.get_module_map(), context)


@part(
    "triton.ttir",
    "runs kernels without a GPU by Triton's first intermediate code",
    "kernels run on a GPU, or, not checked, in Triton's interpreter (TRITON_INTERPRET=1)",
    names=(
        "JITFunction._do_compile", "JITFunction.device_caches", "ASTSource.make_ir", "make_ttir", "load_dialects",
        "get_codegen_implementation", "get_module_map", "driver._active", "CompiledKernel.run", "get_benchmarker",
    ),
    refuses=True,
)  # fmt: skip
def TTIR() -> str:
    import torch

    from retrograd.compat.triton_probe import doubling_kernel

    calls: list[tuple[Any, ...]] = []
    memory = torch.zeros(16)

    def execute(*call: Any) -> None:
        calls.append(call)

    with _executing(PROBE_GPU, execute, print, lambda key, make: make()), unheard():
        doubling_kernel[(3,)](memory, N=16, enable_fp_fusion=True)  # Triton 3.9 warns who leaves it open
    ((kernel, grid, values),) = calls
    if grid != (3, 1, 1) or list(values) != ["x_ptr", "N"] or values["x_ptr"] is not memory or values["N"] != 16:
        return f"a launch brings the grid {grid} and the arguments {list(values)}"
    if kernel.signature != {"x_ptr": "*fp32", "N": "constexpr"}:
        return f"a kernel has the signature {kernel.signature}"
    expected = ("tt.func public @doubling_kernel", "tt.load", "arith.mulf", "tt.store", "loc(")
    missing = [word for word in expected if word not in kernel.text]
    return f"TTIR has no {', '.join(missing)}" if missing else ""
