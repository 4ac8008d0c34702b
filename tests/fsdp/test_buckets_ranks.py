"""Buckets over FSDP2 groups, on processes that talk through gloo."""

from __future__ import annotations

import json
from dataclasses import replace

import bucket_steps as steps
import pytest
import torch
from ranks import Ranks

from retrograd.fsdp.bucket_plan import Bucket, BucketPlan

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without distributed")

SIZES = (0.0001, 0.004, 100)  # one group a bucket; two; everything
ALONE = {"unused": {"missing": "skip"}, "unused parameter": {"missing": "skip"}}
RESETS = hasattr(torch.distributed.fsdp.FSDPModule, "reset_iter_state") if torch.distributed.is_available() else False


@pytest.fixture(scope="module")
def _four():
    started = []
    yield started
    for group in started:
        group.close()


@pytest.fixture
def four(_four, tmp_path_factory):
    """Four processes joined by gloo."""
    if not _four or not _four[-1].alive:
        _four.append(Ranks(4, tmp_path_factory.mktemp("ranks") / "store"))
    return _four[-1]


KINDS = [
    "plain",
    "kept",
    "twice",
    "reentrant",
    "not reentrant",
    "tied",
    "frozen",
    "unused",
    "unused parameter",
    "random",
    "accumulate",
    "accumulate kept",
    "accumulate apart",
    "two backwards",
    "mixed",
    "bfloat16",
]


def same_bits(native, ours):
    for one, other in zip(native, ours, strict=True):
        assert other["grads"] == one["grads"]
        assert other["params"] == one["params"]


@pytest.mark.dealt(3)
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_get_the_bits_of_fsdp2(ranks, kind):
    """Two numbers are added in either order: the same bits, whatever the bucket."""
    native = ranks.run(steps.train, kind)
    sent = []
    for size in SIZES:
        ours = ranks.run(steps.train, kind, steps.STEPS, {"bucket_mb": size, **ALONE.get(kind, {})})
        same_bits(native, ours)
        assert len({word for one in ours for word in one["hashes"]}) == 1
        sent.append(ours[0]["sent"])
    assert sent[0] == native[0]["sent"]
    assert sent[0] > sent[1] > sent[2]


MORE = pytest.param(
    "two in flight", marks=pytest.mark.skipif(not RESETS, reason="this torch keeps one input in flight")
)


@pytest.mark.parametrize("kind", ["plain", "twice", "random", "unused", "accumulate", "bfloat16", MORE])
def test_buckets_of_one_group_between_buckets_of_several(ranks, kind):
    """FSDP2 keeps what is in flight of the former, retrograd of the latter: together no more than FSDP2 alone."""
    native = ranks.run(steps.train, kind)
    options = {"bucket_mb": 0.004, **ALONE.get(kind, {})}
    plan = BucketPlan.from_json(ranks.run(steps.train, kind, 1, options)[0]["plan"])
    groups = {group.name: group for group in plan.groups}
    first, second, third, fourth, *rest = [name for bucket in plan.buckets for name in bucket.groups]
    uneven = [
        (first,),
        (second, third),
        (fourth,),
        *((name,) for name in rest[:1]),
        tuple(rest[1:-1]),
        tuple(rest[-1:]),
    ]
    uneven = [Bucket(names, sum(groups[n].bytes for n in names), groups[names[0]].key) for names in uneven if names]
    ours = ranks.run(steps.train, kind, steps.STEPS, options | {"plan": replace(plan, buckets=tuple(uneven))})
    same_bits(native, ours)
    assert len({word for one in ours for word in one["hashes"]}) == 1
    assert [one["most kept"] for one in ours] == ([2, 2] if kind == "two in flight" else [1, 1])


@pytest.mark.dealt(2)
@pytest.mark.parametrize("kind", ["hsdp", "no all-reduce"])
def test_replicas_of_shards(four, kind):
    native = four.run(steps.train, kind)
    for size in SIZES:
        ours = four.run(steps.train, kind, steps.STEPS, {"bucket_mb": size})
        same_bits(native, ours)
        assert len({word for one in ours for word in one["hashes"]}) == 1
        # Sums that wait for their all-reduce belong to one group and are not mixed with another's.
        assert (ours[0]["sent"] < native[0]["sent"]) is (kind == "hsdp" and size != SIZES[0])


