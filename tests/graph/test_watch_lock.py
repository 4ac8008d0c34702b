"""Lock files: what is kept, what is compared, what is said when a graph changes."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from fake_torch_xla import hlo

from retrograd.errors import GraphChangedError, GraphError, UsageError
from retrograd.graph.watching import lock
from retrograd.graph.watching.events import Compiled
from retrograd.graph.watching.session import WatchSession

DATA = Path(__file__).parent / "data" / "xla"


@pytest.fixture
def files(tmp_path):
    paths = [tmp_path / "first.hlo.txt", tmp_path / "rest.hlo.txt.gz"]
    paths[0].write_text(hlo(rate=0.25))
    paths[1].write_bytes(gzip.compress(hlo().encode()))
    return paths


def test_the_same_files_are_as_locked_and_other_names_do_not_count(files, tmp_path):
    path = tmp_path / "graphs.lock"
    lock.write(path, lock.of_files(files))
    assert lock.read(path) == lock.of_files(files)
    files[0].write_text(hlo(rate=0.25).replace("multiply.4", "product.77").replace("source_line=30", "source_line=31"))
    found = lock.check(lock.of_files(files), lock.read(path), "graphs.lock")
    assert found
    assert found.exit_code == 0
    assert found.text() == "graphs.lock: as locked\nsame     first.hlo.txt\nsame     rest.hlo.txt.gz"


def test_a_changed_an_added_and_a_missing_graph(files, tmp_path):
    locked = lock.of_files(files)
    files[0].write_text(hlo(rate=0.25, stray=True))
    files[1] = files[1].rename(tmp_path / "other.hlo.txt.gz")
    found = lock.check(lock.of_files(files), locked)
    assert [(g.name, g.status) for g in found.graphs] == [
        ("first.hlo.txt", "changed"),
        ("other.hlo.txt.gz", "added"),
        ("rest.hlo.txt.gz", "missing"),
    ]
    assert found.graphs[0].causes[0].kind == "output_added"
    assert "train.py:41" in found.text()
    assert found.exit_code == 1
    assert lock.Check.from_json(found.to_json()) == found


def test_without_texts_a_change_is_seen_but_not_explained(files):
    locked = lock.of_files(files, keep=False)
    files[0].write_text(hlo(stray=True))
    changed = lock.check(lock.of_files(files), locked).graphs[0]
    assert changed.status == "changed"
    assert changed.causes == ()
    assert "cannot be said why" in changed.note


def test_a_save_file_with_many_graphs_and_two_files_of_one_name(files, tmp_path):
    blocks = [
        f"## BEGIN_GRAPH\n{hlo(rate=rate)}\nGraph Hash: {i}\n## END_GRAPH\n" for i, rate in enumerate((0.25, 0.5))
    ]
    saved = tmp_path / "saved.0"
    saved.write_text("".join(f"[x]\nTensorsGraphInfo:\n\nRoot Hashes: ()\n\n{b}\n\n" for b in blocks))
    made = lock.of_files([saved])
    assert list(made) == ["saved.0", "saved.0#1"]
    assert [g.key for g in made.values()] == [g.key for g in lock.of_files(files).values()]
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "first.hlo.txt").write_text(hlo())
    with pytest.raises(UsageError, match=r"two of the files are called 'first\.hlo\.txt'"):
        lock.of_files([files[0], tmp_path / "again" / "first.hlo.txt"])


def test_bad_files(files, tmp_path):
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        lock.read(tmp_path / "no.lock")
    (tmp_path / "a.lock").write_text("{}")
    with pytest.raises(UsageError, match="lock file of graphs has schema None"):
        lock.read(tmp_path / "a.lock")
    with pytest.raises(UsageError, match="cannot be written"):
        lock.write(tmp_path / "no" / "a.lock", {})
    path = tmp_path / "graphs.lock"
    lock.write(path, lock.of_files(files))
    text = path.read_text()
    at = text.index('"text": [') + 20
    path.write_text(text[:at] + "####" + text[at + 4 :])
    files[0].write_text(hlo(stray=True))
    with pytest.raises(UsageError, match="the text of a graph cannot be read"):
        lock.check(lock.of_files(files), lock.read(path))
    files[0].write_text("nothing")
    with pytest.raises(GraphError, match="line 1"):
        lock.of_files(files)


def session(*texts):
    made = WatchSession(expect=9)
    made.step([Compiled("step", "hlo", text) for text in texts])
    return made


def test_a_run_writes_the_lock_file_and_is_held_to_it(tmp_path):
    path = tmp_path / "graphs.lock"
    lock.hold(path, session(hlo(rate=0.25), hlo()))
    assert list(lock.read(path)) == ["step 0", "step 1"]
    lock.hold(path, session(hlo(rate=0.25), hlo()))
    with pytest.raises(GraphChangedError, match=r"1 of 2 graphs are not as locked(?s:.*)train\.py:41"):
        lock.hold(path, session(hlo(rate=0.25), hlo(stray=True)))


def test_real_graphs_make_a_small_lock_file(tmp_path):
    path = tmp_path / "graphs.lock"
    lock.write(path, lock.of_files([DATA / "tied_bucket_step1.hlo.txt.gz"]))
    assert path.stat().st_size < 60_000
    now = lock.of_files([DATA / "tied_bucket_step2.hlo.txt.gz"])
    found = lock.check({"tied_bucket_step1.hlo.txt.gz": now["tied_bucket_step2.hlo.txt.gz"]}, lock.read(path))
    assert found.graphs[0].causes[0].kind == "gradient_carried_over"


def test_a_lock_file_of_the_version_before_is_read_by_its_texts(files, tmp_path):
    path = tmp_path / "graphs.lock"
    for keep in (True, False):
        lock.write(path, lock.of_files(files, keep))
        text = path.read_text().replace("graph.lock/2", "graph.lock/1")
        for graph in lock.of_files(files).values():
            text = text.replace(graph.key, "0" * 32)  # keys were others
        path.write_text(text)
        result = lock.check(lock.of_files(files), lock.read(path))
        assert bool(result) == keep
        assert keep or "older version" in result.text()
