"""Campaigns: what a process does to itself costs one case, and what is known is not done again, here or on a cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from retrograd import config
from retrograd.core.campaign import ResultStore, run
from retrograd.core.subprocesses import Child
from retrograd.core.tasks import Begin, End, Outcome, Task, WorkerOptions
from retrograd.errors import MissingExtraError, UsageError

FOREVER = threading.Event()


def dies():
    os.kill(os.getpid(), signal.SIGSEGV)


def exits():
    sys.stderr.write("last words\n")
    raise SystemExit(3)


def hangs():
    FOREVER.wait()


def single(calls):
    """Work of one case: the call whose number is the argument."""

    def work(number, done):
        if "only" not in done:
            yield Begin("only")
            yield End("only", calls[number]())

    return lambda: work


def outcomes(calls, **options):
    tasks = [Task(str(n), n) for n in range(len(calls))]
    return {int(t): o for t, _, o in run(single(calls), tasks, ResultStore(), WorkerOptions(**options))}


def test_each_end_is_told_and_the_others_go_on():
    ends = outcomes([lambda: 1, dies, lambda: 2, exits, lambda: 3], jobs=2, timeout=60)
    assert {n: o.state for n, o in ends.items()} == {0: "done", 1: "crashed", 2: "done", 3: "crashed", 4: "done"}
    assert [ends[n].value for n in (0, 2, 4)] == [1, 2, 3]
    assert "SIGSEGV" in ends[1].text
    assert "exit code 3" in ends[3].text


def ends_with_what_it_started(start, pid):
    """How work that hangs ends, and whether what it has started before; the limit begins after that, however long it took."""

    def work(argument, done):
        if not done:
            with start([sys.executable, "-c", "import threading; threading.Event().wait()"]) as child:
                pid.write_text(str(getattr(child, "process", child).pid))
                yield Begin("only", limit=0.1)
                hangs()

    ((_, _, outcome),) = run(lambda: work, [Task("t")], ResultStore())
    return outcome.state, outcome.text, ends(int(pid.read_text()))


ENDED = ("timed out", "after 1 s", True)


def test_what_never_ends_is_ended_with_all_that_it_started(tmp_path):
    def start(command):
        return contextlib.nullcontext(subprocess.Popen(command))  # Popen's own block would wait for it

    assert ends_with_what_it_started(start, tmp_path / "pid") == ENDED


def test_what_it_started_in_another_group_ends_with_it(tmp_path):
    assert ends_with_what_it_started(Child, tmp_path / "pid") == ENDED


def ends(pid: int) -> bool:
    """Whether a process ends: one that is killed does so when it is scheduled next, one that is not never would."""
    until = time.monotonic() + 60
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.01)
    return not alive(pid)


def alive(pid: int) -> bool:
    """Whether a process runs: one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def computes(seconds):
    """Take CPU time, however long that lasts."""
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_a_case_is_ended_after_so_much_cpu_time_and_not_for_what_others_take():
    calls = [lambda: computes(1e9), lambda: FOREVER.wait(1.5)]  # the second waits for three times its limit
    ends = outcomes(calls, timeout=0.5)
    assert (ends[0].state, ends[0].text) == ("timed out", "after 0.5 s of CPU time")
    assert ends[1].state == "done"


def test_nothing_is_begun_after_the_time():
    assert list(run(single([lambda: 1]), [Task("0", 0)], ResultStore(), until=0.0)) == []


def three(argument, done):
    """Work of three cases, of which the second dies; the process is noted with each."""
    for name in ("a", "b", "c"):
        if name not in done:
            yield Begin(name)
            if name == "b":
                dies()
            yield End(name, [argument, os.getpid()])


def test_a_task_goes_on_after_the_case_that_died_and_a_second_run_does_nothing(tmp_path):
    path = tmp_path / "folder" / "results.sqlite"
    ended = list(run(lambda: three, [Task("t", 7)], ResultStore(path)))
    assert [(case, o.state) for _, case, o in ended] == [("a", "done"), ("b", "crashed"), ("c", "done")]
    assert list(run(lambda: three, [Task("t", 7)], ResultStore(path))) == []
    known = ResultStore(path).of("t")
    assert {case: o for _, case, o in ended} == known
    assert known["a"].value != known["c"].value  # another process, since the first one died
    assert ResultStore(path, campaign="another").of("t") == {}


def test_what_dies_before_a_case_begins_is_told_once():
    def work(argument, done):
        dies()
        yield Begin("never")

    ((task, case, outcome),) = run(lambda: work, [Task("t")], ResultStore())
    assert (task, case, outcome.state) == ("t", "", "crashed")


def test_a_case_may_ask_for_more_time_than_others():
    def work(argument, done):
        if done:
            return
        yield Begin(argument, limit=60.0 if argument == "long" else None)
        computes(0.6)
        yield End(argument, None)

    ended = run(lambda: work, [Task("long", "long"), Task("short", "short")], ResultStore(), WorkerOptions(timeout=0.2))
    assert {task: o.state for task, _, o in ended} == {"long": "done", "short": "timed out"}


def test_work_that_begins_a_case_again_is_refused():
    def work(argument, done):
        yield Begin("again")
        dies()

    with pytest.raises(ValueError, match="begins 'again' again"):
        list(run(lambda: work, [Task("t")], ResultStore()))


