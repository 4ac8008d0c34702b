"""`rg.mutate` from the op to the report: mutants of source and of operations, both judges, budget and seeds."""

from __future__ import annotations

import sys
from pathlib import Path

import norm_op
import pytest
import torch
from norm_op import spec

import retrograd as rg
from retrograd import report
from retrograd.errors import UsageError
from retrograd.mutation.schema import MutationReport

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="torch runs no backward in a fork beside a GPU")


@pytest.fixture(scope="module")
def mutated():
    return rg.mutate(spec, count=24, seed=1, levels=["python"])


def test_every_mutant_has_a_fate_and_the_original_is_back(mutated):
    assert len(mutated.results) == 24
    assert {r.fate for r in mutated.results} >= {"differs", "raises"}
    assert all(r.mutant.diff and r.mutant.line for r in mutated.results)
    assert rg.verify(spec, level="quick", only=["oracle"]).verdict == "proved"


def test_verify_notices_all_that_differs(mutated):
    assert len(mutated.differing) >= 10
    assert [r.mutant.diff for r in mutated.survivors("verify")] == []
    assert mutated.score("verify") == 1.0
    assert mutated.exit_code == 0


def test_a_seed_draws_the_same_mutants(mutated):
    again = rg.mutate(spec, count=24, seed=1, levels=["python"], jobs=2)
    assert [(r.mutant.id, r.fate, r.rarity) for r in again.results] == [
        (r.mutant.id, r.fate, r.rarity) for r in mutated.results
    ]


def test_a_record_is_read_back_and_shown(mutated, tmp_path):
    assert MutationReport.from_json(mutated.to_json()) == mutated
    report.write(mutated, str(tmp_path / "r.html"), str(tmp_path / "r.txt"))
    assert "mutants of norm" in (tmp_path / "r.html").read_text()
    assert f"24 mutants of {mutated.candidates} possible" in (tmp_path / "r.txt").read_text()


def test_weak_tests_let_a_lost_weight_pass_and_the_pasted_test_does_not(monkeypatch):
    monkeypatch.chdir(HERE)
    (lost,) = lines_of("g = dy * w")
    before = Path(norm_op.__file__).read_text()
    weak = rg.mutate(
        spec, count=9, functions=["norm_op:input_grad"], lines=lambda file, line: line == lost,
        tests=f"{sys.executable} -m pytest weak_test_norm.py",
    )  # fmt: skip
    assert Path(norm_op.__file__).read_text() == before
    survivor = next(r for r in weak.survivors("tests") if r.mutant.operator == "factor dropped")
    assert survivor.killed("verify")
    assert survivor.rarity == "every input"
    assert any(r.killed("tests") for r in weak.differing)
    scope = {"torch": torch, "fn": norm_op.norm, "reference": norm_op.reference}
    exec(survivor.test, scope)
    test = scope["test_factor_dropped"]
    test()
    stock = norm_op.input_grad.__code__
    try:
        norm_op.input_grad.__code__ = (lambda dy, w, xhat, rstd: without_weight(dy, xhat, rstd)).__code__.replace(
            co_name="f"
        )
        norm_op.without_weight = lambda dy, xhat, rstd: (dy - xhat * (dy * xhat).mean(-1, keepdim=True)) * rstd
        with pytest.raises(AssertionError):
            test()
    finally:
        norm_op.input_grad.__code__ = stock
        del norm_op.without_weight


def without_weight(dy, xhat, rstd):
    """Stands in norm_op while the test above runs."""
    raise NotImplementedError


def lines_of(text):
    return [n for n, line in enumerate(Path(norm_op.__file__).read_text().splitlines(), 1) if line.strip() == text]


def test_operations_need_no_source():
    cosine = rg.op(lambda x: torch.sin(x) * x, lambda x: torch.sin(x) * x, inputs={"x": rg.tensor("M", "N")})
    mutated = rg.mutate(cosine, count=12, levels=["operation"])
    assert len(mutated.differing) >= 6
    assert mutated.survivors("verify") == ()
    assert any("aten." in r.mutant.diff for r in mutated.results)


def test_findings_of_the_original_give_no_credit():
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * x * 2.002

    wrong = rg.op(lambda x: Wrong.apply(x), torch.square, inputs={"x": rg.tensor("M", "N")})
    mutated = rg.mutate(wrong, levels=["operation"], count=5)
    assert mutated.score("verify") < 1.0
    assert "no mutant is credited with" in mutated.notes[0]


def test_a_budget_ends_it_between_two_mutants():
    short = rg.mutate(spec, count=5, budget=0.0)
    assert short.results == ()
    assert "the budget ended after 0 of 5 mutants" in short.notes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"levels": ["ptx"]}, "`levels` is"),
        ({"tests": "true", "levels": ["operation"]}, "`tests` cannot be given"),
        ({"functions": ["nothing"]}, "which norm does not run"),
        ({"tests": " "}, "`tests` is empty"),
        ({"tests": "false"}, "must pass without any mutant"),
        ({"lines": lambda file, line: False}, "nothing to mutate"),
        ({"functions": ["norm_op:nothing"]}, "`functions` names"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(UsageError, match=message):
        rg.mutate(spec, count=1, **arguments)


def test_kernels_are_mutated_without_a_gpu():
    pytest.importorskip("triton", reason="kernels of Triton")
    mutated = rg.mutate(
        resolve("rms_norm"), count=6, levels=["triton"], functions=["retrograd.ops.norm.triton.forward:norm_fwd_kernel"]
    )
    assert {r.mutant.level for r in mutated.results} == {"triton"}
    assert any(r.fate == "differs" for r in mutated.results)
    assert mutated.survivors("verify") == ()


def test_operations_of_a_kernel_need_no_source():
    pytest.importorskip("triton", reason="kernels of Triton")
    mutated = rg.mutate(resolve("rms_norm"), count=5, levels=["ttir"])
    assert mutated.candidates > 50
    assert any("arith." in r.mutant.diff or "tt." in r.mutant.diff for r in mutated.results)
    assert len(mutated.differing) >= 3
    assert mutated.survivors("verify") == ()
    assert rg.verify(resolve("rms_norm"), level="quick", only=["oracle"]).verdict == "proved"


def resolve(name):
    from retrograd.catalog import resolve

    return resolve(name)
