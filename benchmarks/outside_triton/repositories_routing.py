"""Specs of ops of five of thirteen further repositories that nobody here had run or read: see repositories.py.

    python benchmarks/outside_triton/repositories_routing.py    # the commands that clone all thirteen

repositories_elementwise.py and repositories_sparse.py have the other eight.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from repositories import CLONES, LABELS, bare, print_commands
from specs import SINGLE, apply, log_softmax, of, registries
from torch import Tensor

import retrograd as rg

_COMMITS = {
    "katcu": "Adamdad/rational_kat_cu@181bae8baf19075bef94b5f62dac320b3d4b27d3",
    "infclip": "DAMO-NLP-SG/Inf-CLIP@d9f2833b3753ab1342db46666523c6621012fbf6",
    "vmamba": "MzeroMiko/VMamba@2ed52ead062a51a64521ed3871d52914bf532876",
    "transducer": "odunola499/transducer@8326393d87aeed158ace5b5417b5c47d75d62bc9",
    "megablocks": "databricks/megablocks@78eea65fda01e638af36ae38853bc51efb04a4b4",
    "openfold3": "aqlaboratory/openfold-3@b7940cb04a7bc9f7df359206e070220982b41ef6",
    "mdy": "mdy666/mdy_triton@0718faabe657b2f389e00beb31e8c66d1c122e2a",
    "xopes": "Doraemonzzz/xopes@1dfa3df896141398cd1afb92bca5c95ea8dacbac",
    "flexgemm": "JeffreyXiang/FlexGEMM@6dd94a859c26ee8246888502eada3dd8ad85532e",
    "dynsparse": "epfml/dynamic-sparse-flash-attention@266f36a914216c439f5aa63e12b00fa8489fde95",
    "convgemm": "manzhura/conv2d-img2col-gemm@40fa7c5f659c6e7e218be12217352cdcf4ef6bbd",
    "flashattn": "Dao-AILab/flash-attention@0251105a2fb19d2957484b7f023cd8c115286ced",
    "stickbreaking": "shawntan/stickbreaking-attention@3147a3841b025a31d271fc8f873120ff6fa0461b",
}
_STK = "stanford-futuredata/stk@736313768ef697ce13a0594a41b2512a0fbc9884"  # of which megablocks takes autocast.py
SECOND = registries(_COMMITS)
for _repository in (commit.partition("@")[0] for commit in _COMMITS.values()):
    sys.path.append(str(CLONES / _repository))
KAT, CLIP, VMAMBA, RNNT, MEGA, *_ = SECOND.values()


def within(packages: dict[str, str], found: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is imported after these packages (by name, their path in CLONES) were made bare ones."""

    def call(*args: Any, **kwargs: Any) -> Any:
        for name, path in packages.items():
            bare(name, CLONES / path)
        return found(*args, **kwargs)

    return call


# Adamdad/rational_kat_cu: kat_rational/rational_triton.py, rational_triton2d.py. Inputs are cast to float32 (under
# autocast); the size of the dimension is a multiple of the groups; [G, 6] numerators and [G, 4] denominators.

_KAT = {"kat_rational": "Adamdad/rational_kat_cu/kat_rational"}


def _rational(x: Tensor, a: Tensor, b: Tensor, dim: int = -1) -> Tensor:
    """sum_i a_i x^i / (1 + sum_j |b_j| |x|^j), coefficients by group of the dimension."""
    x = x.movedim(dim, -1)
    groups = x.unflatten(-1, (len(a), -1))[..., None]
    top = (groups ** torch.arange(6, device=x.device) * a[:, None]).sum(-1)
    bottom = 1 + (groups.abs() ** torch.arange(1, 5, device=x.device) * b.abs()[:, None]).sum(-1)
    return (top / bottom).flatten(-2).movedim(-1, dim)


