"""Shared fixtures. Without a GPU the real kernels run in Triton's interpreter, which must be asked for before import."""

from __future__ import annotations

import pytest
import torch

from retrograd import config

if not torch.cuda.is_available():
    config.request_interpreter()
torch.set_num_threads(1)  # two cores: small tests lose more to threads than they gain


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run: "cuda", or "cpu" with Triton's interpreter."""
    return "cuda" if torch.cuda.is_available() else "cpu"
