"""Two gloo ranks: healthy runs are left alone, and what is wrong is stopped before the optimizer uses it, by name."""

from __future__ import annotations

import json

import pytest
import scenarios
import torch
import torch.distributed as dist

from retrograd.errors import VerificationError
from retrograd.fsdp import Log, assert_same_order, diff

pytestmark = [
    pytest.mark.dealt(2, whole_file=True),
    pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed"),
]

HEALTHY = ("plain", "checkpoint", "frozen", "compiled", "ddp", "accumulate")


@pytest.mark.parametrize("case", HEALTHY)
@pytest.mark.parametrize("strict", [False, True], ids=["hashes", "strict"])
def test_a_healthy_run_is_left_alone(ranks, case, strict):
    answers = ranks.run(train, case, {"strict": strict, "on_change": "raise"})
    for answer in answers:
        assert (answer["error"], answer["problems"], answer["updates"]) == ("", [], 4)
    assert len({a["hash"] for a in answers}) == 1
    assert_same_order(*(Log.from_json(a["log"]) for a in answers))


def train(case, options):
    return scenarios.train(case, **options)


def test_steps_of_fsdp_follow_one_pattern_from_the_first_on(ranks):
    first = ranks.run(train, "plain", {})[0]
    assert first["patterns"] == [0, 0, 0, 0]
    assert first["names"][:4] == [f"all-gather of {n}" for n in ("(root)", "blocks.0", "blocks.1", "blocks.2")]
    assert sorted(n for n in first["names"] if n.startswith("reduce")) == sorted(
        f"reduce-scatter of {n}" for n in ("(root)", "blocks.0", "blocks.1", "blocks.2")
    )
    assert ranks.run(train, "compiled", {})[0]["hash"] == first["hash"]


def test_micro_batches_that_alternate_are_two_patterns_and_no_change(ranks):
    assert ranks.run(train, "accumulate", {"on_change": "raise"})[0]["patterns"] == [0, 0, 1] * 4
    for answer in ranks.run(scenarios.accumulate_by_update):
        assert answer == {"patterns": [0, 0, 0], "problems": []}


def test_ddp_says_that_it_rebuilt_its_buckets_and_names_them(ranks):
    first = ranks.run(train, "ddp", {"on_change": "raise"})[0]
    assert any("DDP rebuilt its buckets" in note for note in first["notes"])
    reductions = [n for n in first["names"] if n.startswith("all-reduce")]
    assert len(reductions) > 1
    assert "blocks.0" in reductions[-1]


def test_equal_blocks_in_another_order_on_one_rank_never_reach_the_optimizer(ranks):
    """FSDP2 alone reduces block 0 of one rank with block 2 of the other and says nothing."""
    for answer in ranks.run(train, "swap", {}):
        assert answer["updates"] == 2
        assert "RanksDifferError: step 2" in answer["error"]
        assert "rank 1 reduces blocks.0 where rank 0 reduces blocks.2" in answer["error"]
        assert "the same collectives, in another order" in answer["error"]


def test_without_comparison_the_same_run_goes_on_and_the_logs_tell(ranks):
    answers = ranks.run(train, "swap", {"first": 0, "verify_every": None, "on_change": "record"})
    assert [a["updates"] for a in answers] == [4, 4]
    found = diff(*(Log.from_json(a["log"]) for a in answers))
    assert found.place.startswith("step 2")
    assert "rank 1 reduces blocks.0 where rank 0 reduces blocks.2" in found.text


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("strict", "rank 1 gathers blocks.2 where rank 0 gathers blocks.0"),
        ("skip", "rank 0 gathers blocks.2"),
    ],
)
def test_strict_raises_before_the_collective_that_would_hang(ranks, case, sentence):
    for answer in ranks.run(train, case, {"strict": True}):
        assert answer["updates"] == 2
        assert sentence in answer["error"] or (case == "skip" and "where rank 0 gathers blocks.2" in answer["error"])
        assert "it was not started" in answer["error"]


def test_gradients_that_were_never_reduced_are_named_before_the_optimizer(ranks):
    for answer in ranks.run(train, "unreduced", {}):
        assert answer["updates"] == 2
        assert (
            "VerificationError: step 2: the gradients of (root), blocks.0, blocks.1, blocks.2 were never"
            in answer["error"]
        )
        assert "0 reduce-scatters" in answer["error"]


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="FSDP2 supports compiled autograd up to torch 2.11")
def test_gradients_that_compiled_autograd_does_not_reduce_are_named_before_the_optimizer(ranks):
    """The real thing: from its second step on FSDP2 under compiled autograd reduces nothing, without an error."""
    for error, updates, reduced in ranks.run(scenarios.compiled_autograd):
        assert error.startswith(f"VerificationError: step {updates}: the gradients of (root), 0 were never reduced")
        assert "under compiled autograd compile the forward alone" in error
        assert updates == len(reduced) / 2 == 1


@pytest.mark.parametrize(("case", "modules"), [("nan", "blocks.2"), ("nan in buckets", "(root), blocks.2")])
def test_the_rank_that_makes_nan_is_named(ranks, case, modules):
    for answer in ranks.run(train, case, {"nonfinite": True}):
        assert answer["updates"] == 2
        assert f"rank 1 gives NaN or Inf to reduce-scatter of {modules} (collective " in answer["error"]
        assert "rank 0 gives" not in answer["error"]


def test_a_rank_that_raises_is_named_by_the_others(ranks):
    first, second = ranks.run(train, "raise", {"strict": True})
    assert "rank 0 is at" in first["error"]
    assert "rank 1 raised ValueError: bad batch, after all-gather of" in first["error"]
    assert second["error"] == "ValueError: bad batch"
    assert "rank 1 ended after all-gather of" in second["exception notes"][0]


def test_a_step_that_changes_is_told_though_the_ranks_agree(ranks):
    for answer in ranks.run(train, "varies", {"on_change": "record"}):
        assert answer["error"] == ""
        assert "step 1 differs from the steps before it, collective 1" in answer["problems"][0]
        assert "this step gathers blocks.1 where an earlier step gathers blocks.0" in answer["problems"][0]
    for answer in ranks.run(train, "varies", {"on_change": "raise"}):
        assert "VerificationError: step 1 differs" in answer["error"]


def test_compiled_blocks_are_compiled_as_without_a_recording(ranks):
    assert ranks.run(scenarios.frames_compiled, False) == ranks.run(scenarios.frames_compiled, True)


def test_nothing_is_left_after_a_recording(ranks):
    assert ranks.run(scenarios.left_as_it_was) == [(0, 2, 2)] * 2


def test_collectives_of_the_program_itself(ranks):
    want = ["all-reduce 3 max -1", "broadcast 5  1", "all-reduce 6  -1"]
    assert ranks.run(scenarios.program_collectives) == [want] * 2


def test_a_log_with_problems_fails_the_assertion(ranks):
    answers = ranks.run(train, "varies", {"on_change": "record"})
    with pytest.raises(VerificationError, match="step 1 differs"):
        assert_same_order(*(Log.from_json(a["log"]) for a in answers))
    assert json.loads(answers[0]["log"])["schema"] == "retrograd.fsdp.log/1"
