"""Parts are tested anew in each test of this folder: a self-test otherwise runs once a process."""

from __future__ import annotations

import pytest

from retrograd.compat import registry


@pytest.fixture(autouse=True)
def untested_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_statuses", {})
