"""Specs of ops of eight of fourteen repositories that nobody here had run or read, as they were written before any ran.

    python benchmarks/outside_triton/repositories.py    # the commands that clone them to build/repositories, or $CLONES

Beside each spec stands as `# expected:` what reading its kernel predicted. `loads` stands for a tl.load with a mask and
without `other` whose masked lanes enter a sum or a dot: 0 on NVIDIA today, undefined by Triton's documentation. All is
imported at the first call; packages whose own __init__ wants a GPU, or what is not installed, are entered by their
submodules. Run them apart from other libraries: one has a top-level `kernels`, which transformers takes for another.
repositories_further.py has the other six.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from specs import SINGLE, apply, of, registries, rms, softmax
from torch import Tensor

import retrograd as rg

CLONES = Path(os.environ.get("CLONES", "build/repositories")).resolve()
_COMMITS = {
    "sae": "openai/sparse_autoencoder@4965b941e9eb590b00b253a2c406db1e1b193942",
    "linearrnn": "sustcsonglin/flash-linear-rnn@6ea89803e0cff9baf9606cb8a59d26deb704cc7d",
    "xformers": "facebookresearch/xformers@ca6d2aa0d43241fc8a8dcd872debc2406160160d",
    "appliedai": "pytorch-labs/applied-ai@4f8c39eb70d92e3848c65347ca077c8e723c74fd",
    "fa2mask": "alexzhang13/flashattention2-custom-mask@817091628883aab3d43c176218805fe16832aa04",
    "sla": "thu-ml/SLA@d973e55ea5b5b5fd0bc5141959e8410f0d366336",
    "msdatriton": "rziga/msda-triton@90cda22eb5bb17db93ddfcc7feb3903d29acf6da",
    "nsatriton": "XunhaoLai/native-sparse-attention-triton@9bea856c911ebf263be88d797fb28458f82f1d94",
    "equitriton": "IntelLabs/EquiTriton@85f38e6de5b480fcece17b5b5530421335ee57f9",
    "anemoi": "ecmwf/anemoi-core@2cb9b6e18366ee0bbebc96b9bddd39b81298cf98",
    "attorch": "BobMcDear/attorch@67c2772baf33913ef51c2d1064f746ca17b63749",
    "xma": "open-lm-engine/accelerated-model-architectures@384ed0a7bd82ced1f40609603dd541cac5416844",
    "scattermoe": "shawntan/scattermoe@47b5e1502e5a10e82c8e5945d761b877849871e7",
    "hstu": "facebookresearch/generative-recommenders@2e81fab69a497fb5e24cd23569adf1e78070e4ec",
}
_SOURCES = {"IntelLabs/EquiTriton": "src", "rziga/msda-triton": "src"}  # packages that do not lie at the top
REPOSITORIES = registries(_COMMITS)
for _repository in (commit.partition("@")[0] for commit in _COMMITS.values()):
    sys.path.append(str(CLONES / _repository / _SOURCES.get(_repository, "")))
SAE, LINEARRNN, XFORMERS, APPLIED, FA2, SLA, MSDA, NSA, *_ = REPOSITORIES.values()
HALF, SHORT = ("float16",), ("float16", "bfloat16")
MATRIX, ROW = rg.tensor("M", "N"), rg.tensor("N")
ROWS = dict(M=(1, 40), N=(2, 200))
LABELS = rg.tensor("M", dtype="int64", low=0, high="N")


def bare(name: str, path: Path, **attributes: Any) -> None:
    """A package of which only submodules are imported: its own __init__ wants CUDA, or what is not installed."""
    if name not in sys.modules:
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(path)]
        for key, value in attributes.items():
            setattr(package, key, value)


def print_commands(*commits: str) -> None:
    """What clones these, as `owner/name@hash`."""
    for name, _, commit in (each.partition("@") for each in commits):
        print(f"git clone https://github.com/{name} {CLONES / name} && git -C {CLONES / name} checkout {commit}")


def layer(x: Tensor, w: Tensor, b: Tensor, eps: float = 1e-5) -> Tensor:
    return rms(x - x.mean(-1, keepdim=True), w, eps) + b


# openai/sparse_autoencoder: sparse_autoencoder/kernels.py.


def _decoded(indices: Tensor, values: Tensor, w: Tensor) -> Tensor:
    return (values[..., None] * w[indices]).sum(1)


# expected: values and gradients right where A*K is a multiple of 128 and D a power of two; otherwise `loads`: in the
# gradient of w, last_k = tl.min(K_coords) takes masked lanes for indices (if not 0: an atomic outside of `out`); in
# that of values, tl.sum(dense1 * dense2col) adds masked lanes where D is no power of two. grad_out that is not
# contiguous raises AssertionError, with a message that says so: documented refusal, though .sum().backward() does it.
# Extremes: an inf or NaN in w is lost where the value is 0 (`if v != 0`).
SAE.add(
    "sae_decoder",
    lambda indices, values, w: apply("sparse_autoencoder.kernels", "TritonDecoderAutograd")(indices, values, w.T),
    _decoded,
    dict(
        indices=rg.tensor("A", "K", dtype="int64", low=0, high="R"),
        values=rg.tensor("A", "K"),
        w=rg.tensor("R", "D"),
    ),
    sizes=dict(A=[40, 1, 32], K=[3, 1, 4], R=[17, 64], D=[24, 32]),
    dtypes=SINGLE,
    layouts="contiguous",
)
# expected: right; forward `loads` where N is no power of two (both masked loads lack other, and are squared and
# added). The backward is torch. Its target gets None by design. Layouts: asserts stride(1) == 1.
SAE.add(
    "sae_mse",
    of("sparse_autoencoder.kernels", "mse"),
    lambda output, target: (output.float() - target.float()).square().mean(),
    dict(output=MATRIX, target=rg.tensor("M", "N", grad=False)),
    sizes=ROWS,
    dtypes=("float32", "float16"),
    layouts="contiguous",
)

# sustcsonglin/flash-linear-rnn: linear_rnn/scan_triton. Channels are multiples of 256 (asserted).


def _complex_scan(x: Tensor, y: Tensor, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """h = (f + ig) h + x + iy; [B, L, C]."""
    re, im, res, ims = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]), [], []
    for x_t, y_t, f_t, g_t in zip(*(z.unbind(1) for z in (x, y, f, g)), strict=True):
        re, im = re * f_t - im * g_t + x_t, re * g_t + im * f_t + y_t
        res.append(re)
        ims.append(im)
    return torch.stack(res, 1), torch.stack(ims, 1)


def _tied_scan(v: Tensor, f: Tensor) -> Tensor:
    """h = f h + (1 - f) v, where f comes before its sigmoid."""
    h, states, f = torch.zeros_like(v[:, 0]), [], torch.sigmoid(f)
    for v_t, f_t in zip(v.unbind(1), f.unbind(1), strict=True):
        h = f_t * h + (1 - f_t) * v_t
        states.append(h)
    return torch.stack(states, 1)


_STEPS = rg.tensor("B", "L", "C")
_SCANS = dict(B=(1, 3), L=[1, 2, 9, 5], C=[512, 256])
# expected (both): the numbers of a first backward are right, but it writes the gradients over the saved inputs, which
# are the user's own tensors where these are contiguous: mutation of the inputs, and a second backward is wrong.
# grad_out is read as if contiguous: wrong, and out of bounds, for an expanded or transposed one (layouts).
LINEARRNN.add(
    "linearrnn_complex",
    apply("linear_rnn.scan_triton.complex_rnn", "TritonSequentialScan_Complex"),
    _complex_scan,
    dict(x=_STEPS, y=_STEPS, f=rg.tensor("B", "L", "C", scale=0.5), g=rg.tensor("B", "L", "C", scale=0.5)),
    sizes=_SCANS,
)
LINEARRNN.add(
    "linearrnn_tied_fused",
    apply("linear_rnn.scan_triton.real_rnn_tie_input_gate", "TritonSequentialScanFused"),
    _tied_scan,
    dict(v=_STEPS, f=_STEPS),
    sizes=_SCANS,
)

# facebookresearch/xformers: ops/indexing.py. Indices are unique, and fewer than rows; the package's root is left out.


def _xformers(name: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        bare("xformers", CLONES / "facebookresearch/xformers/xformers", _is_triton_available=lambda: True)
        return of("xformers.ops.indexing", name)(*args)

    return call


def _backwards(rows: int, count: int, device: torch.device) -> Tensor:
    """The last `count` of so many rows, from the last on."""
    return rows - 1 - torch.arange(count, device=device)


def _taken(a: Tensor, b: Tensor, extra: int) -> list[Tensor]:
    return [_backwards(len(x), len(x) - extra, x.device) for x in (a, b)]


# expected: right for contiguous inputs. grad_out that is expanded (.sum().backward()) raises ValueError in the
# backward, as its strides are compared with those of a fresh tensor: true bug, as no user chooses them. Layouts: the
# forward writes its output by the strides of the source, so a transposed one gives wrong values or writes outside:
# true bug (no check in the forward).
XFORMERS.add(
    "xformers_index_select_cat",
    lambda a, b: _xformers("index_select_cat")((a, b), _taken(a, b, 2)),
    lambda a, b: torch.cat([x[i].flatten() for x, i in zip((a, b), _taken(a, b, 2), strict=True)]),
    dict(a=rg.tensor("I+2", "D"), b=rg.tensor("J+2", "E")),
    sizes=dict(I=(1, 9), J=(1, 9), D=[1, 17, 600, 64], E=[1, 33, 32]),
)


def _index_add(x: Tensor, source: Tensor, scaling: Tensor) -> Tensor:
    return x.index_add(0, _backwards(len(x), len(source), x.device), 0.7 * source * scaling)


def _scaled_index_add(x: Tensor, source: Tensor, scaling: Tensor) -> Tensor:
    chosen = _backwards(len(x), len(source), x.device)
    return _xformers("scaled_index_add")(x.clone(), chosen, source, scaling, 0.7)


# expected: right for contiguous inputs and grad_out (of scaling it returns one gradient a row, which autograd adds up,
# in bfloat16 with some loss). An expanded or transposed grad_out raises ValueError in the backward: true bug,
# .sum().backward() does it. Writes over x by design, hence the clone.
XFORMERS.add(
    "xformers_scaled_index_add",
    _scaled_index_add,
    _index_add,
    dict(x=rg.tensor("B", "M", "D"), source=rg.tensor("I", "M", "D"), scaling=rg.tensor("D")),
    sizes=dict(B=[9, 1, 5], I=[9, 1, 4], M=(1, 5), D=[1, 17, 600, 64]),
    where="I <= B",
    layouts="contiguous",
)
# pytorch-labs/applied-ai: kernels/triton/training.

# expected: right for contiguous x and grad_out. Layouts: x.view(-1, n) leaves a transposed matrix as it is, of which
# the kernels know the row stride only: wrong values and reads outside; likewise grad_out (expanded by .sum()): true
# bugs. Of three dimensions, a transposed x or grad_out raises in view. float32 alone: tl.exp takes no half
# (compilation error).
APPLIED.add(
    "appliedai_softmax",
    apply("kernels.triton.training.fused_softmax.softmax", "triton_softmax"),
    softmax,
    dict(x=MATRIX),
    sizes=ROWS,
    dtypes=SINGLE,
)
# expected: right, also of other layouts (copied where the last stride is not 1)
APPLIED.add(
    "appliedai_rms_norm",
    of("kernels.triton.training.rms_norm.fused_rms_norm", "fused_rms_norm_fn"),
    rms,
    dict(x=MATRIX, weight=ROW),
    sizes=ROWS,
)

# alexzhang13/flashattention2-custom-mask. Steps are multiples of 128 (asserted), p is float16, so are the inputs.


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return softmax(scores if mask is None else scores.masked_fill(~_seen(mask), -torch.inf)) @ v


def _seen(mask: Tensor) -> Tensor:
    """Each step sees itself, so that no row is empty."""
    return mask | torch.eye(mask.shape[-1], dtype=torch.bool, device=mask.device)


def _masked_fa2(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    mask = None if mask is None else _seen(mask).int()
    return of("fa2_custom_mask.fa2_custom_mask", "flash_attention_custom_mask")(q, k, v, mask, q.shape[-1] ** -0.5)


_QKV = {name: rg.tensor("B", "H", "T", "D") for name in "qkv"}
_LONG = dict(B=[2, 1], H=[2, 1], T=[128, 256], D=[16, 32, 64])
# expected (both): true bug. Forward right; the backward goes through the blocks of 128 as if the mask were causal:
# keys get no gradient from earlier blocks of queries, queries none from later keys, and blocks below the diagonal are
# taken for unmasked in dk and dv: wrong gradients of q, k, v at T=256, right at T=128. A head of 16, which it accepts,
# compiles no configuration (static_assert BLOCK_N <= HEAD_DIM): an error. grad_out that is not contiguous raises
# AssertionError. Strides of k and v other than those of q are wrong in the forward (its offsets are those of q) and
# refused in the backward.
FA2.add("fa2mask_random", _masked_fa2, _attention, _QKV | dict(mask=rg.tensor("B", "H", "T", "T", dtype="bool")),
        sizes=_LONG, dtypes=HALF)  # fmt: skip
FA2.add("fa2mask_none", _masked_fa2, _attention, _QKV, sizes=_LONG, dtypes=HALF)

# thu-ml/SLA: sparse_linear_attention/kernel.py. Blocks of 64 (the setting that it recommends); contiguous inputs
# (asserted).


def _blocks(steps: int, device: torch.device) -> Tensor:
    """Of each block of 64 queries the blocks of keys: its own and the next, around; [blocks, at most 2]."""
    count = (steps + 63) // 64
    own = torch.arange(count, device=device)[:, None]
    return torch.cat([own, (own + 1) % count], 1)[:, : min(2, count)]


def _sparse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    chosen = _blocks(q.shape[2], q.device)
    lut = chosen.expand(*q.shape[:2], *chosen.shape).contiguous()
    kept = torch.zeros(*lut.shape[:3], lut.shape[2], dtype=torch.int8, device=q.device).scatter(-1, lut, 1)
    return apply("sparse_linear_attention.kernel", "_attention")(q, k, v, kept, lut, lut.shape[-1], 64, 64)


def _blockwise(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    block = torch.arange(q.shape[2], device=q.device) // 64
    seen = (_blocks(q.shape[2], q.device)[block][:, :, None] == block).any(1)
    return softmax((q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)) @ v


# expected: right. `loads` where T is no multiple of 64 (q, k, v and grad_out beyond the end go into dots, times 0:
# harmful only if they are inf or NaN).
SLA.add(
    "sla_sparse_attention",
    _sparse,
    _blockwise,
    _QKV,
    sizes=dict(B=[2, 1], H=[2, 1], T=[192, 64, 100, 33, 128], D=[32, 64]),
    dtypes=SHORT,
    layouts="contiguous",
)

# rziga/msda-triton. Its __init__ asks for the version of the distribution; its public function falls back on torch,
# silently, where the kernels raise, so the inner one is taken.

_LEVELS = ((4, 6), (2, 3), (1, 2))


def _msda(img: Tensor, points: Tensor, weights: Tensor, *, padding: str, corners: bool) -> Tensor:
    found = importlib.metadata.version
    importlib.metadata.version = lambda name: "0" if name == "msda_triton" else found(name)
    try:
        frontend = import_module("msda_triton.frontend")
    finally:
        importlib.metadata.version = found
    shapes = torch.tensor(_LEVELS, device=img.device)
    return frontend.triton_multiscale_deformable_attention(img, shapes, points, weights, padding, corners)


def _sampled(img: Tensor, points: Tensor, weights: Tensor, *, padding: str, corners: bool) -> Tensor:
    """img [B, 32, H, C], points [B, N, H, 3, P, 2] as x and y in 0 to 1, weights [B, N, H, 3, P]."""
    levels, out = img.split([h * w for h, w in _LEVELS], 1), 0
    for i, (level, (h, w)) in enumerate(zip(levels, _LEVELS, strict=True)):
        batch, _, heads, channels = level.shape
        image = level.permute(0, 2, 3, 1).reshape(batch * heads, channels, h, w)
        grid = 2 * points[:, :, :, i].transpose(1, 2).flatten(0, 1) - 1
        found = F.grid_sample(image, grid, mode="bilinear", padding_mode=padding, align_corners=corners)
        share = weights[:, :, :, i].transpose(1, 2).flatten(0, 1)[:, None]
        out = out + (found * share).sum(-1).unflatten(0, (batch, heads)).permute(0, 3, 1, 2)
    return out


# expected (both; "border" with corners aligned): right for contiguous inputs. Layouts: true bug, gradients are made by
# zeros_like(x), and the kernel writes to .contiguous() of it, which is a copy where x is not contiguous: all zeros
# come back. `loads`: with "border", masked lanes of the image (a level or a point too many) enter the sum, times a
# weight of 0.
for _padding, _corners in (("zeros", False), ("border", True)):
    MSDA.add(
        f"msdatriton_{_padding}",
        partial(_msda, padding=_padding, corners=_corners),
        partial(_sampled, padding=_padding, corners=_corners),
        dict(
            img=rg.tensor("B", 32, "H", "C"),
            points=rg.tensor("B", "N", "H", 3, "P", 2, low=0.02, high=0.98),
            weights=rg.tensor("B", "N", "H", 3, "P", low=0.0, high=1.0),
        ),
        sizes=dict(B=[2, 1], N=[1, 5], H=[1, 2], C=[5, 16, 8], P=[1, 3, 4]),
        dtypes=SINGLE,
    )

# XunhaoLai/native-sparse-attention-triton: weighted_pool.py. Half precision alone, kernels of 16, ... (asserted).


def _pooled(x: Tensor, w: Tensor, n: int) -> Tensor:
    """Windows of 16 steps, 8 apart, of two sequences, the first of n steps; none of a shorter one. [.., H, D]"""
    windows = [s.unfold(0, 16, 8) for s in (x[:n], x[n:]) if len(s) >= 16]
    return (torch.cat(windows) * w[:, None]).sum(-1)


def _pool(x: Tensor, w: Tensor, n: int) -> Tensor:
    ends = torch.tensor([0, n, len(x)], dtype=torch.int32, device=x.device)
    return of("native_sparse_attention.ops.triton.weighted_pool", "weightedpool_compress")(x, w, ends, 16, 8)[0]


# expected: right, of all layouts. In float16 the sum over a window is one of float16 numbers (tl.sum raises bfloat16
# alone to float32), so it may be less precise than float16 can be.
NSA.add(
    "nsatriton_weighted_pool",
    _pool,
    _pooled,
    dict(x=rg.tensor("L+T", "H", "D"), w=rg.tensor("H", 16), n=rg.size("L")),
    sizes=dict(L=[16, 70, 40], T=[7, 33, 24], H=[1, 2], D=[5, 32, 16]),
    dtypes=SHORT,
)


if __name__ == "__main__":
    print_commands(*_COMMITS.values())
