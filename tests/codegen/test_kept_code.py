"""Disassembled machine code is kept in the user's cache, by what it is the code of."""

from __future__ import annotations

import pytest

from retrograd.codegen import kept_code


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """The cubins that nvdisasm is asked for, in a cache of their own."""
    pytest.importorskip("triton")
    cubins = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kept_code, "require", lambda part: None)
    monkeypatch.setattr(kept_code, "disassemble", lambda cubin: (cubins.append(cubin), (f"REG:{len(cubin)}", "LDG"))[1])
    return cubins


def test_a_cubin_is_disassembled_once(asked):
    assert [kept_code.disassembled(cubin) for cubin in (b"a", b"bc", b"a")] == [
        ("REG:1", "LDG"), ("REG:2", "LDG"), ("REG:1", "LDG")
    ]  # fmt: skip
    assert asked == [b"a", b"bc"]


@pytest.mark.parametrize("damage", [b"", b"no gzip", b"\x1f\x8b"], ids=["empty", "text", "head alone"])
def test_what_is_damaged_is_made_again(asked, tmp_path, damage):
    kept_code.disassembled(b"a")
    (file,) = tmp_path.rglob("machine_code/*.gz")
    for content in (damage, file.read_bytes()[:-9]):
        file.write_bytes(content)
        assert kept_code.disassembled(b"a") == ("REG:1", "LDG")
    assert asked == [b"a"] * 3


def test_another_release_of_triton_reads_it_anew(asked, monkeypatch):
    kept_code.disassembled(b"a")
    monkeypatch.setattr("triton.__version__", "0")
    kept_code.disassembled(b"a")
    assert asked == [b"a", b"a"]
