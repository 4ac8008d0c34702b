"""Each test of a norm runs on every implementation this machine has."""

from __future__ import annotations

import extensions
import pytest


@pytest.fixture(params=["triton", "native", "torch"])
def impl(request: pytest.FixtureRequest, device: str) -> str:
    if request.param == "native":
        if device != "cpu":
            pytest.skip("native code runs on CPU tensors")
        if (reason := extensions.why_no_compiler()) is not None:
            pytest.skip(f"no native code here: {reason}")
    return request.param


@pytest.fixture(params=["rms_norm", "layer_norm"])
def norm(request: pytest.FixtureRequest) -> str:
    return request.param
