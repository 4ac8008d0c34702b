"""Two real processes over gloo: ranks that compile different graphs, and gradients that were not reduced."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

import retrograd.graph as graph
from retrograd.core.order_registry import Order
from retrograd.core.rank_store import FolderStore, RankStore
from retrograd.errors import RanksDifferError, VerificationError
from retrograd.graph.watching.events import Compiled
from retrograd.graph.watching.rank_agreement import Comparison

pytestmark = [
    pytest.mark.dealt(2, whole_file=True),
    pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed"),
]


def step_of(other: bool) -> tuple[str, bool]:
    """Compile one step on each rank, rank 1 with another scale where `other`; which error, and whether the step ran on."""
    torch._dynamo.reset()
    scale = 2.0 if other and dist.get_rank() == 1 else 1.0
    model = torch.nn.Linear(4, 4)
    compiled = torch.compile(lambda x: model(x) * scale, backend="aot_eager")
    ran = False
    try:
        with graph.watch("compile", ranks="compare", ranks_timeout=40) as w:
            compiled(torch.ones(2, 4)).sum().backward()
            ran = True
            w.step()
    except RanksDifferError as error:
        return str(error), ran
    return "", ran


def late_on_one_rank() -> str:
    """Rank 1 alone compiles a second graph in the step."""
    torch._dynamo.reset()
    compiled = torch.compile(torch.nn.Linear(4, 4), backend="aot_eager")
    try:
        with graph.watch("compile", ranks="compare", ranks_timeout=40) as w:
            for batch in (2, 3) if dist.get_rank() else (2,):
                compiled(torch.ones(batch, 4)).sum().backward()
            w.step()
    except RanksDifferError as error:
        return str(error)
    return ""


def test_the_same_graphs_pass(ranks):
    assert ranks.run(step_of, False) == [("", True)] * 2


def test_another_graph_on_one_rank_is_an_error_on_both_before_it_runs(ranks):
    answers = ranks.run(step_of, True)
    for rank, (text, ran) in enumerate(answers):
        assert f"step 0: rank {rank} is about to run the forward graph" in text
        assert f"rank {1 - rank} is about to run the forward graph" in text
        assert "1.0" in text
        assert "2.0" in text
        assert not ran


def test_a_graph_that_only_one_rank_compiles(ranks):
    first, second = ranks.run(late_on_one_rank)
    assert "rank 0 compiles no further graph, rank 1 is about to run the forward graph" in first
    assert "rank 1 is about to run the forward graph" in second


def sharded(spoil: str) -> str:
    """FSDP2 on both ranks; after backward one gradient is spoiled; what the check says."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Partial, Replicate

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 6))
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    out = model(torch.randn(3, 4)).sum()
    if spoil == "before":
        return _said(model)
    out.backward()
    weight = model[1].weight
    full = weight.grad.full_tensor()
    local = weight.grad.to_local()
    if spoil == "plain":
        model[1]._parameters["weight"] = torch.nn.Parameter(weight.full_tensor().detach())
        model[1].weight.grad = full
    elif spoil == "none":
        weight.grad = None
    elif spoil in ("replicated", "partial"):
        weight.grad = None
        placement = Partial() if spoil == "partial" else Replicate()
        object.__setattr__(weight, "_spoilt", DTensor.from_local(full, mesh, [placement], run_check=False))
        return _said(Spoilt(model, "1.weight", weight._spoilt))
    elif spoil == "local":
        return _said(Spoilt(model, "1.weight", local))
    return _said(model)


class Spoilt:
    """A model one of whose parameters shows another gradient than autograd lets it hold."""

    def __init__(self, model, name, gradient):
        self.model, self.name, self.gradient = model, name, gradient
        self.named_modules = model.named_modules

    def named_parameters(self):
        for name, parameter in self.model.named_parameters():
            yield name, Shown(parameter, self.gradient) if name == self.name else parameter


class Shown:
    def __init__(self, parameter, gradient):
        self.parameter, self.grad = parameter, gradient

    def __getattr__(self, name):
        return getattr(self.parameter, name)


def _said(model) -> str:
    try:
        graph.check_gradients(model)
    except VerificationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("", ""),
        ("none", "1.weight: no gradient"),
        ("plain", "1.weight: FSDP left it unsharded after backward, shape (6, 8), with a gradient of shape (6, 8)"),
        ("local", "1.weight: the gradient is a plain tensor of shape (3, 8), expected a DTensor"),
        ("replicated", "1.weight: the gradient has placements (Replicate(),), expected (Shard(dim=0),)"),
        ("partial", "1.weight: the gradient has placements (Partial(sum),)"),
    ],
)
def test_gradients_of_a_sharded_model(ranks, spoil, said):
    for text in ranks.run(sharded, spoil):
        if said:
            assert said in text
            assert text.startswith("1 sharded parameters")
        else:
            assert text == ""


