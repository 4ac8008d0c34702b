"""The first NaN or Inf: the planted one is named, with line and reason; what is healthy, or meant, is left alone."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import nn
from transformer import Transformer, line, train

from retrograd import trace
from retrograd.errors import UsageError
from retrograd.trace import Provenance, provenance


def of(step: Callable[[], Any], model: Any = None, **options: Any) -> Provenance:
    with trace.record(model, **options) as recorder:
        step()
    assert "lost" not in recorder.trace.meta
    return provenance(recorder.trace)


@pytest.mark.parametrize("level", ["fast", "full"])
def test_a_healthy_transformer_has_none_though_its_mask_is_infinite(device, level):
    found = provenance(train(Transformer().to(device), level=level).trace)
    assert (found.found, found.op, found.exit_code) == ("", None, 0)


def test_an_overflow_planted_in_a_backward_is_named(device):
    model = Transformer().to(device)
    model.blocks[0].by = 1e38
    model.blocks[1].by = 1e4
    found = provenance(train(model).trace)
    assert (found.origin, found.op.phase, found.op.module) == ("made", "backward", "blocks.0")
    assert (found.op.name, found.op.node) == ("aten.mul.Tensor", "ScaleBackward")
    assert line("planted in the backward") in found.op.inside
    assert found.op.place.endswith(line("return x.clone()"))
    assert "overflow" in found.reason
    assert "1e+38" in found.reason
    assert found.exit_code == 1


def test_an_overflow_planted_in_a_forward_is_named(device):
    model = Transformer().to(device)
    model.blocks[1].gain = 1000.0
    found = provenance(train(model).trace)
    assert (found.origin, found.op.phase, found.op.module) == ("made", "forward", "blocks.1")
    assert (found.op.name, found.op.node) == ("aten.exp.default", "")
    assert found.op.place.endswith(line("planted in the forward"))
    assert found.reason.startswith("exp overflows float32 beyond 88.7")


@triton.jit
def planted_kernel(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mask = at < count
    x = tl.load(x_ptr + at, mask=mask, other=1.0)
    tl.store(y_ptr + at, 1.0 / (x - x), mask=mask)


class Planted(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad_x = torch.empty_like(grad)
        planted_kernel[(1,)](grad.contiguous(), grad_x, grad.numel(), 64)
        return grad_x


@pytest.mark.filterwarnings("ignore:.*divide:RuntimeWarning")
def test_a_triton_kernel_in_a_backward_is_named(device):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    found = of(lambda: model[1](Planted.apply(model[0](torch.ones(2, 4, device=device)))).sum().backward(), model)
    assert (found.origin, found.op.name, found.op.kernels) == ("made", "triton::planted_kernel", ("planted_kernel",))
    assert (found.op.phase, found.op.node) == ("backward", "PlantedBackward")
    assert "planted_kernel[(1,)]" in found.op.inside
    assert "the kernel divides by zero" in found.reason
    # Memory that the kernel fills is no input of it, whatever was in there.
    assert len(found.op.inputs) == len(found.op.outputs) == 1


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_our_own_kernel_is_named_as_an_operator(device):
    from retrograd.nn import RMSNorm

    model = nn.Sequential(nn.Linear(8, 8, bias=False), RMSNorm(8, eps=0.0, impl="triton")).to(device)
    x = torch.ones(3, 8, device=device)
    x[1] = 0
    found = of(lambda: model(x).sum().backward(), model)
    assert (found.op.name, found.op.module, found.op.kernels) == ("retrograd::norm_fwd", "1", ("norm_fwd_kernel",))
    assert found.reason == "with eps = 0 a row of zeros is divided by 0"
    assert "test_provenance.py" in found.op.place


def leaf(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, requires_grad=True)


def masked() -> torch.Tensor:
    return torch.zeros(2, 2).masked_fill(torch.tensor([[True, True], [False, True]]), float("-inf"))


REASONS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "log of zero": (lambda: leaf(0, 1).log(), "aten.log.default", "log(0) is -inf: its input has 1 zeros"),
    "log of negative": (lambda: leaf(-2, 1).log(), "aten.log.default", "log of numbers below 0: its input goes down to -2"),
    "sqrt of negative": (lambda: leaf(-2, 1).sqrt(), "aten.sqrt.default", "sqrt of negative numbers"),
    "sqrt at zero": (lambda: leaf(0, 1).sqrt().sum().backward(), "aten.div.Tensor", "in the derivative of sqrt"),
    "zero by zero": (lambda: leaf(0, 1) / leaf(0, 2), "aten.div.Tensor", "0/0: the divisor has 1 zeros"),
    "by zero": (lambda: leaf(3, 1) / leaf(0, 2), "aten.div.Tensor", "division by zero: the divisor has 1 zeros"),
    "exp": (lambda: leaf(12, 1, dtype=torch.float16).exp(), "aten.exp.default", "exp overflows float16 beyond 11.09"),
    "matmul": (lambda: leaf(3e38, 3e38)[None] @ leaf(2, 2)[:, None], "aten.mm.default", "overflow: the inputs reach 3e+38, 2"),
    "cast": (lambda: leaf(7e4, 1).half(), "aten._to_copy.default", "a number of 7e+04 was cast to float16"),
    "power": (lambda: leaf(-1, 1) ** 0.3, "aten.pow.Tensor_Scalar", "negative numbers to the power 0.3"),
    "number": (lambda: leaf(0, 1) * 1e39, "aten.mul.Tensor", "the number 1e+39 is infinite in float32, whose largest is 3.4028e+38; 0 times inf"),
    "masked softmax": (lambda: masked().softmax(-1), "aten._softmax.default", "softmax of a row that is -inf only"),
    "learned power": (lambda: leaf(-1, 1) ** leaf(0.3, 2), "aten.pow.Tensor_Tensor", "to the power 0.3 to 2: the base goes down to -1"),
    "learned power of zero": (lambda: leaf(0, 1) ** leaf(-2, -1), "aten.pow.Tensor_Tensor", "0 to the power -2 to -1: the base has 1 zeros"),
    "powers of both signs": (lambda: leaf(0, 1) ** leaf(-2, 1), "aten.pow.Tensor_Tensor", "1 zeros, or an overflow"),
    "addcdiv": (lambda: torch.addcdiv(leaf(1, 1), leaf(1, 2), leaf(0, 2)), "aten.addcdiv.default", "division by zero: the divisor has 1 zeros"),
    "quotient": (lambda: torch.addcdiv(leaf(1, 1), leaf(0, 3e38), leaf(1, 0.1)), "aten.addcdiv.default", ""),
    "sinh": (lambda: leaf(-100, 0).sinh(), "aten.sinh.default", "sinh overflows float32 beyond 89.42, and its input reaches 100"),
    "bessel": (lambda: torch.special.i0(leaf(-92, 0)), "aten.i0.default", "i0 overflows float32 beyond 91.88, and its input reaches 92"),
    "reflection": (lambda: torch.logdet(torch.tensor([[-1.0, 0], [0, 1]])), "aten._linalg_slogdet.default", "the determinant is negative"),
    "mean of nothing": (lambda: torch.empty(0).mean(), "aten.mean.default", "the mean of no elements is 0/0"),
    "arc": (lambda: leaf(2, 0).acos(), "aten.acos.default", "acos outside of -1 to 1"),
    "ignored": (
        lambda: F.nll_loss(torch.zeros(2, 3), torch.tensor([-100, -100])),
        "aten.nll_loss_forward.default",
        "every target is the ignored one",
    ),
    "inf minus inf": (
        lambda: torch.full((2,), float("inf")) - torch.full((2,), float("inf")),
        "aten.sub.Tensor",
        "inf - inf: input 1 has 2 infinities",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("step", "name", "reason"), REASONS.values(), ids=REASONS)
def test_the_reason_is_told_where_it_is_plain(step, name, reason):
    found = of(step)
    assert found.origin == "made"
    assert found.op.name == name
    assert reason in found.reason


def test_an_infinity_is_followed_to_the_nan_it_becomes():
    found = of(lambda: (leaf(300, 300, dtype=torch.float16) * 300).softmax(-1).sum())
    assert (found.found, found.op.name) == ("nan", "aten.mul.Tensor")
    assert [op.name for op in found.way] == ["aten.mul.Tensor", "aten._softmax.default"]


def test_a_parameter_that_had_it_already_is_named():
    model = Transformer()
    with torch.no_grad():
        model.blocks[1].up.weight[0, 0] = float("nan")
    found = provenance(train(model).trace)
    assert (found.origin, found.tensor.name, found.tensor.nan) == ("outside", "blocks.1.up.weight", 1)
    assert "blocks.1.up.weight` already had 1 NaN before the recording began" in found.reason


def test_data_that_had_it_already_is_told():
    batch = torch.tensor([[1.0, float("nan")]])
    found = of(lambda: nn.Linear(2, 2)(batch).sum().backward())
    assert (found.origin, found.tensor.shape) == ("outside", (1, 2))


def nan_memory() -> torch.Tensor:
    """Memory as `empty` may return it: poisoned without an operator, so that the test does not depend on luck."""
    memory = torch.empty(2, 2)
    memory.numpy().fill(float("nan"))
    return memory


def test_memory_that_nobody_filled_is_told_where_it_is_read():
    found = of(lambda: nan_memory().t() * 2)
    assert (found.origin, found.op.name) == ("unseen", "aten.mul.Tensor")
    assert "`aten.empty.memory_format` (" in found.reason


def test_memory_that_is_filled_before_it_is_read_is_left_alone():
    assert of(lambda: nan_memory().fill_(1) * 2 + nan_memory().copy_(torch.ones(2, 2))).found == ""
    assert of(lambda: torch.mm(torch.ones(2, 2), torch.ones(2, 2), out=nan_memory())).found == ""


def test_infinities_that_are_meant_are_left_alone():
    mask = torch.zeros(2, 2)
    mask[0, 1] = float("-inf")
    assert of(lambda: (torch.randn(2, 2) + mask).softmax(-1)).found == ""
    assert of(lambda: torch.where(torch.eye(2) > 0, 1.0, float("-inf")).softmax(-1)).found == ""


def test_no_statistics_no_answer():
    found = of(lambda: leaf(0, 1).log(), level="names")
    assert (found.found, found.exit_code) == ("", 3)


def test_the_record_survives_json():
    found = of(lambda: leaf(0, 1).log().sum().backward())
    assert Provenance.from_json(found.to_json()) == found


def test_the_listing_survives_json_and_refuses_another_version():
    with trace.record(level="full") as recorder:
        leaf(0, 1).log()
    found = trace.listing(recorder.trace)
    assert trace.Listing.from_json(found.to_json()) == found
    with pytest.raises(UsageError, match=r"listing of a trace has schema 'retrograd\.trace-listing/0', this version"):
        trace.Listing.from_json(found.to_json().replace("listing/1", "listing/0"))


def _weights():
    return torch.linspace(-1, 1, 32).reshape(4, 8).requires_grad_()


def _branch_not_chosen(x):
    return torch.where(x > 2, torch.nan, x).sum()


def _buffer_filled_later(x):
    rows = torch.full((4, 8), torch.nan)
    for number, row in enumerate(x.detach()):
        rows[number] = row
    return (rows * x).sum()


def _missing_values_left_out(x):
    return x.sum() + torch.full((3,), torch.nan).nan_to_num().sum()


def _mask_written_into_a_view(x):
    scores = x * 1
    scores[:, 0] = -torch.inf
    return scores.softmax(-1)[:, 1:].square().sum()


def _masked_classes(x):
    return F.cross_entropy(x.masked_fill(torch.arange(8) < 4, -torch.inf), torch.tensor([5, 6, 7, 4]))


def _determinant(x):
    return torch.logdet(x[:, :4] * 0 + torch.eye(4))


def _learned_power_of_a_relu(x):
    """The derivative by the exponent has log(0), which autograd's own `where` leaves out; that of relu leaves 1/0 out."""
    return (x.relu() ** leaf(0.5)).sum()


