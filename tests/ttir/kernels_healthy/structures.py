"""Data structures that programs of one launch share, each step ordered by an atomic operation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import Check, healthy, integers


def _zeros(device, *sizes):
    return [torch.zeros(n, dtype=torch.int32, device=device) for n in sizes]


@triton.jit
def hash_kernel(key_ptr, slot_ptr, full_ptr, value_ptr, out_ptr, SLOTS: tl.constexpr):
    pid = tl.program_id(0)
    key = tl.load(key_ptr + pid)
    at = key % SLOTS
    seen = tl.atomic_cas(slot_ptr + at, 0, key, sem="relaxed")
    while (seen != 0) & (seen != key):
        at = (at + 1) % SLOTS
        seen = tl.atomic_cas(slot_ptr + at, 0, key, sem="relaxed")
    if seen == 0:
        tl.store(value_ptr + at, key * 10)
        tl.debug_barrier()
        tl.atomic_xchg(full_ptr + at, 1, sem="release")
    else:
        while tl.atomic_add(full_ptr + at, 0, sem="acquire") == 0:
            pass
    tl.debug_barrier()
    tl.store(out_ptr + pid, tl.load(value_ptr + at))


@healthy("a slot is claimed by its key and says when its value is there")
def hash_table(device):
    keys = torch.tensor([3, 11, 3, 19, 11, 3], dtype=torch.int32)
    out, *tables = _zeros(device, 6, 8, 8, 8)
    hash_kernel[(6,)](keys.to(device), *tables, out, SLOTS=8)
    return [Check(out, keys * 10)]


@triton.jit
def relay_kernel(x_ptr, y_ptr, flag_ptr, out_ptr, BLOCK: tl.constexpr):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    last = tl.num_programs(0) - 1
    if pid > 0:
        while tl.atomic_add(flag_ptr + pid - 1, 0, sem="acquire") == 0:
            pass
        tl.debug_barrier()
    if pid == 0:
        tl.store(y_ptr + cols, tl.load(x_ptr + cols) + 1)
    if pid == last:
        tl.store(out_ptr + cols, tl.load(y_ptr + cols))
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr + pid, 1, sem="release")


@healthy("the last program reads what the first wrote; those between hand on that it has, and touch nothing else")
def news_handed_on(device):
    x, out = integers(32), torch.zeros(32, device=device)
    relay_kernel[(5,)](x.to(device), torch.empty(32, device=device), *_zeros(device, 5), out, BLOCK=32)
    return [Check(out, x + 1)]


@triton.jit
def ring_kernel(x_ptr, ring_ptr, head_ptr, tail_ptr, out_ptr, ITEMS: tl.constexpr, SLOTS: tl.constexpr):
    if tl.program_id(0) == 0:
        for item in range(ITEMS):
            while item - tl.atomic_add(tail_ptr, 0, sem="acquire") >= SLOTS:
                pass
            tl.store(ring_ptr + item % SLOTS, tl.load(x_ptr + item))
            tl.debug_barrier()
            tl.atomic_add(head_ptr, 1, sem="release")
    else:
        for item in range(ITEMS):
            while tl.atomic_add(head_ptr, 0, sem="acquire") <= item:
                pass
            tl.debug_barrier()
            tl.store(out_ptr + item, tl.load(ring_ptr + item % SLOTS))
            tl.debug_barrier()
            tl.atomic_add(tail_ptr, 1, sem="release")


@healthy("producer and consumer each wait for the other's counter")
def ring_buffer(device):
    x, out = integers(12), torch.zeros(12, device=device)
    ring_kernel[(2,)](x.to(device), torch.zeros(4, device=device), *_zeros(device, 1, 1), out, ITEMS=12, SLOTS=4)
    return [Check(out, x)]


@triton.jit
def push_kernel(head_ptr, next_ptr, out_ptr):
    pid = tl.program_id(0) + 1
    old = tl.atomic_add(head_ptr, 0, sem="acquire")
    tl.store(next_ptr + pid, old)
    seen = tl.atomic_cas(head_ptr, old, pid, sem="acq_rel")
    while seen != old:
        old = seen
        tl.store(next_ptr + pid, old)
        seen = tl.atomic_cas(head_ptr, old, pid, sem="acq_rel")
    walked = 0
    node = tl.atomic_add(head_ptr, 0, sem="acquire")
    while node != 0:
        walked += 1
        node = tl.load(next_ptr + node)
    tl.store(out_ptr + pid, (walked > 0).to(tl.int32))


@healthy("a node says what is behind it before it is in the list; who walks has acquired the head")
def list_linked_before_it_is_published(device):
    head, following, out = _zeros(device, 1, 6, 6)
    push_kernel[(5,)](head, following, out)
    return [Check(out[1:], torch.ones(5, dtype=torch.int32))]


@triton.jit
def union_kernel(edge_ptr, parent_ptr):
    pid = tl.program_id(0)
    a, b = tl.load(edge_ptr + 2 * pid), tl.load(edge_ptr + 2 * pid + 1)
    joined = 0
    while joined == 0:
        up = tl.atomic_add(parent_ptr + a, 0)
        while up != a:
            a = up
            up = tl.atomic_add(parent_ptr + a, 0)
        up = tl.atomic_add(parent_ptr + b, 0)
        while up != b:
            b = up
            up = tl.atomic_add(parent_ptr + b, 0)
        low, high = tl.minimum(a, b), tl.maximum(a, b)
        if low == high:
            joined = 1
        else:
            if tl.atomic_cas(parent_ptr + high, high, low) == high:
                joined = 1


@triton.jit
def flatten_kernel(parent_ptr, out_ptr):
    a = tl.program_id(0)
    up = tl.load(parent_ptr + a)
    while up != a:
        a = up
        up = tl.load(parent_ptr + a)
    tl.store(out_ptr + tl.program_id(0), a)


@healthy("roots are joined by compare and swap, again where somebody was first")
def sets_joined_by_compare_and_swap(device):
    edges = torch.tensor([[0, 1], [1, 2], [2, 3], [0, 3], [4, 5]], dtype=torch.int32, device=device)
    parent, (out,) = torch.arange(6, dtype=torch.int32, device=device), _zeros(device, 6)
    union_kernel[(5,)](edges, parent)
    flatten_kernel[(6,)](parent, out)
    return [Check(out, torch.tensor([0, 0, 0, 0, 4, 4], dtype=torch.int32))]


@triton.jit
def generation_kernel(a_ptr, count_ptr, generation_ptr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    pid, cols, programs = tl.program_id(0), tl.arange(0, BLOCK), tl.num_programs(0)
    for step in range(ROUNDS):
        beside = (pid + 1) % programs
        x = tl.load(a_ptr + (step % 2) * programs * BLOCK + beside * BLOCK + cols)
        tl.store(a_ptr + ((step + 1) % 2) * programs * BLOCK + pid * BLOCK + cols, x + 1)
        tl.debug_barrier()
        if tl.atomic_add(count_ptr, 1, sem="acq_rel") == programs - 1:
            tl.atomic_xchg(count_ptr, 0, sem="relaxed")
            tl.atomic_add(generation_ptr, 1, sem="release")
        else:
            while tl.atomic_add(generation_ptr, 0, sem="acquire") <= step:
                pass
        tl.debug_barrier()


@healthy("a barrier whose counter goes back to 0 each time: the generation says that all have come")
def barrier_that_is_used_again(device):
    a = torch.stack([integers(4, 16), torch.zeros(4, 16)])
    own = a.to(device)
    generation_kernel[(4,)](own, *_zeros(device, 1, 1), ROUNDS=4, BLOCK=16)
    return [Check(own[0], a[0] + 4)]


@triton.jit
def tree_kernel(x_ptr, part_ptr, flag_ptr, out_ptr, LEVELS: tl.constexpr, BLOCK: tl.constexpr):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    total = tl.load(x_ptr + pid * BLOCK + cols)
    sent = 0
    for level in range(LEVELS):
        if sent == 0:
            if (pid >> level) & 1:
                tl.store(part_ptr + pid * BLOCK + cols, total)
                tl.debug_barrier()
                tl.atomic_xchg(flag_ptr + pid, 1, sem="release")
                sent = 1
            else:
                other = pid + (1 << level)
                while tl.atomic_add(flag_ptr + other, 0, sem="acquire") == 0:
                    pass
                tl.debug_barrier()
                total += tl.load(part_ptr + other * BLOCK + cols)
    if pid == 0:
        tl.store(out_ptr + cols, total)


@healthy("programs add up in pairs, each of which waits for one other")
def sum_by_a_tree(device):
    x, out = integers(8, 16), torch.zeros(16, device=device)
    tree_kernel[(8,)](x.to(device), torch.empty(8, 16, device=device), *_zeros(device, 8), out, LEVELS=3, BLOCK=16)
    return [Check(out, x.sum(0))]


@triton.jit
def token_kernel(word_ptr, turn_ptr, ROUNDS: tl.constexpr):
    pid, programs = tl.program_id(0), tl.num_programs(0)
    for number in range(ROUNDS):
        while tl.atomic_cas(turn_ptr, number * programs + pid, -1, sem="acquire") != number * programs + pid:
            pass
        tl.debug_barrier()
        tl.store(word_ptr, tl.load(word_ptr) * 3 + pid)
        tl.debug_barrier()
        tl.atomic_xchg(turn_ptr, number * programs + pid + 1, sem="release")


@healthy("one token goes round twice; who has it may write")
def token_that_goes_round(device):
    word, turn = _zeros(device, 1, 1)
    token_kernel[(4,)](word, turn, ROUNDS=2)
    want = 0
    for pid in [0, 1, 2, 3] * 2:
        want = want * 3 + pid
    return [Check(word, torch.tensor([want], dtype=torch.int32))]


@triton.jit
def steal_kernel(queue_ptr, out_ptr, OWN: tl.constexpr):
    pid, programs = tl.program_id(0), tl.num_programs(0)
    for victim in range(programs):
        queue = (pid + victim) % programs
        item = tl.atomic_add(queue_ptr + queue, 1, sem="relaxed")
        while item < OWN:
            place = queue * OWN + item
            tl.store(out_ptr + place, tl.load(out_ptr + place) + place)
            item = tl.atomic_add(queue_ptr + queue, 1, sem="relaxed")


@healthy("programs take items of their own queue, then of others': each item has one taker, in place")
def work_stealing(device):
    (queues,), out = _zeros(device, 4), integers(20)
    own = out.to(device)
    steal_kernel[(4,)](queues, own, OWN=5)
    return [Check(own, out + torch.arange(20))]


@triton.jit
def once_kernel(ready_ptr, table_ptr, out_ptr, BLOCK: tl.constexpr):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    if tl.atomic_cas(ready_ptr, 0, 1, sem="relaxed") == 0:
        tl.store(table_ptr + cols, cols * cols)
        tl.debug_barrier()
        tl.atomic_xchg(ready_ptr, 2, sem="release")
    else:
        while tl.atomic_cas(ready_ptr, 2, 2, sem="acquire") != 2:
            pass
    tl.debug_barrier()
    tl.store(out_ptr + pid * BLOCK + cols, tl.load(table_ptr + cols))


@healthy("one program is chosen to make the table; the others wait by a compare and swap that changes nothing")
def table_made_by_the_first_to_come(device):
    ready, table, out = _zeros(device, 1, 16, 64)
    once_kernel[(4,)](ready, table, out, BLOCK=16)
    return [Check(out.view(4, 16), torch.arange(16, dtype=torch.int32).square().repeat(4, 1))]
