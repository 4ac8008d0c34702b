"""What a person can get wrong, and what `verify` then says; repro lines; options."""

from __future__ import annotations

import random

import pytest
import torch
from specimens import square

import retrograd as rg
from retrograd.check import inputs as make
from retrograd.check.stages import contract
from retrograd.errors import SpecError, UsageError, VerificationError


def _square(x):
    return x * x


def _spec(fn=_square, reference=_square, **more):
    return rg.op(fn, reference, dict(x=rg.tensor("M", "N")), **more)


Wrong = square(2.002)  # off by one part in a thousand


def test_right_op_is_proved_and_truthy():
    report = rg.verify(_spec(), level="quick")
    assert report
    assert report.exit_code == 0
    assert {s.id for s in report.stages} >= {"contract", "oracle", "determinism"}
    assert report.stage("oracle").power < 1e-4


def test_wrong_op_says_what_where_and_repro():
    report = rg.verify(_spec(Wrong), level="quick")
    assert report.verdict == "finding"
    f = report.findings[0]
    assert f.tensor == "grad x"
    assert f.excess > 100
    assert "smallest: M=1 N=1" in f.where
    with pytest.raises(VerificationError, match="repro"):
        report.raise_if_failed()


def test_repro_case_reproduces():
    first = rg.verify(_spec(Wrong), level="quick").findings[0]
    again = rg.verify(_spec(Wrong), level="quick", only=["oracle"], case=first.case.text())
    assert again.findings[0].got == first.got
    assert again.findings[0].index == first.index


def test_a_repro_line_is_a_call_where_no_command_finds_the_op():
    spec = _spec(Wrong)
    first = rg.verify(spec, level="quick").findings[0]
    assert eval(first.repro, dict(rg=rg, spec=spec)).findings[0].got == first.got
    named = rg.verify(spec, level="quick", name="ops.py:spec").findings[0]
    assert named.repro.startswith("retrograd verify ops.py:spec --only oracle")


def test_same_seed_same_findings():
    one, two = (rg.verify(_spec(Wrong), level="quick", seed=5).findings for _ in range(2))
    assert [f.what for f in one] == [f.what for f in two]


def test_power_is_real():
    # An error twice the stated power must be found, one far below must not.
    power = rg.verify(_spec(), level="quick").stage("oracle").power

    def scaled(by):
        return rg.verify(_spec(square(2 * (1 + by))), level="quick", only=["oracle"])

    assert scaled(4 * power).verdict == "undecided"  # it might be another algorithm's constant, which it may state
    assert scaled(16 * power).verdict == "finding"
    assert scaled(power / 1000).verdict == "proved"


def test_without_reference_the_rest_still_runs():
    report = rg.verify(_spec(reference=None), level="quick")
    assert report.verdict == "proved"
    assert report.stage("oracle").status == "skipped"
    assert report.notes


def test_reference_that_raises():
    def broken(x):
        raise RuntimeError("no")

    with pytest.raises(SpecError, match="mend the reference"):
        rg.verify(_spec(reference=broken), level="quick")


def test_op_that_returns_nothing():
    with pytest.raises(SpecError, match="expected a tensor or a tuple"):
        rg.verify(_spec(lambda x: None), level="quick")


def test_op_that_raises_is_a_finding():
    def raises(x):
        raise RuntimeError("boom")

    report = rg.verify(_spec(raises), level="quick")
    assert report.verdict == "finding"
    assert "boom" in report.findings[0].what


def test_nan_in_the_reference_cannot_be_decided():
    report = rg.verify(_spec(torch.log, torch.log), level="quick")
    assert report.verdict == "undecided"
    assert report.exit_code == 3
    assert "NaN" in report.stage("oracle").reason


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(level="huge"), "level"),
        (dict(only=["orakel"]), "orakel"),
        (dict(device="gpu9"), "device"),
        (dict(dtypes=["float8"]), "float8"),
        (dict(case="Q=3"), "Q=3"),
        (dict(case="y:transposed"), "y"),
    ],
)
def test_bad_option(options, says):
    with pytest.raises(UsageError, match=says):
        rg.verify(_spec(), **{"level": "quick", **options})


