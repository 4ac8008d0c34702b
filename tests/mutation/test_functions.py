"""Functions that an op runs, and their mutants in their places."""

from __future__ import annotations

import pytest
import torch
from norm_op import RmsNorm, input_grad, norm, reference, spec

from retrograd.core.loading import load
from retrograd.errors import UsageError
from retrograd.mutation.functions import functions_of, named, recompiled
from retrograd.mutation.injection import _apply
from retrograd.mutation.operators import python_edits


def step():
    x, w = torch.randn(3, 5, requires_grad=True), torch.randn(5, requires_grad=True)
    norm(x, w, 1e-5).sum().backward()
    return x.grad


def test_what_forward_and_backward_run_is_found_and_the_reference_is_not():
    targets = functions_of(step, lambda: reference(torch.ones(2, 3), torch.ones(3), 1e-5))
    assert {t.name for t in targets} >= {"RmsNorm.forward", "RmsNorm.backward", "input_grad", "norm"}
    assert "reference" not in {t.name for t in targets}
    assert all(t.file.startswith(str(__file__).rpartition("/")[0]) for t in targets)


def test_a_folder_that_is_called_like_a_framework_is_the_users(tmp_path):
    (tmp_path / "torch").mkdir()
    path = tmp_path / "torch" / "mine.py"
    path.write_text("def doubled(x):\n    return x * 2\n")
    module = load(str(path), str(path), "")
    (target,) = functions_of(lambda: module.doubled(torch.sin(torch.ones(2))))
    assert (target.name, target.file) == ("doubled", str(path))


def test_helpers_that_the_reference_shares_are_left_out():
    shared = functions_of(step, lambda: input_grad(*torch.ones(4, 3, 2)))
    assert "input_grad" not in {t.name for t in shared}


def test_a_mutant_stands_wherever_the_function_was_imported():
    (target,) = named(["norm_op:input_grad"])
    edit = next(e for e in target.edits() if e.operator == "factor dropped")
    code, imported, before = input_grad.__code__, input_grad, step
    torch.manual_seed(0)
    right = before()
    try:
        target.replace(edit)
        torch.manual_seed(0)
        assert not torch.allclose(step(), right)
        assert imported.__code__ is not code
        assert imported.__code__.co_firstlineno == code.co_firstlineno
    finally:
        imported.__code__ = code
    torch.manual_seed(0)
    assert torch.equal(step(), right)


def test_a_mutant_of_a_decorator_stands_for_all_that_it_decorates(tmp_path):
    path = tmp_path / "decorated.py"
    path.write_text(
        "def plus(f):\n    def wrapped(x):\n        return f(x) + 1\n    return wrapped\n\n"
        "@plus\ndef single(x):\n    return x\n\n@plus\ndef double(x):\n    return x * 2\n"
    )
    module = load(str(path), str(path), "")
    target = next(t for t in functions_of(lambda: module.double(3)) if "wrapped" in t.name)
    target.replace(next(e for e in target.edits() if e.text == "f(x)"))
    assert (module.single(3), module.double(3)) == (3, 6)


WRAPPED = """import functools

def plus(f):
    @functools.wraps(f)
    def wrapper(x):
        return f(x) + 1
    return wrapper

@plus
def single(x):
    return x

def make():
    class Twice:
        @staticmethod
        def of(x):
            return x * 2
    return Twice
"""


def test_a_mutant_stands_for_wrappers_and_nested_functions_in_tests_too(tmp_path):
    path, applied = tmp_path / "wrapped.py", tmp_path / "applied"
    path.write_text(WRAPPED)
    module = load(str(path), str(path), "")
    target = next(t for t in functions_of(lambda: module.single(3)) if t.line == 5)
    assert target.name == "plus.<locals>.wrapper"
    twice = module.make()
    (nested,) = functions_of(lambda: twice.of(3))
    assert nested.name == "make.<locals>.Twice.of"

    for each, text in ((target, "f(x)"), (nested, "x")):
        job = dict(file=str(path), name=each.name, kind="python", line=each.line, applied=str(applied))
        _apply(job | dict(edited=next(e for e in each.edits() if e.text == text).applied(each.source)))
        assert applied.exists()
        applied.unlink()

    assert (module.single(3), module.single.__wrapped__(3), module.plus(abs)(-3)) == (3, 3, 3)
    assert (twice.of(3), module.make().of(3)) == (3, 3)
    _apply(job | dict(name="make.<locals>.Twice.other", edited=""))
    assert not applied.exists()


def test_a_static_method_is_found_by_its_path():
    (target,) = named(["norm_op:RmsNorm.backward"])
    assert target.function is RmsNorm.__dict__["backward"].__func__
    assert target.source.startswith("def backward(ctx, dy):")


@pytest.mark.parametrize("word", ["norm_op:missing", "no_such_module:f", "norm_op:spec", "math:sqrt"])
def test_what_has_no_source_is_refused(word):
    with pytest.raises(UsageError, match=r"`functions` names .*" + word):
        named([word])


def test_names_of_enclosing_scopes_are_kept():
    factor = 3.0

    def scaled(x):
        return x * factor

    source = "def scaled(x):\n    return x + factor\n"
    scaled.__code__ = recompiled(scaled.__code__, source, 1)
    assert scaled(1.0) == 4.0
    with pytest.raises(ValueError, match="enclosing"):
        recompiled(scaled.__code__, "def scaled(x):\n    return x\n", 1)


def test_a_wrong_source_is_refused_as_python_does():
    with pytest.raises(SyntaxError):
        recompiled(input_grad.__code__, "def input_grad(dy):\n    return (\n", 1)


def test_edits_do_not_depend_on_the_run():
    (target,) = named(["norm_op:input_grad"])
    assert target.edits() == python_edits(target.source)
    assert spec.fn is norm
