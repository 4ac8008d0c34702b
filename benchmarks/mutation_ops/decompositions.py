"""Backward formulas of PyTorch's decompositions as ops: the forward is ATen's, the backward the decomposition's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch._decomp import decompositions

import retrograd as rg
from retrograd import tensor


class _Copies:
    """Functions of their own with the code of the decompositions, which references in float64 are run with, too."""

    def __getattr__(self, name: str) -> FunctionType:
        stock = inspect.unwrap(getattr(decompositions, name))
        copy = FunctionType(stock.__code__, stock.__globals__, name, stock.__defaults__, stock.__closure__)
        setattr(self, name, copy)
        return copy


d: Any = _Copies()
X = {"x": tensor("M...", "N")}
PAIR = {"x": tensor("M", "N"), "y": tensor("M", "N", grad=False)}
MEAN, SUM = 1, 2


@dataclass(frozen=True)
class Formula:
    """A backward formula.

    Attributes:
        function: its name in torch._decomp.decompositions.
        forward: of the inputs and parameters.
        backward: of grad_out, the output and the inputs in a list, and the parameters: the gradients of all inputs.
    """

    function: str
    forward: Callable[..., torch.Tensor]
    backward: Callable[..., Any]
    inputs: Mapping[str, Any] = field(default_factory=lambda: X)
    params: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """The function, as `rg.mutate(functions=)` names it."""
        return f"{__name__}:d.{self.function}"

    def spec(self, name: str) -> Any:
        """The op."""
        formula = self

        class Op(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, params: Any, *inputs: Any) -> torch.Tensor:
                out = formula.forward(*inputs, **params)
                ctx.save_for_backward(out, *inputs)
                ctx.params = params
                return out

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> Any:
                out, *inputs = ctx.saved_tensors
                grads = formula.backward(grad, out, inputs, ctx.params)
                grads = grads if isinstance(grads, tuple) else (grads,)
                return None, *grads, *(None,) * (len(inputs) - len(grads))

        return rg.op(
            lambda *inputs, **params: Op.apply(params, *inputs), formula.forward, inputs=dict(self.inputs),
            params={k: list(v) for k, v in self.params.items()}, dtypes=["float64", "float32"], name=name,
            **self.options,
        )  # fmt: skip


def reduced(losses: torch.Tensor, reduction: int) -> torch.Tensor:
    """A loss by the number that ATen has for its reduction."""
    return losses.mean() if reduction == MEAN else losses.sum() if reduction == SUM else losses


def name_of(reduction: int) -> str:
    """The word for the number that ATen has for a reduction."""
    return ("none", "mean", "sum")[reduction]


LOSS = {"reduction": (0, 1, 2)}
FORMULAS = {
    "tanh": Formula("tanh_backward", torch.tanh, lambda g, y, i, p: d.tanh_backward(g, y)),
    "sigmoid": Formula("sigmoid_backward", torch.sigmoid, lambda g, y, i, p: d.sigmoid_backward(g, y)),
    "softplus": Formula(
        "softplus_backward", F.softplus, lambda g, y, i, p: d.softplus_backward(g, i[0], p["beta"], p["threshold"]),
        params={"beta": (1, 2.5), "threshold": (20, 1)},
    ),
    "elu": Formula(
        "elu_backward", F.elu, lambda g, y, i, p: d.elu_backward(g, p["alpha"], 1.0, 1.0, False, i[0]),
        params={"alpha": (1.0, 0.3)},
    ),
    "hardsigmoid": Formula("hardsigmoid_backward", F.hardsigmoid, lambda g, y, i, p: d.hardsigmoid_backward(g, i[0])),
    "hardtanh": Formula(
        "hardtanh_backward", F.hardtanh, lambda g, y, i, p: d.hardtanh_backward(g, i[0], p["min_val"], p["max_val"]),
        params={"min_val": (-1.0, -0.2), "max_val": (1.0, 0.7)},
    ),
    "hardswish": Formula("hardswish_backward", F.hardswish, lambda g, y, i, p: d.hardswish_backward(g, i[0])),
    "threshold": Formula(
        "threshold_backward", lambda x, t: F.threshold(x, t, 0.0),
        lambda g, y, i, p: d.threshold_backward(g, i[0], p["t"]),
        params={"t": (0.0, 0.5)},
    ),
    "leaky_relu": Formula(
        "leaky_relu_backward", F.leaky_relu,
        lambda g, y, i, p: d.leaky_relu_backward(g, i[0], p["negative_slope"], False),
        params={"negative_slope": (0.01, 0.3)},
    ),
    "gelu": Formula(
        "gelu_backward", F.gelu, lambda g, y, i, p: d.gelu_backward(g, i[0], p["approximate"]),
        params={"approximate": ("none", "tanh")},
    ),
    "mish": Formula("mish_backward", F.mish, lambda g, y, i, p: d.mish_backward(g, i[0])),
    "silu": Formula("silu_backward", F.silu, lambda g, y, i, p: d.silu_backward(g, i[0])),
    "glu": Formula(
        "glu_backward", F.glu, lambda g, y, i, p: d.glu_backward(g, i[0], p["dim"]),
        inputs={"x": tensor("M", "2*N")}, params={"dim": (-1,)},
    ),
    "prelu": Formula(
        "_prelu_kernel_backward", lambda x, w: torch.where(x > 0, x, w * x),
        lambda g, y, i, p: d._prelu_kernel_backward(g, *i), inputs={"x": tensor("M", "N"), "w": tensor("M", "N")},
    ),
    "logit": Formula(
        "logit_backward", torch.logit, lambda g, y, i, p: d.logit_backward(g, i[0], p["eps"]),
        inputs={"x": tensor("M...", "N", low=0.05, high=0.95)}, params={"eps": (None, 0.2)},
    ),
    "mse_loss": Formula(
        "mse_loss_backward", lambda x, y, reduction: reduced((x - y) ** 2, reduction),
        lambda g, o, i, p: d.mse_loss_backward(g, *i, p["reduction"]), inputs=PAIR, params=LOSS,
    ),
    "smooth_l1_loss": Formula(
        "smooth_l1_loss_backward",
        lambda x, y, reduction, beta: F.smooth_l1_loss(x, y, reduction=name_of(reduction), beta=beta),
        lambda g, o, i, p: d.smooth_l1_loss_backward(g, *i, p["reduction"], p["beta"]), inputs=PAIR,
        params={**LOSS, "beta": (1.0, 0.3)},
    ),
    "huber_loss": Formula(
        "huber_loss_backward",
        lambda x, y, reduction, delta: F.huber_loss(x, y, reduction=name_of(reduction), delta=delta),
        lambda g, o, i, p: d.huber_loss_backward(g, *i, p["reduction"], p["delta"]), inputs=PAIR,
        params={**LOSS, "delta": (1.0, 0.3)},
    ),
    "binary_cross_entropy": Formula(
        "binary_cross_entropy_backward",
        lambda x, y, w, reduction: F.binary_cross_entropy(x, y, w, reduction=name_of(reduction)),
        lambda g, o, i, p: d.binary_cross_entropy_backward(g, *i, p["reduction"]),
        inputs={
            "x": tensor("M", "N", low=0.05, high=0.95), "y": tensor("M", "N", low=0.0, high=1.0, grad=False),
            "w": tensor("M", "N", grad=False),
        }, params=LOSS,
    ),
    "soft_margin_loss": Formula(
        "soft_margin_loss_backward", lambda x, y, reduction: F.soft_margin_loss(x, y, reduction=name_of(reduction)),
        lambda g, o, i, p: d.soft_margin_loss_backward(g, *i, p["reduction"]), inputs=PAIR, params=LOSS,
    ),
    "nll_loss": Formula(
        "nll_loss_backward",
        lambda x, t, w, reduction, ignore_index: F.nll_loss(
            x, t, w, reduction=name_of(reduction), ignore_index=ignore_index
        ),
        lambda g, o, i, p: d.nll_loss_backward(
            g, *i, p["reduction"], p["ignore_index"], _weight(*i[1:], **p)
        ),
        inputs={
            "x": tensor("M", "C"), "t": tensor("M", dtype="int64", low=0, high="C"),
            "w": tensor("C", low=0.5, high=2.0, grad=False),
        }, params={**LOSS, "ignore_index": (-100, 1)}, options={"sizes": {"C": (2, 300), "M": (1, 300)}},
    ),
    "softmax": Formula(
        "_softmax_backward_data", torch.softmax,
        lambda g, y, i, p: d._softmax_backward_data(g, y, p["dim"], i[0].dtype), params={"dim": (-1, 0)},
    ),
    "log_softmax": Formula(
        "_log_softmax_backward_data", torch.log_softmax,
        lambda g, y, i, p: d._log_softmax_backward_data(g, y, p["dim"], i[0].dtype), params={"dim": (-1, 0)},
    ),
    "embedding": Formula(
        "embedding_dense_backward",
        lambda w, t, padding_idx, scale: F.embedding(t, w, padding_idx, scale_grad_by_freq=scale),
        lambda g, o, i, p: d.embedding_dense_backward(
            g, i[1], len(i[0]), -1 if p["padding_idx"] is None else p["padding_idx"], p["scale"]
        ),
        inputs={"w": tensor("V", "N"), "t": tensor("M", dtype="int64", low=0, high="V")},
        params={"padding_idx": (None, 1), "scale": (False, True)}, options={"sizes": {"V": (2, 300)}},
    ),
    "native_layer_norm": Formula(
        "native_layer_norm_backward", lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b),
        lambda g, o, i, p: d.native_layer_norm_backward(
            g.contiguous(), i[0].contiguous(), i[0].shape[-1:], i[0].mean(-1, keepdim=True),
            (i[0].var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt(), *i[1:], [True] * 3,
        ),
        inputs={"x": tensor("M", "N"), "w": tensor("N"), "b": tensor("N")},
        options={"sizes": {"M": (1, 300), "N": (2, 5000)}},
    ),
    "group_norm": Formula(
        "native_group_norm_backward", lambda x, w, b: F.group_norm(x, 3, w, b), lambda g, o, i, p: _group_norm(g, *i),
        inputs={"x": tensor("B", "3*C", "H"), "w": tensor("3*C"), "b": tensor("3*C")},
        options={"sizes": {"B": (1, 9), "C": (1, 20), "H": (2, 100)}},
    ),
    "unfold": Formula(
        "unfold_backward", lambda x, size, step: x.unfold(-1, size, step),
        lambda g, o, i, p: d.unfold_backward(g, i[0].shape, i[0].ndim - 1, p["size"], p["step"]),
        inputs={"x": tensor("M", "N")}, params={"size": (3, 2), "step": (1, 2, 3)}, options={"sizes": {"N": (3, 300)}},
    ),
    "select": Formula(
        "select_backward", lambda x, index: x.select(1, index),
        lambda g, o, i, p: d.select_backward(g, i[0].shape, 1, p["index"]), inputs={"x": tensor("M", "N")},
        params={"index": (0, 1, -1)}, options={"sizes": {"N": (2, 300)}},
    ),
    "slice": Formula(
        "slice_backward", lambda x, start, step: x[:, start:9:step].clone(),
        lambda g, o, i, p: d.slice_backward(g, i[0].shape, 1, p["start"], 9, p["step"]), inputs={"x": tensor("M", "N")},
        params={"start": (0, 2), "step": (1, 3)}, options={"sizes": {"N": (9, 300)}},
    ),
    "diagonal": Formula(
        "diagonal_backward", lambda x, offset: x.diagonal(offset).clone(),
        lambda g, o, i, p: d.diagonal_backward(g, i[0].shape, p["offset"], 0, 1), inputs={"x": tensor("M", "N")},
        params={"offset": (0, 1, -2)}, options={"sizes": {"M": (3, 100), "N": (3, 100)}},
    ),
    "dropout": Formula(
        "native_dropout_backward", lambda x, m, scale: x * m * scale,
        lambda g, o, i, p: d.native_dropout_backward(g, i[1], p["scale"]),
        inputs={"x": tensor("M", "N"), "m": tensor("M", "N", dtype="bool")}, params={"scale": (1.0, 1.25)},
    ),
    "log_sigmoid": Formula(
        "log_sigmoid_backward", F.logsigmoid, lambda g, y, i, p: d.log_sigmoid_backward(g, i[0], i[0].new_zeros(0))
    ),
    "selu": Formula(
        "elu_backward", F.selu,
        lambda g, y, i, p: d.elu_backward(g, 1.6732632423543772, 1.0507009873554805, 1.0, False, i[0]),
    ),
    "celu": Formula(
        "elu_backward", lambda x, alpha: torch.where(x > 0, x, alpha * torch.expm1(x.clamp(max=0) / alpha)),
        lambda g, y, i, p: d.elu_backward(g, p["alpha"], 1.0, 1.0 / p["alpha"], False, i[0]),
        params={"alpha": (1.0, 0.4)},
    ),
    "rrelu": Formula(
        "rrelu_with_noise_backward",
        lambda x, n, training: torch.where(x > 0, x, n * x) if training else F.leaky_relu(x, 0.2),
        lambda g, y, i, p: d.rrelu_with_noise_backward(
            g, i[0], torch.where(i[0] > 0, torch.ones_like(i[1]), i[1]), 0.1, 0.3, p["training"], False
        ),
        inputs={"x": tensor("M", "N"), "n": tensor("M", "N", low=0.1, high=0.3, grad=False)},
        params={"training": (True, False)},
    ),
    "nll_loss2d": Formula(
        "nll_loss2d_backward",
        lambda x, t, w, reduction, ignore_index: F.nll_loss(
            x, t, w, reduction=name_of(reduction), ignore_index=ignore_index
        ),
        lambda g, o, i, p: d.nll_loss2d_backward(g, *i, p["reduction"], p["ignore_index"], _weight(*i[1:], **p)),
        inputs={
            "x": tensor("B", "C", "H", "W"), "t": tensor("B", "H", "W", dtype="int64", low=0, high="C"),
            "w": tensor("C", low=0.5, high=2.0, grad=False),
        }, params={**LOSS, "ignore_index": (-100, 1)},
        options={"sizes": {"B": (1, 9), "C": (2, 70), "H": (1, 20), "W": (1, 20)}},
    ),
    "fused_rms_norm": Formula(
        "_fused_rms_norm_backward", lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-5),
        lambda g, o, i, p: d._fused_rms_norm_backward(
            g, i[0], i[0].shape[-1:], (i[0].square().mean(-1, keepdim=True) + 1e-5).rsqrt(), i[1], [True] * 2
        ),
        inputs={"x": tensor("M", "N"), "w": tensor("N")}, options={"sizes": {"M": (1, 300), "N": (1, 5000)}},
    ),
    "batch_norm": Formula(
        "native_batch_norm_backward",
        lambda x, w, b, m, v, training: F.batch_norm(
            x, None if training else m, None if training else v, w, b, training
        ),
        lambda g, o, i, p: _batch_norm(g, *i, **p),
        inputs={
            "x": tensor("B", "C", "H"), "w": tensor("C"), "b": tensor("C"), "m": tensor("C", grad=False),
            "v": tensor("C", low=0.5, high=2.0, grad=False),
        }, params={"training": (True, False)}, options={"sizes": {"B": (2, 9), "C": (1, 60), "H": (2, 70)}},
    ),
    "max_pool2d": Formula(
        "max_pool2d_with_indices_backward",
        lambda x, size, stride, padding: F.max_pool2d(x, size, stride, padding),
        lambda g, o, i, p: d.max_pool2d_with_indices_backward(
            g, i[0], [p["size"]] * 2, [p["stride"]] * 2, [p["padding"]] * 2, [1, 1], False,
            F.max_pool2d(i[0], p["size"], p["stride"], p["padding"], return_indices=True)[1],
        ),
        inputs={"x": tensor("B", "C", "H", "W")}, params={"size": (3,), "stride": (2, 1), "padding": (0, 1)},
        options={"sizes": {"B": (1, 4), "C": (1, 8), "H": (3, 20), "W": (3, 20)}},
    ),
    "reflection_pad1d": Formula(
        "_reflection_pad_backward", lambda x, left, right: F.pad(x, (left, right), mode="reflect"),
        lambda g, o, i, p: d._reflection_pad_backward(g, i[0], (p["left"], p["right"])),
        inputs={"x": tensor("M", "C", "N")}, params={"left": (2, 0), "right": (1, 3)},
        options={"sizes": {"M": (1, 9), "C": (1, 9), "N": (4, 100)}},
    ),
    "reflection_pad2d": Formula(
        "_reflection_pad_backward", lambda x, top: F.pad(x, (1, 2, top, 0), mode="reflect"),
        lambda g, o, i, p: d._reflection_pad_backward(g, i[0], (1, 2, p["top"], 0)),
        inputs={"x": tensor("M", "C", "H", "W")}, params={"top": (2, 0)},
        options={"sizes": {"M": (1, 4), "C": (1, 4), "H": (3, 20), "W": (3, 20)}, "algorithm_error": 16},
    ),
}  # fmt: skip


def _weight(target: torch.Tensor, weight: torch.Tensor, reduction: int, ignore_index: int) -> torch.Tensor:
    counted = weight[target].masked_fill(target == ignore_index, 0).sum()
    return counted if reduction == MEAN else torch.zeros_like(counted)


def _group_norm(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
    flat = x.reshape(len(x), 3, -1)  # (B, groups, C / groups * H)
    mean, rstd = flat.mean(-1), (flat.var(-1, unbiased=False) + 1e-5).rsqrt()
    area = x.shape[-1]
    return d.native_group_norm_backward(
        g.contiguous(), x.contiguous(), mean, rstd, w, *x.shape[:2], area, 3, [True] * 3
    )  # fmt: skip


def _batch_norm(
    g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, m: torch.Tensor, v: torch.Tensor, training: bool
) -> Any:
    mean, invstd = x.mean((0, 2)), (x.var((0, 2), unbiased=False) + 1e-5).rsqrt()
    running = (None, None) if training else (m, v)
    return d.native_batch_norm_backward(g, x, w, *running, mean, invstd, training, 1e-5, [True] * 3)
