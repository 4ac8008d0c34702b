"""What kernels do at sizes, layouts and values that the ordinary case has not: told by the stages with such cases."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from specimens import with_backward

import retrograd as rg

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU kernels run there, and nothing is watched")
BLOCK = 16


@triton.jit
def twice_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n) if MASKED else tl.load(x_ptr + i)
    tl.store(y_ptr + i, 2 * x, i < n)


@triton.jit
def twice_in_place_kernel(y_ptr, n, BLOCK: tl.constexpr, SHIFTED: tl.constexpr):
    start = tl.program_id(0) * BLOCK
    # The last tile of all is moved back to end with the row, and shares elements with the one before.
    start = tl.minimum(start, tl.maximum(n - BLOCK, 0)) if SHIFTED else start
    i = start + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, 2 * tl.load(y_ptr + i, i < n), i < n)


@triton.jit
def stepped_kernel(x_ptr, table_ptr, y_ptr, n, m, BLOCK: tl.constexpr, CLAMPED: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, other=0.0)
    step = tl.minimum(tl.abs(x), m - 1.0) if CLAMPED else tl.minimum(tl.abs(x), 1e6)
    tl.store(y_ptr + i, 2 * x + 0 * tl.load(table_ptr + step.to(tl.int32), i < n), i < n)


@triton.jit(debug=True)
def asserting_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, MOST: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, other=0.0)
    tl.device_assert(n % MOST == 0, "rows come in pairs")
    tl.device_assert(x == x, "no NaN")
    tl.store(y_ptr + i, 2 * x, i < n)


FACTOR = 2


@triton.jit
def by_a_factor(x):
    return FACTOR * x  # of the module, and no constexpr: Triton refuses it


@triton.jit
def scaled_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, by_a_factor(tl.load(x_ptr + i, i < n)), i < n)


def _twice(masked):
    def forward(x):
        y = torch.empty(x.shape)
        twice_kernel[(triton.cdiv(x.numel(), BLOCK),)](x.contiguous(), y, x.numel(), BLOCK, masked)
        return y

    return forward


def _in_place(shifted):
    def forward(x):
        y = x.clone(memory_format=torch.contiguous_format)
        twice_in_place_kernel[(triton.cdiv(x.numel(), BLOCK),)](y, x.numel(), BLOCK, shifted)
        return y

    return forward


def _doubling(forward, **sizes):
    op = with_backward(forward, lambda dy, x: 2 * dy)
    return rg.op(op, lambda x: 2 * x, dict(x=rg.tensor("M", "N")), sizes=sizes, dtypes=["float32"], name="twice")


def _verify(spec, **options):
    return rg.verify(spec, level="quick", **options)


def test_a_read_past_the_end_is_told_where_a_size_is_no_multiple_of_the_block():
    spec = _doubling(_twice(masked=False))  # 7 x 48 ordinarily
    report = _verify(spec)
    (finding,) = report.findings
    assert (finding.stage, finding.kind, finding.tensor) == ("shapes", "address-read", "x_ptr")
    assert "x = tl.load(x_ptr + i, i < n) if MASKED else tl.load(x_ptr + i)" in finding.what
    size = math.prod(dict(finding.case.sizes).values())
    assert size % BLOCK
    assert f"element {size} of `x_ptr`" in finding.what
    (again,) = _verify(spec, only=["shapes"], case=finding.case.text()).findings
    assert again.what == finding.what
    assert _verify(_doubling(_twice(masked=True))).verdict == "proved"


def test_a_race_of_the_last_tile_is_told_where_there_is_one():
    report = _verify(_doubling(_in_place(shifted=True)))
    (finding,) = report.findings
    assert (finding.stage, finding.kind) == ("shapes", "race")
    assert "nothing orders the two" in finding.what
    assert _verify(_doubling(_in_place(shifted=False))).verdict == "proved"


def test_what_bounds_tells_no_other_stage_tells_again():
    report = _verify(_doubling(_twice(masked=False), M=[5], N=[33, 31]))
    assert [(f.stage, f.kind) for f in report.findings] == [("bounds", "address-read")]


def test_a_fault_may_stand_by_its_class():
    spec = rg.op(
        with_backward(_twice(masked=False), lambda dy, x: 2 * dy), lambda x: 2 * x, dict(x=rg.tensor("M", "N")),
        dtypes=["float32"], name="twice", accept={"shapes/address-read": "padded"},
    )  # fmt: skip
    report = _verify(spec)
    assert report
    assert [f.kind for f in report.accepted] == ["address-read"]


@pytest.mark.parametrize("clamped", [False, True])
def test_an_address_that_only_large_values_reach_is_told_by_extremes(clamped):
    def forward(x):
        y, table = torch.empty(x.shape), torch.zeros(64)
        stepped_kernel[(triton.cdiv(x.numel(), BLOCK),)](x.contiguous(), table, y, x.numel(), 64, BLOCK, clamped)
        return y

    report = _verify(_doubling(forward))
    told = [(f.stage, f.kind, f.tensor) for f in report.findings]
    assert told == ([] if clamped else [("extremes", "address-read", "table_ptr")])


@pytest.mark.parametrize(("forward", "found"), [(_twice(masked=False), "bounds"), (_in_place(shifted=True), "races")])
def test_without_a_reference_memory_is_looked_at_in_other_sizes_too(forward, found):
    op = with_backward(forward, lambda dy, x: 2 * dy)
    spec = rg.op(op, None, dict(x=rg.tensor("M", "N")), dtypes=["float32"], name="twice")
    assert {f.stage for f in _verify(spec).findings} == {found}
    healthy = with_backward(_twice(masked=True), lambda dy, x: 2 * dy)
    assert _verify(rg.op(healthy, None, dict(x=rg.tensor("M", "N")), dtypes=["float32"], name="twice"))


@pytest.mark.parametrize(("most", "stage"), [(1, None), (2, "shapes"), (5, "bounds")])
def test_an_assertion_of_a_kernel_that_fails_is_told_but_for_values_that_it_refuses(most, stage):
    def forward(x):
        y = torch.empty(x.shape)
        asserting_kernel[(triton.cdiv(x.numel(), BLOCK),)](x.contiguous(), y, x.numel(), BLOCK, most)
        return y

    findings = _verify(_doubling(forward)).findings
    assert [(f.stage, f.kind) for f in findings] == ([(stage, "assertion")] if stage else [])
    assert all("rows come in pairs" in f.what for f in findings)


def test_what_does_not_compile_is_told_by_the_function_that_does_not():
    def forward(x):
        y = torch.empty(x.shape)
        scaled_kernel[(triton.cdiv(x.numel(), BLOCK),)](x.contiguous(), y, x.numel(), BLOCK)
        return y

    (finding,) = _verify(_doubling(forward)).findings
    assert (finding.stage, finding.kind) == ("contract", "raises")
    assert finding.what.startswith("the forward raised CompilationError: NameError(")
    assert "def by_a_factor(x):" in finding.what
    (line,) = (
        n
        for n, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if text == "    return FACTOR * x  # of the module, and no constexpr: Triton refuses it"
    )
    assert f"\nat {__file__}:{line}:\n" in finding.what
