"""Load machine code and launch it, with clusters or without, through the CUDA driver's C interface.

Structs and numbers follow cuda.h of CUDA 12.0, which later versions only add to.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from retrograd import config

_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_PDL = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
PDL_FROM_ARCH = 90
_PDL_FROM_DRIVER = 12030  # the first that captures such launches into graphs
_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_NON_PORTABLE_CLUSTER = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_PORTABLE_CLUSTER = 8


class _Attribute(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_uint * 16),  # a union of 64 bytes
    )


class _Config(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


@dataclass(frozen=True)
class LoadedKernel:
    """A function loaded on one device, to be launched as clusters along the grid's first dimension."""

    function: int
    device_index: int
    cluster: int
    threads: int
    shared_bytes: int
    max_clusters: int  # resident at a time
    pdl: bool

    def launch(self, clusters: int, args: tuple[Any, ...], *, rows: int = 1) -> None:
        """Run `rows` times `clusters` clusters on the current stream; the device has to be the current one.

        Args:
            clusters: 1 or more.
            args: ctypes values in the order of the kernel's parameters.
            rows: the grid's second dimension, up to 65535.
        """
        stream = torch.cuda.current_stream(self.device_index).cuda_stream
        how = _config(clusters * self.cluster, rows, self.threads, self.shared_bytes, self.cluster, stream, self.pdl)
        addresses = (ctypes.c_void_p * len(args))(*(ctypes.addressof(arg) for arg in args))
        _check(_library().cuLaunchKernelEx(ctypes.byref(how), ctypes.c_void_p(self.function), addresses, None))


def load(
    cubin: bytes, name: str, device_index: int, *, cluster: int, threads: int, shared_bytes: int, pdl: bool = False
) -> LoadedKernel:
    """The kernel `name` of `cubin` on a device, which has to be the current one.

    Args:
        cubin: machine code; it stays loaded.
        name: as declared extern "C".
        device_index: the device.
        cluster: CTAs in a cluster.
        threads: in a CTA.
        shared_bytes: of dynamic shared memory in a CTA.
        pdl: launched while the kernel ahead of it ends, for which it waits (`griddepcontrol.wait`); see `has_pdl`.

    Raises:
        RuntimeError: the driver refuses it, or no cluster of that size fits on the device.
    """
    driver = _library()
    _enter_context(device_index)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver.cuModuleLoadData(ctypes.byref(module), cubin))
    _check(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
    _check(driver.cuFuncSetAttribute(function, _DYNAMIC_SHARED_BYTES, shared_bytes))
    if cluster > _PORTABLE_CLUSTER:
        _check(driver.cuFuncSetAttribute(function, _NON_PORTABLE_CLUSTER, 1))
    clusters = ctypes.c_int()
    if cluster == 1:
        bound = ctypes.byref(clusters), function, ctypes.c_int(threads), ctypes.c_size_t(shared_bytes)
        _check(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(*bound))
        clusters.value *= torch.cuda.get_device_properties(device_index).multi_processor_count
    else:
        how = _config(cluster, 1, threads, shared_bytes, cluster, 0)
        _check(driver.cuOccupancyMaxActiveClusters(ctypes.byref(clusters), function, ctypes.byref(how)))
    if clusters.value < 1:
        raise RuntimeError(
            f"no cluster of {cluster} CTAs with {threads} threads and {shared_bytes} bytes of shared memory fits on "
            f"cuda:{device_index}; ask for a smaller one"
        )
    return LoadedKernel(function.value or 0, device_index, cluster, threads, shared_bytes, clusters.value, pdl)


@cache
def arch_of(device_index: int) -> int:
    """The compute capability of a GPU times ten."""
    major, minor = torch.cuda.get_device_capability(device_index)
    return 10 * major + minor


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, copied if it is not contiguous or does not start at a multiple of 16 bytes."""
    if tensor.is_contiguous() and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def has_pdl(arch: int) -> bool:
    """Whether programmatic dependent launch works on compute capability arch / 10, in captured graphs too.

    Raises:
        UsageError: RETROGRAD_PDL, by which it is turned off, is something unknown.
    """
    if not config.pdl() or arch < PDL_FROM_ARCH:
        return False
    version = ctypes.c_int()
    _check(_library().cuDriverGetVersion(ctypes.byref(version)))
    return version.value >= _PDL_FROM_DRIVER


def _config(
    ctas: int, rows: int, threads: int, shared_bytes: int, cluster: int, stream: int, pdl: bool = False
) -> _Config:
    attributes = (_Attribute * 2)()  # the struct keeps them alive
    count = 0
    if cluster > 1:  # GPUs before sm_90 know no clusters and refuse the attribute
        attributes[count].id = _CLUSTER_DIMENSION
        attributes[count].value[:3] = cluster, 1, 1
        count += 1
    if pdl:
        attributes[count].id, attributes[count].value[0] = _PDL, 1
        count += 1
    return _Config(ctas, rows, 1, threads, 1, 1, shared_bytes, stream, attributes, count)


def _enter_context(device_index: int) -> None:
    """Make PyTorch's context current on this thread if none is: a thread that has launched nothing yet has none."""
    driver = _library()
    current = ctypes.c_void_p()
    _check(driver.cuCtxGetCurrent(ctypes.byref(current)))
    if not current.value:
        _check(driver.cuCtxSetCurrent(_primary_context(device_index)))


@cache
def _primary_context(device_index: int) -> ctypes.c_void_p:
    driver = _library()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _check(driver.cuDeviceGet(ctypes.byref(device), device_index))
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    return context


@cache
def _library() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(
            f"the CUDA driver does not load: {error}; install NVIDIA's driver (libcuda.so.1), or use impl='torch'"
        ) from error
    _check(driver.cuInit(0), driver)
    return driver


def _check(status: int, driver: ctypes.CDLL | None = None) -> None:
    if status:
        reason = ctypes.c_char_p()
        (driver or _library()).cuGetErrorString(status, ctypes.byref(reason))
        raise RuntimeError(f"the CUDA driver fails with {status}: {(reason.value or b'unknown error').decode()}")
