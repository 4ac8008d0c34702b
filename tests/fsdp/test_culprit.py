"""Whatever ends a step, the report of a recording with its defaults names rank, module and line; and its ring files."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import faults
import pytest
import torch
import torch.distributed as dist

from retrograd.core.rank_store import RankStore
from retrograd.errors import RanksDifferError
from retrograd.fsdp import diff
from retrograd.fsdp.attribution import Attribution
from retrograd.fsdp.peers import Peers, first_parting, states
from retrograd.fsdp.rank_verification import RankVerifier
from retrograd.fsdp.ring_file import RingReader, RingWriter
from retrograd.fsdp.schema import JOINED, Collective
from retrograd.fsdp.step_patterns import Journal

pytestmark = [
    pytest.mark.dealt(3, whole_file=True),
    pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed"),
]

GONE = "rank 1 is gone without a word, killed or aborted, after all-gather of experts.3 at"
# What both ranks' words must have together, of a fault of rank 1 (or 0, where it says so).
NAMED = {
    "skip": ["rank 1 departs", "it passes over all-gather of experts.2, which came before all-gather of experts.3"],
    "twice": ["rank 1 departs", "all-gather of experts.1 comes where all-gather of experts.2 came in step"],
    "swap": ["rank 1 reduces experts.0 where rank 0 reduces experts.3", "rank 1 departs", "in another order"],
    "unequal": ["rank 1 departs", "it passes over all-gather of experts.1, which came before all-gather of experts.2"],
    "last": ["rank 1 departs", "all-gather of experts.2 comes where all-gather of experts.3 came in step"],
    "hook": ["rank 1 departs", "rank 1 reduces an unnamed tensor where rank 0 gathers experts.2", "(<lambda>)"],
    "shape": ["rank 1 departs", "rank 1: all-reduce, 3 float32", "(train)"],
    "dtype": ["rank 1 departs", "rank 1: all-reduce, 2 float64", "(train)"],
    "groups": ["rank 1 is after all-reduce of an unnamed tensor at", "in another process group of the same ranks"],
    "save": ["rank 0 departs", "all-gather of an unnamed tensor comes where the end of the step came in step"],
    "batch": ["rank 1 stopped recording after reduce-scatter of (root) at", "of step 1"],
    "raise": ["rank 1 raised ValueError: bad batch, after all-gather of experts.3 at", "of step 2"],
    "exit": ["rank 1 raised SystemExit: 3, after all-gather of experts.3 at"],
    "kill": [GONE],
    "abort": [GONE],
    "segfault": [GONE],
    "hang": ["rank 1 is after all-gather of experts.3 at", "now at", "(err_before_backward)"],
}


@pytest.fixture(scope="module")
def ends():
    command = [sys.executable, faults.__file__, "--record", "healthy", *faults.CASES]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return json.loads(done.stdout)


def test_a_healthy_job_says_nothing(ends):
    assert [(end["code"], end["text"]) for end in ends["healthy"].values()] == [(0, "")] * 2


@pytest.mark.parametrize("case", faults.CASES)
def test_the_culprit_is_named(ends, case):
    text = "\n".join(end["text"] for end in ends[case].values())
    missing = [words for words in (*NAMED[case], "faults.py:") if words not in text]
    assert missing == [], f"of {[end['code'] for end in ends[case].values()]} came {text}"


def collective(name: str, group: str = "0", ranks: tuple[int, ...] = (0, 1)) -> Collective:
    return Collective("all-gather", "forward", (name,), 8, "float32", "", ranks, "fsdp", -1, group)


def written(path: Path, rank: int, *steps: str) -> RingWriter:
    """Steps of letters, one a module."""
    writer = RingWriter(path, rank)
    for step, letters in enumerate(steps):
        for index, letter in enumerate(letters):
            writer.add(collective(letter), f"train.py:{index} (main)", step, index)
    return writer


def test_a_ring_file_has_the_last_of_each_group(tmp_path):
    writer = written(tmp_path / "a", 3, "abc" * 1000)
    writer.add(collective("z", "1", (3, 5)), "", 1, 0)
    reader = RingReader(tmp_path / "a", writer.key)
    lane = ("0", (0, 1))
    assert (reader.rank, reader.count(lane), reader.count(("1", (3, 5))), reader.count(("2", ()))) == (3, 3000, 1, 0)
    assert reader.entry(lane, 1) is None
    entry = reader.entry(lane, 2999)
    assert (reader.collective(entry), reader.line(entry)) == (collective("c"), "train.py:2999 (main)")
    assert reader.collective(reader.last()) == collective("z", "1", (3, 5))
    with pytest.raises(ValueError, match="no ring file of this job"):
        RingReader(tmp_path / "a", b"another key of 16")


def test_a_ring_file_that_is_full_goes_on(tmp_path):
    writer = RingWriter(tmp_path / "a", 0)
    for number in range(5000):
        writer.add(collective("x" * 300 + str(number)), "", number, 0)
    reader = RingReader(tmp_path / "a")
    assert reader.count(("0", (0, 1))) == 5000
    assert reader.collective(reader.last()).kind == "collective"
    writer.add(collective("a", "another group" * 30), "", 5000, 0)
    assert len(reader.lanes()) == 1


def test_a_ring_file_has_sixteen_groups(tmp_path):
    writer = RingWriter(tmp_path / "a", 0)
    for number in range(20):
        writer.add(collective("a", str(number)), "", 0, number)
    assert len(RingReader(tmp_path / "a").lanes()) == 16


def _write_and_wait(path, end):
    writer = written(path, 1, "abc", "ab")
    end.send(writer.rank)
    end.recv()


def test_a_rank_that_was_killed_is_gone_and_its_file_tells(tmp_path):
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_write_and_wait, args=(tmp_path / "b", theirs), daemon=True)
    process.start()
    assert ours.recv() == 1
    reader = RingReader(tmp_path / "b")
    assert (reader.gone, states([reader])) == (
        False,
        ["rank 1 is after all-gather of b at train.py:1 (main) (collective 1 of step 1)"],
    )
    process.kill()
    process.join()
    assert reader.gone
    assert states([reader])[0].startswith("rank 1 is gone without a word, killed or aborted, after all-gather of b")


def test_files_alone_tell_where_ranks_part(tmp_path):
    steps = {0: ("abc", "abc"), 1: ("abc", "acb"), 2: ("abc", "abc")}
    readers = [written(tmp_path / str(rank), rank, *own) for rank, own in steps.items()]
    assert first_parting(readers[:1]) == ""
    text = first_parting(readers[:2])
    assert text.startswith(
        "step 1, collective 1: rank 1 gathers c where rank 0 gathers b (all-gather, 8 float32, forward"
    )
    assert "at train.py:1 (main)" in text
    assert "rank 1 departs from its steps before: it passes over all-gather of b" in text
    assert "rank 0 departs" not in text


def verifiers(tmp_path, files: bool, size: int = 2) -> list[RankVerifier]:
    store, made = dist.HashStore(), []
    for rank in range(size):
        exchange = RankStore(store, rank, size)
        peers = Peers(exchange, RingWriter(tmp_path / str(rank), rank)) if files else None
        made.append(RankVerifier(exchange, Journal(rank, size), 5, peers))
    return made


@pytest.mark.parametrize(
    ("dead", "letters", "idle", "speaks"),
    [
        ((), ("ab", "ab", "ab"), 0.0, None),  # preempted
        ((), ("ab", "ab", "a"), 9.0, 0),  # somebody ends a job that hangs
        ((2,), ("ab", "ab", "a"), 0.0, 0),
        ((0,), ("a", "ab", "ab"), 0.0, 1),
        ((), ("ab", "ac", "ab"), 0.0, 0),
    ],
)
def test_of_ranks_that_a_launcher_ends_the_lowest_tells(tmp_path, monkeypatch, dead, letters, idle, speaks):
    monkeypatch.setattr(RingReader, "gone", property(lambda reader: reader.rank in dead))
    ranks = [verifier.peers for verifier in verifiers(tmp_path, files=True, size=3)]
    for peers, own in zip(ranks, letters, strict=True):
        for index, letter in enumerate(own):
            peers.own.add(replace(collective(letter), ranks=(0, 1, 2)), f"train.py:{index} (main)", 0, index)
        peers.find(now=True)
    # In any order: a rank that has ended so is nobody who failed.
    told = {
        p.own.rank: p.terminated(idle, "train.py:7 (main)", ends=True)
        for p in reversed(ranks)
        if p.own.rank not in dead
    }
    assert [rank for rank, text in told.items() if text] == ([] if speaks is None else [speaks])
    if speaks is not None:
        text = told[speaks]
        assert text.startswith(f"rank {speaks} was ended by SIGTERM, after all-gather of b at train.py:1 (main)")
        assert "now at train.py:7 (main)" in text
        assert [f"rank {rank} is gone without a word" in text for rank in dead] == [True] * len(dead)
        assert ("rank 1 gathers c where" in text) is (letters[1] == "ac")


@pytest.mark.parametrize("files", [True, False], ids=["files", "store"])
def test_whoever_comes_last_sees_the_difference_and_waits_for_nobody(tmp_path, files):
    ranks = verifiers(tmp_path, files)

    def issue(rank: int, name: str, index: int) -> None:
        issued = replace(collective(name), numel=len(name))
        if files:
            ranks[rank].peers.own.add(issued, "", 0, index)
        ranks[rank].look(issued, first=True)

    for rank, name, index in ((0, "a", 0), (0, "b", 1), (1, "a", 0)):
        issue(rank, name, index)
    with pytest.raises(RanksDifferError, match="rank 1 gathers cc where rank 0 gathers b"):
        issue(1, "cc", 1)


def test_a_rank_at_the_end_of_a_step_does_not_wait_for_one_in_a_collective_more(tmp_path):
    ranks = verifiers(tmp_path, files=True)
    ranks[0].peers.own.add(collective("a"), "train.py:7 (main)", 0, 0)
    with pytest.raises(RanksDifferError, match=r"rank 0 gathers a .* at train.py:7 .* where rank 1 is at the end of"):
        ranks[1].check()


def test_a_rank_that_has_gone_on_to_the_next_step_is_no_difference(tmp_path):
    ranks = verifiers(tmp_path, files=True)
    for rank in ranks:
        rank.peers.find(now=True)
        rank.peers.own.came()
    ranks[0].peers.own.add(collective("a"), "", 1, 0)
    assert ranks[1].peers.ahead([0]) == ""


def test_the_first_steps_of_ddp_begin_otherwise_and_the_culprit_is_named(tmp_path):
    """Step 1 has a broadcast before what every step has: both ranks differ from it, and one alone in how it ends."""
    steps = {0: ("x", "rab", "abc"), 1: ("x", "rab", "ab", "ab")}
    readers = [written(tmp_path / str(rank), rank, *own) for rank, own in steps.items()]
    text = first_parting(readers)
    assert (
        "rank 0 departs from its steps before: all-gather of c comes where the end of the step came in step 1" in text
    )
    assert "rank 1 departs" not in text


@pytest.mark.parametrize("files", [True, False], ids=["files", "store"])
@pytest.mark.parametrize("wrong", [False, True], ids=["healthy", "wrong"])
def test_a_rank_without_input_shadows_the_others_and_they_are_compared(tmp_path, files, wrong):
    ranks, three = verifiers(tmp_path, files, 3), (0, 1, 2)

    def issue(rank: int, issued: Collective, strict: bool = False) -> None:
        issued = replace(issued, ranks=three)
        ranks[rank].journal.add(issued)
        if files:
            ranks[rank].peers.own.add(issued, "train.py:7 (main)", 0, 0)
        ranks[rank].look(issued, first=True)
        if strict:
            ranks[rank].before(issued)

    shadow = replace(collective(""), by=JOINED, phase="other")
    issue(1, shadow, strict=True)  # waits for nobody
    ranks[1].check()
    with ThreadPoolExecutor() as pool:
        names = {0: "a", 2: "bb" if wrong else "a"}
        pending = [pool.submit(issue, rank, collective(name)) for rank, name in names.items()]
        errors = [str(each.exception() or "") for each in pending]
        pending = [pool.submit(ranks[rank].check) for rank in names]
        errors += [str(each.exception() or "") for each in pending]
    assert any("rank 2 gathers bb where rank 0 gathers a" in text for text in errors) == wrong
    assert any(errors) == wrong
    assert "no input is left" in ranks[1].journal.notes[0]


def test_logs_are_compared_up_to_where_a_rank_has_no_input_left():
    logs = []
    for rank, steps in ((0, ("a", "a", "a")), (1, ("a",)), (2, ("a", "b", "a"))):
        journal = Journal(rank, 3)
        for name in steps:
            journal.add(replace(collective(name), ranks=(0, 1, 2)))
            journal.end_step()
        if rank == 1:
            journal.add(replace(collective(""), by=JOINED, ranks=(0, 1, 2)))
        logs.append(journal.log())
    assert [diff(logs[0], logs[1]).same, diff(logs[1], logs[0]).same, diff(logs[0], logs[2]).same] == [
        True,
        True,
        False,
    ]


class Wrapper(torch.nn.Module):
    """As DDP holds its model."""

    def __init__(self, module):
        super().__init__()
        self.module = module


@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_of_ddp_that_have_lost_their_gradient_are_named(frozen):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    buckets, optimizer = Attribution().ddp, torch.optim.AdamW(model.parameters())
    model[0].bias.requires_grad_(False)  # never had one
    ddp = Wrapper(model)
    buckets._orders[ddp] = None
    for step in range(2):
        model[1].requires_grad_(not (frozen and step))
        model(torch.ones(1, 2)).sum().backward()
        words = buckets.idle(optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert words == ("no gradient for 1.weight, 1.bias, which the optimizer has updated before" if frozen else "")
    assert buckets.idle(None) == ""
