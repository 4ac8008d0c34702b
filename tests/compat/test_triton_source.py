"""Sources of kernels replaced in place: it works here, and where its names are gone kernels are left alone."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="kernels of Triton")

from retrograd.compat import registry, triton_source
from retrograd.compat.triton_probe import scaled, scaling_kernel


@pytest.fixture
def unknown():
    """The state of the part is asked anew, before and after."""
    registry._statuses.pop(triton_source.SOURCE.id, None)
    yield
    registry._statuses.pop(triton_source.SOURCE.id, None)


def test_it_works_here(unknown):
    status = registry.status(triton_source.SOURCE)
    assert (status.state, status.difference) == ("works", "")
    assert triton_source.functions_of(scaling_kernel) == [scaling_kernel, scaled]


def test_kernels_are_left_alone_where_a_name_is_gone(unknown, monkeypatch):
    owner = next(c for c in type(scaling_kernel).__mro__ if "_unsafe_update_src" in vars(c))
    monkeypatch.delattr(owner, "_unsafe_update_src")
    assert registry.status(triton_source.SOURCE).state == "degraded"
    assert triton_source.functions_of(scaling_kernel) == []


def test_a_source_comes_back(unknown):
    source = scaling_kernel.src
    triton_source.replace(scaling_kernel, source + "    pass\n", ())
    assert scaling_kernel.src != source
    triton_source.replace(scaling_kernel, source, ())
    assert scaling_kernel.src == source
