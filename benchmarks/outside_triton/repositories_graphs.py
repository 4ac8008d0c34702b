"""Specs of ops of FlagOpen/FlagAttention, facebookresearch/fairchem, Metta-AI/metta.

Needs no package beyond torch and triton.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from repositories_routing import within
from repositories_third import THIRD, cycle
from specs import SINGLE, apply, softmax
from torch import Tensor

import retrograd as rg

FLAG, FAIR, METTA = (THIRD[name] for name in ("flagattention", "fairchem", "metta"))

# FlagOpen/FlagAttention: src/flag_attn. Heads of 16, 32, 64 or 128 (asserted).

_FLAG = {"flag_attn": "FlagOpen/FlagAttention/src/flag_attn"}


def _distance(scores: Tensor) -> Tensor:
    """How far each key [.., N] lies before each query [.., M], the last of both together."""
    rows, columns = scores.shape[-2:]
    index = partial(torch.arange, device=scores.device)
    return columns - rows + index(rows)[:, None] - index(columns)


def _piecewise(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """softmax of q2 k2 where the distance is at least 5, of q1 k1 elsewhere, over sqrt(D); v."""
    near, far = (q @ k.mT * q.shape[-1] ** -0.5 for q, k in ((q1, k1), (q2, k2)))
    distance = _distance(near)
    scores = torch.where(distance >= 5, far, near)
    return softmax(scores.masked_fill(distance < 0, -torch.inf) if causal else scores) @ v


_KEYS = rg.tensor("B", "H", "M+P", "16*D")
_QUERIES = rg.tensor("B", "H", "M", "16*D")
# expected (both): right within bfloat16, of all layouts (strides of all, grad_out too, are used); float32 within tf32.
# The docstring of `attention` says q1 k1 "when the distance is not greater than w"; kernels and its own test take q2 k2
# from a distance of w on (piecewise.py:311, 557, 741): the reference follows these. `loads`: rows of v, q, k and
# grad_out beyond the last are loaded without `other` and enter dots, times 0, where M or M + P is no multiple of the
# block of 32 (322, 550-552, 736-738). Extremes: q goes through a dot with the unit matrix (295), so that one inf of a
# row makes all of it NaN.
for _causal in (False, True):
    FLAG.add(
        f"flagattention_piecewise{'_causal' if _causal else ''}",
        lambda q1, k1, q2, k2, v, c=_causal: within(_FLAG, apply("flag_attn.piecewise", "PiecewiseAttention"))(
            q1, k1, q2, k2, v, 5, c, None
        ),
        partial(_piecewise, causal=_causal),
        dict(q1=_QUERIES, k1=_KEYS, q2=_QUERIES, k2=_KEYS, v=_KEYS),
        sizes=dict(B=(1, 2), H=[2, 1], M=[20, 1, 40], P=[3, 0, 24], D=[1, 2]),
    )


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention, two heads of queries to one of keys."""
    scores = q @ k.repeat_interleave(2, 1).mT * q.shape[-1] ** -0.5
    return softmax(scores.masked_fill(_distance(scores) < 0, -torch.inf)) @ v.repeat_interleave(2, 1)


# expected: as flagattention_piecewise up to 128 keys. From 129 on, true bug: with few programs for the device's
# multiprocessors the keys are split (flash.py:58-59), and the parts are kept in float16 whatever the dtype
# (flash.py:97, multiple_o): float32 is rounded to 2^-11, parts beyond 65504 are inf, in bfloat16 too; sizes have 150.
# Layouts right, also of the heads of k and v.
FLAG.add(
    "flagattention_flash_grouped",
    lambda q, k, v: within(_FLAG, apply("flag_attn.flash", "FlashAttention"))(
        q, k, v, True, None, 0.0, False, False, False
    ),
    _grouped,
    dict(
        q=rg.tensor("B", "2*H", "M", "16*D"),
        k=rg.tensor("B", "H", "M+P", "16*D"),
        v=rg.tensor("B", "H", "M+P", "16*D"),
    ),
    sizes=dict(B=(1, 2), H=[1, 2], M=[20, 1, 40], P=[3, 0, 110, 24], D=[1, 2]),
)

# facebookresearch/fairchem: src/fairchem/core/models/uma/triton (eSEN / UMA). Features of degree 2: nine numbers, by
# degree (L) or by order (M); rotations [E, 9, 9] of which only the blocks of 1, 3 and 5 count. C is a power of two.

_FAIR = {
    name: f"facebookresearch/fairchem/src/{name.replace('.', '/')}"
    for name in ("fairchem", "fairchem.core", "fairchem.core.models", "fairchem.core.models.uma")
}
_BY_ORDER, _BY_DEGREE = [0, 2, 6, 3, 7, 1, 5, 8, 4], [0, 5, 1, 3, 8, 6, 2, 4, 7]


