"""Repairs of Triton's interpreter that this library relies on: honest bfloat16 on CPU tensors.

The stock interpreter keeps bfloat16 as uint16. It truncates float32 on the way to bfloat16 where a GPU rounds
to nearest even, and it adds and multiplies bfloat16 values as if they were integers. `prepare` mends the casts
and turns bfloat16 arithmetic into an error. Nothing happens at import; kernels are launched elsewhere.
"""

from __future__ import annotations

from typing import Any

from retrograd import config
from retrograd.compat.triton_interpreter.fast_paths import quicken
from retrograd.compat.triton_interpreter.operation_hooks import listen
from retrograd.errors import InterpreterError, RetrogradError

_MARK = "_retrograd_bf16"
_MODULE_NAMES = (
    "_patch_builtin",
    "_patch_attr",
    "_patch_lang",
    "_LangPatchScope",
    "_convert_float",
    "_get_np_dtype",
    "TensorHandle",
    "InterpreterBuilder",
    "ReduceOps",
    "ScanOps",
    "interpreter_semantic",
)
_SEMANTIC_NAMES = ("broadcast_impl_value", "cast", "binary_op_sanitize_overflow_impl")
_BUILDER_NAMES = (
    "cast_impl",
    "create_fp_to_fp",
    "binary_op",
    "create_maxnumf",
    "create_minnumf",
    "unary_op",
    "create_fma",
    "create_clampf",
    "create_dot",
)


def prepare() -> None:
    """Patch `triton.runtime.interpreter` once per process if this process interprets kernels; else do nothing.

    Raises:
        RetrogradError: Triton was imported before TRITON_INTERPRET was set.
        InterpreterError: this version of Triton lacks a private name that the patch replaces, or Triton before 3.7
            meets NumPy 2.4 or later.

    Numerics: float32 to bfloat16 rounds to nearest even, NaN becomes 0x7fc0; float64 goes through float32 first
    (two roundings); bfloat16 to float32 is exact.
    """
    if not config.interpreting():
        return
    import triton
    import triton.language as tl
    from triton.runtime import interpreter as module

    if getattr(module, _MARK, False):
        return
    if not isinstance(tl.sum, getattr(module, "InterpretedFunction", ())):
        raise RetrogradError(
            "TRITON_INTERPRET=1 was set after triton had been imported, so Triton's own functions are already "
            "bound to the compiler; set it in the environment before the first `import triton`"
        )
    _refuse_broken_loops(triton.__version__)
    _require(module, _MODULE_NAMES, "triton.runtime.interpreter", triton.__version__)
    _require(module.InterpreterBuilder, _BUILDER_NAMES, "InterpreterBuilder", triton.__version__)
    _require(module.interpreter_semantic, _SEMANTIC_NAMES, "interpreter_semantic", triton.__version__)
    _require(module.ReduceOps, ("apply_impl",), "ReduceOps", triton.__version__)
    _require(module.ScanOps, ("apply_impl",), "ScanOps", triton.__version__)
    _patch_casts(module, tl)
    _patch_arithmetic(module, tl)
    quicken(module, tl)
    _remember_builtins(module, tl)
    listen(module, tl)
    setattr(module, _MARK, True)


def prepare_or_refuse() -> None:
    """`prepare`, but what is wrong with the interpreter is raised by the first kernel that is launched in it.

    For callers that do not know whether there will be one.
    """
    try:
        prepare()
    except InterpreterError as error:
        from triton.runtime import interpreter as module

        said = str(error)

        def refuse(*_args: Any, **_kwargs: Any) -> None:
            raise InterpreterError(said)

        module.GridExecutor.__call__ = refuse


def active() -> bool:
    """Whether `prepare` has patched the interpreter of this process."""
    if not config.interpreting():
        return False
    import sys

    return bool(getattr(sys.modules.get("triton.runtime.interpreter"), _MARK, False))


def _require(owner: Any, names: tuple[str, ...], owner_name: str, version: str) -> None:
    gone = [name for name in names if not hasattr(owner, name)]
    if gone:
        raise InterpreterError(
            f"Triton {version} has no {', '.join(gone)} in {owner_name}, which the repair of its "
            "interpreter replaces; use a Triton version that retrograd supports, or report this version"
        )


def _refuse_broken_loops(triton_version: str) -> None:
    """Triton 3.6 turns a loop bound into an int by way of a 1-element array, which NumPy 2.4 no longer allows."""
    import numpy as np

    old_triton = tuple(int(part) for part in triton_version.split(".")[:2]) < (3, 7)
    if old_triton and tuple(int(part) for part in np.__version__.split(".")[:2]) >= (2, 4):
        raise InterpreterError(
            f"Triton {triton_version}'s interpreter cannot loop to a run-time bound with NumPy {np.__version__}; "
            "install triton>=3.7 or 'numpy<2.4', or run on a GPU without TRITON_INTERPRET"
        )


