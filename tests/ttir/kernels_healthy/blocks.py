"""Operations over a block: reductions, scans, sorting, shapes, products of matrices, random numbers."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from programs import U32, Check, healthy, integers, normal

APPROXIMATE = 2.0**-22  # PTX: relative error of ex2 and rsqrt


@triton.jit
def reductions_kernel(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    rows, cols = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + rows[:, None] * N + cols[None, :])
    tl.store(out_ptr + rows, tl.sum(x, axis=1))
    tl.store(out_ptr + M + rows, tl.max(x, axis=1))
    tl.store(out_ptr + 2 * M + rows, tl.min(x, axis=1))
    tl.store(out_ptr + 3 * M + rows, tl.argmax(x, axis=1))
    tl.store(out_ptr + 4 * M + rows, tl.argmin(x, axis=1))
    value, index = tl.max(x, axis=1, return_indices=True)
    tl.store(out_ptr + 5 * M + rows, value * 100 + index)
    tl.store(out_ptr + 6 * M + rows, tl.sum(x.to(tl.int32), axis=1))
    tl.store(out_ptr + 7 * M + rows, tl.xor_sum(x.to(tl.int32), axis=1))
    tl.store(out_ptr + 8 * M, tl.sum(x))
    tl.store(out_ptr + 8 * M + 1 + cols, tl.sum(x, axis=0))


@healthy("reductions over each axis; of ties the first is the argmax")
def reductions(device):
    x = integers(8, 32)
    out = torch.zeros(8 * 8 + 1 + 32, device=device)
    reductions_kernel[(1,)](x.to(device), out, M=8, N=32)
    first_max, first_min = ((x == v).int().argmax(1) for v in (x.amax(1, keepdim=True), x.amin(1, keepdim=True)))
    bits = np.bitwise_xor.reduce(x.int().numpy(), axis=1)
    rows = [
        x.sum(1),
        x.amax(1),
        x.amin(1),
        first_max,
        first_min,
        x.amax(1) * 100 + first_max,
        x.sum(1),
        torch.from_numpy(bits),
    ]
    return [Check(out, torch.cat([*(r.float() for r in rows), x.sum().view(1), x.sum(0)]))]


@triton.jit
def nan_kernel(x_ptr, out_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0) * N + tl.arange(0, N))
    tl.store(out_ptr + 2 * tl.program_id(0), tl.max(x))
    tl.store(out_ptr + 2 * tl.program_id(0) + 1, tl.min(x))


@healthy("tl.max and tl.min pass over NaN, on a GPU")
def extrema_beside_nan(device):
    x = normal(4, 32)
    x[1, 7] = x[2, 0] = x[3, 31] = float("nan")
    out = torch.zeros(4, 2, device=device)
    nan_kernel[(4,)](x.to(device), out, N=32)
    return [Check(out, torch.stack([x.nan_to_num(nan=-9.0).amax(1), x.nan_to_num(nan=9.0).amin(1)], dim=1))]


@triton.jit
def _moments(count_a, sum_a, square_a, count_b, sum_b, square_b):
    return count_a + count_b, sum_a + sum_b, square_a + square_b


@triton.jit
def _later(a, b):
    return tl.where(b != 0, b, a)


@triton.jit
def custom_reduction_kernel(x_ptr, out_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0) * N + tl.arange(0, N))
    count, total, square = tl.reduce((tl.full((N,), 1.0, tl.float32), x, x * x), 0, _moments)
    tl.store(out_ptr + tl.program_id(0) * 3, count)
    tl.store(out_ptr + tl.program_id(0) * 3 + 1, total)
    tl.store(out_ptr + tl.program_id(0) * 3 + 2, square)


@healthy("a reduction of three tensors by a function of the program's own")
def custom_reduction(device):
    x, out = integers(4, 64), torch.zeros(4, 3, device=device)
    custom_reduction_kernel[(4,)](x.to(device), out, N=64)
    return [Check(out, torch.stack([torch.full((4,), 64.0), x.sum(1), x.pow(2).sum(1)], dim=1))]


@triton.jit
def _recurrence(a, b, c, d):
    return a * c, b * c + d


@triton.jit
def scans_kernel(x_ptr, a_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    place = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    x, a = tl.load(x_ptr + place), tl.load(a_ptr + place)
    size = M * N
    tl.store(out_ptr + place, tl.cumsum(x, axis=1))
    tl.store(out_ptr + size + place, tl.cumsum(x, axis=0, reverse=True))
    tl.store(out_ptr + 2 * size + place, tl.cumprod(a, axis=1))
    tl.store(out_ptr + 3 * size + place, tl.associative_scan(x, 1, _later))
    _, h = tl.associative_scan((a, x), 1, _recurrence)
    tl.store(out_ptr + 4 * size + place, h)


@healthy("sums and products so far, from both ends, the last value that is not 0, and a linear recurrence")
def scans(device):
    x = integers(4, 16, low=-2, high=3)
    a = integers(4, 16, low=0, high=2, seed=2) * 2 - 1  # signs, so that all of it is exact
    out = torch.zeros(5, 4, 16, device=device)
    scans_kernel[(1,)](x.to(device), a.to(device), out, M=4, N=16)
    latest, h = x.clone(), x.clone()
    for t in range(1, 16):
        latest[:, t] = torch.where(x[:, t] != 0, x[:, t], latest[:, t - 1])
        h[:, t] = a[:, t] * h[:, t - 1] + x[:, t]
    return [Check(out, torch.stack([x.cumsum(1), x.flip(0).cumsum(0).flip(0), a.cumprod(1), latest, h]))]


@triton.jit
def sort_kernel(x_ptr, up_ptr, down_ptr, flip_ptr, top_ptr, N: tl.constexpr, K: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, N)
    x = tl.load(x_ptr + row * N + cols)
    tl.store(up_ptr + row * N + cols, tl.sort(x))
    tl.store(down_ptr + row * N + cols, tl.sort(x, descending=True))
    tl.store(flip_ptr + row * N + cols, tl.flip(x, 0))
    tl.store(top_ptr + row * K + tl.arange(0, K), tl.topk(x, K))


@healthy("sorted both ways, flipped, and the largest four")
def sorting(device):
    checks = []
    for x in (integers(4, 32), integers(4, 32, low=-1000, high=1000, dtype=torch.int32), normal(4, 32)):
        up, down, flip = (torch.zeros_like(x, device=device) for _ in range(3))
        top = torch.zeros(4, 4, dtype=x.dtype, device=device)
        sort_kernel[(4,)](x.to(device), up, down, flip, top, N=32, K=4)
        ordered = x.sort(1).values
        checks += [
            Check(up, ordered),
            Check(down, ordered.flip(1)),
            Check(flip, x.flip(1)),
            Check(top, ordered.flip(1)[:, :4]),
        ]
    return checks


@triton.jit
def histogram_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, BINS: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, other=0)
    tl.store(out_ptr + tl.arange(0, BINS), tl.histogram(x, BINS, mask=i < n))


@healthy("tl.histogram with a mask")
def histogram_of_a_block(device):
    x, out = integers(100, low=0, high=16, dtype=torch.int32), torch.zeros(16, dtype=torch.int32, device=device)
    histogram_kernel[(1,)](x.to(device), out, 100, BLOCK=128, BINS=16)
    return [Check(out, x.bincount(minlength=16).int())]


@triton.jit
def gather_kernel(x_ptr, index_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows = tl.arange(0, M)[:, None]
    x = tl.load(x_ptr + rows * N + tl.arange(0, N)[None, :])
    place = rows * K + tl.arange(0, K)[None, :]
    tl.store(out_ptr + place, tl.gather(x, tl.load(index_ptr + place), 1))


@healthy("tl.gather along an axis")
def gather_within_a_block(device):
    x, index = integers(8, 32), integers(8, 16, low=0, high=32, dtype=torch.int32)
    out = torch.zeros(8, 16, device=device)
    gather_kernel[(1,)](x.to(device), index.to(device), out, M=8, N=32, K=16)
    return [Check(out, x.gather(1, index.long()))]


@triton.jit
def gather_rows_kernel(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    rows, cols, me = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.program_id(0)
    x = tl.load(x_ptr + rows * N + cols)
    total = tl.zeros((1, N), tl.float32)
    for j in range(M):
        total = 3 * total + tl.gather(x, tl.full((1, N), j, tl.int32), 0)
    out_ptr += me * 4 * N
    tl.store(out_ptr + cols, total)
    own = tl.zeros((1, N), tl.int32) + me
    tl.store(out_ptr + N + cols, tl.gather(x, own, 0))
    tl.store(out_ptr + 2 * N + cols, tl.gather(tl.broadcast_to(tl.load(x_ptr + cols), (M, N)), own, 0))
    by_row = tl.broadcast_to(tl.load(x_ptr + rows * N), (M, N))
    tl.store(out_ptr + 3 * N + cols, tl.gather(by_row, (cols + me) % M, 0))


@healthy("tl.gather of one row, of a program's own, of rows that are alike, of columns that are")
def gather_rows(device):
    x, out = integers(4, 16), torch.zeros(2, 4, 16, device=device)
    gather_rows_kernel[(2,)](x.to(device), out, M=4, N=16)
    total = sum(3 ** (3 - j) * x[j] for j in range(4))
    columns = [x[(torch.arange(16) + me) % 4, 0] for me in range(2)]
    return [Check(out, torch.stack([torch.stack([total, x[me], x[0], columns[me]]) for me in range(2)]))]


@triton.jit
def shapes_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    j = tl.arange(0, 2 * N)
    tl.store(out_ptr + j, tl.interleave(x, y))
    square = tl.reshape(tl.join(x, y), (N // 4, 4, 2))
    tl.store(out_ptr + 2 * N + j, tl.ravel(tl.permute(square, (2, 0, 1))))
    even, odd = tl.split(tl.reshape(x, (N // 2, 2)))
    tl.store(out_ptr + 4 * N + tl.arange(0, N // 2), even - odd)
    turned = tl.trans(tl.reshape(y, (N // 4, 4)))
    tl.store(out_ptr + 5 * N + i, tl.reshape(turned, (N,)))
    wide = tl.broadcast_to(tl.expand_dims(x, 0), (2, N))
    tl.store(out_ptr + 6 * N + j, tl.reshape(wide, (2 * N,)))


@healthy("join, split, interleave, reshape, permute, transpose, broadcast")
def shapes(device):
    n = 16
    x, y = torch.arange(float(n)), torch.arange(float(n)) + 100
    out = torch.zeros(8 * n, device=device)
    shapes_kernel[(1,)](x.to(device), y.to(device), out, N=n)
    joined = torch.stack([x, y], dim=-1)
    parts = [joined.flatten(), joined.view(n // 4, 4, 2).permute(2, 0, 1).flatten(), x[::2] - x[1::2], torch.zeros(n // 2),
             y.view(n // 4, 4).t().flatten(), x.repeat(2)]  # fmt: skip
    return [Check(out, torch.cat(parts))]


@triton.jit
def dot_kernel(
    a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, OUT: tl.constexpr, PRECISION: tl.constexpr
):
    rows, cols, ks = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + rows[:, None] * K + ks[None, :])
    b = tl.load(b_ptr + ks[:, None] * N + cols[None, :])
    c = tl.dot(a, b, out_dtype=OUT, input_precision=PRECISION)
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], c)


@healthy("tl.dot of small whole numbers: exact in tf32, f16, bf16 and int8")
def products_of_whole_numbers(device):
    checks = []
    kinds = [(torch.float32, tl.float32, torch.float32), (torch.float16, tl.float32, torch.float32),
             (torch.bfloat16, tl.float32, torch.float32), (torch.float16, tl.float16, torch.float16),
             (torch.int8, tl.int32, torch.int32)]  # fmt: skip
    for dtype, inner, outer in kinds:
        a, b = (
            integers(16, 32, low=-4, high=4, seed=1, dtype=dtype),
            integers(32, 16, low=-4, high=4, seed=2, dtype=dtype),
        )
        c = torch.zeros(16, 16, dtype=outer, device=device)
        dot_kernel[(1,)](a.to(device), b.to(device), c, M=16, N=16, K=32, OUT=inner, PRECISION="tf32")
        checks.append(Check(c, (a.double() @ b.double()).to(outer)))
    return checks


@healthy("tl.dot in float32 within the bound of a sum of 32 products, in any order, fused or not")
def product_in_float32(device):
    a, b, c = normal(16, 32, seed=1), normal(32, 16, seed=2), torch.zeros(16, 16, device=device)
    dot_kernel[(1,)](a.to(device), b.to(device), c, M=16, N=16, K=32, OUT=tl.float32, PRECISION="ieee")
    bound = 33 * U32 / (1 - 33 * U32) * (a.double().abs() @ b.double().abs())
    return [Check(c, a.double() @ b.double(), bound)]


@healthy("tl.dot in tf32: each factor keeps 10 bits, rounded or cut, and the sum may be cut too")
def product_in_tf32(device):
    a, b, c = normal(16, 32, seed=1), normal(32, 16, seed=2), torch.zeros(16, 16, device=device)
    dot_kernel[(1,)](a.to(device), b.to(device), c, M=16, N=16, K=32, OUT=tl.float32, PRECISION="tf32")
    relative = (1 + 2.0**-10) ** 2 - 1 + 2 * 33 * U32
    return [Check(c, a.double() @ b.double(), relative * (a.double().abs() @ b.double().abs()))]


@triton.jit
def batched_dot_kernel(a_ptr, b_ptr, c_ptr, B: tl.constexpr, N: tl.constexpr):
    place = tl.arange(0, B)[:, None, None] * N * N + tl.arange(0, N)[None, :, None] * N + tl.arange(0, N)[None, None, :]
    c = tl.dot(tl.load(a_ptr + place), tl.load(b_ptr + place))
    tl.store(c_ptr + place, c)


@healthy("tl.dot of three dimensions")
def batched_product(device):
    a, b = integers(2, 16, 16, seed=1, dtype=torch.float16), integers(2, 16, 16, seed=2, dtype=torch.float16)
    c = torch.zeros(2, 16, 16, device=device)
    batched_dot_kernel[(1,)](a.to(device), b.to(device), c, B=2, N=16)
    return [Check(c, a.float() @ b.float())]


@triton.jit
def scaled_dot_kernel(a_ptr, sa_ptr, b_ptr, sb_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, cols, ks, groups = tl.arange(0, M)[:, None], tl.arange(0, N), tl.arange(0, K), tl.arange(0, K // 32)[None, :]
    a = tl.load(a_ptr + rows * K + ks[None, :])
    b = tl.load(b_ptr + ks[:, None] * N + cols[None, :])
    scale_a = tl.load(sa_ptr + rows * (K // 32) + groups)
    scale_b = tl.load(sb_ptr + cols[:, None] * (K // 32) + groups)
    c = tl.dot_scaled(a, scale_a, "e5m2", b, scale_b, "e5m2")
    tl.store(c_ptr + rows * N + cols[None, :], c)


@healthy("tl.dot_scaled: float8 factors, a power of two for each 32 of them; small whole numbers, exact")
def scaled_product(device):
    a, b = integers(16, 64, low=-2, high=3, seed=1), integers(64, 16, low=-2, high=3, seed=2)
    scale_a, scale_b = (integers(16, 2, low=126, high=130, seed=s, dtype=torch.uint8) for s in (3, 4))
    c = torch.zeros(16, 16, device=device)
    scaled_dot_kernel[(1,)](a.to(torch.float8_e5m2).to(device), scale_a.to(device), b.to(torch.float8_e5m2).to(device),
                            scale_b.to(device), c, M=16, N=16, K=64)  # fmt: skip
    factor_a, factor_b = (2.0 ** (s.float() - 127) for s in (scale_a, scale_b))
    wide = (a * factor_a.repeat_interleave(32, 1)) @ (b * factor_b.repeat_interleave(32, 1).t())
    return [Check(c, wide)]


def philox(seed: int, offset: torch.Tensor) -> np.ndarray:
    """Philox 4x32-10 (Salmon et al., SC 2011) at counters (offset, 0, 0, 0), key (seed, 0): the first of four words."""
    low, top = np.uint64(0xFFFFFFFF), np.uint64(32)
    c = [offset.numpy().astype(np.uint64), *(np.zeros(len(offset), np.uint64) for _ in range(3))]
    k = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(b >> top) ^ c[1] ^ np.uint64(k[0]), b & low, (a >> top) ^ c[3] ^ np.uint64(k[1]), a & low]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[0].astype(np.uint32)


def uniform(seed: int, offset: torch.Tensor) -> torch.Tensor:
    """tl.rand: |word|, the bits of negative ones turned round, times 4.6566127342e-10."""
    word = philox(seed, offset).view(np.int32)
    word = np.where(word < 0, -word - 1, word)
    return torch.from_numpy(word.astype(np.float32) * np.float32(4.6566127342e-10))


@triton.jit
def random_kernel(word_ptr, uniform_ptr, seed, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(word_ptr + i, tl.randint(seed, i), i < n)
    tl.store(uniform_ptr + i, tl.rand(seed, i), i < n)


@healthy("Philox: the words and the uniform numbers of a seed, to the bit")
def random_numbers(device):
    checks = []
    for seed in (7, 2**40 + 123):
        word, number = torch.zeros(100, dtype=torch.int32, device=device), torch.zeros(100, device=device)
        random_kernel[(4,)](word, number, seed, 100, BLOCK=32)
        checks.append(Check(word, torch.from_numpy(philox(seed, torch.arange(100)).view(np.int32))))
        checks.append(Check(number, uniform(seed, torch.arange(100))))
    return checks


@triton.jit
def dropout_kernel(x_ptr, out_ptr, n, p, seed, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, other=0.0)
    tl.store(out_ptr + i, tl.where(tl.rand(seed, i) > p, x * 2, 0.0), i < n)


@healthy("dropout whose backward makes the forward's mask again from the seed")
def dropout_forward_and_backward(device):
    x, dy = integers(100, seed=1), integers(100, seed=2)
    out, dx = torch.zeros(2, 100, device=device)
    dropout_kernel[(4,)](x.to(device), out, 100, 0.5, 11, BLOCK=32)
    dropout_kernel[(7,)](dy.to(device), dx, 100, 0.5, 11, BLOCK=16)
    keep = uniform(11, torch.arange(100)) > 0.5
    return [Check(out, torch.where(keep, 2 * x, 0)), Check(dx, torch.where(keep, 2 * dy, 0))]