def under_compiled_autograd() -> tuple[str, bool] | None:
    """What the check says after a backward under compiled autograd, and whether every gradient is in fact a DTensor.

    None where torch refuses the callback that FSDP queues, as 2.11 does.
    """
    from torch._dynamo import compiled_autograd
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch._dynamo.reset()
    model = torch.nn.Linear(4, 6, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with compiled_autograd._enable(torch.compile(backend="eager")):
        try:
            model(torch.ones(2, 4)).sum().backward()
        except Exception as error:
            if "queue_callback() is only supported" in str(error):
                return None
            raise
    return _said(model), all(isinstance(p.grad, DTensor) for p in model.parameters())


def test_compiled_autograd_that_skips_the_reduction_is_caught(ranks):
    answers = ranks.run(under_compiled_autograd)
    if None in answers:
        pytest.skip("this torch refuses FSDP's callback under compiled autograd")
    for said, sharded in answers:
        assert bool(said) != sharded
        assert sharded or "weight: FSDP left it unsharded after backward" in said


def test_an_unused_parameter_may_be_allowed():
    class Model:
        def named_parameters(self):
            yield "w", Shown(torch.nn.Parameter(torch.ones(2)), None)

        def named_modules(self):
            return []

    graph.check_gradients(Model())
    with pytest.raises(Exception, match="`missing` is 'ignore'"):
        graph.check_gradients(Model(), missing="ignore")
    with pytest.raises(Exception, match="`model` is int"):
        graph.check_gradients(3)


def made(text: str) -> Compiled:
    return Compiled("step", "hlo", text)


def test_a_rank_that_says_nothing_is_named(tmp_path):
    one = Comparison(RankStore(FolderStore(tmp_path), 0, 3), 0.05)
    RankStore(FolderStore(tmp_path), 1, 3).post("step-0/graph-0/key", "step 00")
    from fake_torch_xla import hlo

    with pytest.raises(RanksDifferError, match="rank 1 is about to run the step graph 00: their"):
        one.graph(made(hlo()))
    two = Comparison(RankStore(FolderStore(tmp_path / "b"), 0, 2), 0.05)
    with pytest.raises(RanksDifferError, match=r"rank 1 said nothing for 0\.05 s"):
        two.graph(made(hlo()))


def test_ranks_that_keep_to_other_plans_are_told_where_they_part(tmp_path):
    rows = ("[c] of 4 bytes", "[b, a] of 8 bytes")
    plans = [Order("bucket plan", "aa", rows, "bucket"), Order("bucket plan", "bb", rows[::-1], "bucket")]
    held = {"other": [plans[:1], plans[1:]], "one": [plans[:1], []], "same": [plans, plans]}
    want = {
        "other": "step 0: the ranks keep to different orders beside their graphs: rank 0 keeps to bucket plan aa, rank 1 "
        "to bucket plan bb; the same buckets in another order: bucket 0 on rank 0 is [c] of 4 bytes, and on rank 1 is "
        "[b, a] of 8 bytes",
        "one": "step 0: the ranks keep to different orders beside their graphs: only rank 0 keeps to bucket plan aa",
    }
    for name, both in held.items():
        said = {}

        def rank(number, name=name, both=both, said=said):
            try:
                Comparison(RankStore(FolderStore(tmp_path / name), number, 2), 30).end_of_step(both[number])
            except RanksDifferError as error:
                said[number] = str(error)

        threads = [threading.Thread(target=rank, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (said[0] == want[name] and len(said) == 2) if name in want else said == {}


class Layer(torch.nn.Module):
    """torch.compile leaves modules of torch's own alone."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def planned(sizes: list[float]) -> list[tuple[bool, str]]:
    """FSDP2 with compiled blocks, watched; buckets are made anew where the next size differs from the one before."""
    from torch.distributed.fsdp import fully_shard

    from retrograd.fsdp import bucket_gradients

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Layer() for _ in range(3)))
    for layer in model:
        layer.compile(backend="eager")
        fully_shard(layer)
    fully_shard(model)
    handle, before = None, None
    with graph.watch("compile", warmup=1, ranks="compare", ranks_timeout=40) as w:
        for size in sizes:
            if size != before:
                if handle is not None:
                    handle.remove()
                handle, before = bucket_gradients(model, bucket_mb=size), size
            model(torch.ones(2, 4, requires_grad=True)).sum().backward()
            model.zero_grad()
            w.step()
    handle.remove()
    assert w.report().graphs
    return bool(w.report()), w.report().text(), [order.key for order in w.report().orders]


def test_the_plan_of_gradient_buckets_is_watched_beside_compiled_graphs(ranks):
    small, large = 0.0001, 1.0
    answers = ranks.run(planned, [small, small, large])
    assert len({tuple(keys) for _, _, keys in answers}) == 1
    for same, text, keys in answers:
        assert not same
        assert f"bucket plan {keys[0]}: 3 buckets, since step 0" in text
        assert (
            f"bucket plan {keys[0]} -> {keys[1]}: bucket 0 was [2] of 80 bytes, and is [2, 1, 0] of 240 bytes" in text
        )


def test_threads_compare_through_a_folder(tmp_path):
    from fake_torch_xla import hlo

    said = {}

    def rank(number):
        comparison = Comparison(RankStore(FolderStore(tmp_path), number, 2), 30)
        try:
            comparison.graph(made(hlo()))
            comparison.end_of_step()
            comparison.graph(made(hlo(stray=number == 1)))
        except RanksDifferError as error:
            said[number] = str(error)

    threads = [threading.Thread(target=rank, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "step 1: rank 0 is about to run" in said[0]
    assert "train.py:41" in said[0]
    assert "From rank 1 to rank 0" in said[1]
