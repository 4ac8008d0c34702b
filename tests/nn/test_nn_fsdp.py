"""Models with these norms under FSDP2 on two processes: parameters lie in halves, each process has half of the batch.

The expectation is computed in one process from both halves, gradient by gradient: their mean, which FSDP takes.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch.testing import assert_close

from retrograd import nn, patch

pytestmark = pytest.mark.dealt(2, whole_file=True)

N = 16
Results = dict[str, torch.Tensor]


def make(kind: str) -> torch.nn.Module:
    """Norms alone, or norms between the layers that they stand between."""
    torch.manual_seed(0)
    if kind == "norms":
        model = torch.nn.Sequential(nn.RMSNorm(N, eps=1e-6), nn.LayerNorm(N), nn.RMSNorm(N, weight_offset=1.0))
    elif kind == "model":
        layers = [torch.nn.Linear(N, N), nn.RMSNorm(N), torch.nn.Tanh(), torch.nn.Linear(N, N), nn.LayerNorm(N)]
        model = torch.nn.Sequential(*layers)
    else:
        model = torch.nn.Sequential(torch.nn.Linear(N, N), torch.nn.RMSNorm(N), torch.nn.LayerNorm(N))
        patch.norms(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def batch(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x and the gradient of y for both processes."""
    x, grad = torch.randn(2, 4, 6, N, generator=torch.Generator().manual_seed(1), dtype=torch.float64).unbind()
    return x.to(dtype), grad.to(dtype)


def shard_and_step(kind: str, dtype: torch.dtype, each: bool, mixed: bool) -> tuple[Results, Results, torch.Tensor]:
    """Gradients and parameters after a step, whole, and the gradient of this rank's half of x."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = make(kind).to(dtype)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: Any = {"mp_policy": policy} if mixed else {}
    for module in model if each else ():
        fully_shard(module, **options)
    fully_shard(model, **options)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    rank = torch.distributed.get_rank()
    x, grad = (t.chunk(2)[rank] for t in batch(dtype))
    x.requires_grad_()
    y = model(x)
    y.backward(grad.to(y.dtype))
    grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    optimiser.step()
    return grads, {name: p.detach().full_tensor() for name, p in model.named_parameters()}, x.grad


def in_one_process(kind: str, dtype: torch.dtype, mixed: bool) -> tuple[Results, Results, torch.Tensor]:
    """What two processes should find: each half by itself, and the mean of their gradients."""
    model = make(kind).to(dtype)
    halves, grads_of_x = [], []
    for x, grad in zip(*(t.chunk(2) for t in batch(dtype)), strict=True):
        x, copied = x.clone().requires_grad_(), copy.deepcopy(model)
        used = copied.bfloat16() if mixed else copied
        y = used(x.to(next(used.parameters()).dtype))
        y.backward(grad.to(y.dtype))
        halves.append({name: p.grad.float() if mixed else p.grad for name, p in used.named_parameters()})
        grads_of_x.append(x.grad)
    grads = {name: (half + halves[1][name]) / 2 for name, half in halves[0].items()}
    return grads, {name: p.detach() - 0.5 * grads[name] for name, p in model.named_parameters()}, torch.cat(grads_of_x)


@pytest.mark.parametrize("each", [True, False], ids=["norms-sharded-alone", "one-group"])
@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "bfloat16-parameters"])
def test_norms_have_the_bits_of_one_process(mixed: bool, each: bool, ranks: Ranks) -> None:
    want = in_one_process("norms", torch.float32, mixed)
    answers = ranks.run(shard_and_step, "norms", torch.float32, each, mixed)
    for grads, parameters, _ in answers:
        for got, expected in ((grads, want[0]), (parameters, want[1])):
            assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert torch.equal(torch.cat([x for _, _, x in answers]), want[2])


@pytest.mark.parametrize("each", [True, False], ids=["layers-sharded-alone", "one-group"])
@pytest.mark.parametrize("kind", ["model", "patched"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_model_has_the_gradients_of_one_process(dtype: torch.dtype, kind: str, each: bool, ranks: Ranks) -> None:
    want = in_one_process(kind, dtype, mixed=False)
    answers = ranks.run(shard_and_step, kind, dtype, each, False)
    # Matrix products may round differently in memory that lies elsewhere; the norms may not.
    for grads, parameters, _ in answers:
        for got, expected in ((grads, want[0]), (parameters, want[1])):
            for name, tensor in expected.items():
                assert_close(got[name], tensor, msg=lambda text, name=name: f"{name}: {text}")
    assert_close(torch.cat([x for _, _, x in answers]), want[2])
