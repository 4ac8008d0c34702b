"""The facts of kernels built to spill, to load narrowly, to use float64 and so on; and of healthy ones."""

from __future__ import annotations

import dataclasses

import pytest
from codegen_gates import faults

from retrograd.codegen import Facts, targets
from retrograd.codegen.access import Access
from retrograd.core.schema import decode

pytestmark = pytest.mark.dealt(2, whole_file=True)

TARGETS = list(targets())
NVIDIA = [name for name, target in targets().items() if target.nvidia]


@pytest.fixture(params=TARGETS)
def facts(request, probes):
    return lambda name: decode(Facts, probes[f"{request.param} {name}"])


@pytest.mark.parametrize("name", ["copy", "copy-f32"])
def test_healthy_kernel_has_no_fault(facts, name):
    found = facts(name)
    assert set(found.load_bytes) == set(found.store_bytes) == {16}
    # 2048 elements on 4 warps.
    threads = 4 * targets()[found.target].warp_size
    assert found.load_bytes[16] * 16 * threads == 2048 * (2 if name == "copy" else 4)
    assert (found.spill_bytes, found.shared_bytes, found.uses_f64, found.atomics) == (0, 0, False, {})
    assert found.registers > 0
    assert faults(found, wide=True) == []


def test_arguments_and_options(facts):
    found = facts("copy")
    assert found.arguments == {"x_ptr": "*bf16", "y_ptr": "*bf16", "N": "i32"}
    assert found.constants == {"BLOCK": 2048}
    assert found.aligned == ("x_ptr", "y_ptr", "N")
    assert found.num_warps == 4


def test_spill(facts):
    found = facts("spill")
    assert found.spill_bytes > 0
    assert [fault for fault in faults(found) if "spills" in fault]


@pytest.mark.parametrize(("name", "stores"), [("unaligned-pointer", 16), ("unaligned-size", 2)])
def test_scalar_loads(facts, name, stores):
    found = facts(name)
    assert set(found.load_bytes) == {2}
    assert set(found.store_bytes) == {stores}
    assert ["loads of 2 bytes" in fault for fault in faults(found, wide=True)] == [True]
    assert faults(found, wide=True, narrow=frozenset({"x_ptr"})) == []
    assert faults(found) == []


@pytest.mark.parametrize("width", [2, 4])
def test_load_of_two_paths_counts_as_one_of_its_width(facts, width):
    found = facts("unaligned-size")
    branch = Access("load", width, "sync", 1, "narrow.py:64", ())
    found = dataclasses.replace(found, accesses=(*found.accesses, branch))
    assert bool(faults(found, wide=True, narrow=frozenset({"x_ptr"}))) is (width == 4)


def test_thin_tile_loads_narrowly(facts):
    assert set(facts("copy-thin").load_bytes) < {4, 8}
    assert faults(facts("copy-thin"), wide=True)


def test_float64(facts):
    assert facts("f64").uses_f64
    assert ["float64" in fault for fault in faults(facts("f64"))] == [True]


def test_float32_atomic(facts):
    found = facts("atomic")
    assert set(found.atomics) <= {"add.f32", "add.f32x4"}
    assert sum(found.atomics.values()) > 0
    assert faults(found) == []


def test_compare_and_swap(facts):
    assert facts("cas").atomics == {"cas": 1}
    assert ["compare-and-swap" in fault for fault in faults(facts("cas"))] == [True]


def test_load_in_a_function_is_found_at_its_own_line(facts):
    (load,) = [access for access in facts("pipelined").accesses if access.op == "load"]
    assert load.bytes == 16
    assert load.names == ("BLOCK", "block_ptr")


def test_accesses_are_told_apart_by_variable(facts):
    assert {(access.op, access.names) for access in facts("copy").accesses} == {
        ("load", ("cols", "x_ptr")),
        ("store", ("cols", "y_ptr")),
    }


@pytest.mark.parametrize("target", NVIDIA)
def test_asynchronous_copies_count_as_loads(probes, target):
    found = decode(Facts, probes[f"{target} pipelined"])
    assert {access.kind for access in found.accesses if access.op == "load"} == {"async"}
    assert found.shared_bytes > 0


@pytest.mark.parametrize("target", TARGETS)
def test_too_much_shared_memory(probes, target):
    limit = targets()[target].shared_limit_bytes
    data = probes[f"{target} copy"]
    assert faults(decode(Facts, data | {"shared_bytes": limit})) == []
    assert ["shared memory" in fault for fault in faults(decode(Facts, data | {"shared_bytes": limit + 1}))] == [True]


@pytest.mark.parametrize(
    ("target", "registers", "num_warps", "shared", "programs"),
    [
        ("sm_90", 128, 16, 0, 1),  # all 65536 registers
        ("sm_90", 129, 4, 0, 3),  # handed out in multiples of 8
        ("sm_90", 16, 4, 0, 16),  # 64 warps
        ("sm_90", 16, 4, 100 * 1024, 2),
        ("gfx942", 128, 4, 0, 4),
    ],
)
def test_programs_per_multiprocessor(probes, target, registers, num_warps, shared, programs):
    data = probes[f"{target} copy"] | {"registers": registers, "num_warps": num_warps, "shared_bytes": shared}
    assert decode(Facts, data).programs_per_sm == programs


def test_launches_are_recorded_not_executed(probes):
    assert len(probes["recorded"]) == 3
    assert probes["recorded"][0]["grid"] == [3, 2]
    assert probes["recorded"][0]["aligned"] == ["x_ptr", "y_ptr", "N"]
    assert probes["recorded"][2]["aligned"] == ["x_ptr", "y_ptr"]
    assert probes["distinct"] == 2
