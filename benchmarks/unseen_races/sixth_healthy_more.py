"""Healthy kernels of the sixth set: launches one after the other, views of one memory, autotuners, atomics."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import Check, healthy, integers
from triton.tools.tensor_descriptor import TensorDescriptor


def whole(*values):
    return torch.tensor(values, dtype=torch.int32)


@triton.jit
def add_tiles_kernel(c_desc, a_ptr, SPLITS: tl.constexpr, T: tl.constexpr):
    m, split = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, T)[:, None] * T + tl.arange(0, T)[None, :]
    c_desc.atomic_add([m * T, 0], tl.load(a_ptr + (m * SPLITS + split) * T * T + place))


@triton.jit
def finish_tile_kernel(c_desc, bias_ptr, T: tl.constexpr):
    m = tl.program_id(0) * T
    c_desc.store([m, 0], tl.maximum(c_desc.load([m, 0]) + tl.load(bias_ptr + tl.arange(0, T))[None, :], 0.0))


# Splits meet by atomics only; the sum is loaded and stored when their launch is over.
@healthy("splits add to tiles by a descriptor, atomically, and the next kernel adds a bias and cuts off at 0")
def tiles_added_to_and_finished_in_the_next_launch(device):
    a, bias, c = integers(2, 3, 16, 16, seed=1), integers(16, seed=2), torch.zeros(32, 16, device=device)
    desc = TensorDescriptor.from_tensor(c, [16, 16])
    add_tiles_kernel[(2, 3)](desc, a.to(device), SPLITS=3, T=16)
    finish_tile_kernel[(2,)](desc, bias.to(device), T=16)
    return [Check(c, (a.sum(1) + bias).clamp(min=0).view(32, 16))]


@triton.jit
def double_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i) * 2)


@triton.jit
def flip_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + n - 1 - i))


# The side stream waits for the first event, and the first stream for the second one before it overwrites.
@healthy("two streams, each of which waits for an event of the other's before it loads what that stored")
def two_streams_and_their_events(device):
    x = integers(64)
    own, (y, z) = x.to(device, copy=True), torch.zeros(2, 64, device=device)
    side, ready, done = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()
    side.wait_stream(torch.cuda.current_stream())
    double_kernel[(4,)](own, y, BLOCK=16)
    ready.record()
    with torch.cuda.stream(side):
        side.wait_event(ready)
        flip_kernel[(4,)](y, z, 64, BLOCK=16)
        done.record()
    torch.cuda.current_stream().wait_event(done)
    flip_kernel[(4,)](own, y, 64, BLOCK=16)
    return [Check(y, x.flip(0)), Check(z, 2 * x.flip(0))]


@triton.jit
def block_sums_kernel(x_ptr, part_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    tl.store(part_ptr + pid, tl.sum(tl.load(x_ptr + pid * BLOCK + tl.arange(0, BLOCK)), 0))


@triton.jit
def all_sums_kernel(part_ptr, out_ptr, P: tl.constexpr):
    pid = tl.program_id(0)
    tl.store(out_ptr + pid, tl.sum(tl.load(part_ptr + tl.arange(0, P)), 0) * pid)


# The allocator may give the same memory out again; launches of a stream come one after the other all the same.
@healthy("scratch that is allocated and freed in a loop, stored by one kernel and loaded by the next")
def scratch_of_recycled_memory(device):
    x, out = integers(3, 128), torch.zeros(3, 4, device=device)
    for k in range(3):
        part = torch.empty(8, device=device)
        block_sums_kernel[(8,)](x[k].to(device), part, BLOCK=16)
        all_sums_kernel[(4,)](part, out[k], P=8)
        del part
    return [Check(out, x.sum(1)[:, None] * torch.arange(4.0))]


@triton.jit
def rotate_three_kernel(x_ptr, work_ptr, out_ptr, turn, BLOCK: tl.constexpr):
    pid, programs = tl.program_id(0), tl.num_programs(0)
    x = tl.load(x_ptr + (turn * programs + pid) * BLOCK + tl.arange(0, BLOCK))
    tl.atomic_add(work_ptr + turn % 3, tl.sum(x, 0), sem="relaxed")
    tl.store(out_ptr + turn * programs + pid, tl.load(work_ptr + (turn + 2) % 3))
    if pid == 0:
        tl.store(work_ptr + (turn + 1) % 3, 0.0)


# What is cleared for the next launch is neither what is read nor what is added to in this one.
@healthy("three sums by turns: one is added to, one read, and one cleared by the first program")
def sums_that_rotate_through_three_places(device):
    x, work, out = integers(5, 64), torch.zeros(3, device=device), torch.zeros(5, 4, device=device)
    for turn in range(5):
        rotate_three_kernel[(4,)](x.to(device), work, out, turn, BLOCK=16)
    before = torch.cat([torch.zeros(1), x.sum(1)[:-1]])
    return [Check(out, before[:, None].expand(5, 4))]


@triton.jit
def take_targets_kernel(logit_ptr, target_ptr, taken_ptr, N: tl.constexpr):
    row = tl.program_id(0)
    tl.store(taken_ptr + row, tl.load(logit_ptr + row * N + tl.load(target_ptr + row)))


@triton.jit
def half_loss_kernel(logit_ptr, target_ptr, taken_ptr, loss_ptr, HALF: tl.constexpr):
    row, half = tl.program_id(0), tl.program_id(1)
    n = half * HALF + tl.arange(0, HALF)
    place = logit_ptr + row * 2 * HALF + n
    x = tl.load(place)
    tl.atomic_add(loss_ptr + row, tl.sum(x, 0) - tl.where(half == 0, tl.load(taken_ptr + row), 0.0), sem="relaxed")
    tl.store(place, x * 3 - tl.where(n == tl.load(target_ptr + row), 1.0, 0.0))


# Targets were taken a kernel before, so that a half loads only what it stores itself.
@healthy("gradients go over the logits by halves of a row; those of the targets were put aside before")
def targets_put_aside_before_halves_of_rows(device):
    logits, target = integers(4, 32), whole(3, 20, 31, 0)
    own, (taken, loss) = logits.to(device, copy=True), torch.zeros(2, 4, device=device)
    take_targets_kernel[(4,)](own, target.to(device), taken, N=32)
    half_loss_kernel[(4, 2)](own, target.to(device), taken, loss, HALF=16)
    at = torch.nn.functional.one_hot(target.long(), 32).float()
    return [Check(own, 3 * logits - at), Check(loss, logits.sum(1) - (logits * at).sum(1))]


@triton.jit
def claim_short_kernel(key_ptr, owner_ptr, winner_ptr):
    pid = tl.program_id(0)
    key = tl.load(key_ptr + pid)
    nobody = tl.full([], -1, tl.int16)
    if tl.atomic_cas(owner_ptr + key, nobody, pid.to(tl.int16), sem="relaxed") == -1:
        tl.store(winner_ptr + key, pid)


# Words of 16 bits lie beside each other; of all that have a key one swap finds -1, and its program stores.
@healthy("keys are claimed by swaps of 16 bits, and the winner of each stores its number")
def keys_claimed_by_swaps_of_16_bits(device):
    key = integers(20, low=0, high=7, dtype=torch.int32)
    owner, winner = torch.full((7,), -1, dtype=torch.int16, device=device), torch.full((7,), -1).int().to(device)
    claim_short_kernel[(20,)](key.to(device), owner, winner)
    taken = torch.zeros(7, dtype=torch.bool).index_fill(0, key.long(), True)
    return [Check(winner, owner.cpu().int()), Check(owner >= 0, taken)]


@triton.jit
def peek_and_raise_kernel(x_ptr, top_ptr, BLOCK: tl.constexpr):
    top = tl.max(tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)), 0)
    if top > tl.atomic_or(top_ptr, 0, sem="relaxed"):
        tl.atomic_max(top_ptr, top, sem="relaxed")


# The look is an atomic as well. An old value only costs a raise that changes nothing.
@healthy("a maximum is looked at by an atomic that changes nothing, to see whether it needs to be raised")
def maximum_looked_at_by_an_atomic(device):
    x, top = integers(128, low=0, high=999, dtype=torch.int32), torch.zeros(1, dtype=torch.int32, device=device)
    peek_and_raise_kernel[(8,)](x.to(device), top, BLOCK=16)
    return [Check(top, x.max()[None])]


@triton.autotune(
    [triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})], key=["n"], restore_value=["state_ptr"]
)  # fmt: skip
@triton.jit
def exchanged_state_kernel(x_ptr, state_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    old = tl.load(state_ptr + i, i < n)
    tl.store(state_ptr + i, tl.load(x_ptr + i, i < n), i < n)
    tl.store(out_ptr + i, old, i < n)


# The state is put back behind every trial; the output is stored anew by each.
@healthy("a new state is exchanged for the old one by a tuned kernel, which restores it")
def tuned_exchange_that_restores_the_state(device):
    x, state, out = integers(70, seed=1), integers(70, seed=2), torch.zeros(70, device=device)
    own = state.to(device, copy=True)
    exchanged_state_kernel[lambda meta: (triton.cdiv(70, meta["BLOCK"]),)](x.to(device), own, out, 70)
    return [Check(own, x), Check(out, state)]


@triton.autotune(
    [triton.Config({"SPLITS": 4}), triton.Config({"SPLITS": 1})], key=["K"], reset_to_zero=["out_ptr"]
)  # fmt: skip
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


# A single split stores, several add to zeros.
@healthy("one split stores, several add by atomics; how many is tuned, and the output reset before each run")
def tuned_number_of_splits_with_a_reset(device):
    x, out = integers(3, 22, 16), torch.zeros(3, 16, device=device)
    tuned_split_kernel[lambda meta: (3, meta["SPLITS"])](x.to(device), out, 22, N=16)
    return [Check(out, x.sum(1))]


@triton.jit
def sum_of_two_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i, i < n) + tl.load(y_ptr + i, i < n), i < n)


# All three arguments are the same memory, of which a program loads what it then stores.
@healthy("the same tensor is both summands and the sum")
def tensor_that_is_all_three_arguments(device):
    x = integers(100)
    own = x.to(device, copy=True)
    sum_of_two_kernel[(4,)](own, own, own, 100, BLOCK=32)
    return [Check(own, 2 * x)]


@triton.jit
def strided_rows_kernel(x_ptr, stride, width, BLOCK: tl.constexpr):
    col = tl.arange(0, BLOCK)
    place = x_ptr + tl.program_id(0) * stride + col
    tl.store(place, tl.load(place, col < width, other=0.0) * 2, col < width)


# Rows of 16 at every twelfth element overlap by 4, which the mask leaves to the next row.
@healthy("rows of a view that overlap, of which each program changes as many columns as rows lie apart")
def overlapping_rows_masked_to_their_distance(device):
    x = integers(64)
    own = x.to(device, copy=True)
    view = own.as_strided((5, 16), (12, 1))
    strided_rows_kernel[(5,)](view, view.stride(0), 12, BLOCK=16)
    return [Check(own, torch.cat([2 * x[:60], x[60:]]))]


@triton.jit
def packed_gradient_kernel(dk_ptr, dv_ptr, packed_ptr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr):
    token, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, D)
    row = packed_ptr + token * (H + 2 * G) * D + d
    tl.store(row + (H + head) * D, tl.load(dk_ptr + (token * G + head) * D + d))
    tl.store(row + (H + G + head) * D, tl.load(dv_ptr + (token * G + head) * D + d))


# Heads of keys are 4 and 5 of a row, those of values 6 and 7.
@healthy("queries, keys and values in one row: gradients of keys and values to heads of their own")
def packed_rows_of_all_heads(device):
    dk, dv, packed = integers(5, 2, 16, seed=1), integers(5, 2, 16, seed=2), torch.zeros(5, 8, 16, device=device)
    packed_gradient_kernel[(5, 2)](dk.to(device), dv.to(device), packed, H=4, G=2, D=16)
    return [Check(packed, torch.cat([torch.zeros(5, 4, 16), dk, dv], 1))]


@triton.jit
def key_and_value_kernel(k_ptr, v_ptr, slot_ptr, cache_ptr, D: tl.constexpr):
    token, d = tl.program_id(0), tl.arange(0, D)
    slot = tl.load(slot_ptr + token)
    if slot >= 0:
        place = cache_ptr + slot * 2 * D + 2 * d
        tl.store(place, tl.load(k_ptr + token * D + d).to(tl.int8))
        tl.store(place + 1, tl.load(v_ptr + token * D + d).to(tl.int8))


# Slots occur once; tokens of slot -1 store nothing.
@healthy("keys and values of 8 bits lie alternately in the slots of a cache; padding stores nothing")
def keys_and_values_by_turns(device):
    k, v, slot = integers(6, 16, seed=1), integers(6, 16, seed=2), whole(4, -1, 0, 7, -1, 5)
    cache, want = torch.zeros(8, 16, 2, dtype=torch.int8, device=device), torch.zeros(8, 16, 2, dtype=torch.int8)
    key_and_value_kernel[(6,)](k.to(device), v.to(device), slot.to(device), cache, D=16)
    want[slot[slot >= 0].long()] = torch.stack([k, v], -1)[slot >= 0].to(torch.int8)
    return [Check(cache, want)]


@triton.jit
def channel_sums_kernel(x_ptr, part_ptr, rows, C, R: tl.constexpr, B: tl.constexpr):
    c, chunk = tl.program_id(0) * B + tl.arange(0, B)[None, :], tl.program_id(1)
    r = chunk * R + tl.arange(0, R)[:, None]
    x = tl.load(x_ptr + r * C + c, (r < rows) & (c < C), other=0.0)
    col = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(part_ptr + chunk * C + col, tl.sum(x, 0), col < C)


@triton.jit
def centre_kernel(x_ptr, part_ptr, rows, C, chunks, R: tl.constexpr, B: tl.constexpr):
    col = tl.program_id(0) * B + tl.arange(0, B)
    total = tl.zeros((B,), tl.float32)
    for chunk in range(chunks):
        total += tl.load(part_ptr + chunk * C + col, col < C, other=0.0)
    r = tl.program_id(1) * R + tl.arange(0, R)[:, None]
    place, mask = x_ptr + r * C + col[None, :], (r < rows) & (col < C)[None, :]
    tl.store(place, tl.load(place, mask, other=0.0) * rows - total[None, :], mask)


# Each pair of chunk and block of channels has partial sums of its own; blocks of another size use them a launch later.
@healthy("statistics of channels in two passes: partial sums, and then all rows in place, by blocks of other sizes")
def channels_centred_in_two_passes(device):
    x, part = integers(22, 24), torch.empty(3, 24, device=device)
    own = x.to(device, copy=True)
    channel_sums_kernel[(2, 3)](own, part, 22, 24, R=8, B=16)
    centre_kernel[(3, 6)](own, part, 22, 24, 3, R=4, B=8)
    return [Check(own, 22 * x - x.sum(0))]


@triton.jit
def split_words_kernel(low_ptr, high_ptr, g_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low, high = tl.load(low_ptr + 2 * i, i < n, other=0), tl.load(high_ptr + 2 * i, i < n, other=0)
    word = (high.to(tl.int32) << 16) | (low.to(tl.int32) & 0xFFFF)
    new = (word.to(tl.float32, bitcast=True) - tl.load(g_ptr + i, i < n, other=0.0)).to(tl.int32, bitcast=True)
    tl.store(low_ptr + 2 * i, new.to(tl.int16), i < n)
    tl.store(high_ptr + 2 * i, (new >> 16).to(tl.int16), i < n)


# Two views of one memory, in turn; both halves of a word belong to the program of its index.
@healthy("float32 weights as two views of 16 bits, upper and lower halves, step in place")
def weights_in_two_views_of_their_halves(device):
    p, g = integers(70, low=-999, high=999, seed=1), integers(70, low=-999, high=999, seed=2)
    own = p.to(device, copy=True)
    halves = own.view(torch.int16).view(70, 2)
    split_words_kernel[(3,)](halves[:, 0], halves[:, 1], g.to(device), 70, BLOCK=32)
    return [Check(own, p - g)]
