"""Compiling Triton kernels for a GPU that is absent: a driver that only says which it is, and Triton's cache hook."""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from retrograd.compat.registry import part, require
from retrograd.errors import RetrogradError

_LABELS = itertools.count()


@dataclass(frozen=True)
class GpuDescription:
    """What launchers and compilers ask of a GPU."""

    name: str  # "sm_90", "gfx942"
    backend: str  # Triton's name of the backend, "cuda" or "hip"
    arch: int | str  # Triton's name of the architecture, 90 or "gfx942"
    warp_size: int  # threads of a warp
    num_sms: int  # multiprocessors (compute units) of the largest GPU on the market
    shared_limit_bytes: int  # most shared memory one program may have
    registers: int  # 32-bit registers of a multiprocessor (of a compute unit on AMD, vector registers only)

    @property
    def properties(self) -> dict[str, int]:
        """As Triton's drivers give them."""
        return {
            "max_shared_mem": self.shared_limit_bytes,
            "max_num_regs": self.registers,
            "multiprocessor_count": self.num_sms,
            "warpSize": self.warp_size,
        }


@dataclass(frozen=True)
class KernelSignature:
    """What a kernel is compiled for."""

    arguments: dict[str, str]  # name -> type as Triton writes it ("*bf16", "i32"), without constexprs
    constants: dict[str, Any]  # name -> value, of constexprs and of arguments that are None or 1
    aligned: tuple[str, ...]  # arguments known to be divisible by 16

    @classmethod
    def of_request(cls, function: Any, specialization: str) -> KernelSignature:
        """Of what a JITFunction asks Triton's compiler for, in Triton's JSON."""
        data = json.loads(specialization)
        constants = zip(data["constant_keys"], data["constant_vals"], strict=True)
        attributes = zip(data["attrs_keys"], data["attrs_vals"], strict=True)
        return cls._of(function.arg_names, data["signature"], constants, attributes)

    @classmethod
    def of_compiled(cls, compiled: Any) -> KernelSignature:
        """Of a CompiledKernel."""
        source = compiled.src
        return cls._of(list(source.signature), source.signature, source.constants.items(), source.attrs.items())

    @classmethod
    def _of(cls, names: list[str], signature: dict[str, Any], constants: Any, attributes: Any) -> KernelSignature:
        values = {names[path[0]]: value for path, value in constants if len(path) == 1}
        return cls(
            {name: str(kind) for name, kind in signature.items() if kind != "constexpr"},
            {n: v["constexpr"] if isinstance(v, dict) and "constexpr" in v else v for n, v in values.items()},
            tuple(names[path[0]] for path, attrs in attributes if ["tt.divisibility", 16] in attrs),
        )


@dataclass(frozen=True)
class CompileRequest:
    """What a launch would have compiled."""

    function: Any  # the JITFunction
    key: str  # Triton's own cache key: types, alignment, constexprs and options
    specialization: str  # Triton's JSON of all that

    @property
    def options(self) -> dict[str, Any]:
        """Options of the compiler, with Triton's defaults: num_warps, enable_fp_fusion, ..."""
        return json.loads(self.specialization)["options"]

    def compile(self) -> Any:
        """The CompiledKernel, from Triton's cache directory where it is there already."""
        return self.function.preload(self.specialization)


@contextmanager
def compile_requests(note: Callable[[CompileRequest], None]) -> Iterator[None]:
    """Tell a callback what launches inside want to have compiled, and compile nothing."""
    from triton import knobs

    def hook(*, key: str, fn: Any, compile: Any, **_: Any) -> bool:
        note(CompileRequest(fn.jit_function, key, compile["specialization_data"]))
        return True  # tells Triton that this launch needs no code

    stock, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, hook
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = stock


def kernel_id(function: Any, key: Any) -> str:
    """The name of what a launch has compiled, in any process; `key` is Triton's own of types, constants and options."""
    return hashlib.sha256(f"{function.cache_key} {key}".encode()).hexdigest()[:32]


def hash_ahead() -> threading.Thread:
    """Have Triton hash itself, as it does once a process before its first launch, while others import: 0.4 s (H200)."""

    def run() -> None:
        with suppress(Exception):  # not installed, or a release that hashes otherwise: the first launch waits for it
            from triton.runtime.cache import triton_key

            triton_key()

    thread = threading.Thread(target=run, name="retrograd.hash_ahead", daemon=True)
    thread.start()
    return thread


