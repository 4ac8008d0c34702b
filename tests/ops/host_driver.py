"""Hold what C++ passes to the driver to what Triton passes: run by tests of C++ paths, where Triton must not interpret.

A library of our own stands for libcuda.so.1, so that Triton's own launcher runs without a GPU: kernels are compiled for
sm_90, loaded nowhere and launched into a function that writes down what it is handed. The first call of an op goes
through Triton, the second of a norm or the third of deformable attention through C++; both lists have to be the same
but for the addresses of results.

    python host_driver.py FOLDER norm|msda LIBRARY    a folder for the stand-in, whose built extension
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(sys.argv[1])
STUB = r"""
#include <stdint.h>
#include <string.h>
typedef void *P;
typedef struct { int id; char pad[4]; int value; char rest[60]; } Attribute;
typedef struct { unsigned gx, gy, gz, bx, by, bz, shared; P stream; Attribute *attrs; unsigned n; } Config;
typedef int (*Sink)(P f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                    P stream, P *params, P extra);
static Sink sink;
static uint64_t loaded;
void set_sink(Sink given) { sink = given; }
int cuLaunchKernelEx(Config *c, P f, P *params, P extra) {
  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, told in place of what is never given.
  if (c->n > 1 || (c->n == 1 && (c->attrs->id != 6 || c->attrs->value != 1))) return 1;
  return sink(f, c->gx, c->gy, c->gz, c->bx, c->by, c->bz, c->shared, 0, params, (P)(uint64_t)c->n);
}
int cuCtxGetCurrent(P *c) { *c = (P)1; return 0; }
int cuCtxSetCurrent(P c) { return 0; }
int cuCtxGetDevice(int *d) { *d = 0; return 0; }  // from Triton 3.9 on, as the two below
int cuModuleUnload(P m) { return 0; }
int cuStreamIsCapturing(P s, int *v) { *v = 0; return 0; }
int cuCtxGetLimit(uint64_t *v, int l) { *v = 0; return 0; }
int cuCtxSetLimit(int l, uint64_t v) { return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = 232448; return 0; }
int cuDevicePrimaryCtxRetain(P *c, int d) { *c = (P)1; return 0; }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuFuncGetAttribute(int *v, int a, P f) { *v = a == 0 ? 1024 : 0; return 0; }
int cuFuncSetAttribute(P f, int a, int v) { return 0; }
int cuFuncSetCacheConfig(P f, int c) { return 0; }
int cuGetErrorString(int e, const char **s) { *s = "stand-in"; return 0; }
int cuModuleGetFunction(P *f, P m, const char *n) { *f = m; return 0; }
int cuModuleLoadData(P *m, const void *i) { *m = (P)(++loaded); return 0; }
int cuPointerGetAttribute(uint64_t *v, int a, uint64_t p) { *v = p; return 0; }
int cuOccupancyMaxActiveClusters(int *v, P f, P c) { *v = 1; return 0; }
int cuTensorMapEncodeTiled() { return 1; }
int cuTensorMapEncodeIm2col() { return 1; }
"""
(FOLDER / "stub.c").write_text(STUB)
library = FOLDER / "libcuda.so.1"
subprocess.run(
    ["gcc", "-w", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", FOLDER / "stub.c", "-o", library], check=True
)
os.environ |= {"TRITON_LIBCUDA_PATH": str(FOLDER), "TRITON_CACHE_DIR": str(FOLDER / "triton")}
stub = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)

import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.driver import DriverBase  # noqa: E402
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils  # noqa: E402

from retrograd import ops  # noqa: E402
from retrograd.codegen import target_named  # noqa: E402
from retrograd.compat import triton_relaunch  # noqa: E402
from retrograd.ops.msda import host as msda_host  # noqa: E402
from retrograd.ops.msda.triton import backward as msda_backward  # noqa: E402
from retrograd.ops.msda.triton import forward as msda_forward  # noqa: E402
from retrograd.ops.msda.triton import launches as msda_launches  # noqa: E402
from retrograd.ops.msda.triton import points as msda_points  # noqa: E402
from retrograd.ops.norm import host as norm_host  # noqa: E402
from retrograd.ops.norm.triton import backward, backward_few, backward_launch, forward, launch  # noqa: E402
from retrograd.runtime.triton.planned_gpu import planning  # noqa: E402

BYTES = {"i32": 4, "i64": 8, "fp32": 4, "fp64": 8, "fp16": 2, "bf16": 2, "i16": 2, "i8": 1}
SINK = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)  # fmt: skip
KERNELS = (
    forward.norm_fwd_kernel, forward.norm_fwd_kernel_looped, backward.norm_bwd_kernel,
    backward.norm_bwd_kernel_finalize, backward_few.norm_bwd_kernel_few, msda_forward.msda_fwd_kernel,
    msda_forward.msda_fwd_kernel_few, msda_backward.msda_bwd_kernel, msda_points.msda_points_kernel,
    msda_points.msda_points_bwd_kernel,
)  # fmt: skip
launches: list[tuple[Any, ...]] = []


class Driver(DriverBase):
    """Triton's CUDA driver with a GPU that is not there."""

    def __init__(self) -> None:
        self.utils, self.launcher_cls = CudaUtils(), CudaLauncher

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return 9, 0

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_device_interface(self) -> None:
        return None

    def get_benchmarker(self) -> Any:
        raise NotImplementedError


def compiled_of(function: int) -> Any:
    """The kernel that has been loaded as `function`."""
    held = [k for kernel in KERNELS for cache in kernel.device_caches.values() for k in cache[0].values()]
    return next(kernel for kernel in held if kernel.function == function)


