"""More rows of `unseen_kernels.py`: kernels of another 16 libraries.

pip install --target libs --no-deps flash-sinkhorn==0.4.1 flash-colsum==0.1.0 torch-fps==0.6.0 lanczos-triton==0.1.0 \
    colortransfer-triton==0.1.0 late-interaction-kernels==0.4.5 jvp-flash-attention==0.14.0 flashnn==0.1.1 \
    mingru-scans==0.2.0 triton-augment==0.3.0 localcorr==0.1.1 fasterkernels==0.2.0 ibu-boost==0.1.1 \
    gemlite==0.6.0.post2 sageattention==1.0.6 bitsandbytes==0.50.2
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

import retrograd as rg

Pairs = list[tuple[Any, Any]]
MORE: dict[str, Callable[[], Pairs]] = {}


def row(run: Callable[[], Pairs]) -> Callable[[], Pairs]:
    """Keep a call: it returns pairs of what the library gives and what it should be."""
    MORE[run.__name__] = run
    return run


def draw(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    """Ordinary numbers."""
    return torch.randn(*shape).to(dtype).requires_grad_(grad)


def of(path: str) -> Any:
    """A function by module and name."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def backward(got: torch.Tensor, want: torch.Tensor, inputs: list[torch.Tensor]) -> Pairs:
    """Outputs and gradients of both."""
    g = torch.randn_like(got)
    pairs = zip(torch.autograd.grad(got, inputs, g), torch.autograd.grad(want, inputs, g.to(want)), strict=True)
    return [(got, want), *pairs]


def shares(q: torch.Tensor, k: torch.Tensor, *, causal: bool = False) -> torch.Tensor:
    """Softmax of scores, the last queries beside the last keys."""
    scores = q.float() @ k.float().transpose(-1, -2) / math.sqrt(q.shape[-1])
    late = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + k.shape[-2] - q.shape[-2])
    return (scores.masked_fill(late, -math.inf) if causal else scores).softmax(-1)


@row
def colsum() -> Pairs:
    q, k = draw(1, 2, 150, 64), draw(1, 2, 150, 64)
    got = of("flash_colsum.kernel_noncausal._flash_colsum_non_batched")(q, k, 1 / 8)
    return [(got.view(-1), shares(q, k).mean((0, 1, 2)))]


@row
def colsum_batched() -> Pairs:
    q, k = draw(3, 2, 150, 64), draw(3, 2, 150, 64)
    got = of("flash_colsum.kernel_noncausal_batched._flash_colsum_batched")(q, k, 1 / 8)
    return [(got, shares(q, k).mean((1, 2)))]


@row
def colsum_causal() -> Pairs:
    q, k = draw(1, 2, 16, 64), draw(1, 2, 100, 64)
    got = of("flash_colsum.kernel_causal._flash_colsum_causal")(q, k, 1 / 8)
    return [(got.view(-1), shares(q, k, causal=True).mean((0, 1, 2)))]


def _farthest(points: torch.Tensor, count: int) -> torch.Tensor:
    chosen, least = [0], torch.full((len(points),), math.inf)
    for _ in range(count - 1):
        least = torch.minimum(least, (points - points[chosen[-1]]).square().sum(-1))
        chosen.append(int(least.argmax()))
    return torch.tensor(chosen)


@row
def farthest_points() -> Pairs:
    points, mask, start = draw(2, 100, 3), torch.ones(2, 100, dtype=torch.bool), torch.zeros(2, dtype=torch.long)
    want = torch.stack([_farthest(p, 12) for p in points])
    index, assigned = of("torch_fps._triton.fps_assign")(points, mask, start, 12)
    near = torch.stack([torch.cdist(p, p[i]).argmin(-1) for p, i in zip(points, want, strict=True)])
    return [(index, want), (assigned, near)]


@row
def farthest_points_and_neighbours() -> Pairs:
    points, mask, start = draw(1, 80, 3), torch.ones(1, 80, dtype=torch.bool), torch.zeros(1, dtype=torch.long)
    index, near = of("torch_fps._triton.fps_knn")(points, mask, start, 8, 4)
    want = _farthest(points[0], 8)
    nearest = torch.cdist(points[0][want], points[0]).topk(4, largest=False).indices
    return [(index[0], want), (near[0].sort(-1)[0], nearest.sort(-1)[0])]


