"""Files in the cache are there whole or not at all, and somewhere else where the cache cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrograd.runtime import disk_cache


def test_replaced_at_the_end_or_not_at_all(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("first")
    with disk_cache.replacing(kept) as made:
        made.write_text("second")
        assert (made.name, kept.read_text()) == ("kept", "first")
    assert kept.read_text() == "second"

    def fail() -> None:
        with disk_cache.replacing(kept) as made:
            made.write_text("third")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert kept.read_text() == "second"
    assert list(tmp_path.iterdir()) == [kept]


def test_one_folder_a_kind_or_a_spare_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not disk_cache.user_folder("cuda").exists()
    folders = {kind: disk_cache.folder(kind) for kind in ("cuda", "native")}
    assert folders == {kind: tmp_path / "retrograd" / kind for kind in folders}
    assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in folders.values())
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    spare = disk_cache.folder("cuda")
    assert spare.is_dir()
    assert spare == disk_cache.folder("cuda")
    assert not spare.is_relative_to(tmp_path)
