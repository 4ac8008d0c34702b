"""Results of mutants that are kept: a run that was stopped goes on, what changed is done again, a cluster does the same."""

from __future__ import annotations

import re
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from norm_op import spec

import retrograd as rg
from retrograd.catalog import resolve
from retrograd.errors import UsageError
from retrograd.mutation.search import Search

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.dealt(2, whole_file=True),
    pytest.mark.skipif(torch.cuda.is_available(), reason="torch runs no backward in a fork beside a GPU"),
]


@pytest.fixture
def mutated(tmp_path, monkeypatch):
    """Runs six mutants of an op in a file that may be changed; results, and ids of those that were not known."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(HERE / "norm_op.py", tmp_path / "mine.py")

    def run(stop_after=99, **options):
        begun = []

        def progress(done, of, result):
            begun.append(result.mutant.id)
            if len(begun) == stop_after:
                raise KeyboardInterrupt

        arguments = dict(count=6, levels=["python"], results=tmp_path / "kept.sqlite", progress=progress) | options
        try:
            return rg.mutate(resolve("mine.py:spec"), **arguments), begun
        except KeyboardInterrupt:
            return None, begun

    return run


def fates(report):
    return [(r.mutant.id, r.fate, r.rarity, r.case, r.killed("verify"), r.test) for r in report.results]


def test_a_run_that_was_stopped_goes_on_where_it_was(mutated):
    stopped, begun = mutated(stop_after=2)
    assert (stopped, len(begun)) == (None, 2)
    whole, others = mutated()
    assert len(others) == 4
    assert not set(begun) & set(others)
    again, none = mutated()
    assert none == []
    assert fates(again) == fates(whole) == fates(mutated(results=None)[0])
    more, five = mutated(count=8)
    assert len(five) == len({r.mutant.id for r in more.results} - {r.mutant.id for r in whole.results})


def test_a_second_round_searches_what_the_first_has_not_seen(mutated, tmp_path):
    rounds = [{dict(t.case.sizes)["N"] for t in Search(spec, 0, number).trials} for number in (0, 1)]
    late = max(rounds[1] - rounds[0])
    mine = tmp_path / "mine.py"
    text = mine.read_text().replace("    g = dy * w\n", "    g = dy * w * factor(xhat.shape[-1])\n")
    mine.write_text(f"{text}\n\ndef factor(n):\n    return 1.0 if n == {late} else 1.0\n")
    options = dict(functions=["factor"], count=5)
    first, _ = mutated(**options)
    unseen = [r.mutant.id for r in first.results if r.fate == "equivalent"]
    second, searched = mutated(search=2, **options)
    assert sorted(searched) == sorted(unseen)  # and no other one
    seen = [r for r in second.differing if r.mutant.id in unseen]
    assert {r.rarity for r in seen} == {"sizes"}
    assert all(f"N={late}" in r.case for r in seen)
    assert fates(mutated(search=2, results=None, **options)[0]) == fates(second)


def test_what_the_op_is_made_of_has_changed(mutated, tmp_path):
    mutated(count=2)
    assert mutated(count=2)[1] == []
    file = tmp_path / "mine.py"
    file.write_text(file.read_text() + "\n# nothing that matters, which nobody can know\n")
    assert len(mutated(count=2)[1]) == 2
    assert len(mutated(count=2, seed=1)[1]) == 2


def test_tests_that_have_changed_judge_again_and_nothing_else_is_done_again(mutated, tmp_path, monkeypatch):
    # In a file that imports no torch, so that a process of the tests is over at once.
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "formula", raising=False)
    mine = tmp_path / "mine.py"
    head, formula, rest = re.split(r"(?ms)^(def input_grad.*?)^(?=def norm)", mine.read_text())
    (tmp_path / "formula.py").write_text(formula)
    mine.write_text(f"{head}from formula import input_grad\n\n{rest}")
    tests = tmp_path / "passes.py"
    tests.write_text("import formula\n")
    options = dict(tests=f"{sys.executable} passes.py", functions=["input_grad"])
    weak, _ = mutated(**options)
    assert weak.differing
    assert [r.killed("tests") for r in weak.differing] == [False] * len(weak.differing)
    assert mutated(**options)[1] == []
    helper = tmp_path / "helper.py"
    tests.write_text("import formula, helper\n")
    helper.write_text("assert 1\n")
    assert len(mutated(**options)[1]) == len(weak.differing)
    helper.write_text("assert 2\n")  # of which the command says nothing
    judged_again, ids = mutated(**options)
    assert len(ids) == len(weak.differing)
    assert [r.seconds for r in judged_again.results] == [r.seconds for r in weak.results]


def test_a_cluster_has_to_load_the_spec(mutated):
    with pytest.raises(UsageError, match="`cluster` needs `load`"):
        mutated(cluster="tcp://127.0.0.1:1")


def test_a_cluster_gives_the_same_results_in_the_same_file(mutated, tmp_path):
    distributed = pytest.importorskip("distributed", reason="the extra `cluster`")
    here, _ = mutated(results=None)
    load = partial(resolve, "mine.py:spec")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, memory_limit=0
    ) as local:
        there, begun = mutated(cluster=local.scheduler_address, load=load)
        assert len(begun) == 6
        assert fates(there) == fates(here)
        assert mutated()[1] == []  # a file is continued by either
        other = tmp_path / "other.py"
        other.write_text((tmp_path / "mine.py").read_text() + "# another file\n")
        with pytest.raises(UsageError, match="has other sources or versions"):
            mutated(cluster=local.scheduler_address, results=None, load=partial(resolve, "other.py:spec"))