@row
def lanczos() -> Pairs:
    image = torch.rand(1, 3, 40, 30)
    got = of("lanczos_triton.resize")(image, (20, 15))
    flat = of("lanczos_triton.resize")(torch.full((1, 3, 40, 30), 0.5), (17, 19))
    return [
        (flat, torch.full((1, 3, 17, 19), 0.5)),
        (got.mean((2, 3)) - image.mean((2, 3)) < 0.1, torch.ones(1, 3) > 0),
    ]


@row
def colour_adain() -> Pairs:
    x, y = torch.rand(1, 3, 24, 20), torch.rand(1, 3, 30, 10) / 2
    got = of("colortransfer_triton.adain")(x, y, clamp=False)
    (sx, mx), (sy, my) = (torch.std_mean(t, (2, 3), keepdim=True) for t in (x, y))
    return [(got, (x - mx) / (sx.square() + 1e-5).sqrt() * (sy.square() + 1e-5).sqrt() + my)]


@row
def colour_wavelet() -> Pairs:
    x = torch.rand(1, 3, 24, 20)
    return [(of("colortransfer_triton.wavelet")(x, x.clone(), clamp=False), x)]


@row
def maxsim() -> Pairs:
    q, d = draw(3, 16, 64, grad=True), draw(4, 40, 64, grad=True)
    want = torch.einsum("qld,nmd->qnlm", q, d).amax(-1).sum(-1)
    return backward(of("late_interaction_kernels.maxsim")(q, d), want, [q, d])


@row
def maxsim_varlen() -> Pairs:
    q, d = draw(20, 64, grad=True), draw(70, 64, grad=True)
    ends = torch.tensor([0, 8, 20], dtype=torch.int32), torch.tensor([0, 30, 31, 70], dtype=torch.int32)
    rows = [
        torch.stack([(a @ b.T).amax(-1).sum() for b in d.split([30, 1, 39])]) for a in q.split([8, 12])
    ]  # fmt: skip
    return backward(of("late_interaction_kernels.maxsim_varlen")(q, d, *ends), torch.stack(rows), [q, d])


@row
def jvp_attention() -> Pairs:
    q, k, v = (draw(1, 2, 64, 32, grad=True) for _ in range(3))
    attention = of("jvp_flash_attention.jvp_attention.JVPAttn").fwd_dual
    return backward(attention(q, k, v, causal=True), shares(q, k, causal=True) @ v, [q, k, v])


@row
def flashnn_rms_norm_quantised() -> Pairs:
    x, w = draw(9, 100, dtype=torch.float16), draw(100, dtype=torch.float16)
    got, scale = of("flashnn.triton_kernels.rms_norm_dquant.triton_rmsnorm_dquant_forward")(x, w, 1e-6)
    y = F.rms_norm(x.float(), (100,), w.float(), 1e-6)
    off = (got.float() * scale.float()[:, None] - y).abs().amax(-1) <= 0.51 * y.abs().amax(-1) / 127 + 1e-2
    return [(off, torch.ones(9) > 0)]


@row
def flashnn_layer_norm() -> Pairs:
    x, w, b = (draw(*shape, dtype=torch.float16) for shape in ((9, 100), (100,), (100,)))
    got = of("flashnn.triton_kernels.layer_norm.triton_layer_norm_forward")(x, w, b, 1e-5)
    return [(got, F.layer_norm(x.float(), (100,), w.float(), b.float()))]


@row
def flashnn_attention() -> Pairs:
    q, k, v = (draw(1, 80, heads, 64, dtype=torch.float16) for heads in (4, 2, 2))
    got = of("flashnn.triton_kernels.flash_attn_v2.triton_flash_attention_forward")(q, k, v, True)
    k, v = (t.repeat_interleave(2, 2).transpose(1, 2) for t in (k, v))
    return [(got.transpose(1, 2), shares(q.transpose(1, 2), k, causal=True) @ v.float())]


@row
def mingru_linear() -> Pairs:
    a, b = torch.rand(2, 37, 20), draw(2, 37, 20)
    products, states = of("mingru.triton_scans.linear_scan_fwd")(a, b)
    want, h = [], torch.zeros(2, 20)
    for step in range(37):
        want.append(h := a[:, step] * h + b[:, step])
    return [(products, a.cumprod(1)), (states, torch.stack(want, 1))]


