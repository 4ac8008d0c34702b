"""Stage batch: bits of a row that depend on its batch are told, and rows that depend on each other are not accused."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from corpus import HERE, load_module

import retrograd as rg
from retrograd.check.stages.batch import NotByRows, batch_axis
from retrograd.errors import SpecError

CORPUS = load_module(Path(HERE) / "mutants" / "batch.py")


def batch(spec, level="quick", **more):
    return rg.verify(spec, level=level, only=["batch"], **more).stage("batch")


@pytest.mark.parametrize(("name", "tensors"), [("BI01", {"out"}), ("BI02", {"grad x"})])
def test_a_sum_split_by_the_number_of_rows_is_a_finding(name, tensors):
    stage = batch(CORPUS.MUTANTS[name])
    assert {f.tensor for f in stage.findings} == tensors
    finding = stage.findings[0]
    assert (finding.kind, dict(finding.case.sizes)["M"]) == ("batch-dependent", 129)
    assert "of M has other bits" in finding.what
    assert "than in a batch of 129" in finding.what
    assert finding.got != finding.want
    assert 0 < finding.wrong <= finding.total


@pytest.mark.parametrize("level", ["quick", "full"])
def test_a_split_that_is_always_the_same_is_left_alone(level):
    stage = batch(CORPUS.HEALTHY_SPLIT, level)
    assert (stage.status, stage.findings, stage.power_text) == ("passed", (), "exact: any bit of rows along M")
    assert (stage.cases, stage.runs) == (2, 14 if level == "quick" else 24)


def blocks(x, rows):
    """Sums of 64 elements each, added up in another order where rows are few: no other bits up to 128 elements."""
    parts = [part.sum(-1) for part in x.split(64, -1)]
    return sum(parts if len(x) > rows else parts[::-1])


@pytest.mark.parametrize("sizes", [{}, dict(N=(1, 300)), dict(N=[8, 48, 300, 16])])
def test_a_split_that_ordinary_rows_are_too_short_for_is_a_finding(sizes):
    inputs = dict(x=rg.tensor("M", "N"))
    spec = rg.op(lambda x: blocks(x, 1), lambda x: x.sum(-1), inputs, sizes=sizes, batch_invariant=True)
    (finding,) = batch(spec).findings
    assert (finding.tensor, dict(finding.case.sizes)["N"]) == ("out", 300 if sizes else 1025)
    assert not batch(replace(spec, fn=lambda x: blocks(x, 0))).findings


def test_what_is_not_promised_is_a_note_in_one_dtype(monkeypatch):
    monkeypatch.setattr(CORPUS, "FEW", 16)  # a batch of 33 is enough for a note
    spec = replace(CORPUS.MUTANTS["BI01"], batch_invariant=None, dtypes=("float32", "bfloat16"))
    stage = batch(spec)
    assert (stage.status, stage.findings, stage.cases) == ("passed", (), 1)
    assert len(stage.notes) == 1
    assert "bits of out depend on the batch" in stage.notes[0]


def test_nobody_looks_where_bits_may_depend():
    assert batch(replace(CORPUS.MUTANTS["BI01"], batch_invariant=False)).status == "skipped"


def test_without_a_reference_a_promise_counts_and_nothing_else():
    spec = replace(CORPUS.MUTANTS["BI01"], reference=None)
    assert batch(spec).findings
    assert "without a reference" in batch(replace(spec, batch_invariant=None)).reason


INTERACTING = {
    "batch_norm": lambda x: (x - x.mean(0)) / x.std(0),
    "softmax over rows": lambda x: torch.softmax(x, 0),
    "cumulative": lambda x: x.cumsum(0),
    "scaled by the number of rows": lambda x: x / len(x),
    "flipped": lambda x: x.flip(0) * 2,
}


@pytest.mark.parametrize("name", INTERACTING)
def test_rows_that_depend_on_each_other_are_not_accused(name):
    fn = INTERACTING[name]
    spec = rg.op(fn, fn, dict(x=rg.tensor("M", "N")), sizes=dict(M=(2, 200)), name=name)
    assert (batch(spec).status, batch(spec).notes) == ("passed", ())
    stage = batch(replace(spec, batch_invariant=True))
    assert stage.status == "undecided"
    assert "depend on each other" in stage.reason


def test_gradients_without_the_batch_are_not_compared():
    # A weight's gradient adds up over the rows: it has other bits in every batch.
    def scaled(x, w):
        return x * w

    spec = rg.op(scaled, scaled, dict(x=rg.tensor("M", "N"), w=rg.tensor("N")), batch_invariant=True)
    assert (batch(spec).status, batch(spec).findings) == ("passed", ())


def test_a_loss_has_no_rows():
    spec = rg.op(torch.sum, torch.sum, dict(x=rg.tensor("M", "N")))
    assert batch(spec).power_text == "no output has rows along M"


def test_the_batch_has_a_name():
    fn = CORPUS.make(4, 1, 1, 1)

    def heads(w, x):
        return fn(x.flatten(0, 1)).view_as(x) * w

    def reference(w, x):
        return x / (1 + x.square().sum(-1, keepdim=True)) * w

    inputs = dict(w=rg.tensor("N"), x=rg.tensor("B", "H", "N"))
    spec = rg.op(heads, reference, inputs, sizes=dict(N=48), batch_invariant="B")
    assert "of B has other bits" in batch(spec).findings[0].what
    assert rg.op(heads, reference, inputs, batch_invariant=True).leading == "N"


def test_a_vocabulary_is_no_batch():
    inputs = dict(w=rg.tensor("V", "N"), i=rg.tensor("B", dtype="int64", low=0, high="V"))
    spec = rg.op(lambda w, i: w[i], lambda w, i: w[i], inputs, batch_invariant=True)
    assert spec.leading == "B"
    assert batch(spec).status == "passed"


class Noisy:
    """x * 2 whose last bit is another in each third call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return x * 2 * (1 + 2e-7 * (self.calls % 3 == 0))


