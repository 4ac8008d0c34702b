"""Files: compressed, joined, cut off, binary, enormous, no graph at all; and save-files of torch_xla."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib
from pathlib import Path

import pytest

from retrograd.errors import GraphError, UsageError
from retrograd.graph.readers import parse, read

DATA = Path(__file__).parent / "data"
SMALL = "HloModule m\n\nENTRY e {\n  a = f32[] parameter(0)\n}\n"


def test_gzip_and_plain_give_the_same_graph(tmp_path: Path) -> None:
    packed = DATA / "xla" / "base_init_rank0.hlo.txt.gz"
    plain = tmp_path / "plain.txt"
    plain.write_bytes(gzip.decompress(packed.read_bytes()))
    [a], [b] = read(packed), read(plain)
    assert a.digest == b.digest
    assert [repr(i) for i in a.main.instructions] == [repr(i) for i in b.main.instructions]
    assert (a.source, b.source, a.ordinal) == (str(packed), str(plain), 0)


def test_a_file_of_several_modules(tmp_path: Path) -> None:
    text = "".join(
        gzip.decompress((DATA / "xla" / f"base_init_rank{k}.hlo.txt.gz").read_bytes()).decode() for k in (0, 1)
    )
    path = tmp_path / "two.gz"
    path.write_bytes(gzip.compress(text[:5000].encode()) + gzip.compress(text[5000:].encode()))  # as `cat a.gz b.gz`
    first, second = read(path)
    assert (first.title, second.title) == (str(path), f"{path}#1")
    assert first.digest != second.digest
    line = second.main.instructions[3].line
    assert f"{second.main.instructions[3].name} = " in text.split("\n")[line - 1]


def test_save_file_of_torch_xla() -> None:
    first, second = read(DATA / "save_file.0")
    assert [graph.key for graph in (first, second)] == ["d6e603", "5e4854"]
    assert [graph.ordinal for graph in (first, second)] == [0, 1]
    assert first.frames == (("train.py", 79), ("/a b/train.py", 102))
    assert first.block == "ScheduleSyncTensorsGraph"
    assert first.digest == read(DATA / "xla" / "base_init_rank0.hlo.txt.gz")[0].digest
    lines = (DATA / "save_file.0").read_text().split("\n")
    for graph in (first, second):
        for instruction in graph.main.instructions:
            assert f"{instruction.name} = " in lines[instruction.line - 1]


def _block(body: str) -> str:
    return f"[Sync]\nTensorsGraphInfo:\n  f (a.py:1)\n\nRoot Hashes: (1)\n\n## BEGIN_GRAPH\n{body}\nGraph Hash: 1\n## END_GRAPH\n"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 1, "empty"),
        (" \n\n", 1, "empty"),
        ("hello\nworld\n", 1, "this is no graph"),
        ("\n<!DOCTYPE html>\n<html></html>", 2, "web page"),
        ("digraph G {\n}", 1, "drawing"),
        (_block("IR {\n  %0 = f32[] prim::Constant()\n}"), 8, "XLA_SAVE_TENSORS_FMT=hlo"),
        (_block("digraph G {}"), 8, "XLA_SAVE_TENSORS_FMT=hlo"),
        (_block("HloModule m\n\nENTRY e {\n  oops\n}"), 11, "no instruction"),
        (_block(SMALL)[:-20], 7, "no `## END_GRAPH`"),
        (_block(SMALL) + "[Sync]\nTensorsGraphInfo:\n  f (a.py:1)\n", 19, "no `## BEGIN_GRAPH`"),
    ],
)
def test_what_is_no_graph(text: str, line: int, words: str) -> None:
    with pytest.raises(GraphError, match=rf"^dump, line {line}: .*{words}"):
        parse(text, "dump")


def test_a_format_that_does_not_exist() -> None:
    with pytest.raises(UsageError, match="format='onnx' is none of hlo, stablehlo, fx, jaxpr, torch_xla, torch_trace"):
        parse(SMALL, format="onnx")


def test_the_format_given_counts() -> None:
    with pytest.raises(GraphError, match="line 1: an HLO module begins with"):
        parse("class GraphModule(torch.nn.Module):\n", format="hlo")


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"nowhere\.txt: cannot be read: No such file"):
        read(tmp_path / "nowhere.txt")
    with pytest.raises(GraphError, match="is a directory; expected one file"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        pytest.param(b"", "line 1: the file is empty", id="empty"),
        pytest.param(gzip.compress(b""), "line 1: the file is empty", id="empty-gz"),
        pytest.param(SMALL.encode() + b"\0\1\2", "line 6: this is a binary file", id="binary"),
        pytest.param(SMALL.encode() + b"\n// caf\xe9\n", "line 7: byte 0xe9 is not UTF-8", id="latin-1"),
        pytest.param(SMALL.encode() + "ä".encode()[:1], "line 6: byte 0xc3 is not UTF-8", id="half-a-character"),
        pytest.param(gzip.compress(SMALL.encode())[:-12], "the gzip data ends here", id="cut-gz"),
        pytest.param(
            gzip.compress(SMALL.encode())[:-8] + b"\xff" * 8, "line 1: the gzip data is damaged", id="wrong-checksum-gz"
        ),
        pytest.param(b"\x1f\x8b", "the gzip data ends here", id="two-bytes-of-gz"),
    ],
)
def test_damaged_files(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "dump"
    path.write_bytes(data)
    with pytest.raises(GraphError, match=words):
        read(path)


def test_a_byte_order_mark_is_no_part_of_the_graph(tmp_path: Path) -> None:
    path = tmp_path / "dump"
    path.write_text("\ufeff" + SMALL, encoding="utf-8")
    assert read(path)[0].name == "m"


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gz"])
def test_files_beyond_the_limit(tmp_path: Path, pack) -> None:
    path = tmp_path / "dump"
    path.write_bytes(pack(SMALL.encode()))
    assert len(read(path, max_bytes=len(SMALL))[0]) == 1
    with pytest.raises(GraphError, match=r"holds more than 20 bytes of text; a larger max_bytes= reads it"):
        read(path, max_bytes=20)


@pytest.mark.parametrize("start", ["", "HloModule m\n"], ids=["nothing in it", "begins like a graph"])
def test_a_gzip_bomb_is_not_unpacked(tmp_path: Path, start: str) -> None:
    """200 MB of blanks in 200 kB: refused at once, or at the limit, with a few megabytes in memory."""
    pack = zlib.compressobj(1, wbits=31)
    with (tmp_path / "bomb.gz").open("wb") as file:
        file.write(pack.compress(start.encode()))
        for _ in range(200):
            file.write(pack.compress(b" " * (1 << 20)))
        file.write(pack.flush())
    tracemalloc.start()
    try:
        with pytest.raises(GraphError, match="line 1: the text is empty" if not start else "holds more than"):
            read(tmp_path / "bomb.gz", max_bytes=8 << 20)
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()
