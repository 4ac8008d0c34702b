"""PyTorch's decompositions of forward functions as ops: what is differentiated by autograd is the decomposition."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from mutation_ops.decompositions import LOSS, d, name_of, reduced

import retrograd as rg
from retrograd import tensor


@dataclass(frozen=True)
class Decomposition:
    """A decomposition, differentiated by autograd.

    Attributes:
        function: its name in torch._decomp.decompositions.
        call: of the decomposition, with the inputs and parameters.
        reference: of the same, with functions of ATen.
    """

    function: str
    call: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Mapping[str, Any] = field(default_factory=lambda: {"x": tensor("M", "N")})
    params: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """The function, as `rg.mutate(functions=)` names it."""
        return f"mutation_ops.decompositions:d.{self.function}"

    def spec(self, name: str) -> Any:
        """The op."""
        return rg.op(
            self.call, self.reference, inputs=dict(self.inputs), params={k: list(v) for k, v in self.params.items()},
            dtypes=["float64", "float32"], name=name, **self.options,
        )  # fmt: skip


def _image(error: float | None = None, **sizes: tuple[int, int]) -> dict[str, Any]:
    """Options of an op on images; `error` where ATen adds up the same terms in another order (`algorithm_error`)."""
    return {"sizes": {"B": (1, 3), "C": (1, 5), "H": (2, 20), "W": (2, 20), **sizes}, "algorithm_error": error}


_PAIR = {"x": tensor("M", "N"), "y": tensor("M", "N")}
_IMAGE = {"x": tensor("B", "C", "H", "W")}
_ROWS = {"sizes": {"M": (1, 300), "N": (1, 300)}}
_WINDOW = dict(kernel=(3,), dilation=(1, 2), padding=(1, 0), stride=(1, 2))


def _window(kernel: int, dilation: int, padding: int, stride: int) -> tuple[list[int], ...]:
    return [kernel, 2], [dilation, 1], [padding, 1], [stride, 1]


FORWARDS = {
    "forward_mse_loss": Decomposition(
        "mse_loss", lambda x, y, reduction: d.mse_loss(x, y, reduction),
        lambda x, y, reduction: F.mse_loss(x, y, reduction=name_of(reduction)), _PAIR, LOSS, _ROWS,
    ),
    "forward_binary_cross_entropy": Decomposition(
        "binary_cross_entropy", lambda x, y, w, reduction: d.binary_cross_entropy(x, y, w, reduction),
        lambda x, y, w, reduction: reduced(-w * (y * x.log() + (1 - y) * (1 - x).log()), reduction),
        {
            "x": tensor("M", "N", low=0.05, high=0.95), "y": tensor("M", "N", low=0.0, high=1.0, grad=False),
            "w": tensor("M", "N", grad=False),
        }, LOSS, _ROWS,
    ),
    "forward_binary_cross_entropy_with_logits": Decomposition(
        "binary_cross_entropy_with_logits",
        lambda x, y, w, p, reduction: d.binary_cross_entropy_with_logits(x, y, w, p, reduction),
        lambda x, y, w, p, reduction: F.binary_cross_entropy_with_logits(
            x, y, w, reduction=name_of(reduction), pos_weight=p
        ),
        {
            "x": tensor("M", "N"), "y": tensor("M", "N", low=0.0, high=1.0, grad=False),
            "w": tensor("M", "N", low=0.5, high=2.0, grad=False), "p": tensor("N", low=0.5, high=2.0, grad=False),
        }, LOSS, _ROWS,
    ),
    "forward_multi_margin_loss": Decomposition(
        "multi_margin_loss",
        lambda x, t, w, p, margin, reduction: d.multi_margin_loss(x, t, p, margin, w, reduction),
        lambda x, t, w, p, margin, reduction: _multi_margin(x, t, w, p, margin, reduction),
        {
            "x": tensor("M", "C"), "t": tensor("M", dtype="int64", low=0, high="C"),
            "w": tensor("C", low=0.5, high=2.0, grad=False),
        }, {"p": (1, 2), "margin": (1.0, 0.3), **LOSS}, {"sizes": {"C": (2, 300), "M": (1, 300)}},
    ),
    "forward_softmax": Decomposition(
        "_softmax", lambda x, dim: d._softmax(x, dim, False), torch.softmax, params={"dim": (-1, 0)},
        options={**_ROWS, "algorithm_error": 4},
    ),
    "forward_log_softmax": Decomposition(
        "_log_softmax", lambda x, dim: d._log_softmax(x, dim, False), torch.log_softmax, params={"dim": (-1, 0)},
        options={**_ROWS, "algorithm_error": 4},
    ),
    "forward_rms_norm": Decomposition(
        "_fused_rms_norm", lambda x, w, eps: d._fused_rms_norm(x, x.shape[-1:], w, eps)[0],
        lambda x, w, eps: F.rms_norm(x, x.shape[-1:], w, eps), {"x": tensor("M", "N"), "w": tensor("N")},
        {"eps": (1e-5, 1e-2)}, {"sizes": {"M": (1, 300), "N": (1, 5000)}},
    ),
    "forward_addmm": Decomposition(
        "addmm", lambda x, a, b, beta, alpha: d.addmm(x, a, b, beta, alpha),
        lambda x, a, b, beta, alpha: torch.addmm(x, a, b, beta=beta, alpha=alpha),
        {"x": tensor("M", "N"), "a": tensor("M", "K"), "b": tensor("K", "N")},
        {"beta": (1.0, 0.5, 0), "alpha": (1.0, 2.0)}, {"sizes": {"M": (1, 70), "N": (1, 70), "K": (1, 70)}},
    ),
    "forward_addmv": Decomposition(
        "_addmv_impl", lambda x, a, b, beta, alpha: d._addmv_impl(x, a, b, beta, alpha),
        lambda x, a, b, beta, alpha: torch.addmv(x, a, b, beta=beta, alpha=alpha),
        {"x": tensor("M"), "a": tensor("M", "K"), "b": tensor("K")}, {"beta": (1.0, 0.5, 0), "alpha": (1.0, 2.0)},
        {"sizes": {"M": (1, 70), "K": (1, 70)}},
    ),
    "forward_baddbmm": Decomposition(
        "baddbmm", lambda x, a, b, beta, alpha: d.baddbmm(x, a, b, beta, alpha),
        lambda x, a, b, beta, alpha: torch.baddbmm(x, a, b, beta=beta, alpha=alpha),
        {"x": tensor("B", "M", "N"), "a": tensor("B", "M", "K"), "b": tensor("B", "K", "N")},
        {"beta": (1.0, 0.5, 0), "alpha": (1.0, 2.0)},
        {"sizes": {"B": (1, 5), "M": (1, 30), "N": (1, 30), "K": (1, 30)}},
    ),
    "forward_mv": Decomposition(
        "mv", lambda a, b: d.mv(a, b), torch.mv, {"a": tensor("M", "K"), "b": tensor("K")},
        options={"sizes": {"M": (1, 70), "K": (1, 70)}},
    ),
    "forward_dist": Decomposition(
        "dist", lambda x, y, p: d.dist(x, y, p), torch.dist, _PAIR, {"p": (2.0, 1.0, 3.0)}, _ROWS,
    ),
    "forward_weight_norm": Decomposition(
        "_weight_norm_interface", lambda v, g: d._weight_norm_interface(v, g, 0)[0],
        lambda v, g: v * (g / v.square().sum(1, keepdim=True).sqrt()), {"v": tensor("M", "N"), "g": tensor("M", 1)},
        options=_ROWS,
    ),
    "forward_im2col": Decomposition(
        "im2col", lambda x, **p: d.im2col(x, *_window(**p)), lambda x, **p: F.unfold(x, *_window(**p)), _IMAGE, _WINDOW,
        _image(4, H=(5, 20)),
    ),
    "forward_col2im": Decomposition(
        "col2im", lambda x, dilation: d.col2im(x, [7, 5], [3, 2], [dilation, 1], [1, 1], [1, 2]),
        lambda x, dilation: F.fold(x, [7, 5], [3, 2], [dilation, 1], [1, 1], [1, 2]),
        {"x": tensor("B", "6*C", 21)}, {"dilation": (1,)}, {"sizes": {"B": (1, 4), "C": (1, 9)}},
    ),
    "forward_upsample_nearest": Decomposition(
        "_upsample_nearest", lambda x, size: d._upsample_nearest(x, [size, 7], [None, None]),
        lambda x, size: F.interpolate(x, (size, 7), mode="nearest"), _IMAGE, {"size": (11, 3)}, _image(),
    ),
    "forward_affine_grid": Decomposition(
        "_affine_grid_generator_4d",
        lambda t, align: d._affine_grid_generator_4d(t, [len(t), 3, 5, 7], align_corners=align),
        lambda t, align: F.affine_grid(t, [len(t), 3, 5, 7], align_corners=align), {"t": tensor("B", 2, 3)},
        {"align": (False, True)}, {"sizes": {"B": (1, 9)}, "algorithm_error": 4},
    ),
    "forward_reflection_pad": Decomposition(
        "_reflection_pad", lambda x, left: d._reflection_pad(x, (left, 1, 0, 2)),
        lambda x, left: F.pad(x, (left, 1, 0, 2), mode="reflect"), _IMAGE, {"left": (2, 0)},
        _image(16, H=(3, 20), W=(3, 20)),
    ),
    "forward_replication_pad": Decomposition(
        "_replication_pad", lambda x, left: d._replication_pad(x, (left, 1, 0, 2)),
        lambda x, left: F.pad(x, (left, 1, 0, 2), mode="replicate"), _IMAGE, {"left": (2, 0)}, _image(16),
    ),
    "forward_adaptive_avg_pool2d": Decomposition(
        "adaptive_avg_pool2d", lambda x, size: d.adaptive_avg_pool2d(x, (size, 4)),
        lambda x, size: F.adaptive_avg_pool2d(x, (size, 4)), _IMAGE, {"size": (3, 5)}, _image(4),
    ),
    "forward_nansum": Decomposition(
        "nansum", lambda x, dim: d.nansum(x, dim, dtype=None), torch.nansum, params={"dim": (-1, 0)}, options=_ROWS,
    ),
    "forward_hardswish": Decomposition(
        "hardswish", lambda x: d.hardswish(x), F.hardswish, options={"algorithm_error": 4}
    ),
    "forward_silu": Decomposition("silu", lambda x: d.silu(x), F.silu),
    "forward_lstm_cell": Decomposition(
        "lstm_cell", lambda g, h, c, w, b: d.lstm_cell(g, h, c, w, b, None, 1), lambda *a: _lstm(*a),
        {
            "g": tensor("M", "4*N"), "h": tensor("M", "N"), "c": tensor("M", "N"), "w": tensor("4*N", "N", scale=0.3),
            "b": tensor("4*N"),
        }, options={"sizes": {"M": (1, 40), "N": (1, 40)}},
    ),
    "forward_gru_cell": Decomposition(
        "gru_cell_data", lambda x, h, u, a, w, b: d.gru_cell_data(x, h, u, a, w, b),
        lambda x, h, u, a, w, b: torch.gru_cell(x, h, u, w, a, b),
        {
            "x": tensor("M", "K"), "h": tensor("M", "N"), "u": tensor("3*N", "K", scale=0.3), "a": tensor("3*N"),
            "w": tensor("3*N", "N", scale=0.3), "b": tensor("3*N"),
        }, options={"sizes": {"M": (1, 40), "N": (1, 40), "K": (1, 40)}},
    ),
}  # fmt: skip


def _lstm(
    g: torch.Tensor, h: torch.Tensor, c: torch.Tensor, w: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    gates = h @ w.t() + b + g
    i, f, cell, o = gates.chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * cell.tanh()
    return o.sigmoid() * c.tanh(), c


def _multi_margin(
    x: torch.Tensor, t: torch.Tensor, w: torch.Tensor, p: int, margin: float, reduction: int
) -> torch.Tensor:
    short = (margin - x.gather(1, t[:, None]) + x).relu() ** p * w[t][:, None]  # (M, C)
    others = torch.nn.functional.one_hot(t, x.shape[1]) == 0
    return reduced(torch.where(others, short, 0).mean(1), reduction)