def test_processes_stay_for_as_many_tasks_as_asked_for():
    def work(argument, done):
        yield End("pid", os.getpid())

    tasks = [Task(str(n)) for n in range(6)]
    pids = [o.value for _, _, o in run(lambda: work, tasks, ResultStore(), WorkerOptions(recycle=3))]
    assert pids[0] == pids[1] == pids[2] != pids[3]
    assert len(set(pids)) == 2


def spawned(argument, done):
    """Work in a process that was spawned, which sees one GPU."""
    yield End("gpu", [config.variables(["CUDA_VISIBLE_DEVICES"]).get("CUDA_VISIBLE_DEVICES"), os.getpid()])


def spawned_work():
    return spawned


def test_each_gpu_is_seen_by_one_process():
    options = WorkerOptions(jobs=3, devices=("0", "5"), start="spawn", recycle=9)
    ended = run(spawned_work, [Task(str(n)) for n in range(8)], ResultStore(), options)
    seen = {tuple(o.value) for _, _, o in ended}
    assert {gpu for gpu, _ in seen} <= {"0", "5"}
    assert len({pid for _, pid in seen}) == len(seen)  # one process a GPU


def test_a_file_that_is_no_results_file_is_refused(tmp_path):
    (tmp_path / "text").write_text("something else that is long enough to be no header of a database\n" * 9)
    with pytest.raises(UsageError, match="cannot be used for results"):
        ResultStore(tmp_path / "text")
    other = sqlite3.connect(tmp_path / "other")
    other.execute("PRAGMA user_version = 99")
    other.close()
    with pytest.raises(UsageError, match="version 99"):
        ResultStore(tmp_path / "other")


def test_a_cluster_without_its_packages_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "joblib", None)
    with pytest.raises(MissingExtraError, match=r"retrograd\[cluster\]"):
        list(run(spawned_work, [], ResultStore(), WorkerOptions(cluster="tcp://127.0.0.1:1")))


# ----- a cluster of two workers


def noted(folder, argument, done):
    """Work that leaves a file each time that it is begun, and ends once there is a file `go`."""
    if done:
        return
    (Path(folder) / f"{argument}-{time.monotonic_ns()}").touch()
    yield Begin("only")
    if argument == "bad":
        dies()
    wait_for(Path(folder).parent / "go")
    yield End("only", argument * 2)


def wait_for(path):
    while not any(path.parent.glob(path.name)):
        FOREVER.wait(0.05)


def noting(folder):
    return partial(noted, folder)


@pytest.fixture
def cluster():
    distributed = pytest.importorskip("distributed", reason="the extra `cluster`")
    pytest.importorskip("joblib", reason="the extra `cluster`")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, memory_limit=0
    ) as local:
        yield local


def test_a_cluster_does_the_tasks_of_a_worker_that_was_killed_again(cluster, tmp_path):
    names = [*map(str, range(12)), "bad"]
    (tmp_path / "begun").mkdir()
    results = ResultStore(tmp_path / "results.sqlite")
    prepare = partial(noting, str(tmp_path / "begun"))
    victim = next(iter(cluster.workers.values())).pid

    def kill_one():
        for first in "01":  # one on each worker, which has one thread
            wait_for(tmp_path / "begun" / f"{first}-*")
        os.kill(victim, signal.SIGKILL)
        (tmp_path / "go").touch()

    killing = threading.Thread(target=kill_one)
    killing.start()
    options = WorkerOptions(cluster=cluster.scheduler_address)
    ended = list(run(prepare, [Task(name, name) for name in names], results, options))
    killing.join()
    assert sorted(task for task, _, _ in ended) == sorted(names)
    values = {task: o.value for task, _, o in ended}
    assert values == {**{name: name * 2 for name in names}, "bad": None}
    assert results.of("bad")["only"].state == "crashed"
    begun = [path.name.split("-")[0] for path in (tmp_path / "begun").iterdir()]
    assert len(begun) > len(names)  # what the killed one had was begun twice
    # The same tasks in processes of this machine: the same outcomes. This one has Dask's threads, and must not fork.
    spawning = WorkerOptions(start="spawn", recycle=99)
    local = {t: o for t, _, o in run(prepare, [Task(n, n) for n in names], ResultStore(), spawning)}
    assert {t: (o.state, o.value) for t, o in local.items()} == {t: (o.state, o.value) for t, _, o in ended}


def refused(kind):
    raise kind("no such thing here")


def test_a_worker_that_cannot_prepare_says_why(cluster):
    for kind in (UsageError, KeyError):
        with pytest.raises(UsageError, match=r"on a worker .*no such thing here"):
            list(
                run(
                    partial(refused, kind), [Task("t")], ResultStore(), WorkerOptions(cluster=cluster.scheduler_address)
                )
            )


def test_no_scheduler_is_named():
    pytest.importorskip("distributed", reason="the extra `cluster`")
    with pytest.raises(UsageError, match="no Dask scheduler answers"):
        list(run(spawned_work, [], ResultStore(), WorkerOptions(cluster="nothing")))


def test_an_outcome_is_read_back_as_it_was(tmp_path):
    results = ResultStore(tmp_path / "r")
    outcome = Outcome("done", {"a": [1, 2.5, None, "b"]}, "text", 0.25)
    results.add("t", "c", outcome)
    assert ResultStore(tmp_path / "r").of("t") == {"c": outcome}
