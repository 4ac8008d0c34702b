"""The bfloat16 repair of Triton's interpreter: casts as on a GPU, arithmetic refused."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types

import pytest
import torch
import triton
import triton.language as tl

from retrograd import config
from retrograd.compat import versions
from retrograd.compat.triton_interpreter.preparation import prepare

pytestmark = pytest.mark.skipif(not config.interpreting(), reason="kernels are compiled in this process")


@triton.jit
def copy_kernel(src_ptr, dst_ptr, CAST: tl.constexpr, N: tl.constexpr):
    value = tl.load(src_ptr + tl.arange(0, N))
    if CAST:
        value = value.to(dst_ptr.dtype.element_ty)
    tl.store(dst_ptr + tl.arange(0, N), value)


@triton.jit
def arithmetic_kernel(src_ptr, dst_ptr, OP: tl.constexpr, N: tl.constexpr):
    value = tl.load(src_ptr + tl.arange(0, N))
    if OP == "add":
        tl.store(dst_ptr + tl.arange(0, N), value + value)
    elif OP == "compare":
        tl.store(dst_ptr + tl.arange(0, N), tl.where(value > value, 1.0, 0.0))
    elif OP == "sum":
        tl.store(dst_ptr, tl.sum(value, axis=0))
    elif OP == "scan":
        tl.store(dst_ptr + tl.arange(0, N), tl.cumsum(value, axis=0))
    elif OP == "dot":
        tile = tl.broadcast_to(value[:, None], (N, N))
        total = tl.dot(tile, tile)
        tl.store(dst_ptr + tl.arange(0, N), tl.sum(total, axis=0))
    else:
        tl.store(dst_ptr + tl.arange(0, N), value.to(tl.float32) * 2.0)


@pytest.fixture(autouse=True)
def prepared() -> None:
    prepare()


def run_copy(src: torch.Tensor, dtype: torch.dtype, *, cast: bool) -> torch.Tensor:
    dst = torch.empty(src.shape, dtype=dtype)
    copy_kernel[(1,)](src, dst, CAST=cast, N=src.numel())
    return dst


def hard_values() -> torch.Tensor:
    """1024 float32 values: random ones, exact ties, carries into the exponent, subnormals, infinities, NaN."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1024, generator=generator) * 10.0 ** torch.randint(-30, 30, (1024,), generator=generator)
    tie = 1.0 + 2.0**-8
    special = [tie, 1.0 + 3 * 2.0**-8, -tie, 1.99999, 3.4028234e38, 1e-40, -1e-45, 0.0, -0.0]
    special += [float("inf"), float("-inf"), float("nan")]
    values[: len(special)] = torch.tensor(special)
    return values


@pytest.mark.parametrize("cast", [True, False], ids=["explicit", "implicit-in-store"])
def test_float32_to_bfloat16_rounds_to_nearest_even(cast: bool) -> None:
    values = hard_values()
    got = run_copy(values, torch.bfloat16, cast=cast).view(torch.int16)
    want = values.to(torch.bfloat16)
    nan = values.isnan()
    assert torch.equal(got[~nan], want.view(torch.int16)[~nan])
    assert got[nan].tolist() == [0x7FC0]


def test_bfloat16_to_float32_is_exact() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16)
    got = run_copy(values, torch.float32, cast=True)
    assert torch.equal(got.view(torch.int32), bits.to(torch.int32) << 16)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float16, torch.float64], ids=str)
def test_other_types_to_bfloat16_and_back(dtype: torch.dtype) -> None:
    values = torch.arange(-64, 64).to(dtype)
    there = run_copy(values, torch.bfloat16, cast=True)
    assert torch.equal(there, values.to(torch.bfloat16))
    assert torch.equal(run_copy(there, dtype, cast=True), values)


@pytest.mark.parametrize("op", ["add", "compare", "sum", "dot"])
def test_bfloat16_arithmetic_is_refused(op: str) -> None:
    src = torch.ones(16, dtype=torch.bfloat16)
    with pytest.raises(Exception, match=r"cast to float32 right after the load"):
        arithmetic_kernel[(1,)](src, torch.empty(16), OP=op, N=16)


def test_scan_widens_by_itself_or_is_refused() -> None:
    """Triton 3.9 adds in bfloat16."""
    dst = torch.empty(16)
    if versions.minor(triton.__version__) < (3, 9):
        arithmetic_kernel[(1,)](torch.full((16,), 0.5, dtype=torch.bfloat16), dst, OP="scan", N=16)
        assert dst[-1] == 8.0
        return
    with pytest.raises(Exception, match="a scan got a bfloat16 operand"):
        arithmetic_kernel[(1,)](torch.full((16,), 0.5, dtype=torch.bfloat16), dst, OP="scan", N=16)