@row
def mingru_log() -> Pairs:
    a, b = F.logsigmoid(draw(2, 37, 20)), draw(2, 38, 20)
    got = of("mingru.triton_scans.parallel_scan_log_fwd")(a, b)
    return [(got, of("mingru.triton_scans.parallel_scan_log_recompute")(a, b))]


@row
def augment_saturation_and_normal() -> Pairs:
    x = torch.rand(2, 3, 20, 24)
    grey = (x * torch.tensor([0.2989, 0.587, 0.114]).view(3, 1, 1)).sum(1, keepdim=True)
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    normal = (x - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    module = import_module("triton_augment.functional")
    return [
        (module.adjust_saturation(x, 1.5), (1.5 * x - 0.5 * grey).clamp(0, 1)),
        (module.normalize(x, mean, std), normal),
        (module.horizontal_flip(x), x.flip(-1)),
        (module.rgb_to_grayscale(x), grey),
    ]


@row
def spatial_correlation() -> Pairs:
    a, b = draw(2, 20, 18, 17, grad=True), draw(2, 20, 18, 17, grad=True)
    got = of("localcorr.triton.spatial_corr.TritonSpatialCorrelationFunction").apply(a, b, 2)
    return backward(got, correlation(a, b), [a, b])


@row
def fs_attention() -> Pairs:
    q, k, v = (draw(1, 2, 128, 64, dtype=torch.float16) for _ in range(3))
    return [(of("fskernels.triton.triton_fa2.flash_attention_2_fwd")(q, k, v), shares(q, k) @ v.float())]


@row
def fs_paged_decode() -> Pairs:
    q, k, v = (draw(*shape, dtype=torch.float16) for shape in ((2, 4, 64), (6, 2, 16, 64), (6, 2, 16, 64)))
    table, lengths = torch.tensor([[0, 3], [5, 1]], dtype=torch.int32), torch.tensor([20, 32], dtype=torch.int32)
    got = of("fskernels.paged_attn.triton_paged_attn.paged_flash_decode")(q, k, v, table, lengths, 16)
    want = []
    for i, n in enumerate(lengths.tolist()):
        keys, values = (t[table[i].long()].transpose(0, 1).flatten(1, 2)[:, :n].repeat_interleave(2, 0) for t in (k, v))
        want.append((shares(q[i][:, None], keys) @ values.float())[:, 0])
    return [(got, torch.stack(want))]


@row
def boosting_histogram() -> Pairs:
    bins, node = torch.randint(-1, 8, (500, 6), dtype=torch.int32), torch.randint(3, (500,), dtype=torch.int32)
    g, h = draw(500), torch.rand(500)
    got = of("ibu_boost.kernels.screening_split_triton.build_histogram_triton")(bins, g, h, node, 3, 8)
    want = [torch.zeros(3, 6, 8) for _ in range(2)]
    for total, values in zip(want, (g, h), strict=True):
        for feature in range(6):
            known = bins[:, feature] >= 0
            at = node[known].long(), torch.full((int(known.sum()),), feature), bins[known, feature].long()
            total.index_put_(at, values[known], accumulate=True)
    return list(zip(got, want, strict=True))


@row
def gemlite_packing() -> Pairs:
    module = import_module("gemlite.bitpack")
    w = torch.randint(16, (24, 64), dtype=torch.uint8)
    packed, _ = module.pack_weights_over_cols_triton(w, 4, 32, False)
    return [(module.unpack_over_cols_triton(packed, 4, 64, torch.uint8), w)]


@row
def gemlite_activations() -> Pairs:
    x = draw(10, 96, dtype=torch.float16)
    got, scale = of("gemlite.quant_utils.scale_activations_per_token_triton_v1")(x, torch.int8)
    off = (got.float() * scale - x.float()).abs().amax(-1) <= 0.51 * x.float().abs().amax(-1) / 127
    return [(off, torch.ones(10) > 0)]


@row
def sage_attention() -> Pairs:
    q, k, v = (draw(1, 2, 160, 64, dtype=torch.float16) for _ in range(3))
    want = shares(q, k, causal=True) @ v.float()
    got = of("sageattention.sageattn")(q, k, v, is_causal=True)
    return [((got.float() - want).abs().max() < 0.03 * want.abs().max(), torch.tensor(True))]


@row
def bnb_blockwise() -> Pairs:
    module = import_module("bitsandbytes.backends.triton.kernels_8bit_quant")
    code = import_module("bitsandbytes.functional").create_dynamic_map()
    x = draw(1000)
    got, largest = module.quantize_blockwise_triton(x, code, 256)
    want = F.pad(x, (0, 24)).view(4, 256).abs().amax(-1)
    back = module.dequant_8bit_blockwise(got, largest, code, 256, dtype=torch.float32)
    return [(largest, want), ((back - x).abs().max() < 0.03 * x.abs().max(), torch.tensor(True))]


@row
def bnb_adam() -> Pairs:
    p, g, m, v = draw(700), draw(700), draw(700), torch.rand(700)
    betas, eps, lr, step = (0.9, 0.99), 1e-8, 1e-2, 3
    want_m, want_v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
    size = lr * math.sqrt(1 - betas[1] ** step) / (1 - betas[0] ** step)
    want = p - size * want_m / (want_v.sqrt() + eps * math.sqrt(1 - betas[1] ** step))
    update = of("bitsandbytes.backends.triton.kernels_optim.optimizer_update_32bit_impl")
    update("adam", g, p, m, v, None, 0.0, 0.0, *betas, 0.0, 0.0, eps, 0.0, step, lr, 1.0, False)
    return [(m, want_m), (v, want_v), (p, want)]


@row
def c_transform() -> Pairs:
    x, y, psi = draw(50, 8), draw(70, 8), draw(70)
    got, index = of("flash_sinkhorn.c_transform_fwd")(x, y, psi, allow_tf32=False)
    cost = (x[:, None] - y).square().sum(-1) - psi
    return [(got, cost.amin(-1)), (index.long(), cost.argmin(-1))]


@row
def sinkhorn_loss() -> Pairs:
    x, y = draw(60, 8, grad=True), draw(70, 8)
    loss = of("flash_sinkhorn.SamplesLoss")(
        "sinkhorn", blur=1.0, use_epsilon_scaling=False, eps=1.0, n_iters=30, debias=False
    )
    got = loss(x, y)
    (grad,) = torch.autograd.grad(got, x)
    return [(got.isfinite() & (got > 0), torch.tensor(True)), (grad.isfinite().all(), torch.tensor(True))]


def correlation(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Products with neighbours up to two pixels away, added up over channels."""
    wide, (height, width) = F.pad(b, (2, 2, 2, 2)), a.shape[-2:]
    rows = [[(a * wide[..., i : i + height, j : j + width]).sum(1) for j in range(5)] for i in range(5)]
    return torch.stack([torch.stack(row, 1) for row in rows], 1)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal, in the inputs' dtype."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    late = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(late, -math.inf).softmax(-1) @ v


_HEADS, _IMAGE = rg.tensor("B", "H", "T", "D"), rg.tensor("B", "C", "H", "W")
# Those with a backward, for `--verify`.
SPECS = {
    "maxsim": rg.op(
        lambda q, d: of("late_interaction_kernels.maxsim")(q, d),
        lambda q, d: torch.einsum("qld,nmd->qnlm", q, d).amax(-1).sum(-1),
        dict(q=rg.tensor("N", "L", "D"), d=rg.tensor("M", "S", "D")),
        sizes=dict(N=(1, 3), M=(1, 3), L=[1, 5, 16, 33], S=[1, 7, 40], D=[64, 128]),
    ),
    "jvp_attention": rg.op(
        lambda q, k, v: of("jvp_flash_attention.jvp_attention.JVPAttn").fwd_dual(q, k, v, causal=True),
        attention,
        dict(q=_HEADS, k=_HEADS, v=_HEADS),
        sizes=dict(B=(1, 2), H=(1, 2), T=[32, 64, 128], D=[16, 32, 64]),
    ),
    "spatial_correlation": rg.op(
        lambda a, b: of("localcorr.triton.spatial_corr.TritonSpatialCorrelationFunction").apply(a, b, 2),
        correlation,
        dict(a=_IMAGE, b=_IMAGE),
        sizes=dict(B=(1, 2), C=[1, 20, 65], H=[1, 5, 17], W=[1, 6, 18]),
    ),
}
