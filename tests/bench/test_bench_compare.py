"""Results beside earlier ones: what is called slower, what is noise, and what decides nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from retrograd.bench.compare import compare, markdown, refuse_other_machines
from retrograd.bench.rows import OVER, Row
from retrograd.errors import UndecidedError

ROW = Row(
    "rms_norm", "8x64", "float32", "retrograd", fwd_how="wall", bwd_how="wall", copy_gb_per_s=10.0, machine={"cpu": "C"}
)
THEN = (1.0, 1.01, 1.02, 1.03, 1.04)


def row(*rounds, **changes):
    return replace(ROW, fwd_ms=sorted(rounds)[len(rounds) // 2], fwd_rounds=rounds, **changes)


def shifted(factor):
    return row(*(factor * ms for ms in THEN))


@pytest.mark.parametrize(
    ("factor", "beyond", "fails"),
    [(1.2, 1, True), (1.01, 0, False), (1.05, 1, False), (1.03, 0, False), (0.8, -1, False)],
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
    assert found.lost == ((("rms_norm", "8x64", "float32", "retrograd"), "wrong: y|"),)
    assert "wrong: y/" in markdown(found)


def test_only_rows_of_the_same_thing_measured_alike_are_compared():
    others = [
        row(*THEN, shape="8x128"),
        row(*THEN, provider="liger"),
        row(*THEN, dtype="bfloat16"),
        row(*THEN, fwd_how="graph"),
    ]
    with pytest.raises(UndecidedError, match="no time for any"):
        compare([row(*THEN)], others)
    found = compare([row(*THEN), row(*THEN, shape="9x64")], [row(*THEN)])
    assert (len(found.changes), found.unmatched) == (1, 1)
    point = Row("ms_deform_attn", "dec300", "bfloat16", "mmcv", beside="float32", fwd_ms=1.0)
    assert compare([point], [replace(point, fwd_ms=2.0)]).changes[0].ratio.median == 0.5


def test_what_was_not_begun_or_timed_otherwise_is_no_finding():
    rows = [row(*THEN), row(*THEN, shape="8x128"), row(*THEN, shape="8x256")]
    now = [row(*THEN), replace(ROW, shape="8x128", skipped=OVER), replace(rows[2], fwd_how="events")]
    found = compare(now, rows)
    assert (len(found.changes), found.unmatched, found.lost) == (1, 2, ())
    assert "2 rows cannot be compared" in markdown(found)


def test_host_times_are_compared_too():
    (change,) = compare([replace(ROW, host_us=30.0)], [replace(ROW, host_us=20.0)]).changes
    assert (change.direction, change.ratio.median, change.then_us) == ("host", 1.5, 20.0)


def test_another_machine_decides_nothing():
    found = compare([shifted(2.0)], [replace(row(*THEN), machine={"gpu": "G"})])
    assert "Not one device: then G, now C." in markdown(found)
    with pytest.raises(UndecidedError, match="one device"):
        refuse_other_machines(found)
    refuse_other_machines(compare([shifted(2.0)], [row(*THEN)]))


def beside_torch(ours, torchs):
    """Rows in which the machine is slower by a factor in each of five rounds."""
    drift = (1.0, 1.5, 0.9, 1.1, 1.3)
    return [
        row(*(ours * a * b for a, b in zip(THEN, drift, strict=True))),
        row(*(torchs * b for b in drift), provider="torch"),
    ]


@pytest.mark.parametrize(
    ("now", "beyond", "beside"),
    [((2.0, 2.0), 0, 1.0), ((1.2, 1.0), 1, 1.2), ((2.4, 2.0), 1, 1.2), ((1.0, 2.0), -1, 0.5)],
    ids=["machine-slower", "we-slower", "both-slower", "we-faster"],
)
def test_the_load_of_the_machine_drops_out_beside_torch(now, beyond, beside):
    found = compare(beside_torch(*now), beside_torch(1.0, 1.0))
    ours, torchs = found.changes
    assert ours.beyond == beyond
    assert ours.beside.median == pytest.approx(beside)
    assert torchs.control
    assert found.slower(10.0) == [ours] * (beyond == 1)


def test_another_torch_is_no_control():
    then = [replace(r, machine={"cpu": "C", "torch": "2.11"}) for r in beside_torch(1.0, 1.0)]
    ours, torchs = compare(beside_torch(2.0, 2.0), then).changes
    assert (ours.beside, torchs.control) == (None, False)
    assert ours.beyond == 1


def test_what_the_machine_itself_did_is_told():
    now = [replace(r, copy_gb_per_s=8.0) for r in beside_torch(2.0, 2.0)]
    text = markdown(compare(now, beside_torch(1.0, 1.0)))
    assert "copy ran at 10.0 GB/s then and at 8.0 now" in text
    assert "Controls took 2.00 times as long" in text
    assert "| control |" in text
    assert "**slower**" not in text
    assert {line.count("|") for line in text.splitlines() if line.startswith("|")} == {11}
