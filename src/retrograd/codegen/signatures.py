"""A kernel without its launcher: types and values of its arguments as a person writes them on a command line."""

from __future__ import annotations

import ast
import re
from typing import Any

from retrograd.codegen.compile import require_triton
from retrograd.core.loading import near
from retrograd.errors import UsageError

_FORM = "'x_ptr=*bf16, N=i32:16, eps=fp32, BLOCK=1024, num_warps=8'"
_TYPE = re.compile(r"(\*?)(bf16|fp16|fp32|fp64|fp8e5|fp8e4nv|i1|i8|i16|i32|i64|u8|u16|u32|u64|f16|f32|f64)(?::(\d+))?")
_DTYPES = {
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64", "f16": "float16", "f32": "float32",
    "f64": "float64", "fp8e5": "float8_e5m2", "fp8e4nv": "float8_e4m3fn", "i1": "bool", "i8": "int8", "i16": "int16",
    "i32": "int32", "i64": "int64", "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64",
}  # fmt: skip
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion")


def launch(kernel: Any, signature: str) -> None:
    """Launch `kernel` on one program with arguments as described; for the inside of `recording`.

    Args:
        kernel: a `@triton.jit` function, also under `@triton.autotune` and `@triton.heuristics`.
        signature: NAME=VALUE, comma separated. A type stands for an argument of it: "*bf16" a pointer at a multiple of
            16 bytes, "*bf16:1" one that is not, "i32" any integer, "i32:16" a multiple of 16, "fp32" a number. Any
            other value is taken as it is: 1024, 1e-6, True, None, "text", tl.float32.

    Raises:
        UsageError: an argument is missing, unknown or cannot be read.
    """
    names = list(kernel.arg_names)
    arguments = parse(signature)
    options = {name: arguments.pop(name) for name in _OPTIONS if name in arguments and name not in names}
    if unknown := [name for name in arguments if name not in names]:
        hint = near(unknown[0], names)
        raise UsageError(f"`--signature` has {unknown[0]!r}{hint}; arguments of the kernel are {', '.join(names)}")
    if missing := [name for name in needed(kernel) if name not in arguments]:
        raise UsageError(f"`--signature` lacks {', '.join(missing)}; expected every argument, such as {_FORM}")
    kernel[(1,)](
        **{name: _value(name, text) for name, text in arguments.items()},
        **{name: _literal(name, text) for name, text in options.items()},
    )


def needed(kernel: Any) -> list[str]:
    """Arguments that neither decorators nor defaults give."""
    supplied = _supplied(kernel)
    return [name for name in kernel.arg_names if name not in supplied]


def parse(signature: str) -> dict[str, str]:
    """NAME -> text of its value; UsageError for a word without one."""
    texts = {}
    for word in re.split(r",\s*(?=\w+\s*=)", signature.strip().rstrip(",")):
        name, equals, value = word.partition("=")
        if not equals or not name.strip().isidentifier() or not value.strip():
            raise UsageError(f"`--signature` has {word.strip()!r}, expected NAME=VALUE, comma separated: {_FORM}")
        texts[name.strip()] = value.strip()
    return texts


def _supplied(kernel: Any) -> set[str]:
    """Arguments that decorators or the kernel's own defaults give."""
    names: set[str] = set()
    while kernel is not None:
        configs = getattr(kernel, "configs", None) or ()
        names |= {name for config in configs for name in config.kwargs}
        names |= set(getattr(kernel, "values", {}) or {})
        parameters = getattr(kernel, "params", None) or ()
        names |= {parameter.name for parameter in parameters if parameter.has_default}
        inner = getattr(kernel, "fn", None)
        kernel = inner if hasattr(inner, "arg_names") else None
    return names


def _value(name: str, text: str) -> Any:
    kind = _TYPE.fullmatch(text)
    if kind is None:
        return _literal(name, text)
    pointer, dtype, multiple = kind.groups()
    if pointer:
        return _Pointer(_DTYPES[dtype], aligned=multiple is None or int(multiple) % 16 == 0)
    if dtype.startswith(("f", "bf")):
        return 0.5
    # Triton looks at values: 1 becomes a constant, a multiple of 16 may be loaded in vectors, a large one has 64 bits.
    large = 1 << 40 if dtype.endswith("64") else 0
    return large + (16 * 7 if multiple is not None and int(multiple) % 16 == 0 else 7)


def _literal(name: str, text: str) -> Any:
    if text.startswith("tl."):
        import triton.language as tl

        if hasattr(tl, text[3:]):
            return getattr(tl, text[3:])
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        raise UsageError(
            f"`--signature` has {name}={text}, expected a type such as *bf16, i32:16, fp32, or a value such as 1024, "
            "1e-6, True, None, 'text', tl.float32"
        ) from None


class _Pointer:
    """What Triton reads of a tensor: its dtype and its address."""

    def __init__(self, dtype: str, aligned: bool) -> None:
        import torch

        require_triton()
        self.dtype = getattr(torch, dtype)
        self._address = 1 << 20 if aligned else (1 << 20) + self.dtype.itemsize

    def data_ptr(self) -> int:
        return self._address

    def ptr_range(self) -> int:
        """Bytes behind the pointer, which decides on AMD whether offsets fit 32 bits."""
        return 0
