"""Triton's interpreter without what it does again and again: the same results in less of Python.

Of a launch on a few elements nearly all time goes into types and shapes that are worked out anew for each operation.
What depends on types alone is kept here, whatever the version's own code makes of it, and a check is left out whose
result the interpreter throws away.
"""

# The stubs do not have private names, or not as they are.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import ast
import inspect
from typing import Any

from retrograd.compat.triton_interpreter import program_recorder
from retrograd.compat.triton_interpreter.patches import Patches
from retrograd.compat.triton_interpreter.type_cache import OperationCache

_MISSING = object()
# Types keep their number when the speed-ups are put back and made again.
_KINDS: dict[str, int] = {}
# What is rewritten besides is a chained comparison; `visit_Constant` is Python's own.
_REWRITTEN = {"visit_Assign", "visit_Compare", "visit_Constant"}


def quicken(patches: Patches, module: Any, tl: Any) -> None:
    """Replace in `triton.runtime.interpreter` and in the types that its kernels use what can be kept between uses."""
    _keep_types(patches, tl)
    _keep_array_types(patches, module, tl)
    _shorten_semantic(patches, module, tl)
    _bind_builtins(patches, module, tl)
    _replay_patches(patches, module, tl)
    _keep_constexprs(patches, module)
    _convert_arguments(patches, module, tl)
    patches.set(module, "inspect", _Signatures(module.inspect))
    _rewrite_statements(patches, module)
    _remember_builtins(patches, module, tl)
    module.InterpretedFunction.rewritten_fn.clear()


def _keep_types(patches: Patches, tl: Any) -> None:
    """Attributes of block types by element type and shape, and those that all tensors of a type have."""
    block_type, tensor = tl.block_type, tl.tensor
    stock_block, stock_tensor = block_type.__init__, tensor.__init__
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, Any] = {}
    constexpr = tl.constexpr

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([s.value if type(s) is constexpr else s for s in shape])
        known = blocks.get(key := (element_ty.name, sizes))
        if known is None:
            stock_block(self, element_ty, shape)
            self.shape = shapes.setdefault(sizes, self.shape)  # one object a shape, so that `is` compares shapes
            self._of_tensors = {}
            blocks[key] = {k: v for k, v in self.__dict__.items() if k != "element_ty"}
        else:
            self.__dict__.update(known)
            self.element_ty = element_ty

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        known = type.__dict__.get("_of_tensors")
        if known:
            self.__dict__.update(known)
            self.handle, self.type = handle, type
            return
        stock_tensor(self, handle, type)
        known = type.__dict__.setdefault("_of_tensors", {})  # of a block type: shared by all of its kind
        known.update({k: v for k, v in self.__dict__.items() if k not in ("handle", "type")})
        if hasattr(type, "name"):
            known["_kind"] = self._kind = _KINDS.setdefault(type.name, len(_KINDS))  # for `type_cache`

    patches.set(block_type, "__init__", init_block)
    patches.set(tensor, "__init__", init_tensor)


def _keep_array_types(patches: Patches, module: Any, tl: Any) -> None:
    """NumPy's type of each of Triton's: the stock function makes a table of all of them at each call."""
    stock = module._get_np_dtype
    known: dict[str, Any] = {}

    def get_np_dtype(tt_dtype: Any) -> Any:
        # The name of a type says all of it; pointers have the one of addresses.
        array_type = known.get(tt_dtype.name)
        if array_type is None:
            array_type = known[tt_dtype.name] = stock(tt_dtype)
        return array_type

    patches.set(module, "_get_np_dtype", get_np_dtype)