def _foreign(*values):
    """Of the shape [4, 8], begins with these; no recorded operator has seen them."""
    return torch.from_numpy(np.resize(np.array(values, dtype=np.float32), (4, 8)))


def _row_that_is_never_taken(x):
    table = _foreign(*[1.0] * 24, *[np.nan] * 8)
    return (x[:3] * table[torch.tensor([0, 1, 2])]).sum()


def _loaded(value):
    file = io.BytesIO()
    torch.save(_foreign(0.0, 0.0, 0.0, value), file)
    file.seek(0)
    return torch.load(file)


def _mask_of_a_checkpoint(x):
    return (x + torch.zeros(4, 8).copy_(_loaded(-np.inf))).softmax(-1).square().sum()


def _least_that_begins_at_infinity(x):
    """As a metric of torchmetrics does, which copies the infinity by its memory."""
    least = copy.deepcopy(torch.tensor(torch.inf))
    return torch.minimum(least, x.sum())


@pytest.mark.parametrize(
    "healthy",
    [
        _branch_not_chosen, _buffer_filled_later, _missing_values_left_out, _mask_written_into_a_view, _masked_classes,
        _determinant, _learned_power_of_a_relu, _row_that_is_never_taken, _mask_of_a_checkpoint,
        _least_that_begins_at_infinity,
    ],
)  # fmt: skip
@pytest.mark.parametrize("level", ["fast", "full"])
def test_what_is_written_deliberately_is_no_finding(healthy, level):
    found = of(lambda: healthy(_weights()).backward(), level=level)
    assert (found.found, found.op, found.exit_code) == ("", None, 0)


