"""Configurations of autotuned kernels: a wrong one that is not the first is found, right ones are left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_races import in_a_process

HERE = Path(__file__).resolve().parent
RIGHT = {"two blocks": 2, "static assertion": 1, "pruned": 1, "sum": 2, "many": 4, "kept": 1, "a mask at odd sizes": 2}


@pytest.fixture(scope="module")
def rows() -> dict[str, dict]:
    pytest.importorskip("triton")
    return {row["name"]: row for row in in_a_process(HERE / "tuned_ops.py")}


@pytest.mark.parametrize("name", RIGHT)
def test_right_configurations_are_left_alone(rows, name):
    assert rows[name]["verdict"] == "proved", rows[name]
    text = f"; {RIGHT[name]} configurations of autotuned kernels"
    assert rows[name]["power"].endswith(text) if RIGHT[name] > 1 else "configurations" not in rows[name]["power"]


@pytest.mark.parametrize(
    ("name", "configuration", "kind", "what"),
    [
        ("no mask", "BLOCK=64", "configuration", "out of bounds in kernel doubled_without_mask"),
        ("no mask at odd sizes", "BLOCK=2", "configuration", "out of bounds in kernel doubled_without_mask"),
        ("heuristics", "BLOCK=32, HALVES=2", "wrong-value", "times the attainable error"),
        ("splits", "BLOCK=32, SPLITS=4", "configuration", "race in kernel summed_in_splits: element 0 of `y_ptr`"),
        ("splits", "BLOCK=32, SPLITS=4", "wrong-value", "times the attainable error"),
    ],
)
def test_a_wrong_configuration_is_named(rows, name, configuration, kind, what):
    assert rows[name]["verdict"] == "finding"
    assert {stage for stage, *_ in rows[name]["findings"]} == {"determinism"}, rows[name]
    texts = [text for _, each, text in rows[name]["findings"] if each == kind]
    assert any(what in text for text in texts), rows[name]
    assert all(text.startswith(f"under Config({configuration}, num_warps=2) of kernel ") for text in texts)
    assert not any("kernel doubled:" in text for text in texts)  # the other one that is tuned


def test_what_trials_leave_behind_is_found_and_what_they_reset_is_not(rows):
    assert ("races", "autotune") in {(stage, kind) for stage, kind, _ in rows["no reset"]["findings"]}, rows["no reset"]
    own = {(stage, kind) for stage, kind, _ in rows["own tuner, no reset"]["findings"]}
    assert ("races", "autotune") in own, rows["own tuner, no reset"]
    (wiped,) = [text for stage, kind, text in rows["reset of what was written"]["findings"] if kind == "autotune"]
    assert wiped.startswith("out of the call that tunes is not what later calls give; reset_to_zero"), wiped
    for name in ("reset", "reset of programs", "reset of what is overwritten", "own tuner"):
        assert not [kind for _, kind, _ in rows[name]["findings"] if kind == "autotune"], rows[name]


def test_bits_that_depend_on_the_choice_are_a_note_and_a_finding_where_they_are_promised(rows):
    text = "bits of out depend on the configuration that autotuning chooses, by time: not the same with Config(BLOCK="
    (note,) = [note for note in rows["sum"]["notes"] if "autotuning" in note]
    assert note.startswith(text)
    assert "(BLOCK=128, num_warps=2) of kernel summed as with Config(BLOCK=32, num_warps=2)" in note
    promised = rows["sum, deterministic"]
    assert [(stage, kind) for stage, kind, _ in promised["findings"]] == [("determinism", "not-repeatable")], promised
    assert promised["findings"][0][2].startswith(text)
    assert not any("autotuning" in note for note in rows["two blocks"]["notes"])


def test_an_op_that_chooses_by_a_clock_of_its_own_is_said_to(rows):
    said = {
        name for name, row in rows.items() for note in row.get("notes", ()) if "times its launches by itself" in note
    }
    assert said == {"by the fastest"}
    assert rows["by the fastest"]["verdict"] == "proved"


def test_a_level_says_how_many_it_left_out(rows):
    assert any("4 of 6 configurations of autotuned kernels" in note for note in rows["many"]["notes"])


def test_the_innermost_session_chooses_and_leaves_nothing(rows):
    *_, inner_grid, inner, _, _, outer_grid, outer = rows["nested"]["blocks"]
    assert (inner_grid, inner, outer_grid, outer) == (128, 128, 64, 64)
    assert rows["nested"]["kept"]
    assert rows["nested"]["left"] == []


def test_a_verification_asks_a_tuner_for_one_key_where_something_else_is_tried(rows):
    assert rows["pruned"]["asked"] == 4  # 45 where each stage and each repeat asked anew
