"""Races that are found in programs which have them, and in no other, whatever order the seed draws."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import programs
import pytest
from test_corpora import REGISTRY, _registered, of_this_triton

from retrograd.ttir.faults import AccessAt, FaultList, KernelFault

HERE = Path(__file__).resolve().parent
# Seeds of the order of programs, each with another GPU: grids of persistent kernels have a program a multiprocessor.
RUNS = ((0, 132), (1, 46))
HIDING = (3, 5, 6, 7)
READERS, PRODUCER = "lock_of_readers_that_look_first", "slots_of_a_hasty_producer"
HIDDEN = (READERS, READERS + "_beside_a_note", PRODUCER)


def in_a_process(*words: object) -> list[dict]:
    """Rows of JSON that a script of this folder writes in a process without Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in [str(HERE), *sys.path] if path)
    command = [sys.executable, *(str(word) for word in words)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


# One process for all runs of a kind: of the 8.5 s of one that ran a single program, 6 were imports.
@pytest.fixture(scope="module")
def rows() -> dict[tuple[int, str, str], dict]:
    """What was noticed of each program, by seed, kind and name."""
    return _noticed(RUNS)


@pytest.fixture(scope="module")
def hidden() -> dict[tuple[int, str, str], dict]:
    """The same of the programs whose race some orders hide, in seeds whose first order does."""
    return _noticed(((seed, 40 + 9 * seed) for seed in HIDING), *HIDDEN)


def _noticed(runs: Iterable[tuple[int, int]], *names: str) -> dict[tuple[int, str, str], dict]:
    lines = in_a_process(HERE / "run_programs.py", ",".join(f"{seed}:{count}" for seed, count in runs), *names)
    return {(row["seed"], row["kind"], row["name"]): row for row in lines}


def arguments_of(name: str) -> tuple[str, ...]:
    text = "".join(path.read_text() for path in sorted((HERE / REGISTRY["racy"]).glob("*.py")))
    head = text[: text.index(f"def {name}(")].rpartition("@racy(")[2]
    return tuple(head.strip().split('"')[1].split(","))


def test_who_only_draws_a_place_to_store_at_waits_for_nobody(rows):
    """All programs run at once then, of which one in turns takes 0.6 ms an atomic: others do what a result decides."""
    for name, in_turns in (("appended_by_a_counter", False), ("work_queue", True)):
        assert {rows[seed, "healthy", name]["in_turns"] for seed, _ in RUNS} == {in_turns}


@pytest.mark.parametrize("name", _registered("racy"))
def test_a_race_is_found(rows, name):
    of_this_triton(name)
    seen = [rows[seed, "racy", name] for seed, _ in RUNS]
    named = [
        {argument for kind, argument, _ in row["faults"] if kind in ("race", "same value", "autotune")} for row in seen
    ]
    # Some show only where the grid has another number of programs.
    assert any(arguments & set(arguments_of(name)) for arguments in named), seen
    assert not [row["error"] for row in seen if row["error"]]


def test_of_what_is_stored_or_added_tuning_repeats_what_is_added(rows):
    for seed, _ in RUNS:
        faults = rows[seed, "racy", "autotune_of_tiles_that_are_stored_or_added"]["faults"]
        (text,) = [text for kind, _, text in faults if kind == "autotune"]
        assert "tl.atomic_add(out_ptr" in text


@pytest.mark.parametrize("name", _registered("healthy"))
def test_a_healthy_program_is_not_accused(rows, name):
    of_this_triton(name)
    for seed, _ in RUNS:
        row = rows[seed, "healthy", name]
        assert row["error"] == ""
        assert row["faults"] == []
        assert row["undecided"] == []
        assert row["differences"] == []


def test_a_race_is_one_whichever_access_came_first():
    read, write = AccessAt("reads", "kernel.py", 3), AccessAt("writes", "kernel.py", 4)
    faults = FaultList()
    for first, second in ((read, write), (write, read), (write, write)):
        faults.add(KernelFault("race", "kernel", first, second, "x_ptr", 0, count=2))
    assert [(fault.access, fault.other, fault.count) for fault in faults] == [(read, write, 4), (write, write, 2)]


def test_the_same_value_written_twice_is_no_race(rows):
    for name in ("dropout_mask_stored_twice", "table_that_all_store"):
        assert {kind for seed, _ in RUNS for kind, *_ in rows[seed, "racy", name]["faults"]} == {"same value"}
    for name in ("table_of_two_for_a_third", "counter_that_all_clear_and_count_in"):
        assert all("race" in {kind for kind, *_ in rows[seed, "racy", name]["faults"]} for seed, _ in RUNS)


def test_the_kinds_of_races_are_told_apart(rows):
    for program in _registered("racy"):
        row = rows[0, "racy", program]
        for kind, _, text in row["faults"]:
            assert text.startswith(f"{kind} in kernel "), text
            if kind == "race":
                assert "nothing orders the two" in text
    assert {kind for row in rows.values() for kind, *_ in row["faults"]} <= {"race", "same value", "autotune"}
    assert set(programs.KINDS) >= {"same value", "autotune"}


@pytest.mark.parametrize("seed", [5, 6])
@pytest.mark.parametrize("beside", ["", "_beside_a_note"])
def test_a_race_that_the_first_order_hides(hidden, seed, beside):
    """The writer has the lock before all readers, who are ordered after it by its release."""
    row = hidden[seed, "racy", READERS + beside]
    assert {kind for kind, *_ in row["faults"]} == ({"race", "same value"} if beside else {"race"})
    assert row["error"] == ""


@pytest.mark.parametrize("seed", [3, 5, 7])
def test_a_race_that_a_consumer_hides_which_keeps_up(hidden, seed):
    """The producer is an item too far ahead, which shows only where the consumer loses its turn for long."""
    row = hidden[seed, "racy", PRODUCER]
    assert {(kind, argument) for kind, argument, _ in row["faults"]} == {("race", "slot_ptr")}
    assert row["error"] == ""