_COEFFICIENTS = dict(a=rg.tensor("G", 6), b=rg.tensor("G", 4))
_rational_1d = within(_KAT, apply("kat_rational.rational_triton", "RationalTriton1DGroup"))
_rational_2d = within(_KAT, apply("kat_rational.rational_triton2d", "RationalTriton2D"))
# expected: numbers right for contiguous x and grad_out. Layouts, true bugs: x is walked through in memory order (a
# transposed one gets the coefficients of other groups), and grad_out as if contiguous: expanded (.sum().backward()) it
# is read beyond its end, transposed it is wrong. No `loads`: masked lanes go nowhere. Sums by atomics: order not fixed.
KAT.add(
    "kat_rational_1d",
    lambda x, a, b: _rational_1d(x, a, b, len(a)),
    _rational,
    dict(x=rg.tensor("M", "L", "8*N")) | _COEFFICIENTS,
    sizes=dict(M=(1, 5), L=(1, 7), N=[1, 5, 16], G=[8, 4, 1]),
    dtypes=SINGLE,
)
# expected: as kat_rational_1d, groups by channel
KAT.add(
    "kat_rational_2d",
    lambda x, a, b: _rational_2d(x, a, b, len(a)),
    partial(_rational, dim=1),
    dict(x=rg.tensor("M", "8*N", "H", "W")) | _COEFFICIENTS,
    sizes=dict(M=(1, 3), N=[1, 2], H=(1, 7), W=(1, 9), G=[8, 4, 1]),
    dtypes=SINGLE,
)

# DAMO-NLP-SG/Inf-CLIP: inf_cl/flash.py. float32 logits; heads of a power of two from 16 on. Its __init__ is left out.


def _clip_loss(q: Tensor, k: Tensor, labels: Tensor) -> Tensor:
    scores = 1.3 * q @ k.mT
    return scores.logsumexp(-1) - scores.gather(-1, labels[:, None])[:, 0]


_flash_loss = within({"inf_cl": "DAMO-NLP-SG/Inf-CLIP/inf_cl"}, of("inf_cl.flash", "cal_flash_loss"))
# expected: undecided or unsupported if inline PTX (cvt.rna.tf32) is not known; float32 misses its precision by TF32 on
# purpose. True bug, bounds, at M=100: the pass of dk masks lse and dlse by offs_m < seqlen_q without start_m, so that
# rows 100 to 127 of dlse are read beyond its end; what is read is multiplied by 0 (wrong if it is inf or NaN). The
# forward stores 64 rows at a time without a mask, within room rounded up to 128: fine. Layouts, true bug: the forward
# takes q and k for contiguous (the backward alone copies them): a transposed one is wrong.
CLIP.add(
    "infclip_flash_loss",
    lambda q, k, labels: _flash_loss(q, k, labels, 1.3, 32),
    _clip_loss,
    dict(q=rg.tensor("M", "32*D"), k=rg.tensor("N", "32*D"), labels=LABELS),
    sizes=dict(M=[100, 1, 64, 33], N=[70, 2, 128, 33], D=[1, 2]),
    dtypes=SINGLE,
)

# MzeroMiko/VMamba: classification/models/csm_triton.py (cross_scan_fn falls back on torch where x is not on a GPU).

_VMAMBA = {"vmamba_models": "MzeroMiko/VMamba/classification/models"}
_cross_scan = within(_VMAMBA, apply("vmamba_models.csm_triton", "CrossScanTritonF"))
_cross_merge = within(_VMAMBA, apply("vmamba_models.csm_triton", "CrossMergeTritonF"))