def _branch_chosen(x):
    return torch.where(x > 0, torch.nan, x).sum()  #!


def _row_of_the_buffer_left(x):
    rows = torch.full((4, 8), torch.nan)  #!
    rows[:3] = 0
    return (rows * x).sum()


def _masked_target(x):
    scores = x.masked_fill(torch.arange(8) < 4, -torch.inf)
    return F.cross_entropy(scores, torch.tensor([5, 6, 1, 4]))  #!


def _infinite_before_the_backward(x):
    p, q = x.softmax(-1), torch.tensor([0.5, 0.5, 0, 0, 0, 0, 0, 0])
    return (p * (p / q).log()).sum()  #!


def _learned_power_of_a_zero(x):
    return ((x * 0) ** leaf(0.5)).sum()  #!


def _row_taken_in_the_end(x):
    table, total = _foreign(*[1.0] * 24, *[np.nan] * 8), 0
    for row in range(4):
        total = total + table[torch.tensor([row])].sum()  #!
    return total * x.sum()


def _value_of_a_checkpoint(x):
    return (x + torch.zeros(4, 8).copy_(_loaded(np.nan))).sum()  #!


def _infinite_label(x):
    return F.smooth_l1_loss(x, _foreign(0.0, 0.0, 0.0, np.inf))  #!


