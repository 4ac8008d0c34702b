"""Every exception of retrograd: one class per cause, each with the exit code of the command line.

Standard library only. A message names the argument, what was given, what was expected and the mend.
"""

from __future__ import annotations


class RetrogradError(Exception):
    """Base class. `exit_code` is what the command line returns when this error ends a command."""

    exit_code = 2


class UsageError(RetrogradError):
    """An argument is wrong: an unknown target, stage, dtype or device. Nothing was checked."""


class SpecError(RetrogradError):
    """The description of an op does not work: the reference raises, the op returns nothing, a dimension is unknown."""


class UndecidedError(RetrogradError):
    """Nothing can be concluded, as when the reference itself makes NaN at ordinary inputs."""

    exit_code = 3


class InterpreterError(RetrogradError):
    """Kernels are to be executed as on a GPU, but this process interprets them (TRITON_INTERPRET=1)."""


class UnsupportedOperationError(UndecidedError):
    """A kernel has an operation that cannot be executed without a GPU; the message names it and its source line."""


class UnsupportedVersionError(UsageError):
    """A framework behaves differently from the releases that were tested; the message names the alternative."""


class MissingExtraError(RetrogradError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package '{package}', which is not installed; run: pip install 'retrograd[{extra}]'"
        )


class NativeBuildError(RetrogradError, RuntimeError):
    """C++ code cannot be built: there is no compiler, or it fails. impl="torch" needs none."""


class VerificationError(RetrogradError, AssertionError):
    """A backward pass was found wrong (raised by `Report.raise_if_failed` and by the pytest helpers)."""

    exit_code = 1


class NonFiniteGradientError(RetrogradError, ArithmeticError):
    """A rank has sent a NaN or Inf into a gradient reduction; the message says which rank and for which module."""

    exit_code = 1


class GraphError(RetrogradError, ValueError):
    """A file is no computation graph, or a damaged one; the message says in which line."""


class TraceError(RetrogradError, ValueError):
    """A file is no trace of a run, a damaged one, or one of another version; the message says where."""


class GraphChangedError(RetrogradError, AssertionError):
    """A training step compiled a graph too many, or one that differs from its lock file; the message says why."""

    exit_code = 1


class RanksDifferError(RetrogradError, RuntimeError):
    """Ranks of one job run different graphs or other collectives: they would hang, or add up wrong gradients."""

    exit_code = 1


class ExecutionsDifferError(RetrogradError, ArithmeticError):
    """An operator gave other bits when it was executed again, or copies of a parameter differ, before an update."""

    exit_code = 1


class BucketError(RetrogradError, RuntimeError):
    """Gradients cannot be reduced as planned: a group brought none, or too much waits for one that is late."""

    exit_code = 1
