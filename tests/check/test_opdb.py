"""Suite over op_db, on a list of its own: what ends a worker, what is resumed, what the baseline excuses."""

from __future__ import annotations

import importlib.util
import math
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from specimens import square

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "opdb.py"

forks = pytest.mark.skipif(
    torch.cuda.is_available(), reason="torch runs no backward in a fork of a process that ran one where there is a GPU"
)


@pytest.fixture(scope="module")
def opdb():
    spec = importlib.util.spec_from_file_location("opdb", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["opdb"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["opdb"]


class Sample:
    args, kwargs = (), {}

    def __init__(self, input):
        self.input = input


class Info:
    dtypes = (torch.float32,)
    backward_dtypes = dtypes
    supports_autograd = True
    variant_test_name = ""

    def __init__(self, name, op, samples=2):
        self.name, self.op, self.samples = name, op, samples

    def sample_inputs(self, device, dtype, requires_grad=False):
        for number in range(self.samples):
            yield Sample(torch.ones(2, 3 + number, dtype=dtype, device=device, requires_grad=requires_grad))


def dies(x):
    if x.shape[-1] == 3:
        os.kill(os.getpid(), signal.SIGSEGV)
    return x.sin()


def hangs(x):
    if x.shape[-1] == 3:
        time.sleep(1e4)
    return x.sin()


INFOS = {i.name: i for i in (Info("good", torch.sin), Info("dies", dies), Info("bad", square(2.002), 1))}


def run(opdb, path, infos=INFOS, *options):
    args = opdb.parse(["--results", str(path), *options])
    results, tasks = opdb.open_results(args), opdb.choose(infos, args)
    opdb.run(tasks, results, args, opdb.SampleWork(infos, args.level, args.seed))
    return {(r["variant"], r["sample"]): r for r in opdb.records_of(tasks, results)}, args


@forks
def test_a_case_that_dies_is_recorded_and_the_others_go_on(opdb, tmp_path):
    path = tmp_path / "results.sqlite"
    records, args = run(opdb, path)
    verdicts = {key: record["verdict"] for key, record in records.items()}
    assert verdicts == {
        ("good", 0): "proved", ("good", 1): "proved", ("dies", 0): "crash", ("dies", 1): "proved", ("bad", 0): "finding",
    }  # fmt: skip
    assert "SIGSEGV" in records["dies", 0]["sentence"]
    assert records["good", 0]["cpu"] >= 0
    again, _ = run(opdb, path)
    assert again == records  # seconds too: nothing was done again
    more, _ = run(opdb, path, INFOS, "--samples", "all")
    assert more == records  # there are no more, and those that are there stay
    other, _ = run(opdb, path, {"good": INFOS["good"]}, "--seed", "1")
    assert all(r["seed"] == 1 for r in other.values())
    text = opdb.report(list(records.values()), [], args)
    assert "| proved | 3 |" in text
    assert "| bad | float32 | 0 | finding | " in text
    script = opdb.repro(records["bad", 0])
    assert "'bad'" in script
    assert "[0]" in script


@forks
def test_a_case_that_hangs_ends_its_worker(opdb, tmp_path):
    infos = {"hangs": Info("hangs", hangs)}
    # CPU time, five times what the other sample takes, however busy the machine; by the clock ten times as long.
    records, _ = run(opdb, tmp_path / "results.sqlite", infos, "--timeout", "1.5")
    assert [r["verdict"] for r in records.values()] == ["hang", "proved"]


@forks
def test_a_sample_that_cannot_be_drawn_is_an_error_and_the_last(opdb, tmp_path):
    class Undrawn(Info):
        def sample_inputs(self, device, dtype, requires_grad=False):
            yield from super().sample_inputs(device, dtype, requires_grad)
            raise ValueError("no more numbers")

    few = {"few": Undrawn("few", torch.sin, 1)}
    records, _ = run(opdb, tmp_path / "r", few, "--samples", "all")  # which counts them
    assert [(r["verdict"], r["sentence"]) for r in records.values()] == [("error", "ValueError: no more numbers")]
    assert run(opdb, tmp_path / "r", few, "--samples", "all")[0] == records


@pytest.mark.parametrize(("count", "parts"), [(547, 7), (5, 3), (3, 7), (1, 1)])
def test_rotation_reaches_every_variant_first(opdb, count, parts):
    names = [f"op{i}" for i in range(count)]
    days = parts * math.ceil(count / parts)
    assert {part[0] for day in range(days) if (part := opdb.rotated(names, day, parts))} == set(names)
    assert sorted(n for day in range(parts) for n in opdb.rotated(names, day, parts)) == sorted(names)


def test_shards_share_the_variants(opdb):
    infos = {f"op{i}": Info(f"op{i}", torch.sin) for i in range(7)}
    shards = [opdb.choose(infos, opdb.parse(["--shard", f"{i}/3"])) for i in (1, 2, 3)]
    assert sorted(task.variant for shard in shards for task in shard) == list(infos)


def test_the_baseline_excuses_stages_and_names_what_is_mended(opdb):
    def record(variant, verdict, *stages):
        return {"variant": variant, "dtype": "float32", "sample": 0, "verdict": verdict,
                "told": [(stage, "kind", "sentence") for stage in stages]}  # fmt: skip

    entries = [
        {"name": "a", "dtype": "*", "class": "true bug", "reason": "r", "stages": ["mutation"]},
        {"name": "b", "dtype": "float32", "class": "documented", "reason": "r"},
        {"name": "c", "dtype": "bfloat16", "class": "documented", "reason": "r"},
    ]
    records = [record("a", "finding", "mutation"), record("b", "proved"), record("c", "finding", "oracle")]
    new, mended = opdb.compared(records, entries)
    assert [r["variant"] for r in new] == ["c"]
    assert [entry["name"] for entry in mended] == ["b"]
    new, _ = opdb.compared([record("a", "finding", "mutation", "oracle")], entries)
    assert opdb.uncovered(entries, new[0]) == [("oracle", "kind", "sentence")]
    assert opdb.compared([record("b", "crash")], entries)[0] == []


def test_an_entry_is_missed_only_where_all_of_it_ran(opdb, capsys):
    record = {"variant": "a", "dtype": "float32", "sample": 0, "verdict": "proved", "told": []}
    entry = {"name": "a", "dtype": "*", "class": "true bug", "reason": "r", "stages": ["adjoint"]}
    assert opdb.conclude([record], [entry], [], str, whole=()) == 0
    assert opdb.conclude([record], [entry], [], str, whole={("a", "float32")}) == 1
    assert "no longer so: a (*; adjoint)" in capsys.readouterr().out
    assert opdb.conclude([record], [entry | {"met_at": "seed 2"}], [], str, whole={("a", "float32")}) == 0
    assert opdb.conclude([record], [entry | {"class": "false alarm"}], [], str) == 0
    assert opdb.conclude([record], [entry | {"class": "false alarm"}], [], str, strict=True) == 1


def test_the_baseline_that_is_shipped_can_be_read(opdb):
    assert {entry["class"] for entry in opdb.read_baseline(opdb.BASELINE)} <= set(opdb.CLASSES)


def test_a_class_that_is_none_is_refused(opdb, tmp_path):
    path = tmp_path / "b.toml"
    path.write_text('[[case]]\nname = "a"\ndtype = "*"\nclass = "a feeling"\nreason = "r"\n')
    with pytest.raises(SystemExit, match="a feeling"):
        opdb.read_baseline(path)


def test_an_entry_of_several_names_is_one_each(opdb, tmp_path):
    path = tmp_path / "b.toml"
    path.write_text('[[case]]\nnames = ["a", "b"]\ndtype = "*"\nclass = "documented"\nreason = "r"\n')
    entries = opdb.read_baseline(path)
    assert [entry["name"] for entry in entries] == ["a", "b"]
    record = {"variant": "a", "dtype": "float32", "sample": 0, "verdict": "finding", "told": [("oracle", "", "")]}
    other = record | {"variant": "b", "verdict": "proved", "told": []}
    assert opdb.conclude([record, other], entries, [], str, strict=True) == 1  # b is no longer so
