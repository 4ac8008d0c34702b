"""Ways to say where: wide offsets, tables of addresses, descriptors, block pointers, hints, heuristics, tuples."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import Check, healthy, integers


@triton.jit
def wide_offset_kernel(x_ptr, out_ptr, stride, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    far = row * stride * 2_000_000_000 // 2_000_000_000  # passes 2^31 on the way
    tl.store(out_ptr + row * n + cols, tl.load(x_ptr + far + cols, cols < n), cols < n)


@healthy("offsets in 64 bits")
def offsets_of_64_bits(device):
    x, out = integers(5, 24), torch.zeros(5, 20, device=device)
    wide_offset_kernel[(5,)](x.to(device), out, 24, 20, BLOCK=32)
    return [Check(out, x[:, :20])]


@triton.jit
def address_table_kernel(address_ptr, size_ptr, out_ptr, BLOCK: tl.constexpr):
    group = tl.program_id(0)
    x_ptr = tl.load(address_ptr + group).to(tl.pointer_type(tl.float32))
    n = tl.load(size_ptr + group)
    cols = tl.arange(0, BLOCK)
    tl.store(out_ptr + group, tl.sum(tl.load(x_ptr + cols, cols < n, other=0.0)))


@healthy("addresses of tensors in a tensor, as grouped products of matrices have them")
def table_of_addresses(device):
    xs = [integers(n, seed=n) for n in (5, 16, 11)]
    held = [x.to(device) for x in xs]
    addresses = torch.tensor([x.data_ptr() for x in held], device=device)
    sizes, out = torch.tensor([5, 16, 11], dtype=torch.int32, device=device), torch.zeros(3, device=device)
    address_table_kernel[(3,)](addresses, sizes, out, BLOCK=16)
    return [Check(out, torch.stack([x.sum() for x in xs]))]


def _allocate(size, alignment, stream):
    return torch.empty(size, dtype=torch.int8, device="cuda" if torch.cuda.is_available() else "cpu")


@triton.jit
def descriptor_kernel(x_ptr, out_ptr, M, N, ROWS: tl.constexpr, COLS: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, shape=[M, N], strides=[N, 1], block_shape=[ROWS, COLS])
    out = tl.make_tensor_descriptor(out_ptr, shape=[M, N], strides=[N, 1], block_shape=[ROWS, COLS])
    row, col = tl.program_id(0) * ROWS, tl.program_id(1) * COLS
    block = x.load([row, col])
    out.store([row, col], block + tl.sum(block))  # what is outside counts as 0


@healthy("descriptors made in the kernel: zero outside, and nothing is stored there")
def descriptors(device):
    triton.set_allocator(_allocate)
    x, out = integers(20, 40), torch.zeros(20, 40, device=device)
    descriptor_kernel[(3, 3)](x.to(device), out, 20, 40, ROWS=8, COLS=16)
    sums = torch.nn.functional.pad(x, (0, 8, 0, 4)).view(3, 8, 3, 16).sum((1, 3))
    return [Check(out, x + sums.repeat_interleave(8, 0).repeat_interleave(16, 1)[:20, :40])]


@triton.jit
def host_descriptor_kernel(x, out, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS
    out.store([row, 0], x.load([row, 0]) * 2)


@healthy("descriptors made on the host")
def descriptors_of_the_host(device):
    from triton.tools.tensor_descriptor import TensorDescriptor

    x, out = integers(20, 16), torch.zeros(20, 16, device=device)
    source, target = (TensorDescriptor.from_tensor(t, [8, 16]) for t in (x.to(device), out))
    host_descriptor_kernel[(3,)](source, target, ROWS=8)
    return [Check(out, 2 * x)]


@triton.jit
def descriptor_atomic_kernel(x_ptr, out_ptr, N: tl.constexpr, ROWS: tl.constexpr):
    cols = tl.arange(0, N)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    out = tl.make_tensor_descriptor(out_ptr, shape=[ROWS, N], strides=[N, 1], block_shape=[ROWS, N])
    out.atomic_add([0, 0], tl.load(x_ptr + rows[:, None] * N + cols[None, :]))


@healthy("an atomic addition through a descriptor")
def descriptor_atomics(device):
    triton.set_allocator(_allocate)
    x, out = integers(24, 16), torch.zeros(8, 16, device=device)
    descriptor_atomic_kernel[(3,)](x.to(device), out, N=16, ROWS=8)
    return [Check(out, x.view(3, 8, 16).sum(0))]


@triton.jit
def block_pointer_kernel(x_ptr, out_ptr, M, N, ROWS: tl.constexpr, COLS: tl.constexpr):
    x = tl.make_block_ptr(x_ptr, (M, N), (N, 1), (tl.program_id(0) * ROWS, 0), (ROWS, COLS), (1, 0))
    out = tl.make_block_ptr(out_ptr, (M, N), (N, 1), (tl.program_id(0) * ROWS, 0), (ROWS, COLS), (1, 0))
    for _ in range(0, tl.cdiv(N, COLS)):
        block = tl.load(x, boundary_check=(0, 1), padding_option="zero")
        tl.store(out, block * 2 + tl.sum(block, axis=1)[:, None], boundary_check=(0, 1))
        x, out = tl.advance(x, (0, COLS)), tl.advance(out, (0, COLS))


@healthy("block pointers with boundary checks, advanced in a loop")
def block_pointers(device):
    x, out = integers(20, 41), torch.zeros(20, 41, device=device)
    block_pointer_kernel[(3,)](x.to(device), out, 20, 41, ROWS=8, COLS=16)
    sums = torch.nn.functional.pad(x, (0, 7)).view(20, 3, 16).sum(2).repeat_interleave(16, 1)[:, :41]
    return [Check(out, 2 * x + sums)]


@triton.jit
def hinted_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i = tl.max_contiguous(tl.multiple_of(i, BLOCK), BLOCK)
    tl.assume(n > 0)
    x = tl.load(x_ptr + i, i < n, other=0.0, cache_modifier=".ca")
    y = tl.load(x_ptr + i, i < n, other=0.0, eviction_policy="evict_last")
    tl.store(out_ptr + i, x + y, i < n, cache_modifier=".cs")


@healthy("hints to caches and the compiler change nothing")
def hints(device):
    x, out = integers(100), torch.zeros(100, device=device)
    hinted_kernel[(4,)](x.to(device), out, 100, BLOCK=32)
    return [Check(out, 2 * x)]


@triton.heuristics({"BLOCK": lambda args: triton.next_power_of_2(args["N"]), "EVEN": lambda args: args["N"] % 16 == 0})
@triton.jit
def heuristics_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    place = tl.program_id(0) * N + cols
    if EVEN and BLOCK == 64:
        x = tl.load(x_ptr + place)
    else:
        x = tl.load(x_ptr + place, cols < N, other=0.0)
    tl.store(out_ptr + tl.program_id(0), tl.sum(x))


@healthy("heuristics choose block and masks")
def heuristics(device):
    x, y = integers(5, 50), integers(5, 64)
    a, b = torch.zeros(2, 5, device=device)
    heuristics_kernel[(5,)](x.to(device), a, 50)
    heuristics_kernel[(5,)](y.to(device), b, 64)
    return [Check(a, x.sum(1)), Check(b, y.sum(1))]


@triton.jit
def optional_kernel(x_ptr, bias_ptr, out_ptr, sizes, scales, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < sizes[1]
    x = tl.load(x_ptr + row * sizes[1] + cols, mask, other=0.0) * scales[0]
    if bias_ptr is not None:
        x += tl.load(bias_ptr + cols, mask, other=0.0) * scales[1]
    tl.store(out_ptr + row * sizes[1] + cols, x, mask)


@healthy("tuples as arguments, and a pointer that may be None")
def tuples_and_none(device):
    x, bias = integers(4, 20, seed=1), integers(20, seed=2)
    with_bias, without = torch.zeros(2, 4, 20, device=device)
    optional_kernel[(4,)](x.to(device), bias.to(device), with_bias, (4, 20), (2.0, 3.0), BLOCK=32)
    optional_kernel[(4,)](x.to(device), None, without, (4, 20), (2.0, 3.0), BLOCK=32)
    return [Check(with_bias, 2 * x + 3 * bias), Check(without, 2 * x)]