def sink(function: int, *rest: Any) -> int:
    """Write down names and bytes of the parameters; of addresses whether they are null and aligned."""
    shape, params, pdl = rest[:7], rest[8], bool(rest[9])
    kinds = [(n, k) for n, k in compiled_of(function).src.signature.items() if k != "constexpr"]
    kinds += [("global_scratch", "*"), ("profile_scratch", "*")]
    values = []
    for place, (name, kind) in enumerate(kinds):
        size = 8 if kind.startswith("*") else BYTES[kind]
        data = ctypes.string_at(params[place], size)
        values.append((name, kind, data if size != 8 or name in FIXED else any(data)))
    launches.append((function, shape, pdl, tuple(values)))
    return 0


# Addresses that are the same in both calls.
NAMES = (
    "x",
    "residual",
    "weight",
    "bias",
    "value",
    "locations",
    "weights",
    "references",
    "shapes",
    "offsets",
    "logits",
)
FIXED = {f"{name}{end}" for name in NAMES for end in ("", "_ptr")}
MADE = {"locations_ptr", "weights_ptr"}  # in the fused form's backward
keep_alive = SINK(sink)
stub.set_sink(keep_alive)
triton.runtime.driver.set_active(Driver())
launch.relaunchable = lambda *tensors: all(t is None or t.data_ptr() % 16 == 0 for t in tensors)
msda_launches.relaunchable = launch.relaunchable


def refuse(*_: Any) -> None:
    raise AssertionError("the second call went through Python")


host = {"norm": norm_host, "msda": msda_host}[sys.argv[2]]
module = host.path.module = host.path.library.load(Path(sys.argv[3]))
module.use_cpu(ctypes.cast(stub.cuLaunchKernelEx, ctypes.c_void_p).value)
host.recipes.connect(module)


def compare_norm(norm: str, shape: tuple[int, ...], dtype: torch.dtype, given: str, **options: Any) -> int:
    """Both paths of one call, forward and backward; the number of launches."""
    vector = shape[-2:] if len(shape) > 2 else shape[-1:]
    sizes = {"x": shape, "weight": vector, "bias": vector, "residual": shape}
    args = {name: torch.randn(sizes[name]).to(dtype).requires_grad_() for name in ("x", *given.split())}
    grad, seen = torch.randn(shape).to(dtype), []
    for entry in (None, module.apply):
        host.path.entry = entry
        launches.clear()
        out = getattr(ops, norm)(**args, impl="triton", **options)
        out = out[0] if isinstance(out, tuple) else out
        torch.autograd.grad(out, list(args.values()), grad.to(out.dtype))
        seen.append(list(launches))
    assert seen[0] == seen[1], "\n".join(map(str, seen))
    assert any(name in FIXED for *_, params in seen[0] for name, _, _ in params)
    # All begin while the kernel ahead of them ends.
    assert all(pdl for _, _, pdl, _ in seen[0])
    return len(seen[0])


def compare_msda(dtype: torch.dtype, beside: torch.dtype, fused: bool = False, **options: Any) -> int:
    """Likewise; the second call tells the launches of the backward."""
    shapes, kind = [(7, 9), (5, 4)], dict(dtype=beside)
    leaves = [torch.randn(2, 83, 3, 8, dtype=dtype), torch.rand(2, 11, 3, 2, 4, 2, **kind)]
    leaves += [torch.rand(2, 11, 3, 8 if fused else 2, *([] if fused else [4]), **kind)]
    leaves += [torch.rand(2, 11, 2, 4, **kind)] if fused else []  # boxes
    value, locations, weights, *references = [leaf.requires_grad_() for leaf in leaves]
    op = ops.ms_deform_attn_fused if fused else ops.ms_deform_attn
    grad, seen = torch.randn(2, 11, 3, 8, dtype=dtype), []
    if fused:
        FIXED.difference_update(MADE)
    for entry in (None, module.apply, module.apply, module.apply):
        host.path.entry = entry
        if len(seen) == 3:
            msda_launches.relaunch = refuse
        launches.clear()
        out = op(value, shapes, *references, locations, weights, impl="triton", **options)
        torch.autograd.grad(out, [value, *references, locations, weights], grad)
        seen.append(list(launches))
    msda_launches.relaunch = stock_relaunch
    FIXED.update(MADE)
    assert seen[0] == seen[3], "\n".join(map(str, (seen[0], seen[3])))
    return len(seen[0])


stock_relaunch = msda_launches.relaunch
triton_relaunch.current_raw_stream = lambda _: 0
with planning(target_named("sm_90")):
    if host is norm_host:
        launch.relaunch = backward_launch.relaunch = refuse
        counts = (
            compare_norm("rms_norm", (1024, 256), torch.bfloat16, "weight"),
            compare_norm("rms_norm", (3, 5, 100), torch.float32, "residual", eps=1e-3),
            compare_norm(
                "layer_norm", (64, 4, 64), torch.float16, "weight bias residual", weight_offset=1.0, prenorm=True
            ),
            compare_norm("layer_norm", (1, 72), torch.float32, "bias", out_dtype=torch.bfloat16, dw_parts=3),
        )
    else:
        counts = (
            compare_msda(torch.float32, torch.float32),
            compare_msda(torch.bfloat16, torch.float32, padding_mode="border", align_corners=True),
            compare_msda(torch.float16, torch.float16, fused=True),
            compare_msda(torch.float32, torch.float32, fused=True),
        )
sys.stdout.write(" ".join(map(str, counts)))
