"""What codegen says of kernels as people write them: against the compilers' own reports, and what is known of each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from codegen_gates import faults

from retrograd.codegen.schema import Codegen, Facts, Kernel
from retrograd.runtime.gpu_targets import targets

pytestmark = pytest.mark.dealt(2, whole_file=True)

SOURCE = (Path(__file__).parent / "specimens.py").read_text(encoding="utf-8").splitlines()
NVIDIA = [name for name, target in targets().items() if target.nvidia]
AMD = [name for name in targets() if name not in NVIDIA]
SPILL = [("spills", "sm_90"), ("spills_on_amd", "gfx942")]
NO_SPILL = [("roomy", "sm_90"), ("roomy", "gfx942"), ("rough", "sm_90"), ("rough", "gfx942")]


@pytest.fixture
def record(examined):
    return lambda name: Codegen.from_json(json.dumps(examined[name]))


@pytest.fixture
def kernel(record):
    def one(name: str, arch: str, place: int = 0) -> Kernel:
        return [k for k in record(name).kernels if k.target == arch][place]

    return one


@pytest.fixture
def facts(kernel):
    def one(name: str, arch: str, place: int = 0) -> Facts:
        found = kernel(name, arch, place)
        assert found.facts is not None, found.error
        return found.facts

    return one


def at(text: str, nth: int = 0) -> str:
    """The place of the nth line of the specimens that has a text."""
    return f"specimens.py:{[number for number, line in enumerate(SOURCE, 1) if text in line][nth]}"


def kinds(kernel: Kernel) -> list[str]:
    return [hazard.kind for hazard in kernel.hazards]


# Against the compilers' own reports.


@pytest.mark.parametrize("arch", NVIDIA)
@pytest.mark.parametrize("place", [0, 1], ids=["fwd", "bwd"])
def test_registers_are_those_of_ptxas(facts, examined, arch, place):
    found = facts("norms", arch, place)
    said = examined["themselves"][f"norms {arch}"][found.kernel]
    assert (found.registers, found.spill_bytes) == (said["registers"], said["stack"])


@pytest.mark.parametrize("arch", AMD)
@pytest.mark.parametrize("place", [0, 1], ids=["fwd", "bwd"])
def test_registers_and_occupancy_are_those_of_llvm(facts, examined, arch, place):
    found = facts("norms", arch, place)
    said = examined["themselves"][f"norms {arch}"][found.kernel]
    assert (found.registers, found.spill_bytes) == (said["registers"], said["stack"])
    # LLVM counts waves of one of four SIMDs, of which each takes eight.
    assert found.occupancy == said["occupancy"] / 8


@pytest.mark.parametrize(("name", "arch"), SPILL, ids=["sm_90", "gfx942"])
def test_spills(facts, examined, name, arch):
    found = facts(name, arch)
    said = examined["themselves"][f"{name} {arch}"]["spill_kernel"]
    assert found.spill_bytes == said["stack"] > 0
    assert said.get("spilled", 1) > 0


@pytest.mark.parametrize(("name", "arch"), NO_SPILL, ids=["-".join(c) for c in NO_SPILL])
def test_no_spills(facts, examined, name, arch):
    """The sine keeps an array on the stack on NVIDIA, which ptxas does not call a spill either."""
    found = facts(name, arch)
    said = examined["themselves"][f"{name} {arch}"][found.kernel]
    assert found.spill_bytes == said.get("spilled", 0) == 0
    assert found.registers == said["registers"]


# What is known of each.


@pytest.mark.parametrize("arch", list(targets()))
def test_norm_forward(kernel, facts, arch):
    found = facts("norms", arch)
    threads = 4 * targets()[arch].warp_size
    assert found.load_bytes == {2 * 1024 // threads: 3}  # x, weight and bias: 1024 numbers of 16 bits each
    assert 4 in found.store_bytes
    assert found.one_value == (at("tl.store(mean_ptr"), at("tl.store(rstd_ptr"))
    assert found.approximations
    assert all("rsq" in name or name == "div.full.f32" for name in found.approximations)
    assert found.fp_fusion is True
    assert found.fma > 0
    assert kinds(kernel("norms", arch)) == []


@pytest.mark.parametrize("arch", list(targets()))
def test_lock_of_the_norm_backward(kernel, facts, arch):
    found = facts("norms", arch, 1)
    assert [asked.text() for asked in found.asked] == ["cas i32, acq_rel, gpu", *["exch i32, acq_rel, gpu"] * 2]
    assert sum(found.atomics.values()) == 3
    assert found.atomics["cas"] == 1
    assert kinds(kernel("norms", arch, 1)) == ["lock_order"]
    assert "dw_ptr" in kernel("norms", arch, 1).hazards[0].what


@pytest.mark.parametrize(("arch", "fence"), [("sm_90", "MEMBAR.ALL.GPU"), ("gfx942", "buffer_wbl2 sc1")])
def test_atomic_with_fences(kernel, facts, arch, fence):
    """A ticket drawn with acquire and release: an integer, so that its order shows nowhere."""
    found = facts("ticket", arch)
    assert [asked.text() for asked in found.asked] == ["add i32, acq_rel, gpu"]
    assert found.atomics == {"add": 1}
    assert found.fences[fence] == 1
    assert kinds(kernel("ticket", arch)) == []


@pytest.mark.parametrize(
    ("name", "arch", "atomics"),
    [
        ("adds", "sm_80", {"add.f32": 8}),
        ("adds", "sm_90", {"add.f32x4": 2}),
        ("adds", "gfx942", {"add.f32": 4}),
        ("adds_bf16", "sm_80", {"cas": 8}),
        ("adds_bf16", "sm_90", {"add.bf16x8": 1}),
    ],
    ids=["f32-sm_80", "f32-sm_90", "f32-gfx942", "bf16-sm_80", "bf16-sm_90"],
)
def test_floating_additions(kernel, facts, name, arch, atomics):
    found = facts(name, arch)
    assert found.atomics == atomics
    assert found.fences == {}
    assert [(a.op, a.order, a.scope, a.source) for a in found.asked] == [
        ("add", "relaxed", "gpu", at("tl.atomic_add(out_ptr "))
    ]
    expected = ["float_atomics", "cas_loop"] if "cas" in atomics else ["float_atomics"]
    assert kinds(kernel(name, arch)) == expected


@pytest.mark.parametrize(
    ("arch", "product"),
    [("sm_90", "wgmma.mma_async.m64n64k8.f32.tf32.tf32"), ("sm_100", "tcgen05.mma.kind::tf32"), ("gfx942", "xf32")],
    ids=["sm_90", "sm_100", "gfx942"],
)
def test_tf32(facts, arch, product):
    found = facts("tf32", arch)
    assert found.tf32
    assert any(product in name for name in found.matrix)


def test_float32_products_are_no_tf32(facts):
    assert facts("ieee", "sm_90").matrix == {}
    assert facts("ieee", "sm_90").fma == 64 * 64 * 32 // 128  # a thread's share of one step of the loop
    assert list(facts("ieee", "gfx942").matrix) == ["v_mfma_f32_32x32x2_f32"]
    assert not facts("ieee", "gfx942").tf32


def test_what_does_not_compile_is_told(kernel):
    found = kernel("tf32", "gfx950")
    assert found.facts is None
    assert found.error == "input_precision must be one of ('ieee', 'bf16x3', 'bf16x6'). Got tf32"


def test_a_compiler_that_dies_takes_nothing_with_it(record):
    alive, dead = record("kills").kernels
    assert (alive.name, alive.error) == ("exact_kernel", "")
    assert dead.error == "the compiler's process died; what it said is above"


def test_approximations(facts):
    ptx = facts("rough", "sm_90").approximations
    assert ptx["div.full.f32"] == ptx["rsqrt.approx.ftz.f32"] == ptx["sqrt.approx.ftz.f32"] == 1
    assert sum(count for name, count in ptx.items() if name.startswith("ex2.approx")) == 2
    assert facts("rough", "sm_90").flushing > 0
    amd = facts("rough", "gfx942").approximations
    assert {"amdgcn.rsq", "amdgcn.sqrt", "amdgcn.exp2", "exp2", "log"} <= set(amd)
    assert facts("rough", "gfx942").flushing == 0


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_exact_division_and_root_are_no_approximations(record, facts, arch):
    found = facts("exact", arch)
    # Before 3.7 Triton wrote the exact root for AMD itself: an approximation and its corrections.
    old = tuple(map(int, record("exact").versions["triton"].split(".")[:2])) < (3, 7)
    assert found.approximations == ({"amdgcn.rsq": 1} if old and arch == "gfx942" else {})
    assert found.flushing == 0


def test_contraction_is_as_asked(facts):
    assert (facts("exact", "sm_90").fp_fusion, facts("unfused", "sm_90").fp_fusion) == (True, False)


def test_shared_memory(facts):
    assert {(a.op, a.bytes) for a in facts("tf32", "sm_90").shared_accesses} == {("load", 16), ("store", 16)}
    assert {(a.op, a.bytes) for a in facts("roomy", "sm_90").shared_accesses} == {("load", 4), ("store", 4)}
    assert facts("adds", "sm_90").shared_accesses == ()


# Programmatic dependent launch.


@pytest.mark.parametrize(
    ("name", "ahead", "said"),
    [
        ("waits_first", 0, []),
        ("waits_late", 1, [("and loads before it waits", "tl.load(factor_ptr)")]),
        ("never_waits", 5, [("does not wait for the kernel ahead of it before it touches memory", "")]),
        ("not_early", 0, []),
    ],
)
def test_access_ahead_of_the_wait(kernel, facts, name, ahead, said):
    """A program of four warps loads a factor, and 1024 numbers in two instructions a thread, and stores as many."""
    found = facts(name, "sm_90")
    assert found.pdl is (name != "not_early")
    assert found.early == ahead
    assert bool(faults(found)) is bool(ahead)
    hazards = kernel(name, "sm_90").hazards
    assert [hazard.kind for hazard in hazards] == ["early_access"] * len(said)
    for hazard, (what, line) in zip(hazards, said, strict=True):
        assert what in hazard.what
        assert hazard.source == (at(line) if line else "")


# Autotuning.


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tuned", ["float_atomics", "tuning_accumulates", "tuned_choice"]),
        ("tuned_reset", ["float_atomics", "tuned_choice"]),
        ("tuned_in_place", ["tuning_in_place"]),
        ("tuned_restored", []),
    ],
)
def test_autotuned(record, name, expected):
    found = [kernel for kernel in record(name).kernels if kernel.target == "sm_90"]
    assert [kernel.tuning.configs for kernel in found] == [2, 2]
    assert [kernel.tuning.choice["num_warps"] for kernel in found] == [4, 8]
    assert [kernel.facts.num_warps for kernel in found] == [4, 8]
    assert [kinds(kernel) for kernel in found] == [expected, expected]


def test_the_argument_behind_a_variable_is_named(kernel):
    """`out_ptrs` is made of `out_ptr`."""
    (hazard,) = [h for h in kernel("tuned", "sm_90").hazards if h.kind == "tuning_accumulates"]
    assert hazard.advice == "@triton.autotune(..., reset_to_zero=['out_ptr'])"
    assert hazard.source == at("tl.atomic_add(out_ptrs")


def test_heuristics_are_applied(facts):
    assert facts("tuned", "sm_90").constants["EVEN"] is True


# Other ways in.


def test_kernel_by_its_signature(facts):
    found = facts("signature", "sm_90")
    assert found.arguments == {"x_ptr": "*bf16", "out_ptr": "*fp32", "N": "i32"}
    assert found.aligned == ("out_ptr",)
    assert found.load_bytes == {2: 8}


def test_shipped_op_with_its_backward(record):
    found = record("shipped").kernels
    assert [kernel.name for kernel in found] == ["norm_fwd_kernel", "norm_bwd_kernel", "norm_bwd_kernel_finalize"]
    assert found[0].facts.arguments["x_ptr"] == "*bf16"
    assert [kernel.hazards for kernel in found] == [(), (), ()]


def test_launchers_that_ask_for_a_gpu(examined):
    """As many programs as the GPU in question has multiprocessors."""
    assert examined["recorded"]["asks"] == {
        arch: [["add_kernel", [targets()[arch].num_sms]]] for arch in ("sm_90", "gfx942")
    }


def test_ops_of_this_library_in_a_function(examined):
    for arch in ("sm_90", "gfx942"):
        assert [kernel for kernel, _ in examined["recorded"]["ours"][arch]] == [
            "norm_fwd_kernel",
            "norm_bwd_kernel_few",
        ]


def test_run_on_a_gpu_and_its_profile(record):
    """The GPU and the profiler are pretended: what is tested is who gets which time."""
    found = record("run")
    assert found.origin == "run on NVIDIA sm_90"
    one, two, tuned = found.kernels
    assert (one.measured.ms, two.measured.ms, one.measured.launches) == (0.01, 0.02, 2)
    assert one.measured.bytes == 4 * (4096 + 1024)
    assert one.measured.gb_per_s == pytest.approx(2.048)
    assert one.measured.share == pytest.approx(0.2048)
    # Launches by which a configuration is found are not shown; one event too many is no time.
    assert tuned.tuning.choice["BLOCK"] == 1024
    assert tuned.measured is None
    assert found.notes == ("tuned_kernel is not timed: 2 launches, but the profiler saw 3",)
