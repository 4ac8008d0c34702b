"""Kernels of public Triton programs that nobody wrote a spec for: each run as it is, on CPU tensors, beside a formula.

    pip install --target libs --no-deps conch-triton-kernels==1.3 mlstm-kernels==2.0.6 triton-sigmoid==0.1.2 \\
        flash-attention-softmax-n==0.3.2 moe-ops==0.1.0 cuda-triton-multiarch==0.2.2 saga-activation==0.2.0 \\
        flash-kmeans==0.3.1 grouped-mm-bf16==0.1.7 bm3d-triton==0.1.1 fused-turboquant==0.1.0
    PYTHONPATH=libs python benchmarks/unseen_kernels.py --out benchmarks/results/unseen-kernels.md
    PYTHONPATH=libs python benchmarks/unseen_kernels.py --verify

unseen_kernels_more.py has the rows of further libraries, and specs of three ops for `--verify`.

A row is a call of a library's function inside `retrograd.cpu_triton()`: what its launches did to memory, and how far
its results are from the formula's, in roundoffs of the result's dtype, of the result's largest element.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import retrograd as rg

sys.path.insert(0, str(Path(__file__).resolve().parent))
import unseen_kernels_more
from unseen_kernels_more import Pairs, backward, draw, of

ROWS: dict[str, Callable[[], Pairs]] = {}


def row(run: Callable[[], Pairs]) -> Callable[[], Pairs]:
    """Keep a call: it returns pairs of what the library gives and what it should be."""
    ROWS[run.__name__] = run
    return run


@row
def conch_silu_and_mul() -> Pairs:
    x = draw(5, 96, dtype=torch.bfloat16)
    a, b = x.float().chunk(2, -1)
    return [(of("conch.ops.activation.silu_and_mul.silu_and_mul")(x), F.silu(a) * b)]


@row
def conch_gelu_tanh_and_mul() -> Pairs:
    x = draw(5, 96)
    a, b = x.chunk(2, -1)
    return [(of("conch.ops.activation.gelu_tanh_and_mul.gelu_tanh_and_mul")(x), F.gelu(a, approximate="tanh") * b)]


@row
def conch_rms_norm() -> Pairs:
    x, w = draw(7, 100, dtype=torch.float16), draw(100, dtype=torch.float16)
    return [(of("conch.ops.normalization.rms_norm.rms_norm")(x, w, 1e-6), F.rms_norm(x.float(), (100,), w.float()))]


@row
def conch_fused_add_rms_norm() -> Pairs:
    x, r, w = draw(7, 100), draw(7, 100), draw(100)
    total = x + r
    y, residual = of("conch.ops.normalization.rms_norm.fused_add_rms_norm")(x, r, w, 1e-6)
    return [(y, F.rms_norm(total, (100,), w, 1e-6)), (residual, total)]


@row
def conch_gemma_rms_norm() -> Pairs:
    x, w = draw(7, 100), draw(100)
    want = F.rms_norm(x, (100,), 1 + w, 1e-6)  # x is overwritten
    return [(of("conch.ops.normalization.gemma_rms_norm.gemma_rms_norm")(x, w, 1e-6), want)]


@row
def conch_scaled_fp8_quant() -> Pairs:
    x, scale = draw(6, 40), torch.tensor([0.02])
    got, _ = of("conch.ops.quantization.fp8.scaled_fp8_quant")(x, scale)
    return [(got.float(), (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float())]


@row
def conch_scaled_int8_quant() -> Pairs:
    x, scale = draw(6, 40), torch.tensor([0.02])
    got, _ = of("conch.ops.quantization.int8.scaled_int8_quant")(x, scale)
    return [(got, (x * scale.reciprocal()).clamp(-128, 127).to(torch.int8))]  # it cuts, and says that it rounds


@row
def conch_rotary_embedding() -> Pairs:
    q, k, cache = draw(6, 128), draw(6, 64), draw(32, 32)
    at = torch.randint(32, (6,))
    cos, sin = cache[at].chunk(2, -1)

    def turned(x: torch.Tensor) -> torch.Tensor:
        a, b = x.view(6, -1, 32).chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat([a * c - b * s, b * c + a * s], -1).view_as(x)

    want = turned(q), turned(k)
    return list(
        zip(of("conch.ops.embedding.rotary_embedding.rotary_embedding")(at, q, k, 32, cache), want, strict=True)
    )


@row
def conch_nms() -> Pairs:
    corner = torch.rand(40, 2) * 10
    boxes, scores = torch.cat([corner, corner + 1 + 3 * torch.rand(40, 2)], 1), torch.rand(40)
    order, kept = scores.argsort(descending=True), list[int]()
    for i in order.tolist():
        a = boxes[i]
        sides = [(torch.minimum(a[2:], boxes[j][2:]) - torch.maximum(a[:2], boxes[j][:2])).clamp_min(0) for j in kept]
        areas = [float((boxes[j][2:] - boxes[j][:2]).prod() + (a[2:] - a[:2]).prod()) for j in kept]
        if all(float(s.prod()) / (area - float(s.prod())) <= 0.3 for s, area in zip(sides, areas, strict=True)):
            kept.append(i)
    return [(of("conch.ops.vision.nms.nms")(boxes, scores, 0.3), torch.tensor(kept))]


@row
def conch_voxelization() -> Pairs:
    module = import_module("conch.ops.vision.voxelization")
    param = module.VoxelizationParameter((0.0, 0.0, 0.0), (4.0, 4.0, 2.0), (1.0, 1.0, 1.0), 8)
    points = torch.rand(100, 4) * torch.tensor([4.0, 4.0, 2.0, 1.0])
    count, _, cells, number = module.generate_voxels(points, param)
    want, points_of = points[:, :3].floor().int().unique(dim=0, return_counts=True)
    many = len(want)
    return [
        (count.view(-1), torch.tensor([many], dtype=torch.int32)),
        (cells[:many, :3].unique(dim=0), want),
        (number[:many].sort()[0].long(), points_of.clamp_max(8).sort()[0]),
    ]


@row
def conch_quantize_4bit() -> Pairs:
    module = import_module("conch.ops.quantization.bitsandbytes.functional")
    x = draw(512)
    quantised, state = module.quantize_4bit(x, blocksize=64, quant_type="nf4")
    back = module.dequantize_4bit(quantised, state, quant_type="nf4")
    return [((back - x).abs().max() < 0.2 * x.abs().max(), torch.tensor(True))]


@row
def conch_copy_blocks() -> Pairs:
    keys, values = [draw(4, 256) for _ in range(2)], [draw(4, 256) for _ in range(2)]
    before = [t.clone() for t in (*keys, *values)]
    of("conch.ops.vllm.copy_blocks.copy_blocks")(keys, values, torch.tensor([[0, 2], [1, 3]]))
    for t in before:
        t[2], t[3] = t[0].clone(), t[1].clone()
    return list(zip((*keys, *values), before, strict=True))


@row
def conch_scaled_gemm() -> Pairs:
    a, b = (torch.randint(-50, 50, shape, dtype=torch.int8) for shape in ((48, 64), (64, 32)))
    left, right = torch.rand(48, 1), torch.rand(1, 32)
    got = of("conch.ops.quantization.gemm.scaled_gemm")(a, b, left, right, torch.float32)
    return [(got, (a.float() @ b.float()) * left * right)]


@row
def conch_paged_attention() -> Pairs:
    batch, heads, size, block = 2, 2, 32, 16
    q, k, v = draw(batch, heads, size), draw(8, block, heads, size), draw(8, block, heads, size)
    table, lengths = torch.tensor([[0, 3], [5, 1]], dtype=torch.int32), torch.tensor([20, 32], dtype=torch.int32)
    got = of("conch.ops.attention.paged_attention.paged_attention")(q, k, v, table, lengths)
    want = []
    for i, n in enumerate(lengths.tolist()):
        keys, values = (t[table[i].long()].flatten(0, 1)[:n].transpose(0, 1) for t in (k, v))
        want.append(F.scaled_dot_product_attention(q[i][:, None], keys, values)[:, 0])
    return [(got.view(batch, heads, size), torch.stack(want))]


def mlstm(q: Any, k: Any, v: Any, i: Any, f: Any) -> torch.Tensor:
    """A stabilised mLSTM, all steps at once."""
    steps = q.shape[2]
    logs = F.logsigmoid(f).cumsum(-1)
    decay = (logs[..., :, None] - logs[..., None, :] + i[..., None, :]).masked_fill(
        ~torch.ones(steps, steps, dtype=torch.bool).tril(), -math.inf
    )
    most = decay.amax(-1, keepdim=True)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) * (decay - most).exp()
    return scores @ v / (torch.maximum(scores.sum(-1, keepdim=True).abs(), (-most).exp()) + 1e-6)


def _chunkwise(path: str, **options: Any) -> Pairs:
    q, k, v = (draw(1, 2, 128, 64, grad=True) for _ in range(3))
    i, f = draw(1, 2, 128, grad=True), (draw(1, 2, 128) + 3).requires_grad_()
    own = of("mlstm_kernels.torch.chunkwise.native.fwbw.mlstm_chunkwise__native_custbw")
    got = of(path)(q, k, v, i, f, **options)
    # Its backward takes the normaliser for a constant, in torch as in Triton: gradients are not those of the formula.
    return [(got, mlstm(q, k, v, i, f)), *backward(got, own(q, k, v, i, f, chunk_size=64), [q, k, v, i, f])]


@row
def mlstm_limit_chunk() -> Pairs:
    path = "mlstm_kernels.torch.chunkwise.triton_limit_chunk.fwbw.mlstm_chunkwise__limit_chunk"
    return _chunkwise(path, chunk_size=64)


@row
def mlstm_xl_chunk() -> Pairs:
    path = "mlstm_kernels.torch.chunkwise.triton_xl_chunk.fwbw.mlstm_chunkwise__xl_chunk"
    return _chunkwise(path, chunk_size=64, autocast_kernel_dtype=torch.float32)


@row
def mlstm_step() -> Pairs:
    c, n, m = draw(2, 2, 32, 32), draw(2, 2, 32), draw(2, 2, 1)
    q, k, v, i, f = draw(2, 2, 32), draw(2, 2, 32), draw(2, 2, 32), draw(2, 2, 1), draw(2, 2, 1)
    step = of("mlstm_kernels.torch.recurrent.triton_step.mlstm_recurrent_step__triton_fw")
    got, (c1, n1, m1) = step(c, n, m, q, k, v, i, f)
    most = torch.maximum(F.logsigmoid(f) + m, i)
    keep, take = (F.logsigmoid(f) + m - most).exp(), (i - most).exp()
    want_c = keep[..., None] * c + take[..., None] * k[..., :, None] * v[..., None, :]
    want_n = keep * n + take * k
    scaled = q / math.sqrt(32)
    below = torch.maximum((scaled * want_n).sum(-1, keepdim=True).abs(), (-most).exp()) + 1e-6
    return [(c1, want_c), (n1, want_n), (m1, most), (got, torch.einsum("bhk,bhkv->bhv", scaled, want_c) / below)]


@row
def softmax_n_attention() -> Pairs:
    q, k, v = (draw(1, 2, 128, 64, dtype=torch.float16, grad=True) for _ in range(3))
    got = of("flash_attention_softmax_n.core.flash_attn_triton.flash_attention_n_triton")(q, k, v, False, None, 1.0)
    scores = (q.float() @ k.float().transpose(-1, -2)) / 8
    want = (scores - torch.logaddexp(scores.logsumexp(-1, keepdim=True), torch.zeros(()))).exp() @ v.float()
    return backward(got, want.half(), [q, k, v])


@row
def sigmoid_attention() -> Pairs:
    q, k, v = (draw(1, 128, 2, 64, dtype=torch.float16, grad=True) for _ in range(3))
    got = of("triton_sigmoid.sigmoid_triton_dense.sigmoid_attention")(q, k, v)
    wide = [t.float().transpose(1, 2) for t in (q, k, v)]
    want = ((wide[0] @ wide[1].transpose(-1, -2)) / 8 - math.log(128)).sigmoid() @ wide[2]
    return backward(got, want.transpose(1, 2).half(), [q, k, v])


@row
def moe_topk_softmax() -> Pairs:
    logits = draw(16, 8, grad=True)
    weights, indices = of("moe_ops.fused_topk_softmax_ops.fused_topk_softmax")(logits, 2)
    values, places = logits.topk(2, -1)
    return [*backward(weights, values.softmax(-1), [logits]), (indices.long(), places)]


@row
def moe_permute() -> Pairs:
    x, indices = draw(12, 16, grad=True), torch.rand(12, 4).argsort(1)[:, :2].int()
    got = of("moe_ops.permute_ops.permute")(x, indices, 0, 4)
    expert, token = indices.flatten().sort(stable=True)
    # Which place a row has among those of its expert is drawn by a counter.
    mine = torch.stack([torch.cat([t[expert == e][t[expert == e][:, 0].argsort()] for e in range(4)])
                        for t in (got[0], x[token // 2])])  # fmt: skip
    return [(mine[0], mine[1]), *backward(got[0].square().sum(), 2 * x.square().sum(), [x])]


@row
def moe_grouped_gemm() -> Pairs:
    a, b = draw(48, 32, dtype=torch.bfloat16, grad=True), draw(3, 64, 32, dtype=torch.bfloat16, grad=True)
    offsets = torch.tensor([0, 10, 30, 48], dtype=torch.int32)
    got = of("moe_ops.grouped_gemm_ops.grouped_gemm")(a, b, offsets)
    want = torch.cat([a[s:e] @ b[i].T for i, (s, e) in enumerate([(0, 10), (10, 30), (30, 48)])])
    return backward(got, want, [a, b])


@row
def saga() -> Pairs:
    torch.manual_seed(0)
    layer, x = of("saga.activation.SAGA")(8), draw(2, 8, 9, 9, grad=True)
    got = layer(x)
    smooth = layer.spatial_bn(layer.spatial_conv(x))
    return backward(got, x + layer.gate_generator(smooth).sigmoid() * F.relu(smooth - x), [x])


@row
def multiarch_softmax() -> Pairs:
    x = draw(9, 100)
    return [(of("kernels.softmax.softmax_triton")(x), x.softmax(-1))]


@row
def multiarch_rmsnorm_swiglu() -> Pairs:
    module = import_module("kernels.fused_rmsnorm_swiglu")
    x, gate, w = draw(9, 64, dtype=torch.float16), draw(9, 64, dtype=torch.float16), draw(64, dtype=torch.float16)
    want = F.silu(gate.float()) * F.rms_norm(x.float(), (64,), w.float(), 1e-6)
    return [(module.fused_rmsnorm_swiglu_triton(x, gate, w), want)]


@row
def multiarch_int8_matmul() -> Pairs:
    module = import_module("kernels.quantized_matmul")
    x, w = draw(64, 128, dtype=torch.float16), draw(128, 64, dtype=torch.float16)
    quantised, scale, zero = module.quantize_int8(w)
    return [(module.matmul_int8_triton(x, quantised, scale, zero), x.float() @ ((quantised - zero.float()) * scale))]


@row
def multiarch_int4_matmul() -> Pairs:
    module = import_module("kernels.quantized_matmul")
    x, w = draw(64, 128, dtype=torch.float16), draw(128, 64, dtype=torch.float16)
    packed = module.quantize_int4(w)
    return [(module.matmul_int4_triton(x, *packed), x.float() @ module.dequantize_int4(*packed).float())]


@row
def multiarch_flash_attention() -> Pairs:
    q, k, v = (draw(128, 64, dtype=torch.float16) for _ in range(3))
    got = of("kernels.flash_attention.flash_attention_triton")(q, k, v)
    return [(got, F.scaled_dot_product_attention(q.float()[None], k.float()[None], v.float()[None])[0])]


@row
def kmeans_step() -> Pairs:
    x, centres = draw(1, 200, 16), draw(1, 8, 16)
    labels, moved, _ = of("flash_kmeans.batch_kmeans_Euclid")(x, 8, max_iters=1, init_centroids=centres.clone())
    nearest = torch.cdist(x, centres).argmin(-1)
    want = torch.stack([x[0][nearest[0] == i].mean(0) if (nearest[0] == i).any() else centres[0, i] for i in range(8)])
    return [(labels.long(), nearest), (moved[0], want)]


@row
def grouped_mm_bf16() -> Pairs:
    a, b = draw(48, 32, dtype=torch.bfloat16, grad=True), draw(3, 32, 64, dtype=torch.bfloat16, grad=True)
    ends = torch.tensor([10, 30, 48], dtype=torch.int32)
    got = of("grouped_mm_bf16.grouped_mm")(a, b, offs=ends)
    want = torch.cat([a[s:e] @ b[i] for i, (s, e) in enumerate([(0, 10), (10, 30), (30, 48)])])
    return backward(got, want, [a, b])


@row
def bm3d() -> Pairs:
    image = torch.rand(1, 1, 32, 32)
    got = of("bm3d_triton.denoise_variance")(image, 1e-6)
    return [((got - image).abs().max() < 0.02, torch.tensor(True))]


@row
def turboquant_rotation() -> Pairs:
    x, signs = draw(6, 64), torch.randint(2, (64,)).float() * 2 - 1
    got = of("fused_turboquant.kernels.triton_rht.triton_rht")(x, signs)
    matrix = torch.ones(1, 1)
    for _ in range(6):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return [(got, (x * signs) @ matrix / 8)]


def units(got: Any, want: Any) -> float:
    """Largest difference in roundoffs of the result's dtype, of its largest element; infinite for another shape."""
    got, want = torch.as_tensor(got), torch.as_tensor(want)
    if got.shape != want.shape:
        return math.inf
    if not got.is_floating_point():
        return 0.0 if bool((got == want).all()) else math.inf
    off = (got.detach().double() - want.detach().double()).abs().max()
    unit = torch.finfo(got.dtype).eps / 2 * max(float(want.detach().abs().max()), 1e-30)
    return math.inf if bool(off.isnan()) else float(off) / unit


