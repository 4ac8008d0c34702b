"""The text of a file that may be compressed, enormous, binary or cut off: never more than allowed is unpacked."""

from __future__ import annotations

import codecs
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from os import PathLike
from pathlib import Path
from typing import BinaryIO

from retrograd.errors import GraphError
from retrograd.graph.readers import binary
from retrograd.graph.readers.formats import detect

MAX_BYTES = 2 << 30
_PIECE = 1 << 20
_GZIP = b"\x1f\x8b"
_EXPECTED = "expected text as XLA_SAVE_TENSORS_FMT=hlo writes it, an .hlo.pb of xla_dump_to or MLIR bytecode"


def text_of(path: str | PathLike[str], max_bytes: int, stream: BinaryIO | None = None) -> str:
    """The text of a file (or of a stream of that name), unpacked.

    The first piece already has to look like a graph, before the rest is read.
    """
    pieces: list[str] = []
    decode = codecs.getincrementaldecoder("utf-8")().decode
    at = lines = 0
    try:
        opened = _opened(Path(path)) if stream is None else nullcontext(stream)
        read = _limited(_pieces(opened, str(path)), str(path), max_bytes)
        for piece in read:
            if at == 0 and (kind := binary.kind_of(piece)):
                return binary.text_of(b"".join([piece, *read]), kind, str(path))
            if at == 0 and b"\0" in piece:
                line = 1 + piece.count(b"\n", 0, piece.index(b"\0"))
                raise GraphError(f"{path}, line {line}: this is a binary file; {_EXPECTED}")
            pieces.append(_decoded(decode, piece, str(path), lines))
            if at == 0:
                detect(pieces[0].removeprefix("\ufeff"), str(path))
            lines += piece.count(b"\n")
            at += 1
        pieces.append(_decoded(lambda rest: decode(rest, True), b"", str(path), lines))
    except OSError as error:
        raise GraphError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not at:
        raise GraphError(f"{path}, line 1: the file is empty; expected HLO, StableHLO or FX text")
    return "".join(pieces).removeprefix("\ufeff")


def _opened(path: Path) -> AbstractContextManager[BinaryIO]:
    if path.is_dir():
        raise GraphError(f"{path} is a directory; expected one file, as in {path}/graph.hlo.txt")
    return path.open("rb")


def _pieces(opened: AbstractContextManager[BinaryIO], name: str) -> Iterator[bytes]:
    with opened as file:
        start = file.read(2)
        file.seek(0) if file.seekable() else None
        rest = iter(lambda: file.read(_PIECE), b"")
        if start == _GZIP:
            yield from _unpacked(rest, name)
        elif file.seekable():
            yield from rest
        else:
            yield start + file.read(_PIECE)
            yield from rest


def _limited(pieces: Iterator[bytes], name: str, max_bytes: int) -> Iterator[bytes]:
    size = 0
    for piece in filter(None, pieces):
        size += len(piece)
        if size > max_bytes:
            raise GraphError(_too_large(name, max_bytes))
        yield piece


def _unpacked(pieces: Iterator[bytes], name: str) -> Iterator[bytes]:
    """gzip in pieces of at most a megabyte, so that a bomb is stopped long before it is unpacked."""
    unpack = zlib.decompressobj(wbits=31)
    lines = 1
    for packed in pieces:
        while packed:
            if unpack.eof:  # another member follows, as when compressed files are joined
                if not packed.startswith(_GZIP[: len(packed)]):
                    return
                unpack = zlib.decompressobj(wbits=31)
            try:
                piece = unpack.decompress(packed, _PIECE)
            except zlib.error as error:
                raise GraphError(f"{name}, line {lines}: the gzip data is damaged from here on ({error})") from None
            lines += piece.count(b"\n")
            if piece:
                yield piece
            packed = unpack.unused_data if unpack.eof else unpack.unconsumed_tail
    if not unpack.eof:
        raise GraphError(f"{name}, line {lines}: the gzip data ends here; the file is cut off")


def _decoded(decode: Callable[[bytes], str], piece: bytes, name: str, lines: int) -> str:
    try:
        return decode(piece)
    except UnicodeDecodeError as error:
        line = lines + 1 + error.object[: error.start].count(b"\n")
        bad = error.object[error.start]
        raise GraphError(f"{name}, line {line}: byte 0x{bad:02x} is not UTF-8 text; the file may be damaged") from None


def _too_large(name: str, max_bytes: int) -> str:
    shown = f"{max_bytes / (1 << 30):g} GiB" if max_bytes >= 1 << 28 else f"{max_bytes:,} bytes"
    return f"{name} holds more than {shown} of text; a larger max_bytes= reads it"
