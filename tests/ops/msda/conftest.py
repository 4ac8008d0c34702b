"""Each test of deformable attention runs on every implementation this machine has."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["torch"])
def impl(request: pytest.FixtureRequest) -> str:
    return request.param


MODES = [(padding, aligned) for padding in ("zeros", "border") for aligned in (False, True)]


@pytest.fixture(params=MODES, ids=lambda m: f"{m[0]}-{'aligned' if m[1] else 'edges'}")
def mode(request: pytest.FixtureRequest) -> dict[str, object]:
    padding, aligned = request.param
    return dict(padding_mode=padding, align_corners=aligned)