def _shorten_semantic(patches: Patches, module: Any, tl: Any) -> None:
    """Skip casts to the same type and broadcasts to the same shape, and sums in 64 bits that nobody looks at.

    With the interpreter's options `device_assert` is empty, yet every sum and product of integers is first computed in
    64 bits and compared with both ends of the range, to be handed to it.
    """
    semantic = module.interpreter_semantic
    stock_broadcast, stock_cast = semantic.broadcast_impl_value, semantic.cast
    stock_overflow = semantic.binary_op_sanitize_overflow_impl

    def broadcast_impl_value(lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        if a is b or (a.is_block() and b.is_block() and a.shape is b.shape):
            return lhs, rhs
        return stock_broadcast(lhs, rhs)

    def cast(input: Any, dst_ty: Any, *args: Any, **kwargs: Any) -> Any:
        if input.type.scalar is dst_ty.scalar and not args and not kwargs:
            return input
        return stock_cast(input, dst_ty, *args, **kwargs)

    def overflow(lhs: Any, rhs: Any, binary_op: Any) -> Any:
        if semantic.builder.options.debug:
            stock_overflow(lhs, rhs, binary_op)

    patches.set(semantic, "broadcast_impl_value", broadcast_impl_value)
    patches.set(semantic, "cast", cast)
    patches.set(semantic, "binary_op_sanitize_overflow_impl", overflow)


def _bind_builtins(patches: Patches, module: Any, tl: Any) -> None:
    """Call what a builtin wraps, whose wrapper only looks whether it was given a semantic; and keep what it means."""
    meanings, functions = OperationCache(module, tl), dict[Any, Any]()

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)
        if function not in functions:
            functions[function] = meanings.keep(function)
        scope.set_attr(obj, name, functions[function])

    patches.set(module, "_patch_attr", patch_attr)


def _replay_patches(patches: Patches, module: Any, tl: Any) -> None:
    """Make the replacements of a launch once for each kernel, and put the same ones back at its later launches."""
    stock = module._patch_lang
    scope_type = module._LangPatchScope
    known: dict[Any, list[tuple[Any, str, Any, Any]]] = {}

    def patch_lang(fn: Any) -> Any:
        changes = known.get(fn)
        if changes is None or any(getattr(o, n, _MISSING) is not was for o, n, was, _ in changes[:1]):
            scope = stock(fn)
            if scope._changes:
                known[fn] = _last_of(scope._changes)
            return scope
        scope = scope_type()
        append = scope._changes.append
        for obj, name, was, new in changes:
            append((obj, name, was))
            setattr(obj, name, new)
        return scope

    patches.set(module, "_patch_lang", patch_lang)


def _keep_constexprs(patches: Patches, module: Any) -> None:
    """Read the annotations of a kernel once, not at each launch."""
    executor = module.GridExecutor
    stock = executor.__init__
    known: dict[Any, list[str]] = {}

    def init(self: Any, fn: Any, arg_names: Any, grid: Any, pre_run_hooks: Any = ()) -> None:
        if fn in known:
            self.fn, self.arg_names, self.grid, self.pre_run_hooks = fn, arg_names, grid, pre_run_hooks
            self.constexprs = known[fn]
        else:
            stock(self, fn, arg_names, grid, pre_run_hooks)
            known[fn] = self.constexprs

    patches.set(executor, "__init__", init)


def _convert_arguments(patches: Patches, module: Any, tl: Any) -> None:
    """Find out the types of numbers and tensors here.

    The stock function asks the launcher of compiled kernels, which imports Triton's second language (44 ms) when it is
    asked for the first time.
    """
    import torch
    from triton import _utils as names

    stock, handle = module._implicit_cvt, module.TensorHandle
    canonical = getattr(names, "canonicalize_ptr_dtype", None)
    if canonical is None:
        return
    known: dict[Any, Any] = {}

    def implicit_cvt(arg: Any) -> Any:
        whole = type(arg) is int
        if not whole and type(arg) not in (torch.Tensor, torch.nn.Parameter):
            return stock(arg)
        key = program_recorder.kind(arg) if whole else arg.dtype
        triton_type = known.get(key)
        if triton_type is None:
            if whole and not program_recorder.INTEGERS[key]:
                return stock(arg)  # it is too large: who always says so, says so
            name = ("i32" if -(2**31) <= arg < 2**31 else "u64" if arg >= 2**63 else "i64") if whole else ""
            try:
                triton_type = known[key] = tl.str_to_ty(name or canonical(arg.dtype, False), None)
            except KeyError:  # likewise
                return stock(arg)
        return tl.tensor(handle(program_recorder.number(arg), triton_type), triton_type)

    patches.set(module, "_implicit_cvt", implicit_cvt)


