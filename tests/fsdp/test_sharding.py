"""Grouping by size: which modules share a group, and that torch's FSDP2 makes of it what the plan says."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

if not dist.is_available():
    pytest.skip("torch is built without distributed", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from retrograd import fsdp
from retrograd.errors import UsageError

BLOCK = (64 * 64 + 64) * 4 / 1e6  # MB of a Linear of 64


class Layer(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.ReLU())

    def forward(self, x):
        return self.inner(x)


class Decoder(nn.Module):
    """As language models are written: parameters of its own, two embeddings, a list, a norm."""

    def __init__(self, layers=6, vocabulary=100):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 64)
        self.places = nn.Embedding(20, 64)
        self.scale = nn.Parameter(torch.ones(64))
        self.drop = nn.Dropout(0.0)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.LayerNorm(64)

    def forward(self, tokens):
        x = self.embed(tokens) * self.scale + self.places(torch.arange(tokens.shape[-1]))
        for layer in self.layers:
            x = layer(self.drop(x))
        return self.norm(x)


class Causal(nn.Module):
    def __init__(self, tied=False, **sizes):
        super().__init__()
        self.model = Decoder(**sizes)
        self.head = nn.Linear(64, self.model.embed.num_embeddings, bias=False)
        if tied:
            self.head.weight = self.model.embed.weight

    def forward(self, tokens):
        return self.head(self.model(tokens))


def names(plan):
    return [list(group.names) for group in plan.groups]


def layers(*numbers):
    return [f"model.layers.{n}" for n in numbers]


def test_blocks_are_grouped_from_the_last_until_they_reach_the_size():
    """Seven blocks in threes: the group that is left over is the first."""
    plan = fsdp.plan_by_size(Causal(layers=7), 2.5 * BLOCK)
    assert names(plan) == [
        ["model.embed", "model.places"],
        layers(0),
        layers(1, 2, 3),
        layers(4, 5, 6),
        ["model.norm", "head"],
    ]
    assert [group.bytes for group in plan.groups] == [30720, 16640, 49920, 49920, 26112]
    assert (plan.root.bytes, plan.root.parameters, plan.root.names) == (256, 1, ())


@pytest.mark.parametrize(("mb", "sizes"), [(0, [1] * 6), (BLOCK, [1] * 6), (BLOCK * 1.01, [2] * 3), (6 * BLOCK, [6])])
def test_size_of_groups(mb, sizes):
    groups = [group for group in names(fsdp.plan_by_size(Causal(), mb)) if any("layers" in name for name in group)]
    assert [len(group) for group in groups] == sizes


def test_a_list_that_is_too_small_joins_its_neighbours():
    plan = fsdp.plan_by_size(Causal(), 1000)
    assert names(plan) == [["model"] + ["head"]]


def test_a_crumb_joins_its_neighbour():
    """A norm before a head that is large by itself."""
    plan = fsdp.plan_by_size(Causal(vocabulary=200), 0.05)
    assert names(plan)[-1] == ["model.norm", "head"]
    assert plan.groups[-1].bytes > 0.05e6


def test_tied_weights_share_a_group_and_count_once():
    plan = fsdp.plan_by_size(Causal(tied=True), 2 * BLOCK)
    assert names(plan)[0] == ["model.embed", "model.places", "model.norm", "head"]
    assert plan.groups[0].bytes == (100 * 64 + 20 * 64 + 2 * 64) * 4
    assert plan.groups[0].parameters == 4


def test_what_is_tied_to_the_root_stays_with_it():
    model = Causal()
    model.model.layers[3].inner[0].bias = model.model.scale
    plan = fsdp.plan_by_size(model, 0)
    assert layers(3) not in names(plan)
    assert plan.root.parameters == 2


def test_a_block_that_is_used_twice_counts_once():
    model = Causal()
    model.model.layers.append(model.model.layers[0])
    assert names(fsdp.plan_by_size(model, 0)) == names(fsdp.plan_by_size(Causal(), 0))


def test_dtypes_are_kept_apart_and_frozen_parameters_are_not():
    model = Causal()
    model.model.layers[2].to(torch.bfloat16)
    model.model.layers[4].to(torch.bfloat16).requires_grad_(False)
    groups = names(fsdp.plan_by_size(model, 4 * BLOCK))
    assert groups[1:-1] == [layers(0, 1), layers(2), layers(3, 4, 5)]


def test_sizes_are_those_of_the_reduction():
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    full = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain, halved, kept = (
        fsdp.plan_by_size(Causal(), 0, mp_policy=policy).groups[0].bytes
        for policy in (MixedPrecisionPolicy(), half, full)
    )
    assert plain == kept == 2 * halved


def test_ignored_parameters_do_not_count():
    model = Causal()
    plan = fsdp.plan_by_size(model, 0, ignored_params={model.head.weight, model.model.scale})
    assert ["head"] not in names(plan)
    assert plan.root.parameters == 0


def test_sequences_are_lists_if_they_are_large():
    model = nn.Sequential(nn.Linear(4, 64), nn.Sequential(*(Layer() for _ in range(4))), nn.Linear(64, 4))
    assert names(fsdp.plan_by_size(model, 2 * BLOCK)) == [["0"], ["1.0", "1.1"], ["1.2", "1.3"], ["2"]]
    assert names(fsdp.plan_by_size(model, 100)) == [["0", "1", "2"]]


def test_named_blocks():
    """Blocks within blocks: stages of an encoder."""
    model = nn.Sequential(nn.ModuleDict({"a": nn.ModuleList([Layer(), Layer()]), "b": nn.Linear(64, 64)}), Layer())
    for blocks in (["Layer"], [Layer]):
        assert names(fsdp.plan_by_size(model, 0, blocks=blocks)) == [["0.a.0"], ["0.a.1"], ["0.b"], ["1"]]
    with pytest.raises(UsageError, match=r"blocks names 'Leyer', expected classes of `model`: .*Layer, Linear"):
        fsdp.plan_by_size(model, blocks=["Leyer"])


def test_plan_as_text_and_digest():
    plan = fsdp.plan_by_size(Causal(layers=40), 2 * BLOCK)
    text = str(plan)
    assert "model.layers.0, model.layers.1" in text
    assert text.count("\n") == len(plan.groups) + 1
    assert "(root)" in text.splitlines()[-1]
    long = str(fsdp.plan_by_size(Causal(layers=40), 39 * BLOCK))
    assert "model.layers.0, model.layers.1, model.layers.2, ... model.layers.39" in long
    assert plan.digest == fsdp.plan_by_size(Causal(layers=40), 2 * BLOCK).digest
    assert plan.digest != fsdp.plan_by_size(Causal(layers=40), 3 * BLOCK).digest


def test_meta_device():
    with torch.device("meta"):
        model = Causal()
    assert fsdp.plan_by_size(model, 0).digest == fsdp.plan_by_size(Causal(), 0).digest


@pytest.mark.parametrize("mb", [-1, float("nan")])
def test_size_must_be_a_size(mb):
    with pytest.raises(UsageError, match="expected 0 or more"):
        fsdp.plan_by_size(Causal(), mb)


def test_nothing_to_shard():
    with pytest.raises(UsageError, match=r"`model` \(ReLU\) has no parameters"):
        fsdp.plan_by_size(nn.ReLU())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mb", [0, 2 * BLOCK, 1000])
def test_fsdp_makes_the_groups_of_the_plan_and_a_step_is_the_same(alone, mb, tied):
    torch.manual_seed(0)
    model = Causal(tied)
    torch.manual_seed(0)
    plain = Causal(tied)
    # FSDP computes on the accelerator that it sees, unless a mesh says otherwise.
    plan = fsdp.shard_by_size(model, mb, mesh=init_device_mesh("cpu", (1,)))
    states: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            states.setdefault(id(fully_shard.state(module)), []).append(name)
    assert sorted(states.values()) == sorted([*names(plan), [""]])
    tokens = torch.randint(0, 100, (3, 9))
    for one in (model, plain):
        one(tokens).square().mean().backward()
    for (name, got), (_, want) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(got.grad.full_tensor(), want.grad), name
    with pytest.raises(UsageError, match="is sharded already"):
        fsdp.shard_by_size(model, mb)
