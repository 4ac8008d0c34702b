"""Record of compiled kernels, as plain data with its JSON. No torch, no triton, no renderer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from retrograd.codegen.access import Access
from retrograd.core.notebook import Shown
from retrograd.core.schema import Record
from retrograd.runtime.gpu_targets import target_named

SCHEMA = "retrograd.codegen/1"

Verdict = Literal["better", "worse", "changed"]


@dataclass(frozen=True)
class Asked:
    """An atomic operation as the kernel's source asks for it, whatever a GPU makes of it."""

    op: str  # "add", "max", "exch", "cas" and so on
    dtype: str  # Triton's name of the element type, "f32", "bf16", "i32"
    order: str  # "relaxed", "acquire", "release" or "acq_rel"
    scope: str  # "cta", "gpu" or "sys"
    source: str = ""  # "norm.py:12", "" if unknown
    names: tuple[str, ...] = ()  # the variables that make up the address on that line, () if unknown

    @property
    def adds_floating(self) -> bool:
        """Whether it adds floating numbers, so that the order of additions shows in the last bits."""
        return self.op == "add" and self.dtype.startswith(("f", "bf"))

    def text(self) -> str:
        """ "add f32, relaxed, gpu"."""
        return f"{self.op} {self.dtype}, {self.order}, {self.scope}"


