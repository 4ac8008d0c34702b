"""Dumps of Flight Recorder: real ones of gloo ranks that err, ones in NCCL's form, and files that are none."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from retrograd.cli import main
from retrograd.errors import UsageError
from retrograd.fsdp import Collective, Log
from retrograd.fsdp.flight_recorder import compare, load, with_modules
from retrograd.fsdp.schema import Pattern

JOB = Path(__file__).with_name("dump_job.py")


def entry(number: int, name: str = "nccl:all_reduce", sizes=(4,), group=("0", "default_pg"), **fields) -> dict:
    """One collective as NCCL's dumps write it."""
    line = {"name": "step", "filename": "/home/me/train.py", "line": 10 + number}
    inside = {"name": "all_reduce", "filename": "/env/torch/distributed/distributed_c10d.py", "line": 1}
    return {
        "record_id": number, "pg_id": 0, "process_group": group, "collective_seq_id": number, "p2p_seq_id": 0,
        "op_id": number, "profiling_name": name, "time_created_ns": number, "input_sizes": [list(sizes)],
        "input_dtypes": ["BFloat16"], "output_sizes": [list(sizes)], "output_dtypes": ["BFloat16"],
        "state": "completed", "retired": True, "is_p2p": False, "frames": [inside, line],
    } | fields  # fmt: skip


def files(folder: Path, *ranks: list[dict], groups=None, dump=pickle.dumps) -> list[Path]:
    """The dumps of ranks 0, 1, ... as files."""
    groups = groups or {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(len(ranks))))}}
    for rank, entries in enumerate(ranks):
        content = dump({"version": "2.10", "pg_config": groups, "pg_status": {}, "entries": entries})
        folder.joinpath(f"nccl_trace_rank_{rank}").write_bytes(content)
    return sorted(folder.glob("nccl_trace_rank_*"))


def steps(count: int, **changed) -> list[dict]:
    """Collectives of a step; `n3=` replaces number 3 by these fields."""
    kinds = ["nccl:_all_gather_base", "nccl:_reduce_scatter_base", "nccl:all_reduce"]
    return [entry(n, kinds[n % 3], (8 * n,), **changed.get(f"n{n}", {})) for n in range(1, count + 1)]


@pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed")
def test_ranks_of_a_job_of_which_one_errs(tmp_path):
    arguments = [sys.executable, str(JOB), str(tmp_path)]
    environment = os.environ | {"TORCH_FR_BUFFER_SIZE": "100"}
    ranks = [subprocess.Popen([*arguments, str(rank), "3"], env=environment) for rank in range(3)]
    assert [rank.wait() for rank in ranks] == [0, 0, 0]
    dumps = sorted(tmp_path.glob("dump_*"))
    if not pickle.loads(dumps[0].read_bytes())["entries"]:
        pytest.skip(f"torch {torch.__version__} records no collectives of gloo")
    result = CliRunner().invoke(main, ["fsdp", "diff", *map(str, dumps)])
    found = compare(load(dumps))
    assert (result.exit_code, found.compared) == (1, 3 + 1 + 1)
    leaves_out, ends_early = sorted(found.partings, key=lambda parting: parting.group)
    assert "rank 2 reduces an unnamed tensor where rank 0 gathers an unnamed tensor" in leaves_out.text
    assert "; rank 1 as rank 0" in leaves_out.text
    # Both sides, the innermost line of the program first.
    assert [stack[0].rpartition("/")[2] for stack in leaves_out.stacks.values()] == [
        "dump_job.py:32 layers", "dump_job.py:33 layers",
    ]  # fmt: skip
    assert "where rank 2 does nothing more" in ends_early.text
    assert "rank 2's last, all-reduce of an unnamed tensor, is" in ends_early.text
    assert ends_early.stacks["rank 2, its last"][0].endswith("dump_job.py:20 main")
    assert all(text in result.output for text in (leaves_out.text, ends_early.text))


# Dumps that the watchdog of NCCL 2.28 wrote on two H200 (torch 2.11), of jobs of benchmarks/fsdp_nccl.py in which rank 1
# errs: it leaves a block out, reduces in a backward hook, reduces another shape. Folders in their frames were replaced.
WRITTEN = {
    "skip": (35, "rank 1 reduces an unnamed tensor where rank 0 gathers an unnamed tensor", "fsdp/_fully_shard"),
    "hook": (35, "rank 1 reduces an unnamed tensor where rank 0 gathers an unnamed tensor", "faults.py:99 <lambda>"),
    "shape": (36, "but rank 1: all-reduce, 3 float32, ranks 0 1; rank 0: all-reduce, 2 float32", "faults.py:102 train"),
}


@pytest.mark.parametrize("fault", WRITTEN)
def test_dumps_that_the_watchdog_of_nccl_wrote(fault):
    paths = sorted(JOB.with_name("nccl_dumps").glob(f"{fault}-dump_*"))
    number, words, frame = WRITTEN[fault]
    found = compare(load(paths))
    (parting,) = found.partings
    assert (found.ranks, found.compared, parting.number) == ((0, 1), number - 1, number)
    assert words in parting.text
    assert any(frame in line for line in parting.stacks["rank 1"])
    result = CliRunner().invoke(main, ["fsdp", "diff", *map(str, paths)])
    assert (result.exit_code, parting.text in result.output) == (1, True)


