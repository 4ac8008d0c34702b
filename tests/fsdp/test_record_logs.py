"""Logs, their comparison and the command line; the pytest fixture; what loads torch. One process."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from retrograd.cli import main
from retrograd.compat.versions import UntestedVersionWarning
from retrograd.core.rank_store import RankStore
from retrograd.errors import RanksDifferError, UsageError
from retrograd.fsdp import Collective, Log, assert_same_order, diff, record_collectives
from retrograd.fsdp.check_command import Checked, judged
from retrograd.fsdp.log_diff import first_difference
from retrograd.fsdp.outcome import of_check
from retrograd.fsdp.rank_verification import RankVerifier
from retrograd.fsdp.step_patterns import Journal
from retrograd.fsdp.watchdog import Watchdog

pytest_plugins = ["pytester"]

needs_distributed = pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed")


def one(name: str, kind: str = "reduce-scatter", phase: str = "backward", ranks=(0, 1), **fields) -> Collective:
    return Collective(kind, phase, (name,), 64, "float32", "avg", ranks, **{"by": "fsdp"} | fields)


def journal(*steps: str, rank: int = 0) -> Journal:
    """Steps written as letters, one a module; capitals gather in forward."""
    made = Journal(rank, 2)
    for step in steps:
        for letter in step:
            gathers = letter.isupper()
            made.add(one(letter.lower(), *(("all-gather", "forward") if gathers else ())))
        made.end_step()
    return made


@pytest.mark.parametrize(
    ("here", "there", "index", "kind", "words"),
    [
        ("abc", "acb", 1, "order", "rank 1 reduces c where rank 0 reduces b"),
        ("abc", "ab", 2, "missing", "rank 0 reduces c"),
        ("abc", "ac", 1, "missing", "rank 1 reduces c where rank 0 reduces b"),
        ("ab", "abc", 2, "extra", "rank 1 reduces c"),
        ("ab", "ax", 1, "other", "rank 1 reduces x where rank 0 reduces b"),
    ],
)
def test_the_first_difference(here, there, index, kind, words):
    found = first_difference([one(n) for n in here], [one(n) for n in there])
    assert (found.index, found.kind) == (index, kind)
    assert words in found.text("rank 0", "rank 1")
    assert first_difference([one(n) for n in here], [one(n) for n in here]) is None


def test_a_size_that_differs_is_told_with_both_sizes():
    text = first_difference([one("a")], [replace(one("a"), numel=32)]).text("rank 0", "rank 1")
    assert "rank 1: reduce-scatter, 32 float32" in text
    assert "rank 0: reduce-scatter, 64 float32" in text


def test_every_field_but_names_of_ddp_is_compared():
    base = one("a")
    changes = {
        "kind": "all-reduce",
        "phase": "other",
        "modules": ("b",),
        "numel": 1,
        "dtype": "bfloat16",
        "op": "sum",
        "ranks": (0, 2),
        "by": "module",
        "root": 1,
    }
    for field, value in changes.items():
        assert replace(base, **{field: value}).identity != base.identity, field
    assert replace(base, by="ddp").identity == replace(base, by="ddp", modules=("b",)).identity


def test_hashes_are_the_same_in_every_process():
    code = "from test_record_logs import journal; print(journal('ABba', 'ABba').digest.hex())"
    told = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parent, env=env
        ).stdout
        for env in environments("1", "2")
    }
    assert told == {journal("ABba", "ABba").digest.hex() + "\n"}


def environments(*seeds: str) -> list[dict[str, str]]:
    import os

    return [dict(os.environ) | {"PYTHONHASHSEED": seed} for seed in seeds]


def test_a_log_comes_back_from_its_file(tmp_path):
    log = journal("ABba", "ABab", "ABba").log()
    log.save(tmp_path / "log.json")
    assert Log.load(tmp_path / "log.json") == log
    assert [s.pattern for s in log.steps] == [0, 1, 0]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": "retrograd.fsdp.log/2"}', '{"schema": "retrograd.fsdp.log/1", "table": 3}']
)
def test_what_is_no_log_is_refused(text, tmp_path):
    path = tmp_path / "log.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="log"):
        Log.load(path)
    assert CliRunner().invoke(main, ["fsdp", "diff", str(path), str(path)]).exit_code == 2


def test_numbers_that_lead_nowhere_are_refused():
    data = json.loads(journal("ABba").log().to_json())
    data["patterns"][0]["entries"] = [99]
    with pytest.raises(UsageError, match="a number leads to no collective"):
        Log.from_json(json.dumps(data))


def test_a_change_is_told_once_a_pattern_and_kinds_of_steps_do_not_mix():
    made = Journal(0, 2)
    said = []
    for step in ("ABba", "AB", "ABba", "AB", "ABab", "ABab", "ABba"):
        for letter in step:
            made.add(one(letter.lower(), *(("all-gather", "forward") if letter.isupper() else ())))
        said.append(made.end_step())
    assert [bool(s) for s in said] == [False, False, False, False, True, False, False]
    assert "this step reduces a where an earlier step reduces b" in said[4]


def test_models_that_are_updated_in_turn_are_no_change_and_another_order_in_the_steps_of_one_is():
    made = Journal(0, 2)
    said = []
    for step, updated in (("ab", 1), ("cd", 2), ("ab", 1), ("cd", 2), ("dc", 2), ("ba", 1)):
        for letter in step:
            made.add(one(letter))
        made.updated = updated
        said.append(made.end_step())
    assert [bool(s) for s in said] == [False, False, False, False, True, True]


def test_what_the_program_issues_between_steps_is_no_change():
    made = Journal(0, 2)
    for step in range(3):
        made.add(one("a"))
        if step == 1:
            made.add(one("loss", "all-reduce", "other", by=""))
        assert made.end_step() == ""


def test_memory_stays_bounded_when_every_step_is_new():
    made, rng = Journal(0, 2), random.Random(0)
    names = list("abcdefghij")
    for _ in range(400):
        rng.shuffle(names)
        for name in names:
            made.add(one(name))
        made.end_step()
    assert len(made.patterns) == 256
    assert len(made.entries) == 10
    assert made.total == 400


def test_diff_compares_what_two_ranks_share():
    logs = [journal("abc", rank=0).log(), journal("abc", rank=1).log()]
    assert diff(*logs).same
    logs[1].table = [replace(c, ranks=(1, 3)) for c in logs[1].table]
    assert diff(*logs).place == "step 0, collective 0"
    logs[0].table = [replace(c, ranks=(0, 2)) for c in logs[0].table]
    assert diff(*logs).same  # other groups: order between them is free


def test_the_command_names_the_step_and_both_modules(tmp_path):
    journal("abc", "abc", rank=0).log().save(tmp_path / "0.json")
    journal("abc", "acb", rank=1).log().save(tmp_path / "1.json")
    files = [str(tmp_path / n) for n in ("0.json", "1.json")]
    found = CliRunner().invoke(main, ["fsdp", "diff", *files])
    assert found.exit_code == 1
    assert found.output.startswith("step 1, collective 1: rank 1 reduces c where rank 0 reduces b")
    data = json.loads(CliRunner().invoke(main, ["fsdp", "diff", "--json", *files]).output)
    (parting,) = data["partings"]
    assert (data["verdict"], parting["difference"]["index"]) == ("differs", 1)
    assert parting["difference"]["second"]["modules"] == ["c"]
    saved, page = (str(tmp_path / f"saved.{suffix}") for suffix in ("json", "html"))
    CliRunner().invoke(main, ["fsdp", "diff", "-o", saved, "-o", page, *files])
    assert "rank 1 reduces c where rank 0 reduces b" in Path(page).read_text()
    again = CliRunner().invoke(main, ["report", saved])
    assert (again.exit_code, again.output) == (0, found.output)
    assert CliRunner().invoke(main, ["fsdp", "diff", files[0], files[0]]).exit_code == 0
    assert CliRunner().invoke(main, ["fsdp", "diff", files[0], "missing.json"]).exit_code == 2


def test_a_rank_that_left_no_log_is_named():
    log = journal("abc").log()
    found = judged(1, [log])
    assert found.exit_code == 1
    assert "rank 1 left no log" in "\n".join(found.problems)
    assert judged(0, [log]).exit_code == 0
    assert judged(0, []).exit_code == 2


def test_a_clause_that_a_problem_before_has_is_told_once():
    problems = ("rank 1 reduces c where rank 0 reduces b; at a.py:3", "rank 0 raised E; at a.py:3; ended", "at a.py:3")
    outcome = of_check(Checked(1, (), (), problems), ["train.py"])
    assert outcome.problems == (problems[0], "rank 0 raised E; ended")
    assert outcome.exit_code == 1


def test_an_empty_assertion_is_refused():
    with pytest.raises(UsageError, match="no log"):
        assert_same_order()


def both(journals: list[Journal], seconds: float = 20.0) -> list[RankVerifier]:
    store = dist.HashStore()
    return [RankVerifier(RankStore(store, rank, 2), made, seconds) for rank, made in enumerate(journals)]


def side_by_side(functions) -> list[str]:
    """Errors of functions that run in threads, "" for none."""
    said = [""] * len(functions)

    def run(at):
        try:
            functions[at]()
        except Exception as error:
            said[at] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


@needs_distributed
def test_a_difference_between_two_comparisons_is_found_at_the_next():
    verifiers = both([journal("abc", "abc", "abc", rank=0), journal("abc", "bac", "abc", rank=1)])
    for text in side_by_side([v.check for v in verifiers]):
        assert "RanksDifferError: step 1, collective 0: rank 1 reduces b where rank 0 reduces a" in text
    verifiers = both([journal("abc", rank=0), journal("abc", rank=1)])
    assert side_by_side([v.check for v in verifiers]) == ["", ""]


@needs_distributed
def test_a_rank_that_does_not_come_is_named_in_time():
    verifier = both([journal("abc"), journal("abc")], seconds=0.2)[0]
    with pytest.raises(RanksDifferError, match=r"rank 0 is at the end of the step, rank 1 said nothing for 0\.2 s"):
        verifier.check()


@needs_distributed
def test_the_watchdog_says_who_is_behind_and_what_is_due():
    behind = journal("abc", rank=1)
    ahead = journal("abc", rank=0)
    for made, letters in ((ahead, "ab"), (behind, "a")):
        for letter in letters:
            made.add(one(letter))
    said: dict[int, list[str]] = {0: [], 1: []}
    dogs = [Watchdog(lambda v=v: v, 0.4, said[v.exchange.rank].append) for v in both([ahead, behind])]
    for dog in dogs:
        dog.start()
    until(lambda: said[0] and said[1])
    for dog in dogs:
        dog.stop()
    assert (
        "rank 0 is waiting in reduce-scatter of b, which is due on rank 1: it has issued 1 collectives of step 1"
        in said[0][0]
    )
    assert "rank 0 is waiting in reduce-scatter of b, which is due here" in said[1][0]
    assert [len(texts) for texts in said.values()] == [1, 1]  # once a stall


@needs_distributed
def test_the_watchdog_says_that_a_rank_is_gone():
    said: list[str] = []
    verifiers = both([journal("abc", rank=0), journal("abc", rank=1)])
    verifiers[1].exchange.post(
        "life", json.dumps({"beat": 3, "step": 1, "issued": 0, "idle": 0, "last": "reduce-scatter of c", "at": ""})
    )
    dog = Watchdog(lambda: verifiers[0], 0.4, said.append)
    dog.start()
    until(lambda: said)
    dog.stop()
    assert "rank 1 gives no sign of life: it died or is stopped; its last collective was reduce-scatter of c" in said[0]


def until(true, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "the watchdog said nothing"
        time.sleep(0.02)


@needs_distributed
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"verify_every": 0}, "`verify_every` is 0"),
        ({"first": -1}, "`first` is -1"),
        ({"first": None}, "`first` is None"),
        ({"timeout": 0}, "`timeout` is 0"),
        ({"on_change": "stop"}, "`on_change` is 'stop', expected one of 'warn', 'raise', 'record'"),
        ({"steps": "batch"}, "`steps` is 'batch'"),
        ({"model": 3}, "`model` is int"),
    ],
)
def test_arguments_that_make_no_sense(options, said):
    with pytest.raises(UsageError, match=said.replace("`", "[`]")):
        record_collectives(**options)


@needs_distributed
def test_a_reduction_is_called_the_same_however_it_is_given():
    from retrograd.fsdp.attribution import _reduction

    ops = dist.ReduceOp
    given = (ops.SUM, ops(ops.SUM), ops.AVG, ops(ops.AVG), dist._make_nccl_premul_sum(0.5), None, len, "sum")
    assert [_reduction(op) for op in given] == ["sum", "sum", "avg", "avg", "premul_sum", "", "", ""]


@needs_distributed
def test_one_recording_at_a_time():
    with record_collectives() as log:
        with pytest.raises(UsageError, match="recorded already"):
            record_collectives().start()
        log.step()
        with pytest.raises(UsageError, match="`step` is 7"):
            log.collectives(7)
    record_collectives().start().stop()


@needs_distributed
@pytest.mark.parametrize("change", ["new operator", "other arguments"])
def test_an_operator_that_is_not_known_is_named_when_it_runs(mesh, monkeypatch, change):
    from retrograd.compat import c10d_collectives as c10d

    known = {name: value for name, value in c10d.OPERATORS.items() if name != "reduce_"}
    monkeypatch.setattr(
        c10d, "OPERATORS", known | ({"reduce_": ("reduce", "x")} if change == "other arguments" else {})
    )
    with record_collectives() as log:
        assert [note for note in log.notes if note.endswith("not recorded: reduce_")]
        dist.all_reduce(torch.ones(2))
        with pytest.warns(UntestedVersionWarning, match=r"c10d::reduce_ of torch .* ran, and neither it nor"):
            dist.reduce(torch.ones(2), 0)
        dist.reduce(torch.ones(2), 0)
        log.step()
    assert [c.kind for c in log.collectives()] == ["all-reduce"]
    assert sum("c10d::reduce_" in note for note in log.notes) == 1


def test_nothing_but_the_recorder_loads_torch():
    code = (
        "import sys, retrograd.fsdp as f; f.diff, f.Log, f.assert_same_order; import retrograd.fsdp.rank_verification, "
        "retrograd.fsdp.watchdog, retrograd.cli.fsdp; print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


SUITE = """
import torch, torch.distributed as dist

def test_order(retrograd_order):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with retrograd_order.record() as log:
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    retrograd_order.assert_same(log)
    assert len(log.steps) == 3

def test_varies(retrograd_order):
    with retrograd_order.record():
        linears = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)]
        for order in ((0, 1), (1, 0)):
            optimizer = torch.optim.SGD(linears[0].parameters(), lr=0.1)
            for i in order:
                x = torch.nn.functional.linear(torch.ones(3), linears[i].weight)
                x.register_hook(lambda g, i=i: dist.all_reduce(torch.ones(3 + i)))
                x.sum().backward()
            optimizer.step()
"""


@pytest.mark.dealt(2)
@needs_distributed
def test_the_fixture(pytester):
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*VerificationError: step 1 differs from the steps before it, collective 0*"])
    assert torch.distributed.is_available()