@dataclass(frozen=True)
class Facts:
    """One compiled kernel."""

    kernel: str  # name of the kernel function
    target: str  # name of the target
    arguments: dict[str, str]  # argument -> type ("*bf16"), without constexprs
    constants: dict[str, Any]  # argument -> value, of constexprs and of arguments that are None or 1
    aligned: tuple[str, ...]  # arguments known to be divisible by 16
    # Options of the launch.
    num_warps: int
    num_stages: int
    registers: int  # 32-bit registers of a thread; on AMD vector and accumulation registers together
    # stack of a thread without the arrays it declares; kernels without calls have one only for spilled registers
    spill_bytes: int
    shared_bytes: int  # shared memory of a program
    uses_f64: bool  # whether any instruction computes in float64
    bulk_copies: int  # instructions that copy whole blocks to or from shared memory (TMA)
    accesses: tuple[Access, ...]  # what touches global memory, one entry per kind, width and source line
    shared_accesses: tuple[Access, ...] = ()  # loads and stores of shared memory, likewise
    asked: tuple[Asked, ...] = ()  # atomic operations of the source
    one_value: tuple[str, ...] = ()  # "file.py:12" of loads and stores of one value a program
    # memory fences in the machine code, by name -> number
    fences: dict[str, int] = field(default_factory=dict[str, int])
    # instructions of tensor cores (matrix cores), by name -> number
    matrix: dict[str, int] = field(default_factory=dict[str, int])
    # arithmetic that is not correctly rounded, by name -> number
    approximations: dict[str, int] = field(default_factory=dict[str, int])
    fma: int = 0  # fused multiply-adds of float32, those of exact divisions and square roots included
    fp_fusion: bool | None = None  # whether the compiler may contract a * b + c to one rounding; None if unknown
    flushing: int = 0  # instructions that take subnormal float32 numbers for zero
    # whether the source reduces or multiplies matrices, so that block sizes decide the order of additions
    reduces: bool = False
    # whether it is launched while the kernel ahead of it ends (`launch_pdl`, programmatic dependent launch)
    pdl: bool = False
    # then, what touches global memory ahead of the wait for that kernel (`gdc_wait`) in the machine code, block copies
    # as well (`op` "copy"); without a wait, all
    ahead_of_wait: tuple[Access, ...] = ()

    @property
    def load_bytes(self) -> dict[int, int]:
        """Width in bytes -> number of global load instructions, asynchronous copies to shared memory included."""
        return widths(self.accesses, "load")

    @property
    def store_bytes(self) -> dict[int, int]:
        """Width in bytes -> number of global store instructions."""
        return widths(self.accesses, "store")

    @property
    def atomics(self) -> dict[str, int]:
        """Kind ("add.f32", "cas") -> number of atomic instructions."""
        counts: Counter[str] = Counter()
        for access in self.accesses:
            if access.op == "atomic":
                counts[access.kind] += access.count
        return dict(sorted(counts.items()))

    @property
    def compare_and_swaps(self) -> int:
        """Number of compare-and-swap instructions: locks, or loops in the place of an instruction that is not there."""
        return sum(count for kind, count in self.atomics.items() if "cas" in kind)

    @property
    def early(self) -> int:
        """Number of instructions in `ahead_of_wait`."""
        return sum(access.count for access in self.ahead_of_wait)

    @property
    def tf32(self) -> bool:
        """Whether tensor cores round float32 operands to 10 bits of mantissa."""
        return any("tf32" in name or "xf32" in name for name in self.matrix)

    @property
    def programs_per_sm(self) -> int:
        """Programs of this kernel that fit one multiprocessor (AMD: compute unit) at once."""
        target = target_named(self.target)
        # Registers are handed out to warps in multiples of 8 a thread on all of these targets.
        a_program = max(-(-self.registers // 8) * 8, 8) * target.warp_size * self.num_warps
        shared = self.shared_bytes + target.reserved_bytes
        by_shared = (target.shared_limit_bytes + target.reserved_bytes) // shared if self.shared_bytes else 32
        return min(target.registers // a_program, target.max_warps // self.num_warps, by_shared, 32)

    @property
    def occupancy(self) -> float:
        """Estimate of warps resident on a multiprocessor, as a share of the most there can be."""
        return self.programs_per_sm * self.num_warps / target_named(self.target).max_warps


@dataclass(frozen=True)
class Tuning:
    """What `@triton.autotune` adds to a launch."""

    configs: int  # number of configurations that are timed
    choice: dict[str, Any]  # this one: its constants and options
    # Arguments that are put back before each timed run.
    reset_to_zero: tuple[str, ...] = ()
    restore_value: tuple[str, ...] = ()
    hooks: bool = False  # whether the author gave hooks of their own, of which nothing is known

    @property
    def text(self) -> str:
        """ "BLOCK=1024 num_warps=4", the choice."""
        return " ".join(f"{name}={value}" for name, value in self.choice.items())


@dataclass(frozen=True)
class Hazard:
    """What makes results of a kernel differ from run to run, or wrong, or its atomics slow, or cannot be launched."""

    # "float_atomics", "lock_order", "tuning_accumulates", "tuning_in_place", "tuned_choice", "fenced_atomics",
    # "early_access", "cas_loop" or "too_much_shared"
    kind: str
    what: str  # in a sentence
    advice: str = ""  # what to do about it
    source: str = ""  # "norm.py:12", "" if it belongs to no line


@dataclass(frozen=True)
class Measured:
    """A kernel on a GPU."""

    ms: float  # median device time of one launch in milliseconds
    launches: int  # how many were timed
    bytes: int  # size of its tensor arguments together, each counted once
    copy_gb_per_s: float = 0.0  # what a large device copy reaches on this GPU; 0 if unknown

    @property
    def gb_per_s(self) -> float:
        """Bytes of the arguments a second."""
        return self.bytes / self.ms / 1e6 if self.ms else 0.0

    @property
    def share(self) -> float | None:
        """Of the bandwidth of a copy; None if that is unknown."""
        return self.gb_per_s / self.copy_gb_per_s if self.copy_gb_per_s else None


@dataclass(frozen=True)
class Kernel:
    """One kernel for one architecture.

    `place` is "path/file.py:12" where it is defined; `error` says why it does not compile, and then there are no
    `facts`. `code` is Triton's hash of what was run, "" if nothing was.
    """

    name: str
    target: str
    place: str = ""
    launches: int = 1
    grid: tuple[int, ...] = ()
    facts: Facts | None = None
    error: str = ""
    tuning: Tuning | None = None
    hazards: tuple[Hazard, ...] = ()
    measured: Measured | None = None
    code: str = ""


@dataclass(frozen=True)
class Violation:
    """A limit that one kernel does not keep, in a sentence; of an autotuned one with its configuration."""

    kernel: str
    target: str
    what: str
    place: str = ""
    configuration: str = ""


@dataclass(frozen=True)
class Change:
    """What differs between two versions of a kernel for one architecture."""

    kernel: str
    target: str
    fact: str
    verdict: Verdict
    what: str


@dataclass(frozen=True)
class Codegen(Record, Shown):
    """Everything that one call says.

    `origin` says where the code comes from: "cross-compiled", or "run on NVIDIA H200". `against` is what it was
    compared with, "" if with nothing; `forbid_worse` makes what got worse a violation. `notes` say what was left out.
    """

    _noun: ClassVar[str] = "record of generated code"

    target: str
    architectures: tuple[str, ...]
    kernels: tuple[Kernel, ...]
    origin: str = "cross-compiled"
    versions: dict[str, str] = field(default_factory=dict[str, str])
    limits: dict[str, Any] = field(default_factory=dict[str, Any])
    violations: tuple[Violation, ...] = ()
    against: str = ""
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    schema: str = SCHEMA

    @property
    def exit_code(self) -> int:
        """0 all limits kept, 1 not."""
        return 1 if self.violations else 0


def widths(accesses: tuple[Access, ...], op: str) -> dict[int, int]:
    """Width in bytes -> number of instructions, widest first."""
    counts: Counter[int] = Counter()
    for access in accesses:
        if access.op == op:
            counts[access.bytes] += access.count
    return dict(sorted(counts.items(), reverse=True))