@pytest.mark.parametrize(
    "make_spec",
    [
        lambda: rg.op(3, inputs=dict(x=rg.tensor("N"))),
        lambda: rg.op(_square),
        lambda: rg.tensor("1x"),
        lambda: rg.tensor("N", dtype="int64"),
        lambda: rg.tensor("N", low=0.0),
        lambda: _spec(sizes=dict(N=(5, 2))),
        lambda: _spec(params=dict(eps=[])),
    ],
)
def test_bad_spec(make_spec):
    with pytest.raises(SpecError):
        make_spec()


def test_callable_and_concrete_inputs():
    made = rg.op(_square, _square, lambda seed, dtype, sizes: (torch.ones(sizes["N"], dtype=dtype),), sizes=dict(N=6))
    assert rg.verify(made, level="quick")
    given = rg.op(_square, _square, (torch.randn(3, 4),))
    assert rg.verify(given, level="quick")


def test_case_text_round_trip():
    spec = rg.op(_square, _square, dict(x=rg.tensor("M...", "N")), params=dict(eps=[1e-6, 1e-2]))
    case = make.base_case(spec, "float32").but(
        sizes=dict(M=(2, 3), N=5), params=dict(eps=1e-2), layouts=dict(x="transposed"), draw=2
    )
    assert make.parse_case(spec, "float32", case.text()) == case
    scalar = case.but(sizes=dict(M=(), N=5))
    assert make.parse_case(spec, "float32", scalar.text()) == scalar


def test_undeclared_nondeterminism_is_a_note_and_declared_determinism_a_finding():
    def noisy(x):
        return x * x * (1 + random.random() * 1e-7)  # no generator of torch's, which would be seeded

    loose = rg.verify(_spec(noisy), level="quick", only=["determinism"])
    assert loose.verdict == "proved"
    assert loose.stage("determinism").notes
    strict = rg.verify(_spec(noisy, deterministic=True), level="quick", only=["determinism"])
    assert strict.verdict == "finding"


def test_assert_backward_accepts_and_names():
    x = torch.randn(5, 7)
    g = torch.randn(5, 7)
    rg.assert_backward(_square, dict(x=x), g, grads=dict(x=2 * x * g), out=x * x)
    with pytest.raises(VerificationError, match=r"grad x\[\d, \d\]"):
        rg.assert_backward(_square, dict(x=x), g, grads=dict(x=2.001 * x * g))
    with pytest.raises(UsageError, match="grad_out"):
        rg.assert_backward(_square, dict(x=x), g[0], grads=dict(x=x))


def test_finding_says_what_its_tolerance_is_made_of_and_what_shrinking_did():
    finding = rg.verify(_spec(Wrong), level="quick", only=["oracle"]).findings[0]
    tolerance = sum(size for _, size in finding.terms)
    assert abs(finding.got - finding.want) / tolerance == pytest.approx(finding.excess, rel=1e-3)
    assert all(size >= 0 for _, size in finding.terms)
    assert finding.case.text() == "M=1 N=1"
    assert finding.first.case.text() == "M=7 N=48"
    assert (finding.first.total, finding.total) == (336, 1)


def test_a_function_that_is_of_no_module_is_called_where_triton_is_there():
    pytest.importorskip("triton")
    import triton.runtime.jit  # noqa: F401

    op = eval("lambda x: x * x", {"torch": torch})
    assert op.__module__ is None
    assert rg.verify(rg.op(op, op, dict(x=rg.tensor("M", "N"))), level="quick", only=["oracle"])


@pytest.mark.parametrize(
    ("total", "whole", "sizes", "agree"),
    [
        (2e-8, 1e-8, None, False),
        (2e-8, 1e-8, 1.0, True),  # two parts that cancel
        (0.5, 1.0, 0.5, False),  # one part is missing
        (1.2175e-40, 1.2173e-40, 1.2223e-40, True),  # subnormal
    ],
)
def test_parts_of_a_gradient_add_up_as_far_as_their_digits_go(total, whole, sizes, agree):
    parts = None if sizes is None else torch.tensor([sizes])
    assert contract._agree(torch.tensor([total]), torch.tensor([whole]), tf32=False, sizes=parts) is agree
