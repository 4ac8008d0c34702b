"""Where kernels are launched while the one ahead of them ends, and what the driver is told of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from retrograd import config
from retrograd.codegen import targets
from retrograd.errors import UsageError

pytest.importorskip("triton")

from retrograd.runtime.cuda import driver
from retrograd.runtime.triton.launch import gpu_of
from retrograd.runtime.triton.planned_gpu import planning

CLUSTER_DIMENSION, PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6  # CUlaunchAttributeID in cuda.h


def answer(version: int) -> SimpleNamespace:
    """A driver of this version."""

    def cu_driver_get_version(where) -> int:
        where._obj.value = version
        return 0

    return SimpleNamespace(cuDriverGetVersion=cu_driver_get_version)


@pytest.mark.parametrize(
    ("arch", "version", "expected"),
    [(80, 13000, False), (89, 13000, False), (90, 12020, False), (90, 12030, True), (100, 13000, True)],
)
def test_gpus_and_drivers_that_can(monkeypatch, arch, version, expected):
    """Driver 12.2 launches so, but refuses to capture it into a graph."""
    monkeypatch.delenv("RETROGRAD_PDL", raising=False)
    monkeypatch.setattr(driver, "_library", lambda: answer(version))
    assert driver.has_pdl(arch) is expected


def test_it_can_be_turned_off(monkeypatch):
    monkeypatch.setattr(driver, "_library", lambda: answer(13000))
    monkeypatch.setenv("RETROGRAD_PDL", "off")
    assert not driver.has_pdl(90)
    monkeypatch.setenv("RETROGRAD_PDL", "auto")
    assert driver.has_pdl(90)


def test_unknown_setting(monkeypatch):
    monkeypatch.setenv("RETROGRAD_PDL", "build")
    with pytest.raises(UsageError, match="RETROGRAD_PDL is 'build', expected one of 'auto', 'off'; or unset it"):
        config.pdl()


def test_launches_planned_for_a_gpu_that_is_not_there():
    x = torch.empty(1)
    for target in targets().values():
        with planning(target):
            assert gpu_of(x).pdl is (target.name in ("sm_90", "sm_100"))


@pytest.mark.parametrize(
    ("cluster", "pdl", "expected"),
    [
        (1, False, []),
        (4, False, [(CLUSTER_DIMENSION, [4, 1, 1])]),
        (1, True, [(PROGRAMMATIC_STREAM_SERIALIZATION, [1, 0, 0])]),
        (4, True, [(CLUSTER_DIMENSION, [4, 1, 1]), (PROGRAMMATIC_STREAM_SERIALIZATION, [1, 0, 0])]),
    ],
)
def test_attributes_of_a_launch(cluster, pdl, expected):
    made = driver._config(8, 1, 256, 0, cluster, 0, pdl)
    told = [made.attributes[place] for place in range(made.attribute_count)]
    assert [(one.id, list(one.value[:3])) for one in told] == expected
