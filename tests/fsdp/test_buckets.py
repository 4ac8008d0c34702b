"""The plan and the launcher, without torch: what leaves, in which order, whatever arrives when."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from retrograd.errors import BucketError, UsageError
from retrograd.fsdp.bucket_plan import BucketPlan, Group, Launcher, digest, first_difference


def some(count, seed=0, keys=1, late=0):
    draw = random.Random(seed)
    return [
        Group(f"layer.{i}", draw.randrange(1, 40), f"key {draw.randrange(keys)}", i >= count - late)
        for i in range(count)
    ]


def drive(plan, order, **options):
    launcher = Launcher(plan, [g.name for g in plan.groups], **options)
    sizes = {g.name: g.bytes for g in plan.groups}
    left = [bucket for name in order for bucket in launcher.arrive(name, sizes[name])]
    return launcher, left + launcher.finish()


@pytest.mark.parametrize("seed", range(40))
def test_buckets_hold_each_group_once_and_keep_to_the_cap(seed):
    draw = random.Random(seed)
    groups, cap = some(draw.randrange(1, 30), seed, draw.randrange(1, 4), draw.randrange(3)), draw.randrange(1, 120)
    plan = BucketPlan.of(groups, cap)
    by_name = {group.name: group for group in groups}
    assert sorted(name for b in plan.buckets for name in b.groups) == sorted(by_name)
    for bucket in plan.buckets:
        members = [by_name[name] for name in bucket.groups]
        assert {(g.key, g.late) for g in members} == {(bucket.key, members[0].late)}
        assert bucket.bytes == sum(g.bytes for g in members)
        assert bucket.bytes <= cap or len(members) == 1


@pytest.mark.parametrize("seed", range(60))
def test_the_launch_order_is_constant_and_pending_bounded(seed):
    """Any order of arrival: the same launches; and no more waits than what came out of turn."""
    draw = random.Random(seed)
    groups, cap = some(draw.randrange(2, 25), seed, draw.randrange(1, 3)), draw.randrange(10, 150)
    plan = BucketPlan.of(groups, cap)
    names = [g.name for g in plan.groups]
    shuffled = draw.sample(names, len(names))
    launcher, left = drive(plan, shuffled)
    assert left == list(range(len(plan.buckets)))
    # The bound: everything that arrives before the first bucket's last group, if that comes last.
    waiting, bound, gone = 0, 0, set()
    arrived = set()
    for name in shuffled:
        arrived.add(name)
        while len(gone) < len(plan.buckets) and set(plan.buckets[len(gone)].groups) <= arrived:
            gone.add(len(gone))
        left_names = {n for i in gone for n in plan.buckets[i].groups}
        waiting = sum(g.bytes for g in plan.groups if g.name in arrived - left_names)
        bound = max(bound, waiting)
    assert launcher.peak_bytes == bound
    assert launcher.pending_bytes == 0
    in_order, _ = drive(plan, names)
    keys = len({g.key for g in groups})
    assert in_order.peak_bytes == plan.nominal_peak
    assert plan.nominal_peak <= keys * max(cap, max(g.bytes for g in groups))


@pytest.mark.parametrize("seed", range(40))
def test_arrivals_that_repeat_leave_afterwards(seed):
    draw = random.Random(seed)
    plan = BucketPlan.of(some(draw.randrange(1, 12), seed), draw.randrange(1, 120))
    names = [g.name for g in plan.groups]
    again = draw.choices(names, k=draw.randrange(5))
    order = names + again
    draw.shuffle(order)
    launcher, left = drive(plan, order)
    assert left == list(range(len(plan.buckets)))
    repeated = launcher.repeated()
    assert sorted(name for _, members in repeated for name in members) == sorted(set(again))
    assert [i for i, _ in repeated] == sorted({i for i, _ in repeated})
    assert launcher.pending_bytes == 0


def test_what_arrives_again_never_joins_the_first_round():
    plan = BucketPlan.of([Group("a", 5, "k"), Group("b", 5, "k")], 10)
    orders = []
    for order in (["a", "a", "b"], ["a", "b", "a"]):
        launcher, left = drive(plan, order)
        orders.append((left, launcher.repeated()))
    assert orders == [([0], [(0, ["a"])])] * 2


def test_the_cap_on_pending_names_who_blocks():
    plan = BucketPlan.of([Group(name, 10, "k") for name in "abcd"], 10)
    launcher = Launcher(plan, "abcd", max_pending=20)
    launcher.arrive("d", 10)
    launcher.arrive("c", 10)
    with pytest.raises(BucketError, match="bucket 0 waits for a, which comes later") as caught:
        launcher.arrive("b", 10)
    assert "max_pending_mb" in str(caught.value)
    assert launcher.peak_groups == 3
    assert launcher.blocked_by == "a"


def test_groups_that_cannot_have_gradients_are_not_waited_for():
    plan = BucketPlan.of([Group(name, 10, "k") for name in "abc"], 10)
    launcher = Launcher(plan, ["a", "c"])
    assert launcher.arrive("c", 10) == []
    assert launcher.arrive("a", 10) == [0, 1, 2]
    assert launcher.missing() == []


def test_a_late_group_goes_last_and_alone():
    plan = BucketPlan.of([Group("root", 10, "k", late=True), *(Group(n, 10, "k") for n in "ab")], 100)
    assert [b.groups for b in plan.buckets] == [("a", "b"), ("root",)]


def test_dtypes_between_each_other_share_buckets_of_their_own():
    groups = [Group(f"{kind}{i}", 10, kind) for i in range(4) for kind in ("bf16", "fp32")]
    plan = BucketPlan.of(groups, 40)
    assert [len(b.groups) for b in plan.buckets] == [4, 4]


def test_a_plan_survives_its_file(tmp_path):
    plan = BucketPlan.of(some(9, keys=2, late=2), 60)
    plan.save(tmp_path / "plan.json")
    assert BucketPlan.load(tmp_path / "plan.json") == plan
    assert plan.hash in plan.describe()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not a retrograd bucket plan: line 1"),
        ("[]", "bucket plan has schema None"),
        ('{"schema": 9}', "schema 9, this version of retrograd reads 1"),
        (BucketPlan.of(some(3), 50).to_json().replace('"layer.1"', '"layer.2"', 1), "exactly once"),
    ],
)
def test_a_damaged_plan_is_refused(text, said):
    with pytest.raises(UsageError, match=said):
        BucketPlan.from_json(text)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"nowhere\.json"):
        BucketPlan.load(tmp_path / "nowhere.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(UsageError, match=r"binary\.json' cannot be read: 'utf-8' codec"):
        BucketPlan.load(tmp_path / "binary.json")
    with pytest.raises(UsageError, match="which cannot be written: "):
        BucketPlan.of(some(3), 50).save(tmp_path)


@pytest.mark.parametrize(("groups", "cap", "said"), [(some(2), 0, "positive"), (some(1) * 2, 5, "more than once")])
def test_what_cannot_be_planned(groups, cap, said):
    with pytest.raises(UsageError, match=said):
        BucketPlan.of(groups, cap)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ([Group("b", 1, "k"), Group("a", 1, "k")], "group 0 is a against b"),
        ([Group("a", 1, "k"), Group("b", 2, "k")], "group 1, b, has bytes 1 against 2"),
        ([Group("a", 1, "k")], "b is in one only"),
    ],
)
def test_the_first_difference_of_plans(other, said):
    one = BucketPlan.of([Group("a", 1, "k"), Group("b", 1, "k")], 9)
    assert said in first_difference(one, BucketPlan.of(other, 9))
    assert first_difference(one, one) == ""
    assert one.hash != BucketPlan.of(other, 9).hash


def test_a_hash_is_the_same_in_every_process():
    code = "from retrograd.fsdp.bucket_plan import digest; import sys; print(digest('plan'), 'torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert told == [digest("plan"), "False"]
