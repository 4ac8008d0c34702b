"""Parts are tested anew where a test asks for it: a self-test otherwise runs once a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from retrograd.compat import registry


@pytest.fixture
def untested_parts() -> Iterator[None]:
    before = dict(registry._statuses)
    registry._statuses.clear()
    yield
    registry._statuses.clear()
    registry._statuses.update(before)
