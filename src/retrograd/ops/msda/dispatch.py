"""Implementation that a call takes, and its functions; implementations are imported when first run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple

import torch

from retrograd.ops.msda.arguments import MsdaGrads, MsdaInputs, MsdaSpec, NeededGrads
from retrograd.ops.msda.fused import sampled, sampled_bwd
from retrograd.ops.types import Family, Impl
from retrograd.runtime.cpp.recipe import Recipe

FAMILY = Family(
    "retrograd.ops.msda", "value", (Impl.TRITON, Impl.CUDA, Impl.NATIVE, Impl.TORCH), (Impl.NATIVE, Impl.TORCH)
)


class Functions(NamedTuple):
    """`msda_fwd` and `msda_bwd` of an implementation; `arguments` documents them."""

    forward: Callable[[MsdaInputs, MsdaSpec], torch.Tensor]
    backward: Callable[[torch.Tensor, MsdaInputs, MsdaSpec, NeededGrads], MsdaGrads]
    # whether the forward takes references; elsewhere `sampled` has to make locations and weights
    fused: bool = False
    # of the fused form's backward: locations and weights, and the gradients through them; see `fused`
    sampled: Callable[[MsdaInputs, MsdaSpec], MsdaInputs] = sampled
    sampled_bwd: Callable[..., MsdaGrads] = sampled_bwd
    # of a call that has run, forward or backward (with what was needed): its launches, where it consists of them
    recipe: Callable[..., Recipe | None] = lambda *_: None


class MsdaCall(NamedTuple):
    """A call ready to run: what is computed, by which functions."""

    spec: MsdaSpec
    functions: Functions


@lru_cache(maxsize=1024)
def resolve(spec: MsdaSpec, impl: str | Impl | None, dtype: torch.dtype, device: torch.device) -> MsdaCall:
    """The call for a value of this dtype on this device; cached, since every forward asks. See `Family.choose`."""
    return MsdaCall(spec, functions_for(impl, dtype, device))


def functions_for(impl: str | Impl | None, dtype: torch.dtype, device: torch.device) -> Functions:
    """Those of the choice; with None on a GPU, CUDA C++ where it computes a call of such sizes, else Triton."""
    chosen = FAMILY.choose(impl, dtype, device)
    return _by_sizes() if impl is None and chosen is Impl.TRITON else functions(chosen)


@cache
def functions(impl: Impl) -> Functions:
    """The functions of an implementation that exists."""
    module = FAMILY.module(impl)
    functions = Functions(module.msda_fwd, module.msda_bwd)
    if impl is Impl.TRITON:
        functions = functions._replace(fused=True, sampled=module.sampled, sampled_bwd=module.sampled_bwd)
    return functions._replace(recipe=module.recipe) if impl in (Impl.TRITON, Impl.CUDA) else functions


@cache
def _by_sizes() -> Functions:
    """CUDA C++ where it computes the call and is the faster one, else Triton."""
    from retrograd.ops.msda import cuda, triton

    def forward(inputs: MsdaInputs, spec: MsdaSpec) -> torch.Tensor:
        return (cuda if cuda.forward_pays(inputs, spec) else triton).msda_fwd(inputs, spec)

    def backward(grad_out: torch.Tensor, inputs: MsdaInputs, spec: MsdaSpec, needed: NeededGrads) -> MsdaGrads:
        return (cuda if cuda.backward_pays(inputs, spec) else triton).msda_bwd(grad_out, inputs, spec, needed)

    def recipe(inputs: MsdaInputs, spec: MsdaSpec, needed: NeededGrads | None = None) -> Recipe | None:
        if needed is not None and inputs.references is not None:
            return triton.recipe_of(inputs, spec, needed, recipe)
        pays = cuda.forward_pays(inputs, spec) if needed is None else cuda.backward_pays(inputs, spec)
        return (cuda if pays else triton).recipe(inputs, spec, needed)

    return functions(Impl.TRITON)._replace(forward=forward, backward=backward, recipe=recipe)