def _last_of(changes: list[tuple[Any, str, Any]]) -> list[tuple[Any, str, Any, Any]]:
    """Each attribute that was changed, with what it was first and what it is now."""
    first: dict[tuple[int, str], tuple[Any, str, Any]] = {}
    for obj, name, was in changes:
        first.setdefault((id(obj), name), (obj, name, was))
    return [(obj, name, was, getattr(obj, name)) for obj, name, was in first.values()]


class _Signatures:
    """The module `inspect`, with signatures of functions kept: a launch asks for its kernel's twice."""

    def __init__(self, inspect: Any) -> None:
        self._inspect = inspect
        self._known: dict[Any, Any] = {}
        self._lines: dict[Any, tuple[list[str], int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inspect, name)

    def getfullargspec(self, fn: Any) -> Any:
        if fn not in self._known:
            self._known[fn] = self._inspect.getfullargspec(fn)
        return self._known[fn]

    def getsourcelines(self, fn: Any) -> tuple[list[str], int]:
        if fn not in self._lines:
            self._lines[fn] = self._inspect.getsourcelines(fn)
        return self._lines[fn]

    def getcallargs(self, fn: Any, /, *args: Any, **kwargs: Any) -> dict[str, Any]:
        spec = self.getfullargspec(fn)
        positional = dict(zip(spec.args, args, strict=False))
        plain = not (spec.varargs or spec.varkw or spec.kwonlyargs) and len(args) <= len(spec.args)
        if plain and not positional.keys() & kwargs.keys():
            defaults = spec.defaults or ()
            values = {
                **dict(zip(spec.args[len(spec.args) - len(defaults) :], defaults, strict=True)),
                **positional,
                **kwargs,
            }
            if values.keys() == set(spec.args):
                return {name: values[name] for name in spec.args}
        return self._inspect.getcallargs(fn, *args, **kwargs)


def _rewrite_statements(patches: Patches, module: Any) -> None:
    """Rewrite the assignments of a kernel without a walk through its expressions, and without reading its file again.

    Of 20 functions, which a norm has with those of the language, this takes 10 ms instead of 35.
    """
    rewriter = module.FunctionRewriter
    stock = rewriter._transform_ast
    if not {name for name in dir(rewriter.ast_transformer) if name.startswith("visit_")} <= _REWRITTEN:
        return  # something else is rewritten too

    def file_and_line(self: Any) -> tuple[str, int]:
        lines, first = module.inspect.getsourcelines(self.fn)
        above = (n for n, line in enumerate(lines) if line.strip().startswith("def "))
        return self.fn.__code__.co_filename, first + next(above, 0)

    def transform(self: Any, source: str) -> ast.Module:
        tree = ast.parse("\n" * (self.def_file_lineno - 1) + source)
        if any(isinstance(node, ast.Compare) and len(node.ops) > 1 for node in ast.walk(tree)):
            return stock(self, source)  # chained: rewritten wherever it stands
        rest: list[Any] = [*tree.body]
        for node in rest:  # grows
            for block in ("body", "orelse", "finalbody", "handlers", "cases"):
                rest += getattr(node, block, ())
            if isinstance(node, ast.Assign):
                self.ast_transformer.visit_Assign(node)
                _place(node.value, node)
        return tree

    patches.set(rewriter, "_get_jit_fn_file_line", file_and_line)
    patches.set(rewriter, "_transform_ast", transform)


def _place(new: ast.AST, at: ast.AST) -> None:
    """Give nodes without a place that of a statement."""
    if not hasattr(new, "lineno") and "lineno" in new._attributes:
        ast.copy_location(new, at)
        for child in ast.iter_child_nodes(new):
            _place(child, at)


def _remember_builtins(patches: Patches, module: Any, tl: Any) -> None:
    """Look up once which names of the language are builtins, and replace them once a launch.

    The stock interpreter does both whenever a kernel calls a function, 31 times per launch of RMSNorm, which took half
    of the time of 7 x 48 elements.
    """
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

    patches.set(module, "_patch_builtin", patch_builtin)
    patches.set(module, "_patch_lang", patch_lang)