def test_sums_that_wait_for_their_all_reduce_are_added_to_once(four):
    """Gradients that come again add to the sums of the first time, not to those before it."""
    right = four.run(steps.train, "no all-reduce twice")[0]
    ours = four.run(steps.train, "no all-reduce twice reentrant", steps.STEPS, {"bucket_mb": 0.004})[0]
    for want, got in zip(right["grads"], ours["grads"], strict=True):
        for name in want:
            assert got[name] == pytest.approx(want[name], abs=1e-6), name


def one_sequence(kind, ours):
    """20 steps on every rank, of which the last 8 run their blocks in any order: one sequence, by name."""
    assert len(ours[0]["hashes"]) == 20
    assert len({word for one in ours for word in one["hashes"]}) == 1
    assert len({one["plan"] for one in ours}) == 1
    # The recorder sees the same, also what FSDP2 gathers, and has a name for everything; ranks asking each other is
    # none of the run's collectives. Shards of different replicas differ in their ranks and the name of their group, and
    # have the same place in a mesh.
    assert len({one["whole"] for one in ours}) == 1
    assert len({tuple(replace(c, ranks=(), group="") for step in one["reductions"] for c in step) for one in ours}) == 1
    still = 1 if kind == "random" else 12
    first = kind == "accumulate apart"  # gathers once more, before its first step
    for one in ours:
        assert one["unnamed"] == []
        assert len(set(one["recorded"][first:still])) == 1
        assert one["problems"] == [] or still == 1 or first
        assert len({tuple(c.identity for c in made) for made in one["reductions"]}) == 1
        # Of a step that has several backwards the last ones are those of the last backward.
        made = [c.modules for c in one["reductions"][-1] if c.kind == "reduce-scatter"][-len(one["launches"]) :]
        groups = [tuple("" if name == "(root)" else name for name in x.groups) for x in one["launches"]]
        assert [tuple(names) for names in made] == groups


@pytest.mark.dealt(3)
@pytest.mark.parametrize("kind", [*KINDS, "reentrant twice"])
def test_one_sequence_over_20_steps_and_all_ranks(ranks, kind):
    options = {"bucket_mb": 0.004, "verify_every": 7, **ALONE.get(kind, {})}
    one_sequence(kind, ranks.run(steps.recorded, kind, options))


def test_one_sequence_of_replicas(four):
    one_sequence("hsdp", four.run(steps.recorded, "hsdp", {"bucket_mb": 0.004, "verify_every": 7}))


def test_every_rank_its_own_order_at_every_step(ranks):
    """FSDP2 matches reductions by position: with equal blocks these gradients are wrong, without an error."""
    ours = ranks.run(steps.steps_of_orders, 20)
    assert len({word for one in ours for word in one["hashes"]}) == 1
    assert max(one["worst"] for one in ours) < 1e-6


def test_the_native_order_mixes_up_gradients(ranks):
    """What the test above protects from is still there; else it proves nothing."""
    native = ranks.run(steps.train, "rank order", 2)
    ours = ranks.run(steps.train, "rank order", 2, {"bucket_mb": 0.004})
    name = "blocks.0.down.weight"
    one, other = torch.tensor(native[0]["grads"][1][name]), torch.tensor(ours[0]["grads"][1][name])
    assert (one - other).norm() > 0.1 * other.norm()


def test_a_block_used_twice_under_reentrant_checkpointing(ranks):
    """FSDP2 (2.13) leaves gradients of the earlier use for the next step; buckets reduce them in this one."""
    right = ranks.run(steps.train, "twice")[0]
    ours = ranks.run(steps.train, "reentrant twice", steps.STEPS, {"bucket_mb": 0.004})[0]
    for want, got in zip(right["grads"], ours["grads"], strict=True):
        for name in want:
            assert got[name] == pytest.approx(want[name], abs=1e-6), name


@pytest.mark.parametrize("kind", ["unused", "unused parameter"])
def test_zeros_where_no_gradient_came(ranks, kind):
    native = ranks.run(steps.train, kind, 1)
    ours = ranks.run(steps.train, kind, 1, {"bucket_mb": 0.004, "missing": "zeros"})
    for name, want in native[0]["grads"][0].items():
        got = ours[0]["grads"][0][name]
        assert got == (want if want is not None else [0.0] * len(got)), name
    full = ranks.run(steps.train, "plain", 1, {"bucket_mb": 0.004})
    if kind == "unused":
        assert [b["bytes"] for b in json.loads(ours[0]["plan"])["buckets"]] != []
        assert sum(x.numel for x in ours[0]["log"][0]) == sum(x.numel for x in full[0]["log"][0])


