"""Mutation operators on the source of a function, of Python or of Triton: each the mistake that a person makes."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterator

from retrograd.mutation.edits import Edit, Source

Operator = Callable[[Source], Iterator[Edit]]

_SWAPPED = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//",
    ast.BitAnd: "|", ast.BitOr: "&", ast.LShift: ">>", ast.RShift: "<<",
}  # fmt: skip
_EDGES = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
# Calls that give way to their first operand, or to another call of the same arguments.
_DROPPED = {
    "to", "float", "double", "half", "bfloat16", "type", "contiguous", "detach", "clone", "abs", "neg", "sigmoid",
    "conj", "transpose", "t", "flip", "clamp", "clamp_min", "clamp_max", "tril", "triu", "roll", "masked_fill",
    "masked_fill_",
}  # fmt: skip
_EXCHANGED = {
    "sum": "mean", "mean": "sum", "maximum": "minimum", "minimum": "maximum", "max": "min", "min": "max",
    "amax": "amin", "amin": "amax", "argmax": "argmin", "sin": "cos", "cos": "sin", "exp": "exp2", "log": "log2",
    "sqrt": "rsqrt", "rsqrt": "sqrt", "zeros_like": "ones_like", "ones_like": "zeros_like", "zeros": "ones",
    "cumsum": "cumprod", "index_add_": "index_copy_", "index_add": "index_copy", "scatter_add_": "scatter_",
    "scatter_add": "scatter", "tril": "triu", "triu": "tril", "atomic_add": "store", "all": "any", "any": "all",
    "float32": "float16", "float64": "float32", "ceil": "floor", "floor": "ceil", "log1p": "log", "expm1": "exp",
}  # fmt: skip
_KEYWORDS = ("mask", "other", "min", "max", "keepdim", "weights", "reduction", "alpha", "eps", "diagonal")


def python_edits(text: str) -> list[Edit]:
    """Every edit of a Python function, by place.

    Args:
        text: source of one function, from its `def` on, without indentation.
    """
    return _all(Source(text), _COMMON + _PYTHON)


def triton_edits(text: str) -> list[Edit]:
    """Every edit of a Triton kernel or of a function that one calls."""
    return _all(Source(text), _COMMON + _TRITON)


def _all(source: Source, operators: tuple[Operator, ...]) -> list[Edit]:
    seen: dict[str, Edit] = {}
    for operator in operators:
        for edit in operator(source):
            mutated = edit.applied(source.text)
            if mutated != source.text and _parses(mutated):
                seen.setdefault(mutated, edit)
    return sorted(seen.values(), key=lambda e: (e.start, e.end, e.operator, e.text))


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _body(source: Source) -> Iterator[ast.AST]:
    """Every node of the body, annotations and docstrings apart."""
    function = source.tree.body[0]
    assert isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    todo: list[ast.AST] = list(function.body)
    while todo:
        node = todo.pop(0)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        yield node
        todo += [c for field, c in _children(node) if field not in ("annotation", "returns", "decorator_list", "msg")]


def _children(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    # What an assertion says, and an exception, is nobody's mathematics.
    if isinstance(node, (ast.Raise, ast.Assert)):
        return
    for field, value in ast.iter_fields(node):
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.AST):
                yield field, each


def _arithmetic(source: Source) -> Iterator[Edit]:
    for node in _body(source):
        if not isinstance(node, ast.BinOp):
            continue
        left, right = source.of(node.left), source.of(node.right)
        middle = source.text[source.span(node.left)[1] : source.span(node.right)[0]]
        symbol = _symbol(node.op)
        if type(node.op) in _SWAPPED and symbol in middle:
            other = middle.replace(symbol, _SWAPPED[type(node.op)], 1)
            yield source.edit("arithmetic", node, f"{left}{other}{right}")
        word = "factor dropped" if isinstance(node.op, (ast.Mult, ast.Div, ast.BitAnd)) else "term dropped"
        if not isinstance(node.op, (ast.Mod, ast.FloorDiv, ast.LShift, ast.RShift)):
            yield source.edit(word, node, left)
        if isinstance(node.op, (ast.Add, ast.Mult, ast.MatMult, ast.BitAnd, ast.BitOr)):
            yield source.edit(word, node, right)
        if isinstance(node.op, ast.Sub):
            yield source.edit("sign", node, f"{right}{middle}{left}")
            yield source.edit(word, node, f"-({right})")
        if isinstance(node.op, ast.Pow):
            yield source.edit("factor dropped", node, left)


def _symbol(operator: ast.operator) -> str:
    symbols = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%",
               ast.BitAnd: "&", ast.BitOr: "|", ast.LShift: "<<", ast.RShift: ">>"}  # fmt: skip
    return symbols.get(type(operator), "")


def _signs(source: Source) -> Iterator[Edit]:
    for node in _body(source):
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not, ast.Invert)):
            yield source.edit("sign", node, source.of(node.operand))
        value = getattr(node, "value", None)
        if isinstance(node, (ast.Assign, ast.AugAssign)) and isinstance(value, ast.BinOp):
            yield source.edit("sign", value, f"-({source.of(value)})")


def _constants(source: Source) -> Iterator[Edit]:
    for node in _body(source):
        if not isinstance(node, ast.Constant):
            continue
        value = node.value
        if isinstance(value, bool):
            yield source.edit("constant", node, str(not value))
        elif isinstance(value, int):
            yield source.edit("constant", node, f"{value + 1}")
            yield source.edit("constant", node, f"({value - 1})" if value < 1 else f"{value - 1}")
        elif isinstance(value, float):
            others = (1.0,) if value == 0 else (value * 2, value * 1.001, 0.0)
            for other in others:
                yield source.edit("constant", node, repr(other))


def _comparisons(source: Source) -> Iterator[Edit]:
    for node in _body(source):
        if not (isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _EDGES):
            continue
        left, right = source.of(node.left), source.of(node.comparators[0])
        symbol = _EDGES[type(node.ops[0])]
        yield source.edit("comparison edge", node, f"{left} {symbol} {right}")
        if isinstance(node.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE)):
            turned = {"<": ">", ">": "<"}[symbol[0]] + symbol[1:]
            yield source.edit("comparison turned", node, f"{left} {turned} {right}")
            yield source.edit("comparison edge", node, f"{left} {symbol} {right} - 1")


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _calls(source: Source) -> Iterator[Edit]:
    for node in _body(source):
        if not isinstance(node, ast.Call):
            continue
        name = _name(node)
        base = _operand(node)
        if name in _DROPPED and base is not None:
            yield source.edit("call dropped", node, source.of(base))
        if name in ("sum", "mean", "sum_to_size") and base is not None and not _is_module(base):
            yield source.edit("sum dropped", node, source.of(base))
        if name in ("where",) and len(node.args) == 3:
            chosen, first, second = map(source.of, node.args)
            yield source.edit("mask dropped", node, first)
            yield source.edit("mask dropped", node, second)
            yield source.edit("mask turned", node, f"{source.of(node.func)}({chosen}, {second}, {first})")
        for keyword in node.keywords:
            if keyword.arg in _KEYWORDS:
                yield _without(source, node, keyword)


def _operand(call: ast.Call) -> ast.expr | None:
    """What a method is called on, or a function's first argument."""
    if isinstance(call.func, ast.Attribute) and not _is_module(call.func.value):
        return call.func.value
    return call.args[0] if call.args and not isinstance(call.args[0], ast.Starred) else None


