"""Texts that are kept in the user's cache: made once a key, and each time where nothing can be written."""

from __future__ import annotations

import pytest

from retrograd.ttir.kept_texts import kept_text


@pytest.fixture
def texts():
    """A function that gives another text at each call."""
    numbers = iter(range(9))
    return lambda: f"text {next(numbers)} of µ"


def test_a_text_is_made_once_for_each_key(tmp_path, monkeypatch, texts):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert [kept_text(key, texts) for key in ("a", "a", "b", "a")] == [f"text {n} of µ" for n in (0, 0, 1, 0)]


def test_a_file_that_is_no_text_is_made_anew(tmp_path, monkeypatch, texts):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept_text("a", texts)
    (path,) = tmp_path.rglob("*.ttir")
    path.write_bytes(b"\xff\xfe\xff")
    assert [kept_text("a", texts), kept_text("a", texts)] == ["text 1 of µ"] * 2


def test_without_a_folder_that_can_be_written_to_each_text_is_made(tmp_path, monkeypatch, texts):
    monkeypatch.setattr("retrograd.runtime.disk_cache.folder", lambda kind: tmp_path / "missing")
    assert [kept_text("a", texts), kept_text("a", texts)] == ["text 0 of µ", "text 1 of µ"]
