"""Specs of ops of the other six of fourteen repositories: see repositories.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from repositories import CLONES, LABELS, MATRIX, REPOSITORIES, ROW, ROWS, bare, layer
from specs import SINGLE, apply, of, rms, softmax
from torch import Tensor

import retrograd as rg

*_, EQUI, ANEMOI, ATTORCH, XMA, SCATTER, HSTU = REPOSITORIES.values()


# IntelLabs/EquiTriton: equitriton/sph_harm/direct. Without e3nn, of which it needs annotations only.


def _equi(module: str, name: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        bare("e3nn", CLONES, o3=SimpleNamespace())
        bare("equitriton.sph_harm", CLONES / "IntelLabs/EquiTriton/src/equitriton/sph_harm")
        return apply(f"equitriton.sph_harm.direct.{module}", name)(*args)

    return call


def _harmonics(xyz: Tensor, *degrees: int) -> Tensor:
    """Real spherical harmonics as polynomials, y the axis, of norm sqrt(2 degree + 1) on the sphere, by order."""
    x, y, z = xyz.unbind(-1)
    r2, one = x * x + y * y + z * z, torch.ones_like(x)
    columns = []
    for degree in degrees:
        re, im, rows = one, torch.zeros_like(x), {}
        for m in range(degree + 1):  # re + i im = (z + ix)^m
            polar = torch.zeros_like(x)
            for k in range((degree - m) // 2 + 1):
                term = (-1) ** k * math.comb(degree, k) * math.comb(2 * degree - 2 * k, degree) / 2**degree
                term *= math.factorial(degree - 2 * k) / math.factorial(degree - 2 * k - m)
                polar = polar + term * r2**k * y ** (degree - 2 * k - m)
            norm = math.sqrt(
                (2 * degree + 1) * (1 if m == 0 else 2 * math.factorial(degree - m) / math.factorial(degree + m))
            )
            rows[m], rows[-m] = norm * polar * re, norm * polar * (im if m else re)
            re, im = z * re - x * im, z * im + x * re
        columns += [rows[m] for m in range(-degree, degree + 1)]
    return torch.stack(columns, -1)


_POINTS = rg.tensor("B", "N", 3)
_MANY = dict(B=(1, 3), N=[1, 64, 65, 130, 20])
# expected: true bug, it raises TypeError: its forward leaves out output_stride, and its backward the coordinates
EQUI.add("equitriton_l1", _equi("y_1", "FirstOrderSphericalHarmonic"), lambda xyz: _harmonics(xyz, 1),
         dict(xyz=_POINTS), sizes=_MANY, dtypes=SINGLE)  # fmt: skip
# expected (both): right for contiguous inputs. True bugs: grad_out is read by its row stride alone, or as if
# contiguous, so an expanded one (.sum().backward()) reads beyond its single number, and a transposed one is wrong;
# coordinates are taken for contiguous, so transposed ones are wrong (layouts).
for _name, _module, _class, _degrees in (
    ("l3", "y_3", "ThirdOrderSphericalHarmonic", (3,)),
    ("up_to_l2", "special", "FusedSecondOrderSphericalHarmonic", (0, 1, 2)),
):
    EQUI.add(f"equitriton_{_name}", _equi(_module, _class), lambda xyz, d=_degrees: _harmonics(xyz, *d),
             dict(xyz=_POINTS), sizes=_MANY, dtypes=SINGLE)  # fmt: skip
_joint = _equi("utils", "TritonSphericalHarmonic")
# expected: right but for layouts, as above: the l of a forward are kept as attributes of the class
EQUI.add("equitriton_joint", lambda xyz: _joint([1, 2, 3], xyz), lambda xyz: _harmonics(xyz, 1, 2, 3),
         dict(xyz=_POINTS), sizes=_MANY, dtypes=SINGLE)  # fmt: skip
# expected: true bug. Of two calls in one graph the first one's backward takes the l of the second: wrong gradients,
# and reads outside of its grad_out
EQUI.add(
    "equitriton_joint_twice",
    lambda a, b: (_joint([1], a), _joint([2, 3], b)),
    lambda a, b: (_harmonics(a, 1), _harmonics(b, 2, 3)),
    dict(a=_POINTS, b=_POINTS),
    sizes=_MANY,
    dtypes=SINGLE,
)

# ecmwf/anemoi-core: models/src/anemoi/models/triton/gt.py. Its functions are custom ops for CUDA alone; here the
# functions themselves are called, between its own setup of the context and what it returns.


def _gt() -> ModuleType:
    bare("anemoi_triton", CLONES / "ecmwf/anemoi-core/models/src/anemoi/models/triton")
    return import_module("anemoi_triton.gt")


class _Graph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        gt = _gt()
        outputs = gt.graph_transformer_attention._init_fn(*inputs)
        gt._graph_transformer_attention_setup_context(ctx, inputs, outputs)
        return outputs[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gt = _gt()
        return (*gt.graph_transformer_attention_backward._init_fn(grad, *ctx.saved_tensors), *[None] * 5)


def _starts(sorted_index: Tensor, count: int) -> Tensor:
    return torch.searchsorted(sorted_index, torch.arange(count + 1, device=sorted_index.device))


def _graph(q: Tensor, k: Tensor, v: Tensor, e: Tensor, src: Tensor, dst: Tensor) -> Tensor:
    """Edges in any order; as its own helper does, they are sorted by where they lead."""
    order = dst.argsort(stable=True)
    row, col, e = src[order], dst[order], e[order]
    by_source = row.argsort(stable=True)
    return _Graph.apply(q, k, v, e, row, _starts(col, len(q)), _starts(row[by_source], len(k)), by_source, col)


def _edges(q: Tensor, k: Tensor, v: Tensor, e: Tensor, src: Tensor, dst: Tensor) -> Tensor:
    scores = (q[dst] * (k[src] + e)).sum(-1) * q.shape[-1] ** -0.5  # [E, H]
    index = dst[:, None].expand_as(scores)
    largest = torch.full_like(q[..., 0], -torch.inf).detach().scatter_reduce(0, index, scores.detach(), "amax")
    share = (scores - largest[dst]).exp()
    total = torch.zeros_like(q[..., 0]).index_add(0, dst, share)
    share = share / total[dst]
    return torch.zeros_like(q).index_add(0, dst, share[..., None] * (v[src] + e))


# expected: right for H and C powers of two. With H=6 the pass over sources loads m and D of 8 heads without a mask:
# reads outside of both tensors at the last destination (true bug: bounds). With C=6 or H=6 `loads`: masked lanes of q,
# k, e enter tl.sum.
ANEMOI.add(
    "anemoi_graph_transformer",
    _graph,
    _edges,
    dict(
        q=rg.tensor("D", "H", "C"),
        k=rg.tensor("S", "H", "C"),
        v=rg.tensor("S", "H", "C"),
        e=rg.tensor("E", "H", "C"),
        src=rg.tensor("E", dtype="int64", low=0, high="S"),
        dst=rg.tensor("E", dtype="int64", low=0, high="D"),
    ),
    sizes=dict(D=[10, 1, 7], S=[4, 1, 9], E=[1, 40, 25], H=[6, 1, 2], C=[6, 1, 4]),
)

# BobMcDear/attorch. Its __init__ asks for the capability of a GPU, so submodules are imported without it.


def _attorch(module: str, name: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        bare("attorch", CLONES / "BobMcDear/attorch/attorch")
        return apply(f"attorch.{module}", name)(*args)

    return call


_act = _attorch("act_layers", "ActFuncAutoGrad")
_FREE = rg.tensor("M", "L", "N")
_SMALL = dict(M=(1, 6), L=(1, 6), N=(2, 100))
# expected: right at ordinary values. Extremes, true bug: its gradient is NaN for x above about 22 (exp(x)^4 over
# exp(x)^4).
ATTORCH.add("attorch_mish", lambda x: _act(x, "mish", 0.0, True),
            lambda x: x * torch.tanh(torch.logaddexp(x, torch.zeros_like(x))), dict(x=_FREE), sizes=_SMALL)  # fmt: skip
# expected: values right. Layouts, true bug: the backward takes grad_out for contiguous (no copy, no stride): an
# expanded one reads outside, a transposed one is wrong.
ATTORCH.add(
    "attorch_glu_silu",
    lambda x: _attorch("glu_layer", "GLUAutoGrad")(x, -1, "silu"),
    lambda x: x.chunk(2, -1)[0] * F.silu(x.chunk(2, -1)[1]),
    dict(x=rg.tensor("M", "L", "2*N")),
    sizes=_SMALL,
)
# expected: right (masked lanes are +inf before they are negated). Of three dimensions, view_as of an expanded or
# transposed grad_out raises RuntimeError in the backward: true bug; of two dimensions strides are used.
ATTORCH.add("attorch_softmin", lambda x: _attorch("softmax_layers", "SoftmaxAutoGrad")(x, True, False),
            lambda x: softmax(-x), dict(x=_FREE), sizes=_SMALL)  # fmt: skip
# expected: right, strides are used. `loads`: the mean adds masked lanes where N is no power of two.
ATTORCH.add(
    "attorch_layer_norm",
    lambda x, w, b: _attorch("layer_norm_layer", "LayerNormAutoGrad")(x, w, b, 1e-5, True),
    layer,
    dict(x=MATRIX, w=ROW, b=ROW),
    sizes=ROWS,
)


def _smooth_l1(x: Tensor, y: Tensor) -> Tensor:
    d = (x - y).abs()
    return torch.where(d < 1, 0.5 * d * d, d - 0.5).mean()


# expected: right in float32; `loads`: the sum adds masked lanes. In bfloat16 partial sums are stored, and added, in
# bfloat16.
ATTORCH.add(
    "attorch_smooth_l1",
    lambda x, y: _attorch("p_loss_layers", "PLossAutoGrad")(x, y, 0, "mean", 1.0),
    _smooth_l1,
    dict(x=MATRIX, y=MATRIX),
    sizes=ROWS,
)
# expected: true bug at M=2049, N < 64: blocks of two rows, room for M // 2 = 1024 partial sums but 1025 programs: one
# is written outside, so the last row is missing, and its second half is NaN. Right for up to 2048 rows.
ATTORCH.add(
    "attorch_cross_entropy",
    lambda x, y: _attorch("cross_entropy_loss_layer", "CrossEntropyLossAutoGrad")(x, y, None),
    lambda x, y: F.cross_entropy(x, y),
    dict(x=MATRIX, y=LABELS),
    sizes=dict(M=[2049, 1, 40], N=[2, 100, 37]),
)

# open-lm-engine/accelerated-model-architectures (xma): the Triton functions themselves, as its dispatch wants a GPU
# found at import. Each is autotuned over many configurations; rnn and swiglu are made of inline PTX (tanh.approx.f32).

# expected: true bug in extremes: up to 1024 columns, where it does not choose the online kernel, exp(x) without its
# maximum: NaN for x above 88. `loads` in the backward (dy * y of masked lanes is added). Else right.
XMA.add(
    "xma_softmax",
    lambda x: apply("xma.functional.softmax.triton_implementation", "_SoftmaxTriton")(x, 0.7),
    lambda x: softmax(0.7 * x),
    dict(x=MATRIX),
    sizes=ROWS,
)
# expected: undecided or unsupported (inline PTX); if it is executed, wrong-value in float32, as tanh.approx has 11
# bits: a known approximation, though called sigmoid. Strides are used.
XMA.add(
    "xma_swiglu",
    lambda g, u: apply("xma.functional.swiglu.triton_implementation", "_SwigluTriton")(g, u),
    lambda g, u: F.silu(g) * u,
    dict(g=MATRIX, u=MATRIX),
    sizes=ROWS,
)
# expected: values right. State, true bug: the backward multiplies the saved gradient in place: a second one raises
# RuntimeError (or is multiplied twice), and the gradients of the first change.
XMA.add(
    "xma_cross_entropy",
    lambda x, y: apply("xma.functional.cross_entropy.triton_implementation", "_CrossEntropyTriton")(x, y, "mean", 1.3),
    lambda x, y: F.cross_entropy(1.3 * x, y).float(),
    dict(x=MATRIX, y=LABELS),
    sizes=ROWS,
)
_xma_norm = apply("xma.functional.fused_residual_add_rmsnorm.triton_implementation", "_FusedResidualAddRMSNormTriton")
# expected: right; `loads` where N is no power of two. Strides are used.
XMA.add(
    "xma_residual_rms_norm",
    lambda x, r, w: _xma_norm(x, r, w, 1e-5, 0.9, False),
    lambda x, r, w: (rms(0.9 * x + r, w, 1e-5), 0.9 * x + r),
    dict(x=MATRIX, r=MATRIX, w=ROW),
    sizes=ROWS,
)
# expected: true bug. Without a residual x is saved before it is multiplied, and the backward takes it for the product:
# wrong gradients of x and of w. (Its tests have a residual always.)
XMA.add(
    "xma_rms_norm_multiplied",
    lambda x, w: _xma_norm(x, None, w, 1e-5, 1.7, False)[0],
    lambda x, w: rms(1.7 * x, w, 1e-5),
    dict(x=MATRIX, w=ROW),
    sizes=ROWS,
)


def _rnn(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """h = tanh(h w + x), [B, S, N, H]."""
    states = []
    for step in x.unbind(1):
        h = torch.tanh(torch.einsum("bnh,nhk->bnk", h, w) + step)
        states.append(h)
    return torch.stack(states, 1), h


# expected: undecided or unsupported (inline PTX), else float32 misses its precision, as above. `loads` into dots where
# H is not a power of two from 16 on (its tests have 8 and 9). The recurrence itself looks right.
XMA.add(
    "xma_rnn",
    lambda x, w, h: apply("xma.layers.rnn.triton_implementation", "_RNNTriton")(x, w, h, None, None, None),
    _rnn,
    dict(x=rg.tensor("B", "S", "N", "H"), w=rg.tensor("N", "H", "H", scale=0.2), h=rg.tensor("B", "N", "H")),
    sizes=dict(B=[4, 1, 17], S=[1, 5], N=[1, 2], H=[9, 16]),
)

# shawntan/scattermoe.


def _experts(x: Tensor, w: Tensor, chosen: Tensor, b: Tensor | None = None, gates: Tensor | None = None) -> Tensor:
    flat = chosen.flatten()
    (ids, order), ends = flat.sort(stable=True), flat.bincount(minlength=len(w)).cumsum(-1)
    parallel = of("scattermoe.parallel_experts", "parallel_linear")
    return parallel(x, w, chosen.shape[1], ids, order, ends, expert_biases=b, gates=gates)


def _moe(x: Tensor, w: Tensor, chosen: Tensor, b: Tensor | None = None, gates: Tensor | None = None) -> Tensor:
    each = torch.einsum("tk,tjkn->tjn", x, w[chosen]) + (0 if b is None else b[chosen])
    return each.flatten(0, 1) if gates is None else (gates[..., None] * each).sum(1)


# expected: values and first gradients right, if masked lanes are 0: `loads`, strongly: rows of other experts in a
# block of 128 are masked out without `other` and go into the dot. State, true bug: the backward uses the saved
# products of the experts as its buffer: a second one raises RuntimeError, or its gradient of gates is wrong. float32
# is TF32 on a GPU (ALLOW_TF32).
SCATTER.add(
    "scattermoe_gated",
    lambda x, w, b, gates, chosen: _experts(x, w, chosen, b, gates),
    lambda x, w, b, gates, chosen: _moe(x, w, chosen, b, gates),
    dict(
        x=rg.tensor("T", "K"),
        w=rg.tensor("E", "K", "N"),
        b=rg.tensor("E", "N"),
        gates=rg.tensor("T", 2, low=0.1, high=0.9),
        chosen=rg.tensor("T", 2, dtype="int64", low=0, high="E"),
    ),
    sizes=dict(T=[1, 70, 20], K=[16, 40, 32], N=[16, 40, 32], E=[1, 4]),
)
# expected: right, if masked lanes are 0: `loads` as above; no state is overwritten without gates
SCATTER.add(
    "scattermoe_scattered",
    lambda x, w, chosen: _experts(x, w, chosen),
    lambda x, w, chosen: _moe(x, w, chosen),
    dict(x=rg.tensor("T", "K"), w=rg.tensor("E", "K", "N"), chosen=rg.tensor("T", "J", dtype="int64", low=0, high="E")),
    sizes=dict(T=[1, 70, 20], J=[1, 2], K=[16, 40, 32], N=[16, 40, 32], E=[1, 4]),
)

# facebookresearch/generative-recommenders: generative_recommenders/ops/triton.

_HSTU = "generative_recommenders.ops.triton"
# expected: true bugs in layouts: grad_out is read by its row stride alone (expanded by .sum(): reads outside), and x
# is saved before it is made contiguous, so a transposed one gives wrong gradients. Else right.
HSTU.add(
    "hstu_layer_norm",
    lambda x, w, b: of(f"{_HSTU}.triton_layer_norm", "triton_layer_norm")(x, w, b, 1e-5),
    layer,
    dict(x=MATRIX, w=ROW, b=ROW),
    sizes=ROWS,
)
# expected: as hstu_layer_norm, but x is saved contiguous: only grad_out is wrong in layouts
HSTU.add(
    "hstu_swish_layer_norm",
    lambda x, w, b: of(f"{_HSTU}.triton_layer_norm", "triton_swish_layer_norm")(x, [x.shape[-1]], w, b, 1e-5),
    lambda x, w, b: x * torch.sigmoid(layer(x, w, b)),
    dict(x=MATRIX, w=ROW, b=ROW),
    sizes=ROWS,
)
# expected: grad_out as above. Its sums over rows are guarded by spin locks, without a barrier before they are
# released: a race for rows that share one, which begins at 2049 rows; none here.
HSTU.add(
    "hstu_rms_norm",
    lambda x, w: of(f"{_HSTU}.triton_layer_norm", "triton_rms_norm")(x, w, 1e-5),
    lambda x, w: rms(x, w, 1e-5),
    dict(x=MATRIX, w=ROW),
    sizes=ROWS,
)
# expected: right, of all layouts; the backward is torch
HSTU.add(
    "hstu_addmm",
    of(f"{_HSTU}.triton_addmm", "triton_addmm"),
    lambda y, x, w: y + x @ w,
    dict(y=rg.tensor("N"), x=rg.tensor("M", "K"), w=rg.tensor("K", "N")),
    sizes=dict(M=[1, 70, 33], K=[16, 1, 40], N=[1, 130, 24]),
)


def _ends(total: int, device: torch.device) -> Tensor:
    """Where three sequences of ever larger length begin and end; some are empty where the total is small."""
    return torch.arange(4, device=device) ** 2 * total // 9


def _jagged(name: str) -> Callable[..., Tensor]:
    def call(x: Tensor, *more: Tensor) -> Tensor:
        ends = _ends(len(x), x.device)
        return of(f"{_HSTU}.triton_jagged", name)(int(ends.diff().max()), ends, x, *more)

    return call


def _sequence(x: Tensor) -> Tensor:
    """Of each row, the number of its sequence."""
    return torch.searchsorted(_ends(len(x), x.device)[1:], torch.arange(len(x), device=x.device), right=True)


_JAGGED = rg.tensor("L", "K")
_SEQUENCES = dict(L=[1, 9, 200, 40], K=[16, 5, 70, 32])
# expected (both): right for contiguous grad_out. Layouts, true bugs: of grad_out (and of a jagged one) the last stride
# is taken for 1 without a check in the backward: expanded or transposed is wrong, and reads outside.
HSTU.add(
    "hstu_jagged_bmm_add",
    _jagged("triton_jagged_dense_bmm_broadcast_add"),
    lambda x, dense, bias: torch.einsum("lk,lkn->ln", x, dense[_sequence(x)]) + bias[_sequence(x)],
    dict(x=_JAGGED, dense=rg.tensor(3, "K", "N"), bias=rg.tensor(3, "N")),
    sizes=_SEQUENCES | dict(N=[16, 3, 70, 24]),
)
# expected: moreover, the forward writes its output by the row stride of the input: rows cut out of a wider matrix are
# written outside (true bug)
HSTU.add(
    "hstu_jagged_add",
    _jagged("triton_jagged_dense_broadcast_add"),
    lambda x, dense: x + dense[_sequence(x)],
    dict(x=_JAGGED, dense=rg.tensor(3, "K")),
    sizes=_SEQUENCES,
)