def _four_ways(x: Tensor, *, each: bool = False, backward: bool = False) -> Tensor:
    """Rows, columns, and both reversed: [B, C, H, W], or four of them if `each`, to [B, 4, C, H W]; or back again."""
    if backward:  # x is [B, 4, C, H, W], of which the flat order of the last two counts
        h, w = x.shape[-2:]
        a, b, c, d = x.flatten(-2).unbind(1)
        down, up = (y.unflatten(-1, (w, h)).mT.flatten(-2) for y in (b, d.flip(-1)))
        return torch.stack([a, down, c.flip(-1), up], 1) if each else a + down + c.flip(-1) + up
    a, b, c, d = x.unbind(1) if each else (x, x, x, x)
    return torch.stack([a.flatten(-2), b.mT.flatten(-2), c.flatten(-2).flip(-1), d.mT.flatten(-2).flip(-1)], 1)


_IMAGE, _FOUR = rg.tensor("B", "C", "H", "W"), rg.tensor("B", 4, "C", "H", "W")
_IMAGES = dict(B=(1, 2), C=(1, 3), H=[7, 32, 1, 40], W=[9, 32, 1, 33])
# expected: right, of all layouts (copied); no `loads`, what is masked is not stored
VMAMBA.add("vmamba_cross_scan", _cross_scan, _four_ways, dict(x=_IMAGE), sizes=_IMAGES)
# expected: right, of all layouts. In bfloat16 it adds bfloat16 numbers.
VMAMBA.add("vmamba_cross_merge", _cross_merge, partial(_four_ways, backward=True), dict(y=_FOUR), sizes=_IMAGES)


# expected: right (channels last on both sides)
VMAMBA.add(
    "vmamba_cross_scan_channels_last",
    lambda x: _cross_scan(x, False, False),
    lambda x: _four_ways(x.permute(0, 3, 1, 2)).permute(0, 3, 1, 2),
    dict(x=rg.tensor("B", "H", "W", "C")),
    sizes=_IMAGES,
)
# expected: true bug, bounds: the branch of merging one by one loads without a mask, so that H or W that is no multiple
# of 32 reads before the beginning and beyond the end of grad_out in the backward. Numbers right.
VMAMBA.add(
    "vmamba_cross_scan_each",
    lambda x: _cross_scan(x, True, True, True),
    partial(_four_ways, each=True),
    dict(x=_FOUR),
    sizes=_IMAGES,
)
# expected: the same true bug in the forward
VMAMBA.add(
    "vmamba_cross_merge_each",
    lambda y: _cross_merge(y, True, True, True),
    partial(_four_ways, each=True, backward=True),
    dict(y=_FOUR),
    sizes=_IMAGES,
)

# odunola499/transducer: transducer/losses/rnnt/rnnt_triton.py. float32 on CUDA (it says so); blank is 0 here, without
# fastemit and clamp. Lengths of frames and labels follow from the number in the batch.


def _lengths(acts: Tensor) -> tuple[Tensor, Tensor]:
    number, frames, labels = torch.arange(len(acts), device=acts.device), acts.shape[1], acts.shape[2] - 1
    return frames - number % frames, labels - number % (labels + 1)


def _rnnt(acts: Tensor, labels: Tensor, reduction: str) -> Tensor:
    root = CLONES / "odunola499/transducer/transducer"
    bare("transducer", root)
    bare("transducer.commons", root / "commons", Loss=torch.nn.Module)
    bare("transducer.losses", root / "losses")
    bare("transducer.losses.rnnt", root / "losses/rnnt")
    loss = apply("transducer.losses.rnnt.rnnt_triton", "_RNNTTriton")
    return loss(acts, labels, *_lengths(acts), 0, reduction, 0.0, 0.0)


def _rnnt_sum(acts: Tensor, labels: Tensor, *, reduction: str) -> Tensor:
    logp, index = log_softmax(acts), torch.arange(len(acts), device=acts.device)
    frames, count = _lengths(acts)
    rows: list[list[Tensor]] = []
    for t in range(acts.shape[1]):
        row: list[Tensor] = []
        for u in range(acts.shape[2]):
            ways = [rows[-1][u] + logp[:, t - 1, u, 0]] if t else []
            if u:
                ways.append(row[-1] + logp[index, t, u - 1, labels[:, u - 1]])
            row.append(torch.stack(ways).logsumexp(0) if ways else torch.zeros_like(logp[:, 0, 0, 0]))
        rows.append(row)
    alpha = torch.stack([torch.stack(row, -1) for row in rows], 1)
    costs = -alpha[index, frames - 1, count] - logp[index, frames - 1, count, 0]
    return costs if reduction == "none" else costs.mean()[None]


