"""`rg.mutate` from the op to the report: mutants of source and of operations, both judges, budget and seeds."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import norm_op
import pytest
import torch
from norm_op import spec

import retrograd as rg
from retrograd import report
from retrograd.errors import UnsupportedOperationError, UsageError
from retrograd.mutation import judges, mutant_work
from retrograd.mutation.schema import Judgement, MutationReport

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="torch runs no backward in a fork beside a GPU")


@pytest.fixture(scope="module")
def mutated():
    return rg.mutate(spec, count=16, seed=1, levels=["python"])


def test_every_mutant_has_a_fate_and_the_original_is_back(mutated):
    assert len(mutated.results) == 16
    assert {r.fate for r in mutated.results} >= {"differs", "raises"}
    assert all(r.mutant.diff and r.mutant.line for r in mutated.results)
    assert rg.verify(spec, level="quick", only=["oracle"]).verdict == "proved"


def test_verify_notices_all_that_differs(mutated):
    assert len(mutated.differing) >= 7
    assert [r.mutant.diff for r in mutated.survivors("verify")] == []
    assert mutated.score("verify") == 1.0
    assert mutated.exit_code == 0


def test_a_seed_draws_the_same_mutants(mutated):
    again = rg.mutate(spec, count=16, seed=1, levels=["python"], jobs=2)
    assert [(r.mutant.id, r.fate, r.rarity) for r in again.results] == [
        (r.mutant.id, r.fate, r.rarity) for r in mutated.results
    ]


def test_a_record_is_read_back_and_shown(mutated, tmp_path):
    assert MutationReport.from_json(mutated.to_json()) == mutated
    report.write(mutated, str(tmp_path / "r.html"), str(tmp_path / "r.txt"))
    assert "mutants of norm" in (tmp_path / "r.html").read_text()
    assert f"16 mutants of {mutated.candidates} possible" in (tmp_path / "r.txt").read_text()


@pytest.mark.dealt(3)
def test_weak_tests_let_a_lost_weight_pass_and_the_pasted_test_does_not(monkeypatch):
    monkeypatch.chdir(HERE)
    (lost,) = lines_of("g = dy * w")
    before = Path(norm_op.__file__).read_text()
    weak = rg.mutate(
        spec, count=3, functions=["norm_op:input_grad"], lines=lambda file, line: line == lost,
        tests=f"{sys.executable} -m pytest weak_test_norm.py",
    )  # fmt: skip
    assert Path(norm_op.__file__).read_text() == before
    survivor = next(r for r in weak.survivors("tests") if r.mutant.operator == "factor dropped")
    assert survivor.killed("verify")
    assert survivor.rarity == "every input"
    assert any(r.killed("tests") for r in weak.differing)
    scope = {}
    exec(survivor.test, scope)
    tests = [scope["test_factor_dropped"], scope["test_factor_dropped_by_attainable_error"]]
    for test in tests:
        test()
    stock = norm_op.input_grad.__code__
    try:
        norm_op.input_grad.__code__ = (lambda dy, w, xhat, rstd: without_weight(dy, xhat, rstd)).__code__.replace(
            co_name="f"
        )
        norm_op.without_weight = lambda dy, xhat, rstd: (dy - xhat * (dy * xhat).mean(-1, keepdim=True)) * rstd
        for test in tests:
            with pytest.raises(AssertionError):
                test()
    finally:
        norm_op.input_grad.__code__ = stock
        del norm_op.without_weight


lost = rg.op(torch.nn.Tanh(), torch.tanh, dict(x=rg.tensor("M")))


def test_a_pasted_test_of_what_has_no_name_imports_the_spec():
    mutated = rg.mutate(lost, count=2, levels=["operation"])
    text = mutated.differing[0].test
    assert f"from {__name__} import lost as spec\nfn = spec.fn" in text
    scope = {}
    exec(text, scope)
    scope[next(name for name in scope if name.startswith("test_"))]()


def test_pasted_tests_of_an_op_with_several_outputs():
    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return x * y, (x > 0).sum(), x + 2 * y

        @staticmethod
        def backward(ctx, product, _, total):
            x, y = ctx.saved_tensors
            return product * y + total, product * x + 2 * total

    def reference(x, y):
        return x * y, (x > 0).sum(), x + 2 * y

    both = rg.op(lambda x, y: Both.apply(x, y), reference, inputs={"x": rg.tensor("M"), "y": rg.tensor("M")})
    results = rg.mutate(both, count=12, levels=["python", "operation"]).differing
    assert {r.mutant.level for r in results} == {"python", "operation"}
    for result in results:
        scope = {"spec": both}
        exec(result.test, scope)
        tests = [test for name, test in scope.items() if name.startswith("test_")]
        # assert_backward compares no whole numbers.
        assert len(tests) == 2 - result.judgements[0].why.startswith("oracle: out1")
        for test in tests:
            test()


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


def test_operations_of_a_module_need_no_source():
    mlp = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh())
    plain = lambda x, **state: (x @ state["0.weight"].T + state["0.bias"]).tanh()  # noqa: E731
    mutated = rg.mutate(rg.op(mlp, plain, {"x": rg.tensor("M", 4)}), count=8, levels=["operation"])
    assert {r.mutant.level for r in mutated.results} == {"operation"}
    assert len(mutated.differing) >= 3
    assert mutated.survivors("verify") == ()
    assert mutated.notes == ()


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


def test_what_ends_without_a_verdict_gives_no_credit(monkeypatch):
    def refused(*args, **kwargs):
        raise UnsupportedOperationError("tt.unknown is not executed")

    monkeypatch.setattr(judges, "verify", refused)
    judgement = judges.by_verify(spec, "quick", 0, set())
    assert (judgement.killed, judgement.why) == (
        False, "no verdict: UnsupportedOperationError: tt.unknown is not executed",
    )  # fmt: skip


def test_warnings_of_sizes_that_nobody_asked_for_are_not_shown(recwarn):
    def warns(x):
        warnings.warn("nothing to divide by", stacklevel=1)
        return x.sin()

    rg.mutate(rg.op(warns, torch.sin, dict(x=rg.tensor("M"))), count=1, levels=["operation"])
    assert not recwarn.list


def contiguous(x):
    return x.contiguous().sin()


@pytest.mark.parametrize(
    ("why", "rarity"), [("races: two programs", "order or races"), ("bounds: out of it", "found by verify alone")]
)
def test_what_verify_alone_sees_is_told_apart(monkeypatch, why, rarity):
    monkeypatch.setattr(mutant_work, "by_verify", lambda *_: Judgement("verify", True, why))
    op = rg.op(contiguous, torch.sin, dict(x=rg.tensor("M")), dtypes=["float64"])
    mutated = rg.mutate(op, functions=[f"{__name__}:contiguous"], count=20)
    (dropped,) = (r for r in mutated.results if r.mutant.operator == "call dropped")
    assert (dropped.rarity, dropped.killed("verify")) == (rarity, True)


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
        ({"tests": "true"}, "imports nothing that is mutated"),
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


def test_a_test_of_kernels_is_pasted_where_there_is_no_gpu():
    pytest.importorskip("triton", reason="kernels of Triton")
    import kernel_op

    mutated = rg.mutate(kernel_op.spec, count=4, levels=["triton"])
    texts = [r.test for r in mutated.differing if r.test]
    assert texts
    for text in texts:
        assert (
            "with rg.cpu_triton():\n    from kernel_op import scale as fn\n    from kernel_op import reference" in text
        )
        scope = {}
        exec(text, scope)
        tests = [test for name, test in scope.items() if name.startswith("test_")]
        assert tests
        for test in tests:
            test()


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