def is_built(source: Any, target: Any, options: Any) -> bool:
    """Whether Triton's cache on disk has a kernel; arguments as of `build_kernel`.

    What Triton reads of itself for its keys, 0.4 s, is known to processes that are forked afterwards.
    """
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler.compiler import get_cache_key, make_backend
    from triton.runtime.cache import get_cache_manager

    key = get_cache_key(source, make_backend(target), options, env_vars=get_cache_invalidating_env_vars())
    files = get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(f"{source.name[:150]}.json")
    return bool(files)


def build_kernel(function: Any, source: Any, target: Any, options: Any) -> None:
    """Compile a kernel into Triton's cache on disk, and the C of its launcher, which Triton has up to 3.6.

    Args:
        function: the JITFunction.
        source, target, options: what Triton's compiler is given: ASTSource, GPUTarget and options of the backend.
    """
    compiled = function.compile(source, target=target, options=options.__dict__)
    if target.backend == "cuda":
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(source, compiled.metadata)


@contextmanager
def absent_gpu(gpu: GpuDescription) -> Iterator[None]:
    """Make a driver for a GPU Triton's active one, under a device name of its own so that no cache is shared.

    Raises:
        UnsupportedVersionError: this Triton asks its driver for something else.
    """
    require(COMPILE)
    with _active_driver(gpu):
        yield


def of_dtype(value: Any) -> Any:
    """An aligned tensor for a torch dtype, anything else as it is."""
    from triton.runtime.jit import MockTensor

    return MockTensor.wrap_dtype(value)


# The line of a JITFunction's `def` or first decorator, as Triton counts.
first_line: Callable[[Any], int] = attrgetter("starting_line_number")


@contextmanager
def _active_driver(gpu: GpuDescription) -> Iterator[None]:
    from triton.runtime import driver as holder

    previous: Any = holder._active
    holder.set_active(_driver(gpu, f"dry:{gpu.name}:{next(_LABELS)}"))
    try:
        yield
    finally:
        holder.set_active(previous)


def _driver(gpu: GpuDescription, device: str) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class DryDriver(DriverBase):
        """Answers which GPU it is and can do nothing else."""

        launcher_cls = None
        utils = SimpleNamespace(get_device_properties=lambda device=None: gpu.properties)

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> Any:
            return GPUTarget(gpu.backend, gpu.arch, gpu.warp_size)

        def get_active_torch_device(self) -> Any:
            import torch

            return torch.device("cpu")

        def get_device_capability(self, device: Any = None) -> tuple[int, int]:
            return divmod(gpu.arch, 10) if isinstance(gpu.arch, int) else (0, 0)

        def get_current_device(self) -> str:
            return device

        def get_current_stream(self, device: Any = None) -> int:
            return 0

        def get_device_interface(self) -> None:
            return None

        def get_benchmarker(self) -> Any:
            raise RetrogradError("a kernel asked for a benchmark (autotuning?), which needs the GPU it is compiled for")

    return DryDriver()


PROBE_GPU = GpuDescription("probe", "cuda", 90, 32, 132, 232448, 65536)


def _probe(x_ptr: Any, n: Any, m: Any, N: Any) -> None:
    """What the self-test asks for; it is not compiled."""


@part(
    "triton.compile",
    "compiles kernels for GPUs that are not there",
    "nothing is compiled; `retrograd codegen --run` reads what a GPU of this machine has loaded",
    names=(
        "driver._active", "DriverBase", "GPUTarget", "jit_cache_hook", "preload", "MockTensor.wrap_dtype",
        "runtime.cache.triton_key",
    ),
    refuses=True,
)  # fmt: skip
def COMPILE() -> str:
    import torch
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    _probe.__annotations__.clear()
    _probe.__annotations__["N"] = tl.constexpr
    requests: list[CompileRequest] = []
    kernel = JITFunction(_probe)
    with _active_driver(PROBE_GPU), compile_requests(requests.append):
        kernel.run(of_dtype(torch.bfloat16), 48, 7, 8, grid=(1,), warmup=True, num_warps=2)
    (request,) = requests
    signature = KernelSignature.of_request(kernel, request.specialization)
    expected = KernelSignature({"x_ptr": "*bf16", "n": "i32", "m": "i32"}, {"N": 8}, ("x_ptr", "n"))
    if signature != expected:
        return f"a kernel's request reads as {signature}"
    if json.loads(request.specialization)["options"]["num_warps"] != 2:
        return "a kernel's request has other options than its launch"
    if first_line(kernel) != _probe.__code__.co_firstlineno:
        return f"a kernel of line {_probe.__code__.co_firstlineno} begins at {first_line(kernel)}"
    return ""