@pytest.mark.parametrize("kind", ["unused", "unused parameter"])
def test_missing_gradients_are_named(ranks, kind):
    for said in ranks.run(steps.told, kind, {"bucket_mb": 0.004}):
        assert said.startswith("BucketError: no gradients came for 1 of 7 groups: blocks.")
        assert ("blocks.3.up.weight" if kind == "unused" else "blocks.1.spare.weight") in said
        assert 'missing="zeros"' in said


def test_a_block_that_one_rank_skips_gets_zeros(ranks):
    ours = ranks.run(steps.skip_by_rank, "zeros")
    hashes = {word for words, _ in ours for word in words}
    assert ours[0][1] == ours[1][1]
    assert len(hashes) == 1


@pytest.mark.parametrize("missing", ["skip", "error"])
def test_a_block_that_one_rank_skips_is_named(ranks, missing):
    for said in ranks.run(steps.skip_by_rank, missing):
        assert said.startswith("RanksDifferError: ranks 0 and 1 differ")
        assert "blocks.3" in said


@pytest.mark.parametrize("by_file", [False, True])
def test_plans_that_differ_are_named(ranks, by_file, tmp_path):
    for said in ranks.run(steps.plan_by_rank, by_file, str(tmp_path)):
        assert said.startswith("RanksDifferError: ranks 0 and 1 differ")
        assert "their plans: group " in said
        assert "blocks." in said


def test_too_much_pending_names_the_blocking_group(ranks):
    for said in ranks.run(steps.order_varies, {"max_pending_mb": 0.004}):
        assert said.startswith("BucketError: ")
        assert "bucket 0 waits for blocks.0" in said
    for report in ranks.run(steps.order_varies, {}):
        assert "waited at once, for blocks.0" in report


@pytest.mark.skipif(not RESETS, reason="this torch cannot reset FSDP2 after an exception")
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("reset", [False, True])
def test_nothing_stale_after_an_exception_in_backward(ranks, reset, early):
    for seen in ranks.run(steps.fails_midway, reset, early):
        failed, clean = seen[True], seen[False]
        assert failed["caught"] == ["in the middle"]
        assert failed["grads"] == clean["grads"]
        assert {failed["hash"], failed["first"]} == {clean["hash"]}
        assert failed["n"] == 1
        assert len(failed["words"]) == (0 if reset else 1)


@pytest.mark.skipif(RESETS, reason="this torch can reset FSDP2 after an exception")
def test_an_exception_that_cannot_be_mended_is_named(ranks):
    for said in ranks.run(steps.fails_for_good):
        assert said.startswith("BucketError: the last backward ended in an exception")
        assert "use PyTorch 2.13" in said


@pytest.mark.parametrize("first", [True, False], ids=["plan", "bucket"])
def test_a_rank_that_does_not_come_is_waited_for_and_named(ranks, first):
    said, nothing = ranks.run(steps.absent, first)
    assert nothing == ""
    due = "the comparison of plans" if first else "the reduction of bucket 0 [blocks.5, blocks.4]"
    last = "it came to nothing yet" if first else "the last that it came to was the end of backward"
    assert said.startswith(
        f"RanksDifferError: rank 0 is at {due} and waited for the other ranks, {61 if first else 62} s at most: "
    )
    assert f": rank 1 did not come, {last}: it died, hangs, or does something else (" in said


def test_compiled_blocks_keep_order_graphs_and_bits(ranks):
    native = ranks.run(steps.compiled, None)
    ours = ranks.run(steps.compiled, {"bucket_mb": 0.002})
    for one, other in zip(native, ours, strict=True):
        assert one["graphs"] > 0
        assert (other["graphs"], other["breaks"], other["grads"]) == (one["graphs"], one["breaks"], one["grads"])
        assert len(other["sequences"]) == 1
        assert "_orig_mod" not in other["plan"]


def test_compiled_autograd_is_refused(ranks):
    for said in ranks.run(steps.compiled_autograd):
        assert len(said) == 3
        for text in said:
            assert "compiled autograd is on" in text


@pytest.mark.parametrize("kind", ["plain", "accumulate"])
def test_ordered_bits_do_not_depend_on_buckets(four, kind):
    first, *others = [four.run(steps.ordered, kind, size) for size in SIZES]
    for other in others:
        same_bits(first, other)