def _widen(bits: Any) -> Any:
    """The float32 values of bfloat16 bit patterns (uint16, any shape)."""
    import numpy as np

    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _narrow(values: Any) -> Any:
    """The bfloat16 bit patterns (uint16) nearest to `values`, ties to even."""
    import numpy as np

    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(values, dtype=np.float32).reshape(np.shape(values))
    bits = values.view(np.uint32)
    # Half of the last kept place less one, plus the parity of that place: the carry runs into the exponent by
    # itself, so 1.99999 becomes 2.0 and the largest finite float32 becomes infinity.
    nearest = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), nearest).astype(np.uint16)


def _patch_casts(module: Any, tl: Any) -> None:
    stock_convert = module._convert_float
    stock_cast = module.InterpreterBuilder.cast_impl

    def convert_float(values: Any, src: Any, dst: Any, rounding_mode: Any) -> Any:
        toward_zero = getattr(rounding_mode, "name", "") == "RTZ"
        if dst == tl.bfloat16 and src in (tl.float32, tl.float64) and not toward_zero:
            return _narrow(values)
        if src == tl.bfloat16 and dst == tl.float32:
            return _widen(values)
        return stock_convert(values, src, dst, rounding_mode)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        src_scalar, dst_scalar = src.dtype.scalar, dst_type.scalar
        if tl.bfloat16 not in (src_scalar, dst_scalar) or src_scalar == dst_scalar:
            return stock_cast(self, src, dst_type)
        values = _widen(src.data) if src_scalar == tl.bfloat16 else src.data
        data = _narrow(values) if dst_scalar == tl.bfloat16 else values.astype(module._get_np_dtype(dst_scalar))
        return module.TensorHandle(data, dst_scalar)

    module._convert_float = convert_float
    module.InterpreterBuilder.cast_impl = cast_impl


def _patch_arithmetic(module: Any, tl: Any) -> None:
    import numpy as np

    builder = module.InterpreterBuilder

    def is_bf16(value: Any) -> bool:
        return getattr(getattr(value, "dtype", None), "scalar", None) == tl.bfloat16

    def guarded(stock: Any, operands: int, what: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = args[0] if args and isinstance(args[0], tuple) else args[:operands]
            if any(is_bf16(value) for value in given):
                detail = f" ({args[2].__name__})" if what == "a binary operation" and len(args) > 2 else ""
                raise TypeError(
                    f"{what}{detail} got a bfloat16 operand, which Triton's interpreter computes wrongly (it holds "
                    "bfloat16 as integers); cast to float32 right after the load: tl.load(...).to(tl.float32)"
                )
            return stock(self, *args, **kwargs)

        return method

    builder.binary_op = guarded(builder.binary_op, 2, "a binary operation")
    builder.unary_op = guarded(builder.unary_op, 1, "a unary operation")
    builder.create_fma = guarded(builder.create_fma, 3, "tl.fma")
    builder.create_clampf = guarded(builder.create_clampf, 3, "tl.clamp")
    builder.create_dot = guarded(builder.create_dot, 2, "tl.dot")
    # On a GPU the other operand wins over NaN, unless a kernel asks for NaN; the stock interpreter gives NaN.
    builder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
    builder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    module.ReduceOps.apply_impl = guarded(module.ReduceOps.apply_impl, 1, "a reduction")
    module.ScanOps.apply_impl = guarded(module.ScanOps.apply_impl, 1, "a scan")


def _remember_builtins(module: Any, tl: Any) -> None:
    """Look up once which names of the language are builtins, and replace them once a launch.

    The stock interpreter does both whenever a kernel calls a function, 31 times per launch of RMSNorm, which took half
    of the time of 7 x 48 elements.
    """
    import inspect

    # Here none of them is replaced yet.
    packages = (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base)
    names = {p: [name for name, member in inspect.getmembers(p) if tl.core.is_builtin(member)] for p in packages}
    stock = module._patch_builtin

    def patch_builtin(pkg: Any, builder: Any, scope: Any) -> None:
        if pkg not in names:
            return stock(pkg, builder, scope)
        for name in names[pkg]:
            member = getattr(pkg, name)
            if tl.core.is_builtin(member):  # not so inside a launch, where they are replaced already
                module._patch_attr(pkg, name, member, builder, scope)

    languages: dict[Any, list[Any]] = {}
    stock_lang = module._patch_lang

    def patch_lang(fn: Any) -> Any:
        if fn not in languages:
            languages[fn] = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        known = languages[fn]
        if known and not any(tl.core.is_builtin(language.arange) for language in known):
            return module._LangPatchScope()  # a function that a running kernel calls: all is replaced, nothing to undo
        return stock_lang(fn)

    module._patch_builtin, module._patch_lang = patch_builtin, patch_lang
