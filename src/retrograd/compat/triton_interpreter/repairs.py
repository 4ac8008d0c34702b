"""Repairs of Triton's interpreter: bfloat16, NaN, chained comparisons as a GPU has them, or an error in words.

The stock interpreter keeps bfloat16 as uint16. It truncates float32 on the way to bfloat16 where a GPU rounds
to nearest even, and it adds and multiplies bfloat16 values as if they were integers: casts are mended, arithmetic is an
error.
"""

from __future__ import annotations

import ast
from typing import Any

from retrograd.compat import versions
from retrograd.compat.triton_interpreter.patches import Patches


def repair(patches: Patches, module: Any, tl: Any) -> None:
    """Mend `triton.runtime.interpreter`.

    Numerics: float32 to bfloat16 rounds to nearest even, NaN becomes 0x7fc0; float64 goes through float32 first
    (two roundings); bfloat16 to float32 is exact.
    """
    _patch_casts(patches, module, tl)
    _patch_arithmetic(patches, module, tl)
    _patch_scaled_products(patches, module, tl)
    _refuse_chained_comparisons(patches, module)
    module.InterpretedFunction.rewritten_fn.clear()  # what was launched before may have chained comparisons


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


def _patch_casts(patches: Patches, module: Any, tl: Any) -> None:
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

    patches.set(module, "_convert_float", convert_float)
    patches.set(module.InterpreterBuilder, "cast_impl", cast_impl)


def _patch_arithmetic(patches: Patches, module: Any, tl: Any) -> None:
    import numpy as np

    builder = module.InterpreterBuilder

    def is_bf16(value: Any) -> bool:
        return getattr(getattr(value, "dtype", None), "scalar", None) == tl.bfloat16

    def refusing(stock: Any, operands: int, operation: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            values = args[0] if args and isinstance(args[0], tuple) else args[:operands]
            if any(is_bf16(value) for value in values):
                detail = f" ({args[2].__name__})" if operation == "a binary operation" and len(args) > 2 else ""
                raise TypeError(
                    f"{operation}{detail} got a bfloat16 operand, which Triton's interpreter computes wrongly (it "
                    "holds bfloat16 as integers); cast to float32 right after the load: tl.load(...).to(tl.float32)"
                )
            return stock(self, *args, **kwargs)

        return method

    for owner, name, operands, operation in (
        (builder, "binary_op", 2, "a binary operation"),
        (builder, "unary_op", 1, "a unary operation"),
        (builder, "create_fma", 3, "tl.fma"),
        (builder, "create_clampf", 3, "tl.clamp"),
        (builder, "create_dot", 2, "tl.dot"),
        (module.ReduceOps, "apply_impl", 1, "a reduction"),
        (module.ScanOps, "apply_impl", 1, "a scan"),
    ):
        patches.set(owner, name, refusing(getattr(owner, name), operands, operation))
    # On a GPU the other operand wins over NaN, unless a kernel asks for NaN; Triton before 3.8 gives NaN.
    patches.set(builder, "create_minnumf", lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin))
    patches.set(builder, "create_maxnumf", lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax))


def _patch_scaled_products(patches: Patches, module: Any, tl: Any) -> None:
    """Operands of `tl.dot_scaled` in bfloat16: Triton 3.8 and 3.9 take them through float16, infinite from 65504 on."""
    if not hasattr(module, "_mxfp_value_handle_to_float32"):
        return
    stock = module._mxfp_value_handle_to_float32

    def to_float32(handle: Any) -> Any:
        return _widen(handle.data) if handle.dtype.scalar == tl.bfloat16 else stock(handle)

    patches.set(module, "_mxfp_value_handle_to_float32", to_float32)


def _refuse_chained_comparisons(patches: Patches, module: Any) -> None:
    """Before Triton 3.9 `a < b < c` is computed as `b < c` in the interpreter, and no GPU compiles it."""
    rewriter = module.FunctionRewriter
    if hasattr(rewriter.ast_transformer, "visit_Compare"):
        return
    stock = rewriter._transform_ast

    def refuse(place: str) -> None:
        raise NotImplementedError(
            f"the comparison at {place} is chained (a < b < c), which this Triton neither interprets nor compiles; "
            "write (a < b) & (b < c)"
        )

    class Refusals(ast.NodeTransformer):
        def __init__(self, file: str) -> None:
            self._file = file

        def visit_Compare(self, node: ast.Compare) -> ast.AST:
            self.generic_visit(node)
            if len(node.ops) == 1:
                return node
            # Where it is evaluated: a branch of a constexpr that is not taken is not compiled either.
            name, place = (
                ast.Name("_refuse_chained_comparison", ast.Load()),
                ast.Constant(f"{self._file}:{node.lineno}"),
            )
            return ast.copy_location(ast.Call(name, [place], []), node)

    def transform(self: Any, source: str) -> ast.Module:
        return ast.fix_missing_locations(Refusals(self.filename).visit(stock(self, source)))

    # Kernels find in their own globals what stands in those of the interpreter.
    module.__dict__.setdefault("_refuse_chained_comparison", refuse)
    patches.set(rewriter, "_transform_ast", transform)


def refuse_broken_loops(triton_version: str) -> str:
    """Why loops cannot be interpreted: Triton 3.6 makes ints of 1-element arrays, which NumPy 2.4 refuses."""
    import numpy as np

    if versions.minor(triton_version) < (3, 7) and versions.minor(np.__version__) >= (2, 4):
        return (
            f"Triton {triton_version}'s interpreter cannot loop to a run-time bound with NumPy {np.__version__}; "
            "install triton>=3.7 or 'numpy<2.4', or run on a GPU without TRITON_INTERPRET"
        )
    return ""
