"""Compile a shipped CUDA C++ source with NVRTC, the compiler that PyTorch's CUDA wheels bring along.

The machine code lies in the user's cache under a hash of all it depends on: source, options, compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from retrograd.errors import NativeBuildError
from retrograd.runtime import disk_cache

_MAJORS = (13, 12)
_ERROR_LINES = 12


@cache
def compile_cubin(source: Path, options: tuple[str, ...], headers: tuple[Path, ...] = ()) -> bytes:
    """The machine code of `source`, from the cache if it is there.

    Args:
        source: a CUDA C++ file.
        options: for NVRTC; `--gpu-architecture=sm_90` and the like among them.
        headers: files that it may include, by their names without a folder.

    Raises:
        NativeBuildError: there is no NVRTC, or it refuses the source.
    """
    library = _library()
    text, included = source.read_text(), {path.name: path.read_text() for path in headers}
    facts = [text, *included.values(), *options, ".".join(map(str, version()))]
    key = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:20]
    kept = disk_cache.folder("cuda") / f"{source.stem}-{key}.cubin"
    if kept.exists():
        return kept.read_bytes()
    cubin = _compile(library, text, source.name, options, included)
    with disk_cache.replacing(kept) as path:
        path.write_bytes(cubin)
    return cubin


@cache
def is_there() -> bool:
    """Whether an NVRTC can be loaded."""
    try:
        _library()
    except NativeBuildError:
        return False
    return True


@cache
def version() -> tuple[int, int]:
    """Of NVRTC, as CUDA counts.

    Raises:
        NativeBuildError: there is no NVRTC.
    """
    major, minor = ctypes.c_int(), ctypes.c_int()
    _library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


@cache
def _library() -> ctypes.CDLL:
    tried = []
    for name in _candidates():
        try:
            # NVRTC opens its builtins by name alone, which finds those of a wheel only if they are loaded.
            for builtins in Path(name).parent.glob("libnvrtc-builtins.so*") if "/" in name else ():
                ctypes.CDLL(str(builtins))
            library = ctypes.CDLL(name)
        except OSError as error:
            tried.append(f"{name}: {error}")
            continue
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return library
    reasons = "\n".join(tried[:_ERROR_LINES])
    major = _majors()[0]
    package = "nvidia-cuda-nvrtc" if major >= 13 else f"nvidia-cuda-nvrtc-cu{major}"
    raise NativeBuildError(
        f"no NVRTC found (libnvrtc.so, CUDA's run-time compiler); run: pip install {package}, or set CUDA_HOME to a "
        f"CUDA toolkit.\n{reasons}"
    )


def _candidates() -> Iterator[str]:
    """Files and names to load: the wheels beside PyTorch, a CUDA toolkit, the system's loader."""
    for major in _majors():
        spec = importlib.util.find_spec("nvidia")
        for folder in list(spec.submodule_search_locations or []) if spec is not None else []:
            yield from sorted(map(str, Path(folder).glob(f"*/lib/libnvrtc.so.{major}*")), key=len)
    # A second to import, and asked only where no wheel brought NVRTC.
    from torch.utils.cpp_extension import CUDA_HOME

    for major in _majors() if CUDA_HOME is not None else ():
        for inner in ("lib64", "lib"):
            yield from sorted(map(str, Path(str(CUDA_HOME), inner).glob(f"libnvrtc.so.{major}*")), key=len)
    for major in _majors():
        yield f"libnvrtc.so.{major}"


def _majors() -> tuple[int, ...]:
    """Versions of CUDA, the one of PyTorch first: its driver can load what its compiler makes."""
    import torch

    major = re.match(r"\d+", torch.version.cuda or "")
    mine = int(major.group()) if major else _MAJORS[0]
    return (mine, *(major for major in _MAJORS if major != mine))


def _compile(library: ctypes.CDLL, text: str, name: str, options: tuple[str, ...], headers: Mapping[str, str]) -> bytes:
    """Headers are texts by the names that they are included by."""
    program = ctypes.c_void_p()
    strings = ctypes.c_char_p * len(headers)
    texts, names = (strings(*(each.encode() for each in some)) for some in (headers.values(), headers))
    source = text.encode(), name.encode(), len(headers), texts, names
    _check(library, library.nvrtcCreateProgram(ctypes.byref(program), *source))
    try:
        flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = library.nvrtcCompileProgram(program, len(options), flags)
        if status:
            log = "\n".join(_log(library, program).strip().splitlines()[:_ERROR_LINES])
            raise NativeBuildError(
                f"{name} does not compile with NVRTC {'.'.join(map(str, version()))}: "
                f"{library.nvrtcGetErrorString(status).decode()}.\noptions: {' '.join(options)}\n{log}"
            )
        size = ctypes.c_size_t()
        _check(library, library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        cubin = ctypes.create_string_buffer(size.value)
        _check(library, library.nvrtcGetCUBIN(program, cubin))
        return cubin.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _log(library: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value + 1)
    library.nvrtcGetProgramLog(program, log)
    return log.value.decode(errors="replace")


def _check(library: ctypes.CDLL, status: int) -> None:
    if status:
        raise NativeBuildError(f"NVRTC fails: {library.nvrtcGetErrorString(status).decode()}")
