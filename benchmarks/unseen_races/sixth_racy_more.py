"""Racy kernels of the sixth set: descriptors, atomics beside plain looks, workspaces between launches, autotuners."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import integers, racy


def whole(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def allocate_on(device):
    triton.set_allocator(lambda size, *_: torch.empty(size, dtype=torch.int8, device=device))


@triton.jit
def sequence_tiles_kernel(x_ptr, out_ptr, rows, T, TILE: tl.constexpr, D: tl.constexpr):
    out = tl.make_tensor_descriptor(out_ptr, shape=[rows, D], strides=[D, 1], block_shape=[TILE, D])
    first = tl.program_id(1) * TILE
    row, d = first + tl.arange(0, TILE)[:, None], tl.arange(0, D)[None, :]
    x = tl.load(x_ptr + (tl.program_id(0) * T + row) * D + d, (row < T) & (d >= 0), other=0.0)
    out.store([tl.program_id(0) * T + first, 0], x * 2)


# 24 rows a sequence, and tiles of 16: rows 24..31 of sequence 0 are the first ones of sequence 1, and are stored as 0.
@racy("out_ptr", "write/write", "a descriptor is cut at the end of all sequences; a tile goes on into the next one")
def descriptor_of_all_sequences_in_one(device):
    allocate_on(device)
    x, out = integers(72, 16, low=1).to(device), torch.zeros(72, 16, device=device)
    sequence_tiles_kernel[(3, 2)](x, out, 72, 24, TILE=16, D=16)


@triton.jit
def add_and_look_kernel(a_ptr, c_ptr, out_ptr, M, SPLITS: tl.constexpr, T: tl.constexpr):
    c = tl.make_tensor_descriptor(c_ptr, shape=[M, T], strides=[T, 1], block_shape=[T, T])
    m, split = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, T)[:, None] * T + tl.arange(0, T)[None, :]
    c.atomic_add([m * T, 0], tl.load(a_ptr + (m * SPLITS + split) * T * T + place))
    tl.debug_barrier()
    if split == 0:
        tl.store(out_ptr + m * T * T + place, c.load([m * T, 0]) * 2)


# Split 0 loads the tile when it has added its own part; splits 1 and 2 may not have added theirs.
@racy(
    "c_ptr", "atomic/read", "splits add to a tile by a descriptor, atomically, and the first one goes on with the sum"
)
def tile_loaded_while_others_add_to_it(device):
    allocate_on(device)
    a, c, out = integers(2, 3, 16, 16, low=1).to(device), *torch.zeros(2, 32, 16, device=device)
    add_and_look_kernel[(2, 3)](a, c, out, 32, SPLITS=3, T=16)


@triton.jit
def look_and_raise_kernel(x_ptr, top_ptr, BLOCK: tl.constexpr):
    top = tl.max(tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)), 0)
    if top > tl.load(top_ptr):
        tl.atomic_max(top_ptr, top, sem="relaxed")


# To spare atomics the maximum is loaded first, plainly, where others raise it.
@racy("top_ptr", "atomic/read", "a maximum is loaded to see whether it needs to be raised, by an atomic")
def maximum_loaded_before_it_is_raised(device):
    look_and_raise_kernel[(8,)](integers(128, low=0, high=999, dtype=torch.int32).to(device),
                                torch.full((1,), -1, dtype=torch.int32, device=device), BLOCK=16)  # fmt: skip


@triton.jit
def half_loss_kernel(logit_ptr, target_ptr, loss_ptr, HALF: tl.constexpr):
    row, n = tl.program_id(0), tl.program_id(1) * HALF + tl.arange(0, HALF)
    target = tl.load(target_ptr + row)
    x = tl.load(logit_ptr + row * 2 * HALF + n)
    of_target = tl.load(logit_ptr + row * 2 * HALF + target)
    tl.atomic_add(loss_ptr + row, tl.sum(x, 0) - of_target, sem="relaxed")
    tl.debug_barrier()
    tl.store(logit_ptr + row * 2 * HALF + n, x * 3 - tl.where(n == target, 1.0, 0.0))


# The target is in one half of the row, whose program may have stored the gradient when the other one loads it.
@racy("logit_ptr", "read/write", "gradients go over the logits by halves of a row; both halves load that of the target")
def target_loaded_by_both_halves_of_a_row(device):
    logits, target = integers(4, 32, low=1).to(device), whole(3, 20, 31, 0, device=device)
    half_loss_kernel[(4, 2)](logits, target, torch.zeros(4, device=device), HALF=16)


@triton.jit
def chunk_state_kernel(k_ptr, v_ptr, h_ptr, K: tl.constexpr, V: tl.constexpr, T: tl.constexpr):
    k_block, v_block, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    r, c = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    k = tl.load(k_ptr + (chunk * T + c) * K + k_block * T + r)
    v = tl.load(v_ptr + (chunk * T + r) * V + v_block * T + c)
    state = h_ptr + chunk * K * V
    tl.store(state + (k_block * T + r) * V + c, tl.dot(k, v, input_precision="ieee"))


# Programs (k, 0, chunk) and (k, 1, chunk) store columns 0..15 of the state.
@racy("h_ptr", "write/write", "states of chunks in tiles of keys by values, and the values' offset is left out")
def state_tiles_without_the_offset_of_values(device):
    k, v = integers(48, 32, low=1, seed=1).to(device), integers(48, 32, seed=2).to(device)
    chunk_state_kernel[(2, 2, 3)](k, v, torch.zeros(3, 32, 32, device=device), K=32, V=32, T=16)


@triton.jit
def visit_kernel(to_ptr, seen_ptr, parent_ptr, EDGES: tl.constexpr):
    node = tl.program_id(0)
    for e in range(EDGES):
        to = tl.load(to_ptr + node * EDGES + e)
        if tl.load(seen_ptr + to) == 0:
            tl.store(seen_ptr + to, 1)
            tl.store(parent_ptr + to, node)


# Two nodes may both find the byte of a third one clear.
@racy("seen_ptr,parent_ptr", "read/write,write/write", "a node's byte is looked at, set, and its parent stored")
def bytes_of_nodes_looked_at_and_set(device):
    to = (torch.arange(8)[:, None] * 3 + torch.arange(2)) % 5
    seen, parent = torch.zeros(5, dtype=torch.int8, device=device), whole(*[-1] * 5, device=device)
    visit_kernel[(8,)](to.to(torch.int32).to(device), seen, parent, EDGES=2)


@triton.jit
def rotate_two_kernel(x_ptr, work_ptr, out_ptr, turn, BLOCK: tl.constexpr):
    pid, programs = tl.program_id(0), tl.num_programs(0)
    new, old = work_ptr + turn % 2, work_ptr + (turn + 1) % 2
    x = tl.load(x_ptr + (turn * programs + pid) * BLOCK + tl.arange(0, BLOCK))
    tl.atomic_add(new, tl.sum(x, 0), sem="relaxed")
    tl.store(out_ptr + turn * programs + pid, tl.load(old))
    if pid == 0:
        tl.debug_barrier()
        tl.store(old, 0.0)


# Program 0 clears the sum of the launch before for the launch behind, while others may still have to load it.
@racy(
    "work_ptr", "read/write", "two sums by turns: one is added to, the other one read by all and cleared by the first"
)
def sum_of_the_last_launch_cleared_while_it_is_read(device):
    x, work, out = integers(4, 64, low=1).to(device), torch.zeros(2, device=device), torch.zeros(4, 4, device=device)
    for turn in range(4):
        rotate_two_kernel[(4,)](x, work, out, turn, BLOCK=16)


@triton.autotune([triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})], key=["n"])
@triton.jit
def exchanged_state_kernel(x_ptr, state_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    old = tl.load(state_ptr + i, i < n)
    tl.store(state_ptr + i, tl.load(x_ptr + i, i < n), i < n)
    tl.store(out_ptr + i, old, i < n)


# The second run finds the new state where the old one should be.
@racy("state_ptr,out_ptr", "autotune", "a new state is exchanged for the old one by a tuned kernel, and never restored")
def tuned_exchange_of_a_state(device):
    x, state = integers(70, low=1, seed=1).to(device), integers(70, low=-8, high=0, seed=2).to(device)
    grid = lambda meta: (triton.cdiv(70, meta["BLOCK"]),)  # noqa: E731
    exchanged_state_kernel[grid](x, state, torch.zeros(70, device=device), 70)


@triton.autotune([triton.Config({"SPLITS": 4}), triton.Config({"SPLITS": 1})], key=["K"])
@triton.jit
def tuned_split_kernel(x_ptr, out_ptr, K, N: tl.constexpr, SPLITS: tl.constexpr):
    row, n = tl.program_id(0), tl.arange(0, N)
    acc = tl.zeros((N,), tl.float32)
    for k in range(tl.program_id(1), K, SPLITS):
        acc += tl.load(x_ptr + (row * K + k) * N + n)
    if SPLITS == 1:
        tl.store(out_ptr + row * N + n, acc)
    else:
        tl.atomic_add(out_ptr + row * N + n, acc, sem="relaxed")


# Four splits add to what the trials have left in the output.
@racy("out_ptr", "autotune", "one split stores, several add by atomics; how many is tuned, and the output is not reset")
def tuned_number_of_splits(device):
    x, out = integers(3, 22, 16, low=1).to(device), torch.zeros(3, 16, device=device)
    tuned_split_kernel[lambda meta: (3, meta["SPLITS"])](x, out, 22, N=16)
