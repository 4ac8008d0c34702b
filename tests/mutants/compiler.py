"""Ops that are right in eager and wrong once a model around them is compiled. Ids start with C."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from retrograd.check.spec import OpSpec, op, tensor

_X = dict(x=tensor("M", "N"))


def _operator(name: str, kernel: Callable[[Tensor], Tensor], fake: Callable[[Tensor], Tensor]) -> Any:
    name = f"{name}_{time.monotonic_ns()}"  # this file may be loaded twice, an operator defined once only
    library = torch.library.Library("retrograd_mutants", "FRAGMENT")
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"retrograd_mutants::{name}", fake, lib=library)
    _KEPT.append(library)  # the operator lives as long as its library
    return getattr(torch.ops.retrograd_mutants, name)


_KEPT: list[Any] = []


def _wrapped(operator: Any) -> Callable[[Tensor], Tensor]:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return operator(x)

        @staticmethod
        def backward(_ctx: Any, dy: Tensor) -> Tensor:
            return 2 * dy

    return lambda x: Double.apply(x)


def _twice(x: Tensor) -> Tensor:
    return 2 * x


# The fake says contiguous where the kernel keeps the input's strides turned round: compiled code reads the result
# with strides that it has not (pytorch/pytorch#137437, #198364).
C01 = op(_wrapped(_operator("c01", lambda x: (2 * x).mT.contiguous().mT, torch.empty_like)), _twice, _X, name="C01")


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return _IDENTITY(x.detach()).clone()

    @staticmethod
    def backward(_ctx: Any, dy: Tensor) -> Tensor:
        return dy


_IDENTITY = _operator("c02", lambda x: x, torch.empty_like)

# The operator returns its argument, which its schema denies: whoever writes into the result changes the argument
# (class of open-mmlab/mmcv#1511).
C02 = op(lambda x: 2 * Identity.apply(x), _twice, _X, name="C02")


class DropsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * dy


def _square(x: Tensor) -> Tensor:
    # The branch for the compiler has a formula of its own, and it has another gradient.
    return x * x.detach() if torch.compiler.is_compiling() else DropsBackward.apply(x)


# Compiled, the custom backward is replaced by one for other code, silently (class of pytorch/pytorch#193279).
C03 = op(_square, lambda x: x * x, _X, transforms=["compile"], name="C03")

MUTANTS = {name: spec for name, spec in list(globals().items()) if isinstance(spec, OpSpec)}
