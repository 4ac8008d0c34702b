"""What is said of a description that does not work: the argument, what it is, what was expected."""

from __future__ import annotations

import pytest
import torch

import retrograd as rg
from retrograd.errors import SpecError, UsageError

t = rg.tensor
pytest_plugins = ["pytester"]


def scaled(x, w):
    return x * w


def inputs():
    return dict(x=t("M", "N"), w=t("N"))


@pytest.mark.parametrize("tuned", [False, True])
def test_a_kernel_is_no_op(tuned):
    triton = pytest.importorskip("triton")
    kernel = triton.autotune([triton.Config({})], key=[])(triton.jit(scaled)) if tuned else triton.jit(scaled)
    with pytest.raises(SpecError, match="`fn` is the Triton kernel 'scaled', expected the function that launches it"):
        rg.op(kernel, scaled, inputs())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(inputs=5), "`inputs` is int; expected a dict such as"),
        (dict(inputs=t("M")), "`inputs` is TensorSpec; expected a dict such as"),
        (dict(inputs={}), "`inputs` is missing"),
        (dict(inputs=dict(x=("M", "N"))), r"no tensor: 'x' is \('M', 'N'\); expected retrograd.tensor\('M', 'N'\)"),
        (dict(params=[1]), r"`params` is \[1\], expected a dict such as dict\(eps="),
        (dict(sizes=["N"]), r"`sizes` is \['N'\], expected a dict such as dict\(N="),
        (dict(sizes=dict(NN=5)), "`sizes` is about 'NN', which no dimension .*; they have M, N"),
        (dict(where="K <= N"), "`where` is about 'K', which no dimension"),
        (dict(deterministic="yes"), "`deterministic` is 'yes', expected True or False, or None"),
        (dict(surrogate="yes"), "`surrogate` is 'yes', expected True or False$"),
        (dict(random=1), "`random` is 1, expected True or False, or None to find out$"),
        (dict(name=3), "`name` is 3, expected a string"),
        (dict(algorithm_error="4"), "`algorithm_error` is '4', expected a factor"),
    ],
)
def test_an_argument_of_op_of_another_kind(arguments, message):
    with pytest.raises(SpecError, match=message):
        rg.op(scaled, scaled, **dict(inputs=inputs()) | arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(low=3, high=1), "`low` is 3 and `high` is 1; expected the smaller one as `low`"),
        (dict(low="N", high="N"), "`low` is 'N', expected a number or None$"),
        (dict(low=0, high=[1]), r"`high` is \[1\], expected a number or None, or a dimension's name"),
        (dict(scale="big"), "`scale` is 'big', expected a factor, or"),
        (dict(scale=(0.0, 1.0)), r"`scale` is \(0.0, 1.0\), expected a factor, or"),
        (dict(grad="no"), "`grad` is 'no', expected False"),
    ],
)
def test_an_argument_of_tensor_of_another_kind(arguments, message):
    with pytest.raises(SpecError, match=message):
        t("M", **arguments)


def test_one_dtype_is_no_sequence_of_them():
    with pytest.raises(UsageError, match=r"`dtypes` is 'float32', expected a sequence"):
        rg.op(scaled, scaled, inputs(), dtypes="float32")


@pytest.mark.parametrize(
    "arguments",
    [
        dict(sizes=dict(N=(1, 512)), where=("M <= N", "k <= N"), params=dict(k=[1, 2])),
        dict(sizes=dict(N="8*G", G=[1, 2])),
        dict(inputs=dict(x=t("M", "N"), w=t("N"), n=rg.size("N"))),
        dict(inputs=dict(x=torch.ones(2, 3), w=2.0)),
        dict(inputs=torch.tensor(1.0)),
        dict(inputs=lambda seed, dtype, sizes: (torch.ones(sizes["K"]),), sizes=dict(K=3)),
        dict(inputs=dict(x=t("N", scale=0), w=t("N", scale=(0.5, 0.5), low=-1, high=1))),
    ],
)
def test_what_is_right_is_taken(arguments):
    rg.op(scaled, scaled, **dict(inputs=inputs()) | arguments)


def test_stages_as_one_word_and_a_seed_that_is_none():
    spec = rg.op(scaled, scaled, inputs())
    with pytest.raises(UsageError, match=r"`only` is 'oracle', expected a sequence of stages"):
        rg.verify(spec, only="oracle")
    with pytest.raises(UsageError, match="`seed` is 'a', expected a whole number"):
        rg.verify(spec, seed="a", only=["oracle"])  # type: ignore[arg-type]


def test_a_reference_that_does_not_take_what_it_is_called_with():
    spec = rg.op(scaled, lambda x, w: x * w, inputs(), params=dict(eps=1e-6))
    with pytest.raises(SpecError, match=r"`inputs` and `params` call it as reference\(x, w, eps=\.\.\.\); mend them"):
        rg.verify(spec, level="quick", only=["contract"])