# expected (both): numbers right. Within one program scalars are stored, and loaded again by the next step of the loop,
# without a barrier: a race on a GPU (one thread stores, all threads load). Layouts right but for labels and lengths,
# which are taken for contiguous without a check.
for _reduction in ("none", "mean"):
    RNNT.add(
        f"transducer_rnnt_{_reduction}",
        partial(_rnnt, reduction=_reduction),
        partial(_rnnt_sum, reduction=_reduction),
        dict(acts=rg.tensor("B", "T", "U+1", "V"), labels=rg.tensor("B", "U", dtype="int64", low=1, high="V")),
        sizes=dict(B=[3, 1], T=[5, 1, 2], U=[3, 1, 2], V=[6, 2, 130]),
        dtypes=SINGLE,
    )

# databricks/megablocks: megablocks/ops. Indices as its own dmoe makes them: tokens sorted by expert, int32.

_MEGA = {
    "stk": "stanford-futuredata/stk/stk",
    "stk.backend": "stanford-futuredata/stk/stk/backend",
    "megablocks": "databricks/megablocks/megablocks",
    "megablocks.backend": "databricks/megablocks/megablocks/backend",
    "megablocks.ops": "databricks/megablocks/megablocks/ops",
}


def _mega(name: str) -> Callable[..., Any]:
    return within(_MEGA, of(f"megablocks.ops.{name}", name))


