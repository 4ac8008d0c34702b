"""Useful bytes, JSON lines, tables and ratios: arithmetic and text, nothing is measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from retrograd.bench.registry import BENCHMARKS
from retrograd.bench.rows import Row, load, to_line
from retrograd.bench.table import best_peer, markdown, times_faster
from retrograd.errors import UsageError

BASE = Row("rms_norm", "1024x4096", "bfloat16", "torch", copy_gb_per_s=4000.0, machine={"gpu": "G", "torch": "2.11"})


def row(provider, fwd_ms=None, bwd_ms=None, **changes):
    return replace(BASE, provider=provider, fwd_ms=fwd_ms, bwd_ms=bwd_ms, **changes)


@pytest.mark.parametrize(
    ("op", "direction", "tensors"),
    [("rms_norm", "fwd", 2), ("rms_norm", "bwd", 3), ("add_rms_norm", "fwd", 4), ("add_layer_norm", "bwd", 4)],
)
def test_useful_bytes_count_each_matrix_once(op, direction, tensors):
    assert BENCHMARKS[op].bytes_moved(direction, "8x16", "bfloat16", "") == tensors * 8 * 16 * 2
    assert BENCHMARKS[op].bytes_moved(direction, "8x16", "float32", "") == tensors * 8 * 16 * 4


def test_bandwidth_of_a_row():
    assert row("torch", fwd_ms=1.0).gb_per_s("fwd") == pytest.approx(2 * 1024 * 4096 * 2 / 1e-3 / 1e9)
    assert row("torch").gb_per_s("bwd") is None


def test_best_peer_is_never_this_project():
    rows = [row("retrograd", 1.0), row("retrograd-atomic", 0.1), row("torch", 4.0), row("quack", 2.0)]
    assert best_peer(rows, "fwd").provider == "quack"
    assert best_peer(rows[:2], "fwd") is None
    assert times_faster(rows[0], rows[3], "fwd").median == pytest.approx(2.0)
    assert times_faster(rows[0], rows[3], "bwd") is None


def test_table_has_speeds_shares_and_ratios():
    rows = [row("retrograd", 0.01, 0.01), row("torch", 0.02, 0.04, bwd_how="events"), row("quack", skipped="a|b")]
    text = markdown(rows)
    assert "G, torch 2.11; copy 4000 GB/s" in text
    assert "| 1024x4096 | retrograd | 1678 | 42% | **2.00** torch | 2517 | 63% | **4.00** torch |" in text
    assert "| 1024x4096 | torch | 839 | 21% | 2.00 | 629 (events) | 16% | 4.00 |" in text
    assert "quack | a/b |" in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in lines} == {9}


def test_host_times_have_a_table_of_their_own():
    text = markdown([row("retrograd", host_us=31.26)])
    assert "| rms_norm | 1024x4096 | retrograd | 31.3 |" in text
    assert "fwd GB/s" not in text


def test_lines_come_back_and_the_last_counts(tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text("\n".join(map(to_line, [row("torch", 1.0), row("quack", 1.0)])) + "\n")
    second.write_text(to_line(row("torch", 2.0)) + "\n")
    assert load([first, second]) == [row("quack", 1.0), row("torch", 2.0)]


@pytest.mark.parametrize("text", ["", "no json\n", "[1]\n", '{"op": "rms_norm"}\n'])
def test_a_file_that_holds_no_results_is_a_usage_error(tmp_path, text):
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(UsageError):
        load([tmp_path / "x.jsonl"])
    with pytest.raises(UsageError, match="cannot read"):
        load([tmp_path / "missing.jsonl"])
