"""Files of traces: what goes in comes out; what is damaged, foreign or too large is told."""

from __future__ import annotations

import gzip
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from retrograd.errors import TraceError, UsageError
from retrograd.trace import Exponents, Op, Stats, Trace, load, save
from retrograd.trace.store import Writer

BIG = (1 << 64) - 1
VALUE = Stats(
    0, (2, 3), "float32", "cpu", -1.5, 2.0, 0.7, 1, 0, 0, 2, BIG, 4, "head.weight", Exponents(-3, (1, 0), (0, 2))
)
OPS = [
    Op(0, 0, "forward", "aten.exp.default", "a.b", "", "x.py:1", "y = x.exp()", "dim=-1", (VALUE,), (replace(VALUE, tensor=1),)),
    Op(
        1, 1, "backward", "retrograd::norm_bwd", "", "MulBackward0", "", "grüß \ud800 <b>", "", (),
        (replace(VALUE, rms=math.inf, low=None, digest=None, storage=-1, exponents=None),), True, ("k1", "k2"), "x.py:9: g * 2",
    ),
]  # fmt: skip
TRACE = Trace(OPS, "full", 3, {"torch": "2", "note": "ä"}, conditions={"flags": {"mkldnn.enabled": "True"}, "seed": {}})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save(TRACE, tmp_path / "a.trace")
    return tmp_path / "a.trace"


def lines(file: Path) -> list[bytes]:
    return gzip.decompress(file.read_bytes()).splitlines(keepends=True)


def test_what_goes_in_comes_out_and_equal_traces_make_equal_files(file, tmp_path):
    assert load(file) == TRACE
    save(TRACE, tmp_path / "b.jsonl.gz")
    assert (tmp_path / "b.jsonl.gz").read_bytes() == file.read_bytes()
    assert json.loads(lines(file)[0])["schema"] == 4
    assert b"Infinity" not in b"".join(lines(file))


def test_reading_needs_no_torch(file):
    code = f"import sys; from retrograd.trace import load, provenance; provenance(load({str(file)!r})); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_file_that_was_cut_off_is_told_and_can_be_taken_as_it_is(file):
    data = file.read_bytes()
    file.write_bytes(data[: len(data) - 12])
    with pytest.raises(TraceError, match=r"cut off .* partial=True"):
        load(file)
    assert load(file, partial=True).ops == OPS


def test_a_process_that_dies_leaves_its_operators(tmp_path):
    writer = Writer(tmp_path / "a.trace")
    writer.add(OPS[0])
    writer.flush()
    assert load(tmp_path / "a.trace", partial=True).ops == OPS[:1]
    writer.close({})


def put(file: Path, changed: list[bytes]) -> None:
    file.write_bytes(gzip.compress(b"".join(changed)))


DAMAGES = {
    "word": (lambda found: [found[0], b'["s", 3]\n', *found[1:]], "damaged in line 2: 3 is no text"),
    "unknown": (lambda found: [found[0], b'["?"]\n', *found[1:]], "line of an unknown kind"),
    "number": (lambda found: [line.replace(b'["o",0,', b'["o","0",') for line in found], "is no number"),
    "negative": (lambda found: [line.replace(b'["o",0,0,', b'["o",0,0,-1,') for line in found], "damaged in line"),
    "missing": (lambda found: [line for line in found if b'["t"' not in line], "damaged in line"),
    "count": (lambda found: [*found[:-1], b'["end",7]\n'], "7 operators were written, 2 are there"),
    "after": (lambda found: [*found, b'["s","x"]\n'], "something follows the end"),
    "text": (lambda found: [found[0], b"\xff\xfe\n", *found[1:]], "damaged in line 2"),
    "deep": (lambda found: [found[0], b"[" * 100_000 + b"\n"], "damaged in line 2"),
    "foreign": (lambda found: [b'{"format": "other"}\n'], "first line does not say 'retrograd.trace'"),
    "exponents": (lambda found: [line.replace(b"[-3,[1,0],", b"[-3,[1],") for line in found], "more of one sign"),
    "exponent": (lambda found: [line.replace(b"[-3,[1,0],", b"[0.5,[1,0],") for line in found], "expected a whole number"),
    "older": (lambda found: [found[0].replace(b'"schema":4', b'"schema":2')], "version 2, this retrograd reads 4; record"),
    "version": (lambda found: [found[0].replace(b'"schema":4', b'"schema":9')], "has version 9, this retrograd reads 4"),
    "empty": (lambda found: [], "is empty"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "said"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_told_with_its_line(file, damage, said):
    put(file, damage(lines(file)))
    with pytest.raises(TraceError, match=said):
        load(file)


def test_no_gzip_no_file_and_no_suffix_are_told(file, tmp_path):
    with pytest.raises(UsageError, match=r"cannot read .*nothing.trace"):
        load(tmp_path / "nothing.trace")
    file.write_text("text")
    with pytest.raises(TraceError, match="not compressed by gzip"):
        load(file)
    with pytest.raises(UsageError, match=r"must end in .trace or .jsonl.gz"):
        save(TRACE, tmp_path / "a.pt")


def test_flipped_bytes_are_told(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(bytes(data))
    with pytest.raises(TraceError, match=r"damaged|cut off"):
        load(file)


def test_a_file_that_unpacks_beyond_the_limit_is_refused(file):
    put(file, [lines(file)[0], b'["s","' + b"x" * 5000 + b'"]\n'])
    with pytest.raises(TraceError, match="too large"):
        load(file, limit=2000)
