"""Faults of single kernels: each mistake is told with its argument, element and line, and its healthy neighbour is not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_races import in_a_process

HERE = Path(__file__).resolve().parent
# Specimen -> kind of its fault, argument, first element, and a part of the sentence.
FAULTS = {
    "reads_beyond_the_end": ("out of bounds", "x_ptr", 100, "the tensor has 100 elements"),
    "reads_beyond_the_end_of_a_view": ("out of bounds", "x_ptr", 100, "the tensor has 100 elements"),
    "chooses_an_offset_that_is_beyond_the_end": ("out of bounds", "x_ptr", 64, "the tensor has 64 elements"),
    "writes_between_rows": ("between rows", "out_ptr", 8, "a tensor that is not contiguous"),
    "overflows_32_bits": ("out of bounds", "x_ptr", 1 << 30, "the tensor has 64 elements"),
    "overflows_below_the_tensor": (
        "out of bounds",
        "x_ptr",
        -(1 << 31),
        "its offset, 2147483648, overflows 32 bits: it ",
    ),
    "overflows_into_the_tensor": (
        "overflow",
        "x_ptr",
        0,
        "its offset, 4294967296, overflows 32 bits: it is computed in ",
    ),
    "reads_crooked": ("misaligned", "x_ptr", 1, "an access of 4 bytes"),
    "sums_what_nobody_has_written": ("uninitialised", "", None, "depends on memory that nobody has written"),
    "hands_on_what_nobody_has_written": ("uninitialised", "", None, "written: kernel copy_kernel reads in faulty_"),
    "hands_it_on_into_what_was_empty": ("uninitialised", "", None, "written: kernel copy_kernel reads in faulty_"),
    "takes_nought_times_what_nobody_has_written": (
        "uninitialised",
        "",
        None,
        "a value that leaves torch by item(), float() or a condition depends on memory that nobody has written: "
        "it is allocated in faulty_kernels.py:",
    ),
    "hands_numpy_what_is_written_in_part": ("left unwritten", "", None, "nobody has written 14 of the 64 elements"),
    "lists_what_is_written_in_part": ("uninitialised", "", None, "a value that leaves torch by tolist"),
    "adds_to_what_nobody_has_written": ("uninitialised", "", None, "written: kernel block_sums_kernel updates atom"),
    "adds_what_nobody_has_written": ("uninitialised", "", None, "a value that leaves torch"),
    "counts_on_from_what_nobody_has_written": ("uninitialised", "", None, "the branch taken depends on memory"),
    "adds_to_a_column_that_nobody_has_written": ("uninitialised", "", None, "a value that leaves torch"),
    "goes_where_nobody_has_said": ("uninitialised", "", None, "an address depends on memory"),
    "goes_far_where_nobody_has_said": ("uninitialised", "", None, "an address depends on memory"),
    "waits_for_ever": ("endless loop", "", None, "3 programs wait here for what no program will do"),
    "waits_alone_for_ever": ("endless loop", "", None, "waits here for what no other will do"),
    "waits_in_assembly_for_ever": ("endless loop", "", None, "2 programs wait here for what no program will do"),
    "waits_in_assembly_for_nobody": ("endless loop", "", None, "waits here for what no other will do"),
    "counts_for_ever": ("endless loop", "", None, "while i < 10:"),
    "steps_of_zero": ("endless loop", "", None, "it counts up in steps of 0"),
    "asserts": ("assertion", "", None, "program 2 fails"),
    "adds_in_any_order": ("order", "total_ptr", 0, "bits differ between orders"),
    "adds_under_a_lock": ("order", "total_ptr", 0, "bits differ between orders"),
    "goes_on_beyond_a_row": (
        "beyond a view",
        "x_ptr",
        64,
        "the view has 64 elements, the tensor that it is of has more",
    ),
    "fills_what_lies_beside_a_view": ("between rows", "out_ptr", 9, "program 0 writes in"),
    "fills_padding_that_it_has_allocated": ("beyond a view", "out_ptr", 9, "program 0 writes in"),
    "adds_to_what_lies_beside_a_view": ("out of bounds", "counts_ptr", 9, "program 0 updates atomically in"),
    "adds_zeros_to_padding_that_it_has_cleared": ("beyond a view", "counts_ptr", 9, "program 0 updates atomically in"),
    "goes_on_beyond_all_rows": ("out of bounds", "x_ptr", 64, "the tensor has 64 elements"),
    "stores_twice_to_one_place": ("race", "out_ptr", 5, "program 1 writes in"),
    "meets_in_two_widths": ("race", "halves_ptr", 1, "nothing orders the two"),
}
HEALTHY = (
    "stays_inside", "masks_what_nobody_has_written", "padding_that_nobody_has_written", "counts_in_any_order",
    "waits_in_assembly", "hashes_in_32_bits", "goes_far_and_comes_back", "overflows_where_nothing_is_read",
    "counts_long", "goes_round_long_in_each_program", "queues_with_tickets",
    "waits_for_a_time", "waits_for_nothing_but_time", "goes_by_offsets_in_assembly",
    "waits_in_a_crowd", "compares_devices", "is_told_of_an_amd_gpu", "counts_by_a_keyword", "comes_by_an_address",
    "overrides_an_operator", "hands_on_what_it_masks", "leaves_out_what_nobody_has_written",
    "has_numpy_fill_memory", "reads_beside_a_column_that_nobody_has_written",
    "swaps_into_what_nobody_has_written", "counts_on_from_what_it_has_swapped_in",
    "stores_what_is_not_a_number", "goes_only_where_somebody_has_said",
)  # fmt: skip

# What cannot be executed -> what the refusal names.
REFUSED = {"asks_for_a_vote": "vote.sync", "asks_for_its_lane": "the register %laneid",
           "adds_in_assembly": "'red.release.gpu.global.add.u32' each thread of a program makes for itself"}  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> dict[str, dict]:
    """What was noticed of each specimen."""
    pytest.importorskip("triton")
    return {row["name"]: row for row in in_a_process(HERE / "faulty_kernels.py")}


@pytest.mark.parametrize("name", FAULTS)
def test_a_mistake_is_told(rows, name):
    kind, argument, element, part = FAULTS[name]
    ((seen, *where, _, text),) = rows[name]["faults"]
    assert (seen, *where) == (kind, argument, element)
    assert part in text
    assert "faulty_kernels.py:" in text
    assert text in rows[name]["report"]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_neighbour_is_left_alone(rows, name):
    assert rows[name]["faults"] == []
    assert rows[name]["error"] == ""


def test_every_specimen_is_judged(rows):
    assert set(rows) == {*FAULTS, *HEALTHY, *REFUSED, "takes_maxima_by_a_descriptor", "copies_in_gluon"}
    assert rows["asserts"]["printed"] == [f"pid ({i}, 0, 0) idx () program: {i}" for i in range(3)]


@pytest.mark.parametrize("name", REFUSED)
def test_assembly_that_is_not_known_is_refused_by_name_and_line(rows, name):
    error = rows[name]["error"]
    assert error.startswith("UnsupportedOperationError: tt.elementwise_inline_asm (")
    assert "faulty_kernels.py:" in error
    assert REFUSED[name] in error


def test_what_a_gpu_does_by_descriptors_alone_is_refused_by_name(rows):
    error = rows["takes_maxima_by_a_descriptor"]["error"]
    assert error.startswith("UnsupportedOperationError: tt.descriptor_reduce of descriptor_maximum_kernel cannot")


def test_gluon_is_refused_by_its_name(rows):
    assert rows["copies_in_gluon"]["error"].startswith(
        "UnsupportedOperationError: gluon_copy_kernel is written in Gluon"
    )


def test_lanes_of_one_store_are_no_two_programs(rows):
    ((*_, count, text),) = rows["stores_twice_to_one_place"]["faults"]
    assert count == 1
    assert "lanes of this one store write different values to it" in text


def test_keywords_of_range_that_triton_passes_over_are_told(rows):
    (name,) = (name for name, row in rows.items() if "Triton passes over" in row["report"])
    assert name == "counts_by_a_keyword"
    assert re.search(r"faulty_kernels\.py:\d+: range\(0, N, step=BLOCK\): ", rows[name]["report"])
