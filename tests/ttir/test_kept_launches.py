"""Launches that are put in place instead of executed: only where nothing that decides their results has changed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from retrograd.compat.triton_ttir import LaunchedKernel
from retrograd.ttir.execution import Execution
from retrograd.ttir.frames import EndlessLoopError
from retrograd.ttir.kept_launches import KeptLaunches
from retrograd.ttir.launch import pretended
from retrograd.ttir.session import Session

pytest.importorskip("triton")

KERNEL = """
#loc = loc("kernel.py":1:0)
#loc1 = loc("kernel.py":2:4)
module {
  tt.func public @k(%x: !tt.ptr<f32> loc("x"(#loc)), %y: !tt.ptr<f32> loc("y"(#loc)), %n: i32 loc("n"(#loc))) attributes {noinline = false} {
    %pid = tt.get_program_id x : i32 loc(#loc1)
BODY
    tt.return loc(#loc1)
  } loc(#loc)
} loc(#loc)
"""
# y[pid + n] = x[pid]
COPIES = """
    %from = tt.addptr %x, %pid : !tt.ptr<f32>, i32 loc(#loc1)
    %value = tt.load %from : !tt.ptr<f32> loc(#loc1)
    %place = arith.addi %pid, %n : i32 loc(#loc1)
    %to = tt.addptr %y, %place : !tt.ptr<f32>, i32 loc(#loc1)
    tt.store %to, %value : !tt.ptr<f32> loc(#loc1)"""
# y[0] = x[pid]: whichever program comes last
RACES = """
    %from = tt.addptr %x, %pid : !tt.ptr<f32>, i32 loc(#loc1)
    %value = tt.load %from : !tt.ptr<f32> loc(#loc1)
    tt.store %y, %value : !tt.ptr<f32> loc(#loc1)"""
# y[0] += x[pid]
ADDS = """
    %from = tt.addptr %x, %pid : !tt.ptr<f32>, i32 loc(#loc1)
    %value = tt.load %from : !tt.ptr<f32> loc(#loc1)
    %true = arith.constant true loc(#loc1)
    %old = tt.atomic_rmw fadd, acq_rel, gpu, %y, %value, %true : (!tt.ptr<f32>, f32, i1) -> f32 loc(#loc1)"""


class Launches:
    """Launches of a kernel with four programs, and how many of them were executed."""

    def __init__(self, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
        signature = dict(x="*fp32", y="*fp32", n="i32")
        self.kernel = LaunchedKernel(SimpleNamespace(__name__="k"), KERNEL.replace("BODY", body), signature, None)
        self.kept, self.executed = KeptLaunches(), 0
        stock = Execution.run

        def run(*args: object) -> None:
            self.executed += 1
            stock(*args)

        monkeypatch.setattr(Execution, "run", run)

    def __call__(self, x: list[float], y: list[float], n: int = 0, seed: int = 0) -> tuple[list[float], list[str]]:
        """Memory of y afterwards, and the kinds of faults."""
        session, memory = Session(seed), torch.tensor(y)
        session.kept = self.kept
        session.execute(self.kernel, (4, 1, 1), dict(x=torch.tensor(x), y=memory, n=n))
        assert [record.kernel for record in session.launches] == ["k"]
        return memory.tolist(), [fault.kind for fault in session.faults]


X = [1.0, 2.0, 3.0, 4.0]


def test_what_was_written_is_put_in_place_and_nothing_else(monkeypatch):
    launch = Launches(COPIES, monkeypatch)
    assert launch(X, [0.0] * 6, 1) == ([0, *X, 0], [])
    assert launch(X, [9.0] * 6, 1) == ([9, *X, 9], [])
    assert launch.executed == 1


@pytest.mark.parametrize("change", [dict(x=[1.0, 2.0, 3.0, 5.0]), dict(y=[0.0] * 7), dict(n=2)], ids=["x", "y", "n"])
def test_other_memory_or_arguments_are_executed(monkeypatch, change):
    launch = Launches(COPIES, monkeypatch)
    same = dict(x=X, y=[0.0] * 6, n=1)
    launch(**same)
    changed = same | change
    memory, _ = launch(**changed)
    assert memory[changed["n"] : changed["n"] + 4] == changed["x"]
    assert launch.executed == 2


def test_a_fault_comes_with_each_launch(monkeypatch):
    launch = Launches(COPIES, monkeypatch)
    assert [launch(X, [0.0] * 4, 2) for _ in range(2)] == [([0, 0, 1, 2], ["out of bounds"])] * 2
    assert launch.executed == 1


def test_programs_that_do_not_meet_need_no_other_order(monkeypatch):
    launch = Launches(COPIES, monkeypatch)
    assert [launch(X, [0.0] * 4, seed=seed)[0] for seed in range(5)] == [X] * 5
    assert launch.executed == 1


@pytest.mark.parametrize(("body", "kinds"), [(RACES, ["race"]), (ADDS, [])], ids=["race", "atomic"])
def test_programs_that_meet_are_executed_in_each_order(monkeypatch, body, kinds):
    launch = Launches(body, monkeypatch)
    x = [1.0, 2.0**25, -(2.0**25), 4.0]
    runs = [launch(x, [0.0], seed=seed) for seed in range(12)]
    assert launch.executed == 12
    assert len({memory[0] for memory, _ in runs}) > 1
    assert all(faults == kinds for _, faults in runs)
    assert launch(x, [0.0]) == runs[0]
    assert launch.executed == 12


def test_a_kernel_that_reads_what_it_writes_is_executed_on_other_memory(monkeypatch):
    launch = Launches(ADDS, monkeypatch)
    assert [launch(X, [start])[0] for start in (0.0, 1.0, 0.0)] == [[10.0], [11.0], [10.0]]
    assert launch.executed == 2


# counts from pid to n, and never ends where that is below
COUNTS = """
    %one = arith.constant 1 : i32 loc(#loc1)
    %end = scf.while (%i = %pid) : (i32) -> i32 {
      %more = arith.cmpi ne, %i, %n : i32 loc(#loc1)
      scf.condition(%more) %i : i32 loc(#loc1)
    } do {
    ^bb0(%i: i32 loc("i")):
      %next = arith.addi %i, %one : i32 loc(#loc1)
      scf.yield %next : i32 loc(#loc1)
    } loc(#loc1)"""


def test_a_kernel_that_did_not_end_has_fewer_rounds_afterwards(monkeypatch):
    def launch(n: int, kept: KeptLaunches) -> str:
        session = Session(limit=640)
        session.kept = kept
        try:
            session.execute(counting.kernel, (4, 1, 1), dict(x=torch.zeros(4), y=torch.zeros(4), n=n))
        except EndlessLoopError as error:
            assert [(f.kind, f.access.line) for f in session.faults] == [("endless loop", 2)]
            return str(error)
        assert not [*session.faults]
        return ""

    counting = Launches(COUNTS, monkeypatch)
    assert launch(500, counting.kept) == ""
    told = launch(-1, counting.kept)
    assert told == "a loop of kernel k at kernel.py:2 does not end: its programs have gone round 640 times"
    assert launch(501, counting.kept) == told
    assert launch(9, counting.kept) == ""
    assert launch(501, KeptLaunches()) == ""


def test_memory_that_nobody_has_written_makes_no_other_launch(monkeypatch):
    launch = Launches(COPIES, monkeypatch)
    with pretended(repeats=True):
        for size in (4, 4000, 4):  # with what was there before in between
            x = torch.empty(4)
            assert launch(x.tolist(), [0.0] * 4)[0] == x.tolist()
            torch.full((size,), float(size))
    assert launch.executed == 1