def test_a_reference_that_raises_inside_is_not_called_otherwise():
    def reference(x, w):
        raise TypeError("inside")

    with pytest.raises(SpecError, match=r"TypeError: inside .*mend the reference"):
        rg.verify(rg.op(scaled, reference, inputs()), level="quick", only=["contract"])


def test_no_stage_left_is_told_as_that():
    report = rg.verify(rg.op(scaled, scaled, inputs()), level="quick", only=["oracle"], skip=["oracle"])
    assert (report.verdict, report.covers) == ("undecided", "nothing: no stage was left to run")


SPECS = """
import retrograd as rg

def forgets(x):  # half of the gradient
    return x.detach() * 1.5 + x * 0.5

def make():
    return rg.op(forgets, lambda x: 2 * x, dict(x=rg.tensor("N")), name="twice")

spec = make()
"""


@pytest.fixture
def project(pytester, monkeypatch):
    pytester.makepyfile(specs_of_the_project=SPECS)

    def run(body: str):
        pytester.makepyfile(
            test_it=f"import pytest\nimport retrograd as rg\nimport specs_of_the_project as ops\n{body}"
        )
        monkeypatch.setenv("CI", "1")  # pytest cuts no line of the summary there
        return pytester.runpytest_inprocess("-p", "no:cacheprovider")

    return run


_TEST = "def test_it(retrograd_stage):\n    retrograd_stage.assert_passes()\n"


def test_a_failure_shows_the_test_and_the_finding_alone(project):
    result = project(f"@pytest.mark.retrograd(ops.spec, only=['oracle'])\n{_TEST}")
    result.assert_outcomes(failed=1)
    result.stdout.no_fnmatch_line("*_retrograd_pytest.py*")
    result.stdout.fnmatch_lines(["*repro: retrograd verify specs_of_the_project.py:spec *", "FAILED *- [[]oracle] *"])


def test_a_spec_without_a_name_is_shown_again_by_its_test(project):
    result = project(f"@pytest.mark.retrograd(ops.make(), only=['oracle'])\n{_TEST}")
    result.stdout.fnmatch_lines(["*repro: pytest 'test_it.py::test_it[[]oracle]' --retrograd-level quick *"])


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ("@pytest.mark.retrograd(ops.spec, level='quik')", "*test_it: *`level` is 'quik', expected one of quick, full"),
        ("@pytest.mark.retrograd(ops.spec, only=['orcale'])", "*test_it: *names [[]'orcale'], expected stages among*"),
        ("", "*test_it: the fixture retrograd_stage needs @pytest.mark.retrograd(spec, ...)*"),
    ],
)
def test_a_mark_that_does_not_work_is_told_once(project, mark, message):
    result = project(f"{mark}\n{_TEST}")
    result.stdout.fnmatch_lines([message])
    result.stdout.no_fnmatch_line("*_retrograd_pytest.py*")
    result.assert_outcomes(errors=1)


def test_what_a_fixture_refuses_is_a_sentence(project):
    result = project(f"@pytest.mark.retrograd(ops.spec, only=['oracle'], dtypes=['fp32'])\n{_TEST}")
    result.stdout.fnmatch_lines(["*`dtype` is 'fp32', expected one of*"])
    result.stdout.no_fnmatch_line("*runner.py*")


def test_assert_backward_hides_its_own_lines(project):
    result = project(
        "import torch\ndef test_it():\n    x = torch.ones(3)\n"
        "    rg.assert_backward(torch.sin, dict(x=x), x, grads=dict(x=x))\n"
    )
    result.stdout.no_fnmatch_line("*asserts.py*")
    result.stdout.fnmatch_lines(["FAILED *- grad x[[]*"])


def test_ops_may_share_a_table_of_sizes():
    shared = dict(B=(1, 2), K=(3, 5), width=4)
    assert rg.op(torch.sin, torch.sin, dict(x=rg.tensor("B", "width")), sizes=shared)
    with pytest.raises(SpecError, match=r"about 'widht', .* did you mean 'width'"):
        rg.op(torch.sin, torch.sin, dict(x=rg.tensor("B", "width")), sizes=dict(B=(1, 2), widht=4))


def test_what_returns_no_tensor_sometimes_is_wrong_and_what_never_does_is_described_wrongly():
    def scaled(x, by):
        return x * by

    inputs, params = dict(x=rg.tensor("M", "N")), dict(by=[2.0, 0.0])
    nothing = rg.op(lambda x, by: x * by if by else None, scaled, inputs, params=params)
    (finding,) = rg.verify(nothing, level="quick", only=["oracle"]).findings
    assert "returned ['NoneType']" in finding.what
    assert rg.verify(rg.op(scaled, scaled, inputs, params=params), level="quick", only=["oracle"])
    with pytest.raises(SpecError, match=r"returned \['NoneType'\]"):
        rg.verify(rg.op(lambda x, by: None, scaled, inputs, params=params), level="quick")