def test_what_differs_at_each_call_is_nothing_that_the_batch_does():
    spec = rg.op(Noisy(), lambda x: x * 2, dict(x=rg.tensor("M", "N")), batch_invariant=True)
    stage = batch(spec)
    assert (stage.status, stage.findings) == ("undecided", ())
    assert "at each run of the same call" in stage.reason


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "expected True, False, None or the name"),
        ("K", "expected the name of a dimension; they are M, N"),
    ],
)
def test_what_no_dimension_is_called_is_refused(value, message):
    with pytest.raises(SpecError, match=message):
        rg.op(torch.sin, torch.sin, dict(x=rg.tensor("M", "N")), batch_invariant=value)


def test_a_promise_about_no_batch_is_refused():
    with pytest.raises(SpecError, match="no tensor begins with a batch"):
        rg.op(torch.sin, torch.sin, dict(x=torch.ones(3)), batch_invariant=True)


def test_rows_have_equal_shares():
    whole, part = torch.empty(12, 5), torch.empty(3, 5)
    assert batch_axis(whole, part, 4, 1) == 0
    assert batch_axis(whole, whole, 4, 1) is None
    for other in (torch.empty(4, 5), torch.empty(3, 4), torch.empty(3)):
        with pytest.raises(NotByRows):
            batch_axis(whole, other, 4, 1)


def test_an_order_of_programs_that_depends_on_the_batch_is_seen_in_a_kernel():
    pytest.importorskip("triton")
    from batch_kernels import fixed, split  # of this folder: kernels need a file

    stage = batch(split)
    assert {f.tensor for f in stage.findings} == {"out", "grad x"}
    stage = batch(fixed)
    assert (stage.status, stage.findings) == ("passed", ())


def test_a_kernel_is_not_accused_of_the_blas_of_this_machine():
    """OpenBLAS's float32 kernels for AVX2 give a row of a small matrix other bits at another place of it."""
    pytest.importorskip("triton")
    code = (
        "import retrograd as rg, batch_kernels; "
        "stage = rg.verify(batch_kernels.fixed, level='quick', only=['batch']).stage('batch'); "
        "print(stage.status, stage.findings)"
    )
    environment = dict(
        os.environ, OPENBLAS_CORETYPE="Haswell", PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), *sys.path])
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split("\n")[0] == "passed ()"