def test_arithmetic_after_a_cast_works() -> None:
    dst = torch.empty(16)
    arithmetic_kernel[(1,)](torch.full((16,), 1.5, dtype=torch.bfloat16), dst, OP="cast first", N=16)
    assert dst.tolist() == [3.0] * 16


@triton.jit
def extremes_kernel(src_ptr, dst_ptr, N: tl.constexpr):
    value = tl.load(src_ptr + tl.arange(0, N))
    tl.store(dst_ptr + tl.arange(0, N), tl.minimum(tl.maximum(value, -1.0), 1.0))
    kept = tl.maximum(value, -1.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(dst_ptr + N + tl.arange(0, N), kept)


def test_the_greater_of_a_number_and_nan_is_the_number_unless_nan_is_asked_for() -> None:
    """As on a GPU; the stock interpreter gives NaN."""
    dst = torch.empty(8)
    extremes_kernel[(1,)](torch.tensor([float("nan"), 0.5, 3.0, -3.0]), dst, N=4)
    assert dst[:4].tolist() == [-1.0, 0.5, 1.0, -1.0]
    assert dst[4].isnan()


def test_prepare_patches_once() -> None:
    from triton.runtime import interpreter as module

    before = module._convert_float, module.InterpreterBuilder.binary_op
    prepare()
    assert (module._convert_float, module.InterpreterBuilder.binary_op) == before


@triton.jit
def _total(value):
    return tl.sum(value, axis=0)


@triton.jit
def calling_kernel(src_ptr, dst_ptr, N: tl.constexpr):
    value = tl.load(src_ptr + tl.arange(0, N))
    tl.store(dst_ptr, _total(value) + _total(value))


def test_the_language_is_replaced_while_a_kernel_runs_and_not_after(monkeypatch):
    """Functions that a kernel calls find the language replaced already; what to replace is not looked up again."""

    def refuse(*_):
        raise AssertionError

    monkeypatch.setattr(inspect, "getmembers", refuse)
    src, dst = torch.arange(8.0), torch.zeros(1)
    for _ in range(2):
        calling_kernel[(1,)](src, dst, N=8)
        assert dst.item() == 56.0
        assert tl.core.is_builtin(tl.load)
        assert tl.core.is_builtin(tl.arange)
        with pytest.raises(ValueError, match="_semantic"):
            tl.arange(0, 8)


@pytest.mark.parametrize("value", [0, 1, -1, 2**31 - 1, -(2**31), 2**31, 2**32, -(2**63), 2**63 - 1, 2**63, 2**64 - 1])
def test_numbers_become_what_the_launcher_of_compiled_kernels_makes_of_them(value):
    made = triton.runtime.interpreter._implicit_cvt(value)
    assert made.type == tl.str_to_ty(triton.runtime.jit.mangle_type(value), None)
    assert made.handle.data.tolist() == [value]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.int64, torch.uint8, torch.bool]
)
def test_tensors_likewise(dtype):
    t = torch.zeros(3, dtype=dtype)
    made = triton.runtime.interpreter._implicit_cvt(t)
    assert made.type == tl.str_to_ty(triton.runtime.jit.mangle_type(t), None)
    assert made.handle.data.tolist() == [t.data_ptr()]


def test_plain_arguments_do_not_ask_the_launcher_of_compiled_kernels(monkeypatch):
    """Which imports Triton's second language when it is asked for the first time."""
    monkeypatch.setattr(triton.runtime.jit, "mangle_type", None)
    triton.runtime.interpreter._implicit_cvt(7)
    triton.runtime.interpreter._implicit_cvt(torch.zeros(1))
    if versions.minor(triton.__version__) < (3, 9):  # then a flag is one bit
        with pytest.raises(TypeError, match="not callable"):
            triton.runtime.interpreter._implicit_cvt(True)


def test_what_is_no_argument_is_refused_by_the_interpreter():
    for odd, error in (
        (2**64, (ValueError, OverflowError)),
        (torch.zeros(1, dtype=torch.complex64), (KeyError, TypeError)),
    ):
        with pytest.raises(error):
            triton.runtime.interpreter._implicit_cvt(odd)


