"""A patched model under FSDP2, on a mesh of one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from retrograd import patch

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed")


def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 16), torch.nn.RMSNorm(16), torch.nn.Linear(16, 16), torch.nn.LayerNorm(16)
    )


@pytest.mark.parametrize("norms_alone", [False, True])
def test_a_step_of_a_sharded_model(mesh, norms_alone):
    from torch.distributed.fsdp import fully_shard

    model = make()
    plain = copy.deepcopy(model)
    patch.norms(model)
    for module in model if norms_alone else ():
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.randn(6, 16)
    for one in (model, plain):
        optimiser = torch.optim.SGD(one.parameters(), lr=0.1)
        one(x).square().mean().backward()
        optimiser.step()
    for (name, got), (_, want) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert_close(got.full_tensor(), want, msg=lambda text, name=name: f"{name}: {text}")