def _fair(module: str, name: str) -> Any:
    return within(_FAIR, apply(f"fairchem.core.models.uma.triton.{module}", name))


def _edges(edges: int, nodes: int, device: torch.device) -> Tensor:
    return torch.stack([cycle(edges, nodes, device), cycle(edges, nodes, device, 3)])


def _blocks(w: Tensor) -> Tensor:
    ones = torch.block_diag(*(torch.ones(n, n, dtype=w.dtype, device=w.device) for n in (1, 3, 5)))
    return w.view(-1, 9, 9) * ones


def _to_edges(x: Tensor, w: Tensor) -> Tensor:
    """Features of both ends side by side, turned, by order: [E, 9, 2 C]."""
    source, target = _edges(w.shape[0], len(x), x.device)
    return (_blocks(w) @ torch.cat([x[source], x[target]], -1))[:, _BY_ORDER]


def _packed(x: Tensor, w: Tensor, radial: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows by order times the weights of their order (6 blocks of 2 C; both signs share one), packed by order."""
    rows = _to_edges(x, w) * radial.unflatten(-1, (6, -1))[:, [0, 1, 2, 3, 4, 3, 4, 5, 5]]
    return rows[:, :3].flatten(1), rows[:, 3:7].flatten(1), rows[:, 7:].flatten(1)


_NODES, _TURNS = rg.tensor("N", 9, "C"), rg.tensor("E", 9, 9)
_GRAPH = dict(N=[7, 2, 12], E=[20, 1, 33], C=[8, 1, 16])
# expected: float32 right, of all layouts: x and grad_out are copied, a rotation is reshaped. bfloat16: products of a
# rotation are added up in bfloat16: precision, perhaps. Sums over edges are torch's index_add.
FAIR.add(
    "fairchem_node_to_edge",
    lambda x, w: _fair("node_to_edge_wigner_permute", "NodeToEdgeWignerPermuteFunction")(
        x, _edges(len(w), len(x), x.device), w
    ),
    _to_edges,
    dict(x=_NODES, w=_TURNS),
    sizes=_GRAPH,
)
# expected: contiguous right. Layouts, true bugs: the rotation is passed as it is (permute_wigner_inv_edge_to_node.py
# and custom_ops.py:118, no reshape, no contiguous), so that a transposed one, which is what an inverse rotation usually
# is, is read as if it were not, in both directions; out and x_l are empty_like of x before x is made contiguous, and
# written as contiguous: wrong values for an x of permuted strides. bfloat16: gradients of a rotation are summed in
# bfloat16.
FAIR.add(
    "fairchem_edge_to_node",
    lambda x, w: _fair("permute_wigner_inv_edge_to_node", "PermuteWignerInvEdgeToNodeFunction")(x, w),
    lambda x, w: _blocks(w) @ x[:, _BY_DEGREE],
    dict(x=rg.tensor("E", 9, "C"), w=_TURNS),
    sizes=dict(E=[20, 1, 33], C=[8, 1, 16]),
)
# expected (both): float32 proved, all is copied; bfloat16 as fairchem_node_to_edge. Tuples indexed in tl.static_range
# and starred arguments may be what does not compile.
FAIR.add(
    "fairchem_conv1_packed",
    lambda x, w, radial: _fair("fused_wigner", "WignerConv1FusedFunction")(
        x, _edges(len(w), len(x), x.device), w, radial, x.shape[-1]
    ),
    _packed,
    dict(x=_NODES, w=rg.tensor("E", 81), radial=rg.tensor("E", "12*C")),
    sizes=_GRAPH,
)
FAIR.add(
    "fairchem_conv2_unpacked",
    lambda g0, g1, g2, w: _fair("fused_wigner", "WignerInvConv2FusedFunction")(g0, g1, g2, w, g2.shape[-1] // 2),
    lambda g0, g1, g2, w: (
        _blocks(w) @ torch.cat([g.unflatten(-1, (n, -1)) for g, n in ((g0, 3), (g1, 4), (g2, 2))], 1)[:, _BY_DEGREE]
    ),
    dict(
        g0=rg.tensor("E", "3*C"),
        g1=rg.tensor("E", "4*C"),
        g2=rg.tensor("E", "2*C"),
        w=rg.tensor("E", 81),
    ),
    sizes=dict(E=[20, 1, 33], C=[8, 1, 16]),
)

# Metta-AI/metta: packages/cortex/src/cortex/kernels/triton: recurrent trace units and a convolution, both with resets.

_CORTEX = "Metta-AI/metta/packages/cortex/src"
_METTA = {
    name: f"{_CORTEX}/{name.replace('.', '/')}"
    for name in ("cortex", "cortex.kernels", "cortex.kernels.triton", "cortex.kernels.triton.rtu")
}


def _resets(x: Tensor) -> Tensor:
    """[B, T]: the first sequence at steps 1, 4, ..., the next one step earlier."""
    batch, steps = (torch.arange(n, device=x.device) for n in x.shape[:2])
    return (steps + batch[:, None]) % 3 == 1


def _traces(
    x: Tensor, nu: Tensor, theta: Tensor, w1: Tensor, w2: Tensor, h1: Tensor, h2: Tensor, *, reset: bool, final: bool
) -> Any:
    """c = r e^{i theta} c + sqrt(1 - r^2) (w1 + i w2) x, r = exp(-exp(nu)), theta = exp(theta); silu of both parts.

    Recurrent trace units (Elelimy et al., 2024); c begins anew, from 0, at a reset.
    """
    r, angle = torch.exp(-torch.exp(nu)), torch.exp(theta)
    g, phi, gamma = r * angle.cos(), r * angle.sin(), (1 - r * r).sqrt()
    keep, rows = 1 - _resets(x).to(x.dtype), []
    for t in range(x.shape[1]):
        a, b = (h * keep[:, t, None] for h in (h1, h2)) if reset else (h1, h2)
        h1, h2 = g * a - phi * b + gamma * w1 * x[:, t], phi * a + g * b + gamma * w2 * x[:, t]
        rows.append(F.silu(torch.cat([h1, h2], -1)))
    y = torch.stack(rows, 1)
    return (y, h1, h2) if final else y


def _stream(*inputs: Tensor, reset: bool, final: bool) -> Any:
    x, nu, theta, w1, w2, h1, h2 = inputs
    function = within(_METTA, apply("cortex.kernels.triton.rtu.stream_diag", "_RTUStreamDiagFunction"))
    result = function(x, nu, theta, w1, w2, "silu", h1, h2, None, _resets(x) if reset else None)
    return result[:3] if final else result[0]


_CHANNEL = rg.tensor("H", low=-1.5, high=0.3)
_STATE = rg.tensor("B", "H")
# expected: `metta_rtu`, numbers right at the steps that one program handles. True bug, race (all three): the scan is in
# place (rtu/utils.py, _scan_step_segmented_kernel): what one thread stores at t another loads at t + offset, without a
# barrier between (4 warps), and from 130 steps on another program does. `metta_rtu_resets`, true bug: gradients of x,
# weights, nu and theta are wrong: the backward cuts the adjoint where the step itself is reset (stream_diag.py,
# flags_rev = flip(resets)), not where the next one is, so that a reset step loses what comes after it, and the step
# before it gets what it must not. `metta_rtu_final`, true bug: gradients of the final states are ignored (backward
# takes grad_final_hc1 and grad_final_hc2 and uses neither), though only their detaching "for streaming" is documented.
for _name, _reset, _final in (("", False, False), ("_resets", True, False), ("_final", False, True)):
    METTA.add(
        f"metta_rtu{_name}",
        partial(_stream, reset=_reset, final=_final),
        partial(_traces, reset=_reset, final=_final),
        dict(
            x=rg.tensor("B", "T", "H"),
            nu=_CHANNEL,
            theta=_CHANNEL,
            w1=rg.tensor("H"),
            w2=rg.tensor("H"),
            h1=_STATE,
            h2=_STATE,
        ),
        sizes=dict(B=[2, 1, 3], T=[9, 1, 140, 20], H=[5, 1, 8]),
        dtypes=SINGLE,
    )


def _convolved(state: Tensor, x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """Causal convolution [F, C, 3] over what came since the last reset; `state` are the 3 steps before."""
    whole = torch.cat([state, x], 1)
    part = F.pad(_resets(x).long(), (3, 0)).cumsum(1)
    out = bias.expand(*x.shape[:2], -1)
    for back in range(3):
        span = slice(3 - back, whole.shape[1] - back)
        seen = (part[:, span] == part[:, 3:])[..., None]
        out = out + (whole[:, span] * seen) @ w[:, :, 2 - back].T
    return out


# expected: right within the dtype, float32 within tf32 (tl.dot of float32 without input_precision, though the module's
# docstring promises "fp32 accumulation for numerical stability"). Contiguous inputs (asserted, documented); grad_out is
# copied into a fresh tensor. A window of reset segments is cut alike in all three gradients.
METTA.add(
    "metta_conv1d_resets",
    lambda state, x, w, bias: within(
        {**_METTA, "cortex.kernels.triton.conv1d": f"{_CORTEX}/cortex/kernels/triton/conv1d"},
        apply("cortex.kernels.triton.conv1d.channel_mixing", "_ChannelMixCausalResetFn"),
    )(state, x, w, bias, _resets(x), 32, 16, 16, 32),
    _convolved,
    dict(
        state=rg.tensor("B", 3, "C"),
        x=rg.tensor("B", "T", "C"),
        w=rg.tensor("F", "C", 3),
        bias=rg.tensor("F"),
    ),
    sizes=dict(B=[2, 1], T=[9, 1, 40], C=[5, 1, 20], F=[7, 1, 17]),
    layouts="contiguous",
)