@triton.jit
def statements_kernel(x_ptr, N, LOOPS: tl.constexpr):
    """Assignments in loops and branches, of attributes of tuples, with a type, in one that is called."""
    total: tl.constexpr = 0
    for i in range(
        LOOPS,
    ):
        first, second = i, (lambda j: j + 1)(i)
        if first > 1:
            total = first
        elif second:
            total = second
        else:
            while total < N:
                total += 1
    tl.store(x_ptr, total)


def _codes(code):
    yield code.co_code, code.co_linetable, code.co_names, code.co_varnames, code.co_filename
    for const in code.co_consts:
        yield from _codes(const) if isinstance(const, types.CodeType) else [(type(const), const)]


@pytest.mark.parametrize("kernel", [statements_kernel, arithmetic_kernel, tl.softmax])
def test_rewritten_functions_are_the_interpreters_own(kernel):
    module = triton.runtime.interpreter
    rewriter = module.FunctionRewriter(kernel.fn)
    quick = rewriter.rewrite_ast()
    lines, first = inspect.getsourcelines(kernel.fn)
    above = next(n for n, line in enumerate(lines) if line.strip().startswith("def "))
    tree = module.ASTTransformer().visit(ast.parse(textwrap.dedent("".join(lines[above:]))))
    ast.increment_lineno(ast.fix_missing_locations(tree), first + above - 1)
    made = {}
    exec(compile(tree, inspect.getsourcefile(kernel.fn), "exec"), kernel.fn.__globals__, made)
    assert list(_codes(quick.__code__)) == list(_codes(made[kernel.fn.__name__].__code__))


@triton.jit
def lines_kernel(x_ptr, y_ptr, out_ptr, n, N: tl.constexpr):
    """Lines of the same types that mean something else: one operand twice, other constants, another program."""
    at = tl.arange(0, N)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(out_ptr + at, x * y)
    tl.store(out_ptr + N + at, x * x)
    tl.store(out_ptr + 2 * N + at, y * x)
    tl.store(out_ptr + 3 * N + at, y * y)
    tl.store(out_ptr + 4 * N + at, x * 2)
    tl.store(out_ptr + 5 * N + at, x * 2.5)
    tl.store(out_ptr + 6 * N + at, at * 2 + n)
    tl.store(out_ptr + 7 * N + at, at * 2.5 + n)
    tl.store(out_ptr + 8 * N + at, at + tl.program_id(0))
    tl.store(out_ptr + 9 * N + at, (x[:, None] * y[None, :]).to(tl.float32).sum(axis=1), mask=at < n)


@pytest.mark.parametrize("n", [3, 2**33])
def test_lines_of_the_same_types_are_not_taken_for_each_other(n):
    x, y = torch.rand(16) + 0.5, torch.arange(16.0) - 7.5
    out = torch.full((10, 16), -1.0)
    for _ in range(2):  # as it is noted, and as it is known
        lines_kernel[(3,)](x, y, out, n, N=16)
        at = torch.arange(16)
        rows = [x * y, x * x, y * x, y * y, x * 2, x * 2.5, at * 2 + n, at * 2.5 + n, at + 2]
        assert torch.equal(out[:9], torch.stack([row.float() for row in rows]))
        assert (out[9] == -1.0).sum() == max(0, 16 - n)
        out.fill_(-1.0)


def test_a_line_that_is_known_makes_the_same_operations(monkeypatch):
    """All that is left out is the way there: the builder is asked for the same, in the same order."""
    builder = triton.runtime.interpreter.InterpreterBuilder
    asked: list[str] = []
    for name in ("binary_op", "create_splat", "create_broadcast", "create_expand_dims", "create_addptr", "cast_impl",
                 "create_masked_load", "create_masked_store", "create_make_range"):  # fmt: skip
        stock = getattr(builder, name)
        monkeypatch.setattr(
            builder, name, lambda self, *a, name=name, stock=stock: asked.append(name) or stock(self, *a)
        )
    x, out = torch.ones(48), torch.zeros(10, 48)
    runs = []
    for _ in range(2):
        asked.clear()
        lines_kernel[(1,)](x, x, out, 2, N=32)
        runs.append([*asked])
    assert len(runs[0]) > 60
    assert runs[0] == runs[1]


@triton.jit
def square_first_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(out_ptr + at, x * x)
    tl.store(out_ptr + N + at, x * y)


def test_two_values_are_not_taken_for_one_twice():
    """The square comes first, in blocks of a size that no other test has: what is known of it must not do for x * y."""
    x, y, out = torch.arange(1.0, 129.0), torch.full((128,), 3.0), torch.empty(2, 128)
    square_first_kernel[(1,)](x, y, out, N=128)
    assert torch.equal(out, torch.stack([x * x, x * y]))