def _bins(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where each choice goes, by expert: the sorted experts, what is sorted to where, where each expert ends."""
    ids, order = chosen.flatten().sort(stable=True)
    ends = chosen.flatten().bincount(minlength=experts).cumsum(0)
    return ids.int(), order.int(), ends.int()


def _padded(ends: Tensor) -> Tensor:
    """Ends where each expert's rows are padded to a multiple of 8."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    return ((counts + 7) // 8 * 8).cumsum(0).int()


def _starts(ends: Tensor) -> Tensor:
    return F.pad(ends, (1, 0))[:-1].long()


def _gathered(x: Tensor, chosen: Tensor, experts: int) -> Tensor:
    return x[_bins(chosen, experts)[1].long() // chosen.shape[1]]


def _padded_gathered(x: Tensor, chosen: Tensor, experts: int) -> Tensor:
    ids, _, ends = _bins(chosen, experts)
    padded = _padded(ends)
    place = torch.arange(len(ids), device=x.device) - _starts(ends)[ids.long()] + _starts(padded)[ids.long()]
    rows = _gathered(x, chosen, experts)
    return torch.zeros(int(padded[-1]), x.shape[1], dtype=x.dtype, device=x.device).index_add(0, place, rows)


def _places(chosen: Tensor, experts: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Which sorted choices find room, and which row of [experts, capacity] each of them gets."""
    ids, _, ends = _bins(chosen, experts)
    rank = torch.arange(len(ids), device=chosen.device) - _starts(ends)[ids.long()]
    kept = rank < capacity
    return kept, ids.long()[kept] * capacity + rank[kept]


def _binned_gathered(x: Tensor, chosen: Tensor, experts: int, capacity: int) -> Tensor:
    kept, place = _places(chosen, experts, capacity)
    rows = _gathered(x, chosen, experts)[kept]
    empty = torch.zeros(experts * capacity, x.shape[1], dtype=x.dtype, device=x.device)
    return empty.index_add(0, place, rows).unflatten(0, (experts, capacity))


def _binned_scattered(x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    experts, capacity, width = x.shape
    order = _bins(chosen, experts)[1].long()
    kept, place = _places(chosen, experts, capacity)
    rows = x.flatten(0, 1)[place] * w[order[kept], None]
    empty = torch.zeros(len(chosen), width, dtype=x.dtype, device=x.device)
    return empty.index_add(0, order[kept] // chosen.shape[1], rows)


def _scattered(x: Tensor, w: Tensor, chosen: Tensor, experts: int) -> Tensor:
    order = _bins(chosen, experts)[1].long()
    empty = torch.zeros(len(chosen), x.shape[1], dtype=x.dtype, device=x.device)
    return empty.index_add(0, order // chosen.shape[1], x * w[order, None])


def _mega_gather(x: Tensor, chosen: Tensor, experts: int) -> Tensor:
    ids, order, ends = _bins(chosen, experts)
    return _mega("gather")(x, order, ids, ends, chosen.shape[1])


def _mega_padded_gather(x: Tensor, chosen: Tensor, experts: int) -> Tensor:
    ids, order, ends = _bins(chosen, experts)
    return _mega("padded_gather")(x, order, ids, ends, _padded(ends), chosen.shape[1])


def _mega_binned_gather(x: Tensor, chosen: Tensor, experts: int, capacity: int) -> Tensor:
    _, order, ends = _bins(chosen, experts)
    return _mega("binned_gather")(x, order, ends, capacity, chosen.shape[1])


def _mega_binned_scatter(x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    _, order, ends = _bins(chosen, len(x))
    return _mega("binned_scatter")(x, order, w, ends, chosen.shape[1])


def _mega_scatter(x: Tensor, w: Tensor, chosen: Tensor, experts: int) -> Tensor:
    ids, order, ends = _bins(chosen, experts)
    return _mega("scatter")(x, order, ids, w, ends, chosen.shape[1])


_CHOSEN = rg.tensor("T", 2, dtype="int64", low=0, high="E")
_EXPERTS = dict(T=[20, 1, 4], D=[1, 70, 300], E=[4, 1, 6])
# expected (both): right for contiguous x. Layouts, true bug: x is taken for contiguous without a check (grad_out is
# copied): a transposed one is wrong, cut out rows read outside.
for _name, _function, _reference in (
    ("gather", _mega_gather, _gathered),
    ("padded_gather", _mega_padded_gather, _padded_gathered),
):
    MEGA.add(
        f"megablocks_{_name}",
        _function,
        _reference,
        dict(x=rg.tensor("T", "D"), chosen=_CHOSEN, experts=rg.size("E")),
        sizes=_EXPERTS,
    )
# expected: right, tokens beyond the capacity are dropped in both directions; layouts of x as above
MEGA.add(
    "megablocks_binned_gather",
    _mega_binned_gather,
    _binned_gathered,
    dict(x=rg.tensor("T", "D"), chosen=_CHOSEN, experts=rg.size("E"), capacity=rg.size("C")),
    sizes=_EXPERTS | dict(C=[3, 1, 16]),
)
# expected: right; `loads` in the gradient of the weights where D is no multiple of BLOCK_X (64 to 256): masked lanes
# of x and of grad_out are multiplied and added. Layouts of x and w as above.
MEGA.add(
    "megablocks_binned_scatter",
    _mega_binned_scatter,
    _binned_scattered,
    dict(x=rg.tensor("E", "C", "D"), w=rg.tensor("2*T"), chosen=_CHOSEN),
    sizes=_EXPERTS | dict(C=[3, 1, 16]),
)
# expected: as megablocks_binned_scatter
MEGA.add(
    "megablocks_scatter",
    _mega_scatter,
    _scattered,
    dict(x=rg.tensor("2*T", "D"), w=rg.tensor("2*T"), chosen=_CHOSEN, experts=rg.size("E")),
    sizes=_EXPERTS,
)


if __name__ == "__main__":
    print_commands(*_COMMITS.values(), _STK)