def _infinite_label_added_up_later(x):
    errors = (x - _foreign(0.0, 0.0, 0.0, np.inf)).abs()
    return errors.mean()  #!


def _least_that_stays_infinite(x):
    least = copy.deepcopy(torch.tensor(torch.inf))
    return torch.maximum(least, x.sum())  #!


def _infinity_that_becomes_nan_later(x):
    read = torch.from_numpy(np.array([1.0, 2.0, np.inf, 3.0], dtype=np.float32))  #!
    read = torch.stack([read, read])
    return (x[:2, :4] * (read - read.amax())).sum()


@pytest.mark.parametrize(
    ("broken", "operator", "reason"),
    [
        (_branch_chosen, "where", "NaN is written deliberately"),
        (_row_of_the_buffer_left, "full", "NaN is written deliberately"),
        (_masked_target, "nll_loss_forward", "is not left out here and makes the loss infinite"),
        (_infinite_before_the_backward, "div", "division by zero: the divisor has 6 zeros"),
        (_least_that_stays_infinite, "maximum", "already had 1 Inf when it was first read"),
        (_infinity_that_becomes_nan_later, "lift_fresh", "already had 1 Inf when it was first read"),
        (_learned_power_of_a_zero, "pow", "0 to the power -0.5: the base has 32 zeros, in the derivative of pow"),
        (_row_taken_in_the_end, "index", "a tensor of shape [4, 8] that no recorded operator made already had 8 NaN"),
        (_value_of_a_checkpoint, "copy_", "a tensor of shape [4, 8] that no recorded operator made already had 8 NaN"),
        (_infinite_label, "smooth_l1_loss", "already had 8 Inf when it was first read"),
        (_infinite_label_added_up_later, "mean", "was given, as of a mask, is not left out here"),
    ],
)
def test_what_is_written_deliberately_and_does_harm_is_found(broken, operator, reason):
    found = of(lambda: broken(_weights()).backward())
    lines, first = inspect.getsourcelines(broken)
    at = first + next(number for number, text in enumerate(lines) if "#!" in text)
    assert found.op.name.startswith(f"aten.{operator}.")
    assert found.op.place.endswith(f"test_provenance.py:{at}")
    assert reason in found.reason


