"""Trace: every operator of one or more steps with statistics of its tensors. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

SCHEMA = 4  # 1 had no exponents, 2 another digest, 3 no owners
FORWARD, BACKWARD, OTHER = "forward", "backward", "other"
NOT_SEEN = "not seen"  # how `Trace.meta["compiled"]` begins where compiled code ran, whose operators are not all there
PHASES = (FORWARD, BACKWARD, OTHER)
# What an operator belongs to, of which `Op.owner` is one, the third and fourth with " of <module>" or " of <a> to <b>".
MODULE, OPTIMIZER, REDUCTION, GATHER = "module", "optimizer", "gradient reduction", "parameter gather"
SCALER, CALLBACK, PROGRAM = "gradient scaler", "backward callback", "program"


@dataclass(frozen=True, slots=True)
class Exponents:
    """Finite elements other than zero, counted by binary exponent and sign.

    The buckets are the same for every dtype: count k is of 2^(least + k) <= |x| < 2^(least + k + 1). That of exponent
    -127 is open below (2^-126 is the least normal float32), that of 127 is open above. The first and the last count of
    the two signs together are not 0.

    Attributes:
        least: exponent of the first count; 0 if there is none.
        positive: counts of positive elements.
        negative: counts of negative elements, as many.
    """

    least: int
    positive: tuple[int, ...]
    negative: tuple[int, ...]

    @property
    def greatest(self) -> int:
        """Exponent of the last count."""
        return self.least + len(self.positive) - 1

    def __bool__(self) -> bool:
        return bool(self.positive)

    def validate(self) -> None:
        """ValueError if a file holds no such histogram."""
        if len(self.positive) != len(self.negative) or min((*self.positive, *self.negative), default=0) < 0:
            raise ValueError("exponents have negative counts, or more of one sign than of the other")


@dataclass(frozen=True, slots=True)
class Stats:
    """One tensor as an operator saw it.

    Attributes:
        tensor: number of the value within its trace: the same number is the same storage, view and version.
        shape: its sizes.
        dtype: "float32", "bfloat16", "int64": torch's name without "torch.".
        device: "cpu", "cuda:0".
        low: least of the finite elements; None where there is none, or where the level does not count.
        high: greatest of the finite elements, likewise.
        rms: root mean square of the finite elements, added in float64.
        nan: how many elements are NaN; None where nobody counted (integers, or a level that does not).
        inf: how many are infinite.
        subnormal: how many are subnormal in their dtype.
        zero: how many are zero.
        digest: 64-bit hash of the bytes with their positions: a permutation or a sign flip changes it; None if not
            computed. Equal on every device for equal bytes.
        storage: number of the memory it lies in, which views share; -1 if unknown.
        name: "blocks.0.mlp.weight" of a parameter or buffer of the model; "" otherwise.
        exponents: histogram of the magnitudes; None where nobody counted (integers, or a level that does not).
    """

    tensor: int
    shape: tuple[int, ...]
    dtype: str
    device: str
    low: float | None = None
    high: float | None = None
    rms: float | None = None
    nan: int | None = None
    inf: int | None = None
    subnormal: int | None = None
    zero: int | None = None
    digest: int | None = None
    storage: int = -1
    name: str = ""
    exponents: Exponents | None = None

    @property
    def bad(self) -> bool:
        """Whether an element is NaN or infinite, as far as anybody counted."""
        return bool(self.nan) or bool(self.inf)


@dataclass(frozen=True, slots=True)
class Op:
    """One operator that ran.

    Attributes:
        index: position in the trace.
        step: number of the step it belongs to.
        phase: "forward", "backward" or "other" (optimizer, data, anything outside both).
        name: the operator with its overload, "aten.mm.default", or a kernel of ours, "retrograd::rms_norm_fwd".
        module: path of the innermost module whose forward it belongs to ("blocks.0.mlp"; "" is the model itself where
            `owner` is "module", else none); in a backward the module whose forward made the autograd node.
        node: name of the autograd node, "MmBackward0"; "" in a forward.
        place: "file.py:12", the innermost line outside of torch and retrograd that asked for it; in a backward the line
            of the forward.
        code: that line of source, stripped; "" if it cannot be read.
        arguments: what is no tensor, as text, so that two runs can be told apart: "dim=-1, keepdim=False".
        inputs: the tensors it was given, in order.
        outputs: the tensors it returned or wrote into, in order.
        random: whether it draws from a generator.
        kernels: the Triton kernels it launched, by name, as far as they are seen.
        inside: "file.py:12: code" of the line in a custom backward or hook that asked for it; "" elsewhere.
        owner: what it belongs to: "module", "optimizer", "gradient scaler", "gradient reduction of blocks.0 to
            blocks.3" (the modules whose gradients are in the bucket), "parameter gather of blocks.1", "backward
            callback" (what autograd's engine calls when nodes have run) or "program" (a line outside of every module,
            `place`); "" where that is unknown, as in files of schema 3.
    """

    index: int
    step: int
    phase: str
    name: str
    module: str
    node: str
    place: str
    code: str
    arguments: str
    inputs: tuple[Stats, ...]
    outputs: tuple[Stats, ...]
    random: bool = False
    kernels: tuple[str, ...] = ()
    inside: str = ""
    owner: str = ""

    @property
    def belonging(self) -> str:
        """Where it belongs, in words after "in": "module blocks.0", "the model itself", "the optimizer"; or ""."""
        if self.module:
            return f"module {self.module}"
        if self.owner in ("", PROGRAM):
            return ""
        return "the model itself" if self.owner == MODULE else f"the {self.owner}"


@dataclass(slots=True)
class Trace:
    """A recorded run.

    Attributes:
        ops: every operator in the order in which it was issued.
        level: "names" (no statistics), "fast" or "full".
        rank: rank of the process, 0 if there is only one.
        meta: versions, device, seed (the last that was set), start: text by name, for people.
        schema: version of this form.
        conditions: versions, flags, variables and sources of the run (`retrograd.env.run_conditions`); {} if unknown.
    """

    ops: list[Op] = field(default_factory=list[Op])
    level: str = "fast"
    rank: int = 0
    meta: dict[str, str] = field(default_factory=dict[str, str])
    schema: int = SCHEMA
    conditions: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