def _is_module(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("torch", "tl", "F", "math", "np", "libdevice", "triton")


def _without(source: Source, call: ast.Call, keyword: ast.keyword) -> Edit:
    apart = (keyword.arg, "other" if keyword.arg == "mask" else "")  # Triton takes no `other` without a mask
    rest = [source.of(a) for a in call.args]
    rest += [source.of(k) for k in call.keywords if k.arg not in apart]
    return source.edit(f"{keyword.arg}= dropped", call, f"{source.of(call.func)}({', '.join(rest)})")


def _exchanges(source: Source) -> Iterator[Edit]:
    """An attribute for its counterpart: `sum` for `mean`, `atomic_add` for `store`, a wide dtype for a narrow one."""
    for node in _body(source):
        if isinstance(node, ast.Attribute) and node.attr in _EXCHANGED:
            operator = {"atomic_add": "store for atomic", "float32": "accumulator", "float64": "accumulator"}
            text = f"{source.of(node.value)}.{_EXCHANGED[node.attr]}"
            yield source.edit(operator.get(node.attr, "function"), node, text)


def _variables(source: Source) -> Iterator[Edit]:
    """Operands for another variable of the same role: of the same kind of name, or the neighbour in an unpacking."""
    nodes = list(_body(source))
    groups: list[list[str]] = []
    function = source.tree.body[0]
    arguments = [a.arg for a in function.args.args] if isinstance(function, ast.FunctionDef) else []
    groups.append([a for a in arguments if a.endswith("_ptr") or a.endswith("_ptrs")])
    groups.append([a for a in arguments if "stride" in a])
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            names = [e.id for e in node.targets[0].elts if isinstance(e, ast.Name)]
            groups.append(names)
            if len(names) == len(node.targets[0].elts) >= 2:
                swapped = ", ".join([names[1], names[0], *names[2:]])
                yield source.edit("saved tensors swapped", node.targets[0], swapped)
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            for group in groups:
                if node.id in group and len(group) > 1:
                    yield source.edit("variable", node, group[(group.index(node.id) + 1) % len(group)])


def _statements(source: Source) -> Iterator[Edit]:
    for node in _body(source):
        if isinstance(node, ast.AugAssign):
            yield source.edit("statement dropped", node, "pass")
            if isinstance(node.op, (ast.Add, ast.Mult)):
                yield source.edit("overwritten", node, f"{source.of(node.target)} = {source.of(node.value)}")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _name(node.value) != "mark_dirty":
            yield source.edit("statement dropped", node, "pass")
        elif isinstance(node, ast.If) and not _raises(node):
            yield source.edit("condition", node.test, f"not ({source.of(node.test)})")
        elif isinstance(node, ast.IfExp):
            yield source.edit("condition", node, source.of(node.body))
            yield source.edit("condition", node, source.of(node.orelse))
        elif isinstance(node, ast.For) and isinstance(node.iter, ast.Call) and _name(node.iter).endswith("range"):
            yield from _bounds(source, node.iter)


def _raises(node: ast.If) -> bool:
    return any(isinstance(statement, ast.Raise) for statement in node.body)


def _bounds(source: Source, call: ast.Call) -> Iterator[Edit]:
    place = 0 if len(call.args) == 1 else 1
    if call.args:
        end = source.of(call.args[place])
        yield source.edit("loop bound", call.args[place], f"({end}) - 1")
    if len(call.args) == 3:
        yield source.edit("loop bound", call.args[0], source.of(call.args[2]))


def _returns(source: Source) -> Iterator[Edit]:
    """Results of a backward: one lost, one scaled, one turned, two exchanged."""
    for node in _body(source):
        if not (isinstance(node, ast.Return) and node.value is not None):
            continue
        values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        values = [v for v in values if not isinstance(v, (ast.Constant, ast.Starred))]
        for value in values:
            text = source.of(value)
            yield source.edit("gradient lost", value, "None")
            yield source.edit("gradient lost", value, f"({text}) * 0")
            yield source.edit("gradient scaled", value, f"({text}) * 1.01")
            yield source.edit("sign", value, f"-({text})")
            yield source.edit("detached", value, f"({text}).detach()")
        names = [v for v in values if isinstance(v, ast.Name)]
        for a, b in itertools.pairwise(names):
            yield source.edit("variable", a, b.id)


def _precision(source: Source) -> Iterator[Edit]:
    for node in _body(source):
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign) and isinstance(value, ast.BinOp):
            yield source.edit(
                "lower precision",
                value,
                f"(lambda t: t.bfloat16().to(t.dtype) if hasattr(t, 'bfloat16') else t)({source.of(value)})",
            )


