"""Sampled steps whose operators are executed twice: faults are told before the update, sound runs stay as they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import repeated_steps
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import nn

from retrograd import report, trace
from retrograd.cli import main
from retrograd.errors import UsageError
from retrograd.trace.operator_schemas import Operator
from retrograd.trace.repeating import replicas
from retrograd.trace.repeating.executions import CannotRepeat, Executions, same
from retrograd.trace.repeating.schema import RepeatedSteps

JOB = repeated_steps.__file__
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
needs_ranks = pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed")


def ran(*command: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    # FSDP computes on the accelerator that it sees; these steps are on the CPU.
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def answers():
    return json.loads(ran(sys.executable, JOB).stdout)


@pytest.fixture(scope="module")
def on_ranks():
    lines = ran(*TORCHRUN, JOB).stdout.splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.dealt(2)
@pytest.mark.parametrize("way", ["", "closure"])
def test_a_sound_run_stays_as_it_is_to_the_bit(answers, way):
    answer = answers[way]
    assert (answer["alone"], answer["raised"], answer["outcome"]["differences"]) == (True, "", [])
    assert answer["outcome"]["sampled"] == 3
    assert answer["outcome"]["steps"] == 5
    assert answer["outcome"]["operators"] > 100


@pytest.mark.parametrize(
    ("fault", "kind", "executions"),
    [
        ("once", "once", [0, 1, 1, 1, 1, 1]),
        ("second", "once", [0, 1, 0, 0, 0, 0]),
        ("varies", "varies", [0, 1, 2, 3, 4, 5]),
        ("closure once", "once", [0, 1, 1, 1, 1, 1]),
    ],
)
def test_a_fault_ends_the_run_before_the_update(answers, fault, kind, executions):
    answer = answers[fault]
    (found,) = answer["outcome"]["differences"]
    assert (found["kind"], found["op"]["name"], found["executions"]) == (kind, "aten.tanh.default", executions)
    assert (found["op"]["step"], found["op"]["module"], found["elements"], found["total"]) == (2, "1", 1, 64)
    assert found["op"]["code"] == "loss = (model(x)[:, :4]).square().mean()"
    assert answer["outcome"]["steps"] == 2
    assert "gave other bits when it was executed again, in step 2" in answer["raised"]


def test_memory_that_nobody_wrote_is_no_difference(answers):
    outcome = answers["unwritten"]["outcome"]
    assert (answers["unwritten"]["raised"], outcome["differences"], outcome["notes"]) == ("", [], [])


@pytest.mark.dealt(2)
@needs_ranks
def test_all_ranks_end_before_the_same_update(on_ranks):
    assert len(on_ranks) == 2
    for kind in ("ddp", "fsdp"):
        for rank in on_ranks:
            sound, once = rank[kind], rank[f"{kind} once"]
            assert (sound["alone"], sound["raised"], sound["outcome"]["ranks"]) == (True, "", [0, 1])
            assert sound["outcome"]["left_out"]
            assert (sound["outcome"]["sampled"], sound["left"]) == (3, 1)  # in the job's store, of the last sample
            assert once["raised"].endswith("in step 2 on rank 1")
            assert [found["rank"] for found in once["outcome"]["differences"]] == [1]
            assert once["outcome"]["steps"] == 2


@needs_ranks
def test_copies_that_are_not_equal_are_told_by_name(on_ranks):
    for rank in on_ranks:
        (found,) = rank["ddp drift"]["outcome"]["replicas"]
        assert (found["quantity"], found["names"], found["step"]) == ("parameters", ["0.weight"], 2)
        assert rank["ddp drift"]["raised"].startswith(
            "parameters that ranks hold copies of are not equal on ranks 0, 1"
        )


def test_gradients_of_three_ranks_name_the_one_that_differs():
    sums = {rank: {"parameters": {}, "gradients": {"w\0000,1,2": "7" if rank else "8"}} for rank in range(3)}
    (found,) = replicas.compare(sums, 4)
    assert (found.quantity, found.names, found.ranks, found.step) == ("gradients", ("w",), (0,), 4)
    assert replicas.compare({rank: sums[rank] for rank in (1, 2)}, 4) == []


@pytest.mark.dealt(2)
@needs_ranks
def test_rank_0_answers_for_all_ranks():
    command = ("-m", "retrograd", "trace", "repeat", "--every", "2", "--ranks", "--json", "--", JOB, "once")
    record = RepeatedSteps.from_json(ran(*TORCHRUN, *command, code=1).stdout)
    assert (record.rank, record.ranks, [d.rank for d in record.differences]) == (0, (0, 1), [1])


@pytest.mark.dealt(2)
def test_the_command_tells_the_fault_and_writes_a_page(tmp_path):
    page, data = tmp_path / "run.html", tmp_path / "run.json"
    command = ("-m", "retrograd", "trace", "repeat", "--every", "2", "-o", str(page), "-o", str(data), "--", JOB)
    done = ran(sys.executable, *command, "once", code=1)
    assert done.stdout.startswith("aten.tanh.default in 1 at ")
    assert "execution 1 of 6 alone gave another result, with which the program would go on" in done.stdout
    assert "Operators that gave other bits" in page.read_text(encoding="utf-8")
    assert report.load(data).exit_code == 1
    done = ran(sys.executable, *command, "none", "--steps", "3")
    assert done.stdout.startswith("the same bits: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--every", "0"), "0 is not in the range x>=1"),
        (("--ranks",), "--ranks needs --every N"),
        (("--every", "2", "--level", "fast"), "--level is of two runs"),
        (("--every", "2", "--keep", "kept"), "--keep is of two runs"),
        (("--every", "2"), "there is no file 'nowhere.py'"),
    ],
)
def test_wrong_options_are_refused(arguments, says):
    result = CliRunner().invoke(main, ["trace", "repeat", *arguments, "--", "nowhere.py"])
    assert result.exit_code == 2
    assert says in result.output


def test_wrong_arguments_are_refused():
    with pytest.raises(UsageError, match=r"`every` is 0, expected a positive integer"):
        trace.repeat_steps(0)
    with pytest.raises(UsageError, match=r"`steps` is 'all', expected a positive integer"):
        trace.repeat_steps(3, steps="all")


def test_a_program_without_operators_is_undecided():
    with trace.repeat_steps(1) as repeated:
        pass
    assert repeated.outcome.exit_code == 3
    assert report.document(repeated.outcome).text[0].text == "cannot decide: no operator was repeated"


class _Seeing(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_modes_of_the_program_stay_nested():
    """A step inside of somebody's mode is left out, and one that begins before it ends behind it."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trace.repeat_steps(1) as repeated:
        for step in range(4):
            if step % 2:
                with _Seeing():
                    model(torch.ones(2, 3)).sum().backward()
                    optimizer.step()
            else:
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
    assert torch._C._len_torch_dispatch_stack() == 0
    assert repeated.outcome.steps == 4
    assert repeated.outcome.sampled >= 2