@pytest.mark.parametrize("dump", [pickle.dumps, lambda content: json.dumps(content).encode()], ids=["pickle", "json"])
def test_a_rank_that_does_something_else_is_named_beside_the_others(tmp_path, dump):
    paths = files(tmp_path, steps(9), steps(9), steps(9, n5={"input_sizes": [[41]]}), steps(9), dump=dump)
    found = compare(load(paths))
    assert (found.compared, len(found.partings)) == (4, 1)
    parting = found.partings[0]
    assert parting.number == 5
    assert "rank 2: all-reduce, 41 bfloat16" in parting.text
    assert "rank 1, 3 as rank 0" in parting.text
    assert parting.stacks["rank 2"] == ("/home/me/train.py:15 step",)


def test_what_ranks_may_do_differently_is_no_parting(tmp_path):
    """Routed tokens have sizes of their own, as the root of a gather; other states and the oldest entries are chance."""
    routed, gathered = entry(3, "nccl:all_to_all", (5,)), entry(4, "nccl:gather", (1,))
    one = [*steps(2), routed, gathered, entry(5, state="started", retired=False)]
    other = [entry(3, "nccl:all_to_all", (7,)), entry(4, "nccl:gather", ()), entry(5, state="scheduled", retired=False)]
    found = compare(load(files(tmp_path, one, other)))
    assert (found.partings, found.compared, found.notes) == ((), 3, ())


def test_a_dump_that_ends_earlier_is_no_parting_where_the_others_have_completed(tmp_path):
    found = compare(load(files(tmp_path, steps(9), steps(6))))
    assert found.partings == ()
    assert found.notes == ("group 0 (default_pg), ranks 0 1: the dump of rank 1 is older than the others, it ends before "
                           "collective 7",)  # fmt: skip


def test_groups_of_other_ranks_are_compared_apart_and_absent_ranks_and_messages_are_told(tmp_path):
    groups = {
        "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"},
        "7": {"name": "7", "desc": "mesh_tp", "ranks": "[0, 1]"},
        "8": {"name": "8", "desc": "mesh_tp", "ranks": "[1, 2]"},
    }
    tp = entry(1, sizes=(2,), group=("7", "mesh_tp"))
    own = entry(1, sizes=(3,), group=("8", "mesh_tp"))
    waits = entry(2, "nccl:recv 1<-2", (4,), state="started", retired=False, is_p2p=True)
    found = compare(load(files(tmp_path, [*steps(3), tp], [*steps(3), tp, own, waits], groups=groups)))
    assert (found.partings, found.compared) == ((), 4)
    assert found.notes == (
        "there is no dump of rank 2", "rank 1 waits in recv of a message from rank 2, at /home/me/train.py:12 step",
    )  # fmt: skip


def test_the_peer_of_a_message_is_named_by_its_rank_among_all(tmp_path):
    """A dump numbers it within its group."""
    groups = {"5": {"name": "5", "desc": "mesh_pp", "ranks": "[1, 3]"}}
    recv = entry(1, "nccl:recv 0<-1", state="started", retired=False, is_p2p=True, group=("5", "mesh_pp"))
    notes = compare(load(files(tmp_path, [], [recv], groups=groups))).notes
    assert notes == ("rank 1 waits in recv of a message from rank 3, at /home/me/train.py:11 step",)


def test_nothing_in_common_is_not_the_same(tmp_path):
    result = CliRunner().invoke(main, ["fsdp", "diff", *map(str, files(tmp_path, [], []))])
    assert (result.exit_code, result.output.split(":")[0]) == (3, "cannot tell")


def test_logs_lend_modules_also_where_recording_began_later(tmp_path):
    table = [
        Collective(kind, "backward", (name,), 8 * n, "bfloat16", "avg", (0, 1))
        for n, kind, name in [
            (3, "all-gather", "blocks.0"),
            (4, "reduce-scatter", "blocks.1"),
            (5, "all-reduce", "head"),
        ]
    ]
    log = Log(rank=0, size=2, table=table, patterns=[Pattern("", 0, 1, [0, 1, 2])], open=[0, 1, 2])
    one, other = load(files(tmp_path, steps(6), steps(6, n4={"input_sizes": [[1]]})))
    named = with_modules(one, log)
    assert [e.collective.where for e in named.entries][2:5] == ["blocks.0", "blocks.1", "head"]
    text = compare([named, other]).partings[0].text
    assert "blocks.1" in text


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("dump_0", pickle.dumps({"version": "2.1", "entries": [Evil()]}), "posix.system"),
        ("dump_0", b"\x80\x04broken", "is no dump"),
        ("dump_0", pickle.dumps({"version": "3.0", "entries": []}), "of version 2.x"),
        ("dump_0", pickle.dumps({"version": "2.1", "pg_config": {}, "entries": [{}]}), "process_group"),
        ("dump_0", pickle.dumps([1]), "of version 2.x"),
        ("dump", pickle.dumps({"version": "2.1", "entries": []}), "a name that ends with the rank"),
    ],
    ids=["code", "cut off", "newer", "no fields", "no dump", "no rank"],
)
def test_files_that_are_no_dump(tmp_path, monkeypatch, name, content, words):
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content)
    with pytest.raises(UsageError, match=words):
        load([Path(name)])
    assert not Path("evil").exists()


def test_one_dump_alone_or_logs_of_three_are_refused(tmp_path):
    path = str(files(tmp_path, steps(1), steps(1))[0])
    assert CliRunner().invoke(main, ["fsdp", "diff", path]).exit_code == 2
    logs = [tmp_path / f"rank-{r}.json" for r in range(3)]
    for r, log in enumerate(logs):
        Log(rank=r, size=3).save(log)
    result = CliRunner().invoke(main, ["fsdp", "diff", *map(str, logs)])
    assert result.exit_code == 2
