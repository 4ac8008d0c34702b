"""Limits, comparisons and hazards, on facts made by hand: what is broken is told in a sentence, what is healthy is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from subjects import ADD, FACTS, TUNING, kernel, record

from retrograd.codegen.access import Access
from retrograd.codegen.compare import changes
from retrograd.codegen.hazards import hazards
from retrograd.codegen.limits import Limits, violations
from retrograd.codegen.schema import Hazard, Kernel, Measured
from retrograd.codegen.signatures import parse
from retrograd.errors import UsageError

NARROW = Access("load", 2, "sync", 64, "norm.py:14", ("cols", "idx_ptr"))
CAS = Access("atomic", 0, "cas", 8, "norm.py:30", ("y_ptr",))
TF32 = {"wgmma.mma_async.m64n64k8.f32.tf32.tf32": 4}

BROKEN = [
    (dict(max_registers=40), dict(registers=41), "uses 41 registers, at most 40 are allowed"),
    (dict(max_shared=1024), dict(shared_bytes=1025), "uses 1025 bytes of shared memory, at most 1024 are allowed"),
    (dict(no_spills=True), dict(spill_bytes=8), "spills 8 bytes a thread at 40 registers"),
    (dict(no_float_atomics=True), dict(asked=(ADD,)), "adds floating numbers atomically at norm.py:30"),
    (dict(no_cas_loops=True), dict(asked=(ADD,), accesses=(CAS,)), "has 8 compare-and-swap loops"),
    (dict(no_f64=True), dict(uses_f64=True), "computes in float64"),
    (dict(no_tf32=True), dict(matrix=TF32), f"rounds float32 operands to TF32: {next(iter(TF32))}"),
    (
        dict(min_load_bytes=16),
        dict(accesses=(*FACTS.accesses, NARROW)),
        "loads 2 bytes a thread at norm.py:14 (64 loads), at least 16 bytes are asked",
    ),
    (dict(min_occupancy=75), dict(registers=128), "has an occupancy of 25%, at least 75 % is asked"),
]


@pytest.mark.parametrize(("limit", "broken", "said"), BROKEN, ids=[next(iter(limit)) for limit, _, _ in BROKEN])
def test_limit(limit, broken, said):
    assert [v.what for v in violations([kernel(**broken)], [], Limits(**limit))] == [said]
    assert violations([kernel()], [], Limits(**limit)) == ()
    assert violations([kernel(**broken)], [], Limits()) == ()


def test_integer_atomics_and_locks_are_no_floating_additions():
    ticket = replace(ADD, dtype="i32")
    lock = replace(ADD, op="cas", dtype="i32")
    found = kernel(asked=(ticket, lock), accesses=(CAS,))
    assert violations([found], [], Limits(no_float_atomics=True, no_cas_loops=True)) == ()


@pytest.mark.parametrize("narrow", ["idx_ptr", "other_ptr"])
def test_narrow_loads_that_are_allowed(narrow):
    found = kernel(accesses=(*FACTS.accesses, NARROW))
    assert bool(violations([found], [], Limits(min_load_bytes=16, narrow=(narrow,)))) == (narrow != "idx_ptr")


def test_a_kernel_that_does_not_compile_keeps_no_limit():
    (found,) = violations([Kernel("k", "sm_80", "norm.py:10", error="no fp8")], [], Limits())
    assert (found.what, found.place) == ("does not compile: no fp8", "norm.py:10")


def test_hazards_may_be_forbidden_and_the_configuration_is_told():
    found = replace(kernel(), hazards=(Hazard("float_atomics", "adds", "", "norm.py:30"),), tuning=TUNING)
    (said,) = violations([found], [], Limits(no_hazards=True))
    assert (said.what, said.configuration) == ("adds (norm.py:30)", "BLOCK=1024 num_warps=4")


# Two versions.


def compared(new: dict, old: dict) -> list[tuple[str, str, str]]:
    found, notes = changes(record(kernel(**new)), record(kernel(**old)))
    assert notes == ()
    return [(c.fact, c.verdict, c.what) for c in found]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (dict(registers=44), [("registers", "changed", "40 -> 44 registers"),
                              ("occupancy", "worse", "occupancy 75% -> 62%")]),
        (dict(registers=39), [("registers", "changed", "40 -> 39 registers")]),
        (dict(spill_bytes=16), [("spills", "worse", "spills 0 -> 16 bytes a thread")]),
        (dict(matrix={"mma.x": 4}), [("tensor cores", "better", "tensor cores none -> 4 mma.x")]),
        (dict(uses_f64=True), [("f64", "worse", "now computes in float64")]),
        (dict(approximations={"div.full.f32": 1}), [("approximations", "changed",
                                                     "approximations none -> div.full.f32")]),
        (dict(fp_fusion=True), [("contraction", "changed", "a * b + c is now contracted")]),
        (dict(accesses=(NARROW, *FACTS.accesses[1:])), [("loads", "worse", "narrowest load 16 -> 2 bytes a thread"),
                                                        ("loads", "changed",
                                                         "global loads 4x16B 1x4B -> 1x4B 64x2B")]),
    ],
    ids=["registers", "registers-alone", "spills", "tensor-cores", "f64", "approximations", "contraction", "loads"],
)  # fmt: skip
def test_change(change, expected):
    assert compared(change, {}) == expected
    opposite = {"better": "worse", "worse": "better", "changed": "changed"}
    back = compared({}, change)
    assert [(fact, opposite[verdict]) for fact, verdict, _ in back] == [(f, v) for f, v, _ in expected]


def test_equal_kernels_have_no_change():
    assert compared({}, {}) == []


def test_fewer_atomics_for_the_same_are_better():
    wide, scalar = replace(CAS, kind="add.f32x4", count=2), replace(CAS, kind="add.f32")
    old = dict(asked=(ADD,), accesses=(scalar,))
    assert compared(dict(asked=(ADD,), accesses=(wide,)), old) == [
        ("atomics", "better", "atomics 8 add.f32 -> 2 add.f32x4")
    ]
    assert compared(dict(asked=(ADD,), accesses=(CAS,)), old) == [("atomics", "worse", "atomics 8 add.f32 -> 8 cas")]


def test_time_within_noise_is_no_change():
    def timed(ms: float):
        return record(replace(kernel(), measured=Measured(ms, 20, 1 << 20)))

    assert changes(timed(1.04), timed(1.0))[0] == ()
    (found,) = changes(timed(1.5), timed(1.0))[0]
    assert (found.verdict, found.what) == ("worse", "takes 1000.0 -> 1500.0 us, 1.50 times as long")


def test_a_renamed_kernel_is_paired_and_a_missing_one_is_told():
    renamed = replace(kernel(), name="other_kernel")
    assert changes(record(renamed), record(kernel())) == ((), ())
    second = replace(kernel(), name="second_kernel")
    found, notes = changes(record(kernel(), second), record(kernel(), target="old.json"))
    assert (found, notes) == ((), ("second_kernel for sm_90 is in norm.py:launch only",))
    other = record(replace(kernel(), name="third_kernel"), replace(kernel(), name="fourth_kernel"))
    assert changes(record(kernel(), second), other)[1][0] == "no kernel is in both, so nothing is compared"


def test_what_no_longer_compiles_and_new_hazards_are_worse():
    broken = Kernel("norm_kernel", "sm_90", error="no fp8")
    assert [c.verdict for c in changes(record(broken), record(kernel()))[0]] == ["worse"]
    risky = replace(kernel(), hazards=(Hazard("float_atomics", "adds f32 atomically"),))
    assert [c.what for c in changes(record(risky), record(kernel()))[0]] == ["new hazard: adds f32 atomically"]


# Hazards.


def test_shared_memory_that_no_launch_gets():
    assert [h.kind for h in hazards(replace(FACTS, shared_bytes=227 * 1024 + 1), None, "")] == ["too_much_shared"]
    assert hazards(replace(FACTS, shared_bytes=227 * 1024), None, "") == ()


def test_hooks_of_the_author_may_put_everything_back():
    asked = replace(FACTS, asked=(ADD,))
    assert "tuning_accumulates" in [h.kind for h in hazards(asked, TUNING, "")]
    assert "tuning_accumulates" not in [h.kind for h in hazards(asked, replace(TUNING, hooks=True), "")]
    assert "tuning_accumulates" not in [h.kind for h in hazards(asked, replace(TUNING, configs=1), "")]


@pytest.mark.parametrize(
    ("order", "fences", "found"),
    [("acq_rel", {"MEMBAR.ALL.GPU": 2}, True), ("relaxed", {"MEMBAR.ALL.GPU": 2}, False),
     ("acq_rel", {"MEMBAR.ALL.CTA": 2}, False)],
    ids=["fenced", "relaxed", "within-the-program"],
)  # fmt: skip
def test_fences_around_sums(order, fences, found):
    facts = replace(FACTS, asked=(replace(ADD, order=order),), fences=fences)
    assert ("fenced_atomics" in [h.kind for h in hazards(facts, None, "")]) == found
    ticket = replace(facts, asked=(replace(ADD, order=order, dtype="i32"),))
    assert hazards(ticket, None, "") == ()


# Signatures.


def test_signature():
    assert parse("x_ptr=*bf16, N = i32:16,MODE='a,b', BLOCK=1024") == {
        "x_ptr": "*bf16", "N": "i32:16", "MODE": "'a,b'", "BLOCK": "1024",
    }  # fmt: skip


@pytest.mark.parametrize("text", ["*bf16", "x_ptr=", "x ptr=*bf16"])
def test_signature_that_cannot_be_read(text):
    with pytest.raises(UsageError, match=r"expected NAME=VALUE"):
        parse(text)
