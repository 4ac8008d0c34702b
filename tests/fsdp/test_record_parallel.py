"""Pipelines, rings, experts and meshes on two and four gloo ranks are recorded and compared over twenty steps, and never stopped."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import parallel_jobs
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

from retrograd.fsdp import Log, diff
from retrograd.fsdp.messages import Channels

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed")
ALL = parallel_jobs.JOBS | parallel_jobs.CHANGING
MESHES = ("hybrid_sharded", "tensor_parallel", "pipeline_of_ddp", "any_order_hybrid")
MESSAGES = ("ring", *(job for job in parallel_jobs.JOBS if job.startswith("pipeline")))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    group = Ranks(4, tmp_path_factory.mktemp("four") / "store")
    yield group
    group.close()


def record(job, options):
    changing = "record" if job in parallel_jobs.CHANGING else "raise"
    return parallel_jobs.record(job, 20, {"on_change": changing, **options})


@pytest.mark.dealt(3)
@pytest.mark.parametrize("strict", [False, True], ids=["hashes", "strict"])
@pytest.mark.parametrize("job", [job for job in ALL if job not in MESHES])
def test_two_healthy_ranks_are_left_alone(ranks, job, strict):
    _skip_where_torch_waits(job)
    _healthy(ranks.run(record, job, {"strict": strict}), job)


@pytest.mark.dealt(3)
@pytest.mark.parametrize("job", ALL)
def test_four_healthy_ranks_are_left_alone(four, job):
    _skip_where_torch_waits(job)
    _healthy(four.run(record, job, {}), job)


@pytest.mark.parametrize("strict", [False, True], ids=["hashes", "strict"])
def test_ranks_that_run_out_of_input_are_left_alone(four, strict):
    answers = four.run(parallel_jobs.record, "uneven", 20, {"strict": strict})
    assert [(answer["error"], answer["problems"]) for answer in answers] == [("", [])] * 4
    logs = [Log.from_json(answer["log"]) for answer in answers]
    assert [log.total for log in logs] == [60, 40, 60, 40]
    assert all(diff(one, other).same for one, other in combinations(logs, 2))


def _skip_where_torch_waits(job):
    if torch.__version__.startswith("2.11.") and job in ("pipeline_ZBVZeroBubble", "pipeline_DualPipeV"):
        pytest.skip("schedules in the shape of a V wait for ever on gloo in torch 2.11, without a recorder as well")


def _healthy(answers, job):
    for answer in answers:
        # Of blocks in any order: that a step is another one than those before it, which it is, and nothing else.
        expected = ("step ", "further steps differ") if job in parallel_jobs.CHANGING else ()
        assert (answer["error"], [text for text in answer["problems"] if not text.startswith(expected)]) == ("", [])
        assert Log.from_json(answer["log"]).total == 20 or job == "scaled"  # whose first steps are skipped
        assert ("send" in answer["kinds"] and "recv" in answer["kinds"]) == (job in MESSAGES)
    # What a rank is in its mesh is the same for all, whatever the numbers of its groups; sends are its own.
    assert len({answer["hash"] for answer in answers}) == 1
    for one, other in combinations((Log.from_json(answer["log"]) for answer in answers), 2):
        assert diff(one, other).same


def test_messages_have_their_peer_in_words(ranks):
    first, second = (Log.from_json(answer["log"]) for answer in ranks.run(record, "pipeline_GPipe", {}))
    assert {c.name for c in first.table if c.kind == "send"} == {"send of a message to rank 1"}
    assert {c.does for c in second.table if c.kind == "recv"} == {"receives a message from rank 0"}


def _channels(kind, *sizes, tag=0):
    channels = Channels()
    for size in sizes:
        channels.add(("0", 0, 1, tag), kind, size)
    return channels


@pytest.mark.parametrize(
    ("sender", "receiver", "misfit"),
    [
        (_channels("send", 64, 64, 64), _channels("recv", 32, 32, 32), True),
        (_channels("send", 64, 64, 64), _channels("recv", 64, 64, 64), False),
        (_channels("send", 64, 64, 64), _channels("recv", 128, 128, 128), False),  # gloo fills the first half
        (_channels("send", *[64] * 5), _channels("recv", *[64] * 3), False),  # two are on their way
        (_channels("send", 90, 8, 100, 8), _channels("recv", 8, 90, 8, 100), False),  # recorded one message later
        (_channels("send", 64, 64, 64), _channels("recv", 32, 32, 32, tag=1), False),
    ],
)
def test_a_message_that_does_not_fit_is_told_on_both_sides(sender, receiver, misfit):
    sentence = "rank 0 sends rank 1 messages of at least 64 bytes, and rank 1 receives them in at most 32"
    want = sentence if misfit else ""
    assert sender.misfit(receiver.packed(), rank=1, me=0) == want
    assert receiver.misfit(sender.packed(), rank=0, me=1) == want
    assert sender.misfit(receiver.packed(), rank=2, me=0) == ""


def test_after_a_message_from_any_rank_nobody_knows_which_is_which():
    sender, receiver = _channels("send", 64, 64, 64), _channels("recv", 32, 32, 32)
    receiver.add(("0", -1, 1, 0), "recv", 64)
    assert sender.misfit(receiver.packed(), rank=1, me=0) == receiver.misfit(sender.packed(), rank=0, me=1) == ""