def _fused(change, **options):
    """The second step of a fused Adam, before which the first's state or options are changed."""
    parameter = leaf(1, -2, 3)
    optimizer = torch.optim.Adam([parameter, leaf(1)], fused=True, **options)
    for step in range(2):
        parameter.grad = torch.tensor([1.0, -1.0, 0.5])
        if step:
            change(optimizer.param_groups[0], optimizer.state[parameter])
        optimizer.step()
    parameter.sum()  # at level fast it is measured where it is read


def _negative_second_moment(_group, state):
    state["exp_avg_sq"].fill_(-1.0)


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        (_negative_second_moment, {}, "root of a negative number: the second moment goes down to -"),
        (_negative_second_moment, {"amsgrad": False, "lr": torch.tensor(0.01)}, "root of a negative number"),
        (lambda group, _: group.update(betas=(1.0, 0.999)), {}, "the bias correction 1 - beta1**step is 0, as beta1 = 1"),
        (lambda *_: None, {}, ""),
        (lambda group, _: group.update(betas=(0.0, 0.5)), {"amsgrad": True, "lr": torch.tensor(0.01)}, ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("level", ["fast", "full"])
def test_what_a_fused_adam_divides_by_is_told(change, options, reason, level):
    found = of(lambda: _fused(change, **options), level=level)
    assert reason in found.reason
    assert bool(found.found) == bool(reason)


@pytest.mark.parametrize(
    ("decay", "found"), [(torch.inf, "its alpha, of a learning rate or weight decay perhaps, is inf"), (0.1, "")]
)
def test_an_infinite_weight_decay_is_told(decay, found):
    parameter = leaf(1, -2, 0)
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.SGD([parameter], 0.01, weight_decay=decay)
    assert of(lambda: (optimizer.step(), parameter.sum())).reason == found


class _Guarded(torch.optim.Optimizer):
    """Steps of the length of the parameter, unless `guard` is False of a gradient of 0."""

    def __init__(self, parameters, guard):
        super().__init__(parameters, {"guard": guard})

    @torch.no_grad()
    def step(self, _closure=None):
        (parameter,), guard = self.param_groups[0]["params"], self.param_groups[0]["guard"]
        ratio = parameter.norm() / parameter.grad.norm()
        ratio = torch.where((parameter.grad.norm() > 0) | (not guard), ratio, 1.0)
        parameter.sub_(parameter.grad * ratio)


@pytest.mark.parametrize(("guard", "reason"), [(True, ""), (False, "division by zero: the divisor has 1 zeros")])
@pytest.mark.parametrize("engine", ["python", "tape"])
def test_what_an_optimizer_leaves_out_by_where_is_no_finding(guard, reason, engine):
    parameter = leaf(1, -2)
    optimizer = _Guarded([parameter], guard)

    def steps():
        for factor in (1.0, 0.0):
            optimizer.zero_grad()
            (parameter * factor).sum().backward()
            optimizer.step()
        parameter.sum()

    assert of(steps, engine=engine).reason == reason


@pytest.mark.parametrize("engine", ["python", "tape"])
def test_what_is_read_first_in_a_later_step_is_measured_there(engine, tmp_path):
    parameter = leaf(1, -2)
    optimizer = torch.optim.SGD([parameter], 0.1)

    with trace.record(engine=engine, out=tmp_path / "run.trace"):
        label = torch.tensor([1.0, torch.nan])
        for factor in (1.0, label):
            (parameter * factor).sum().backward()
            optimizer.step()
    found = provenance(trace.load(tmp_path / "run.trace"))
    assert (found.origin, found.op.name, found.op.step) == ("outside", "aten.mul.Tensor", 1)