def measure(name: str) -> str:
    """A row of the table."""
    torch.manual_seed(0)
    start, error, worst = time.process_time(), "", "-"
    with rg.cpu_triton(seed=1) as session:
        try:
            worst = f"{max(units(got, want) for got, want in ROWS[name]()):.1f}"
        except Exception as raised:
            last = traceback.extract_tb(raised.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno}"
            error = f"{type(raised).__name__}: {str(raised).partition(chr(10))[0]} ({where})"
    kernels = ", ".join(sorted({record.kernel for record in session.launches}))
    told = "; ".join(fault.text() for fault in session.faults)
    seconds = time.process_time() - start
    return f"| {name} | {kernels} | {len(session.launches)} | {worst} | {error or told} | {seconds:.1f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names, comma separated")
    parser.add_argument("--out", type=Path, help="markdown")
    parser.add_argument("--verify", action="store_true", help="what verify says of ops with a backward, in float32")
    args = parser.parse_args()
    if args.verify:
        for name, spec in unseen_kernels_more.SPECS.items():
            report = rg.verify(spec, level="quick", dtypes=["float32"])
            print(name, report.verdict, *(finding.what for finding in report.findings), sep="\n    ", flush=True)
        return 0
    ROWS.update(unseen_kernels_more.MORE)
    lines = ["| row | kernels | launches | units | what was said | CPU s |", "|---" * 6 + "|"]
    for name in args.only.split(",") if args.only else ROWS:
        lines.append(measure(name))
        print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