# One call each, of operators that write, draw, return several tensors or show their arguments.
X = torch.arange(24.0).reshape(4, 6)
CALLS = {
    "in place on a view": lambda x: x[1:3, ::2].mul_(1.5),
    "in place with itself": lambda x: x.add_(x),
    "to an argument": lambda x: torch.mul(x, 2, out=torch.empty(4, 6)),
    "on several at once": lambda x: torch._foreach_mul_([x[0], x[2]], 2.0),
    "with indices": lambda x: x.index_put_((torch.tensor([0, 0, 1]),), torch.ones(6), accumulate=True),
    "products": lambda x: x.addmm_(x @ x.T, torch.ones(4, 6)),
    "random": lambda x: torch.nn.functional.dropout(x, 0.5),
    "random in place": lambda x: x.normal_(),
    "random with a generator": lambda x: torch.rand(5, generator=torch.Generator().manual_seed(3)),
    "complex": lambda x: torch.complex(x, x).conj().mul(2j),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "NaN": lambda x: (x - 5).log(),
    "several results": lambda x: x.sort(-1, descending=True),
    "transposed in place": lambda x: x.T.contiguous().t_().add_(1),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_operator_executed_twice_leaves_nothing_behind(call):
    torch.manual_seed(5)
    want_x = X.clone()
    want = CALLS[call](want_x)
    want_next = torch.rand(3)
    torch.manual_seed(5)
    x = X.clone()
    with trace.repeat_steps(1) as repeated:
        got = CALLS[call](x)
    want, got = ([t] if isinstance(t, torch.Tensor) else list(t) for t in (want, got))
    assert same([*want, want_x, want_next], [*got, x, torch.rand(3)])
    assert repeated.outcome.exit_code == 0, repeated.outcome
    assert repeated.outcome.operators > 0
    assert repeated.outcome.notes == ()


def test_arguments_that_overlap_what_is_written_are_executed_once():
    x, operator = X.view(-1).clone(), torch.ops.aten.mul_.Tensor
    with pytest.raises(CannotRepeat, match="overlap"):
        Executions(Operator(operator), operator, (x[4:12], x[1:9]), {})
    with pytest.raises(CannotRepeat, match="overlap"):
        Executions(Operator(operator), operator, (x[1:9], x[4:12]), {})
    executions = Executions(Operator(operator), operator, (x[1:9], x[9:17]), {})
    assert same(executions.first()[1], executions.again())


def test_copies_of_what_is_written_are_as_well_aligned():
    seen = []

    def multiply(x, other):
        seen.append(x.data_ptr() % 512)
        return torch.ops.aten.mul_.Tensor(x, other)

    x = torch.arange(40.0)[3:20]  # 12 bytes behind what the allocator gave
    executions = Executions(Operator(torch.ops.aten.mul_.Tensor), multiply, (x, torch.full((17,), 2.0)), {})
    _, results = executions.first()
    assert same(results, executions.again())
    assert seen[0] == seen[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="additions by atomics of a CUDA device")
def test_on_a_gpu_atomics_are_no_fault():
    """Additions in another order each time are told, and the run goes on; deterministic kernels are the same."""
    torch.manual_seed(0)
    index = torch.randint(0, 3, (100_000,), device="cuda")
    x = torch.randn(100_000, device="cuda", requires_grad=True)
    with trace.repeat_steps(1) as repeated:
        y = torch.zeros(3, device="cuda").index_add(0, index, x)
        nn.functional.dropout(y, 0.5).sum().backward()
        x.detach().mul_(2).to("cpu", non_blocking=True)
    outcome = repeated.outcome
    assert (outcome.exit_code, {d.kind for d in outcome.differences}) == (0, {"nondeterministic"})
    assert {d.op.name for d in outcome.differences} == {"aten.index_add.default"}
    assert dict(outcome.left_out) == {"copies between devices": 1}