def _needs(source: Source) -> Iterator[Edit]:
    """`ctx.needs_input_grad[i]` taken for another's, or for always."""
    for node in _body(source):
        if isinstance(node, ast.Subscript) and source.of(node.value).endswith("needs_input_grad"):
            yield source.edit("needs_input_grad", node, "True")
            yield source.edit("needs_input_grad", node, "False")


def _kernel(source: Source) -> Iterator[Edit]:
    """What is only in kernels: stores, precision of a cast, programs."""
    for node in _body(source):
        if not isinstance(node, ast.Call):
            continue
        name = _name(node)
        if name == "program_id":
            yield source.edit("program", node, f"({source.of(node)} + 1)")
        if name == "num_programs":
            yield source.edit("program", node, f"({source.of(node)} + 1)")
        if name in ("load", "store") and len(node.args) > 1 + (name == "store") and not node.keywords:
            dropped = ", ".join(map(source.of, node.args[: 1 + (name == "store")]))
            yield source.edit("mask= dropped", node, f"{source.of(node.func)}({dropped})")


_COMMON: tuple[Operator, ...] = (
    _arithmetic, _signs, _constants, _comparisons, _calls, _exchanges, _variables, _statements,
)  # fmt: skip
_PYTHON: tuple[Operator, ...] = (_returns, _precision, _needs)
_TRITON: tuple[Operator, ...] = (_kernel,)
# How often an operator is drawn beside the others: what makes mistakes that show at some inputs only.
WEIGHTS = {
    "comparison edge": 3, "mask= dropped": 3, "loop bound": 3, "needs_input_grad": 3, "store for atomic": 4,
    "condition": 2, "min= dropped": 3, "max= dropped": 3, "accumulator": 3, "detached": 2, "overwritten": 2,
    "call dropped": 2, "other= dropped": 0.5,
}  # fmt: skip
