"""Results beside earlier ones: what is called slower, what is noise, and what decides nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from retrograd.bench.compare import compare, markdown, refuse_other_machines
from retrograd.bench.msda.rows import Row as Deformable
from retrograd.bench.rows import Row
from retrograd.errors import UndecidedError

ROW = Row(
    "rms_norm", 8, 64, "float32", "torch", fwd_how="wall", bwd_how="wall", copy_gb_per_s=10.0, machine={"cpu": "C"}
)
THEN = (1.0, 1.01, 1.02, 1.03, 1.04)


def row(*rounds, **changes):
    return replace(ROW, fwd_ms=sorted(rounds)[len(rounds) // 2], fwd_rounds=rounds, **changes)


def shifted(factor):
    return row(*(factor * ms for ms in THEN))


@pytest.mark.parametrize(
    ("factor", "beyond", "fails"), [(1.2, 1, True), (1.01, 0, False), (1.05, 1, False), (0.8, -1, False)]
)
def test_slower_is_beyond_noise_and_beyond_the_percentage(factor, beyond, fails):
    found = compare([shifted(factor)], [row(*THEN)])
    (change,) = found.changes
    assert change.beyond == beyond
    assert bool(found.slower(10.0)) == fails
    assert change.ratio.low < change.ratio.median < change.ratio.high


def test_noise_as_large_as_the_difference_fails_nothing():
    noisy = row(0.8, 1.0, 1.2, 1.5, 2.0)
    assert compare([noisy], [row(*THEN)]).slower(10.0) == []


def test_one_round_decides_by_the_percentage_and_says_so():
    now, then = replace(ROW, fwd_ms=1.2), replace(ROW, fwd_ms=1.0)
    found = compare([now], [then])
    assert found.changes[0].beyond is None
    assert "one round: unknown" in markdown(found)
    assert len(found.slower(10.0)) == 1
    assert found.slower(30.0) == []


def test_what_went_wrong_since_is_told():
    found = compare([replace(ROW, skipped="wrong: y|")], [row(*THEN)])
    assert found.lost == ((("rms_norm", "8x64", "float32", "torch"), "wrong: y|"),)
    assert "wrong: y/" in markdown(found)


def test_only_rows_of_the_same_thing_measured_alike_are_compared():
    others = [
        row(*THEN, n=128),
        row(*THEN, provider="liger"),
        row(*THEN, dtype="bfloat16"),
        row(*THEN, fwd_how="graph"),
    ]
    with pytest.raises(UndecidedError, match="no time for any"):
        compare([row(*THEN)], others)
    found = compare([row(*THEN), row(*THEN, m=9)], [row(*THEN)])
    assert (len(found.changes), found.unmatched) == (1, 1)
    point = Deformable("dec300", "bfloat16", "float32", "mmcv", fwd_ms=1.0)
    assert compare([point], [replace(point, fwd_ms=2.0)]).changes[0].ratio.median == 0.5


def test_host_times_are_compared_too():
    (change,) = compare([replace(ROW, host_us=30.0)], [replace(ROW, host_us=20.0)]).changes
    assert (change.way, change.ratio.median, change.then_us) == ("host", 1.5, 20.0)


def test_another_machine_decides_nothing():
    found = compare([shifted(2.0)], [replace(row(*THEN), machine={"gpu": "G"})])
    assert "Not one device: then G, now C." in markdown(found)
    with pytest.raises(UndecidedError, match="one device"):
        refuse_other_machines(found)
    refuse_other_machines(compare([shifted(2.0)], [row(*THEN)]))


def test_what_the_machine_itself_did_is_told():
    rows = [shifted(1.2), replace(shifted(1.2), provider="retrograd")]
    text = markdown(
        compare([replace(r, copy_gb_per_s=8.0) for r in rows], [row(*THEN), row(*THEN, provider="retrograd")])
    )
    assert "copy ran at 10.0 GB/s then and at 8.0 now" in text
    assert "not retrograd: median ratio 1.20" in text
    assert text.count("**slower**") == 2
