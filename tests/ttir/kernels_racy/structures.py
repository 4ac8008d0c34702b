"""Data structures that programs of one launch share, each with a step that nothing orders."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import integers, racy


@triton.jit
def sequence_lock_kernel(data_ptr, version_ptr, out_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    if pid == 0:
        tl.atomic_add(version_ptr, 1, sem="acq_rel")
        tl.debug_barrier()
        tl.store(data_ptr + cols, cols)
        tl.debug_barrier()
        tl.atomic_add(version_ptr, 1, sem="acq_rel")
    else:
        before = tl.atomic_add(version_ptr, 0, sem="acquire")
        tl.debug_barrier()
        tl.store(out_ptr + pid * BLOCK + cols, tl.load(data_ptr + cols))
        tl.debug_barrier()
        after = tl.atomic_add(version_ptr, 0, sem="acquire")
        tl.store(out_ptr + (pid + 4) * BLOCK + cols, cols * 0 + (after - before))


@racy("data_ptr", "read/write", "who reads beside the writer sees so afterwards, and has read half of it by then")
def sequence_lock_of_plain_data(device):
    words = torch.zeros(1, dtype=torch.int32, device=device)
    data, out = (torch.zeros(n, dtype=torch.int32, device=device) for n in (16, 128))
    sequence_lock_kernel[(4,)](data, words, out, BLOCK=16)


@triton.jit
def hash_kernel(key_ptr, slot_ptr, value_ptr, out_ptr, SLOTS: tl.constexpr):
    pid = tl.program_id(0)
    key = tl.load(key_ptr + pid)
    at = key % SLOTS
    seen = tl.atomic_cas(slot_ptr + at, 0, key, sem="acq_rel")
    while (seen != 0) & (seen != key):
        at = (at + 1) % SLOTS
        seen = tl.atomic_cas(slot_ptr + at, 0, key, sem="acq_rel")
    if seen == 0:
        tl.store(value_ptr + at, key * 10)
    else:
        tl.store(out_ptr + pid, tl.load(value_ptr + at))


@racy("value_ptr", "read/write", "the key is there before its value, which another program with the key reads")
def hash_table_whose_keys_come_first(device):
    keys = torch.tensor([3, 11, 3, 19, 11, 3], dtype=torch.int32, device=device)
    slots, values, out = (torch.zeros(n, dtype=torch.int32, device=device) for n in (8, 8, 6))
    hash_kernel[(6,)](keys, slots, values, out, SLOTS=8)


@triton.jit
def union_kernel(edge_ptr, parent_ptr):
    pid = tl.program_id(0)
    a, b = tl.load(edge_ptr + 2 * pid), tl.load(edge_ptr + 2 * pid + 1)
    up = tl.load(parent_ptr + a)
    while up != a:
        a = up
        up = tl.load(parent_ptr + a)
    up = tl.load(parent_ptr + b)
    while up != b:
        b = up
        up = tl.load(parent_ptr + b)
    if a != b:
        tl.store(parent_ptr + tl.maximum(a, b), tl.minimum(a, b))


@racy("parent_ptr", "read/write,write/write", "two edges hang the same root elsewhere, and one of them is lost")
def sets_joined_by_plain_stores(device):
    edges = torch.tensor([[0, 1], [1, 2], [2, 3], [0, 3], [4, 5]], dtype=torch.int32, device=device)
    union_kernel[(5,)](edges, torch.arange(6, dtype=torch.int32, device=device))


@triton.jit
def ring_kernel(x_ptr, ring_ptr, head_ptr, out_ptr, ITEMS: tl.constexpr, SLOTS: tl.constexpr):
    if tl.program_id(0) == 0:
        for item in range(ITEMS):
            tl.store(ring_ptr + item % SLOTS, tl.load(x_ptr + item))
            tl.atomic_add(head_ptr, 1, sem="release")
    else:
        for item in range(ITEMS):
            while tl.atomic_add(head_ptr, 0, sem="acquire") <= item:
                pass
            tl.store(out_ptr + item, tl.load(ring_ptr + item % SLOTS))


@racy("ring_ptr", "read/write", "the producer never looks how far the consumer is: round two overwrites what is unread")
def ring_buffer_without_a_tail(device):
    x = integers(12).to(device)
    ring, head = torch.zeros(4, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    ring_kernel[(2,)](x, ring, head, torch.zeros(12, device=device), ITEMS=12, SLOTS=4)


@triton.jit
def push_kernel(head_ptr, next_ptr, out_ptr):
    pid = tl.program_id(0) + 1
    old = tl.atomic_xchg(head_ptr, pid, sem="acq_rel")
    tl.store(next_ptr + pid, old)
    walked = 0
    node = tl.atomic_add(head_ptr, 0, sem="acquire")
    while (node != 0) & (walked < 8):
        walked += 1
        node = tl.load(next_ptr + node)
    tl.store(out_ptr + pid, walked)


@racy("next_ptr", "read/write", "a node is in the list before it says what is behind it")
def list_linked_after_it_is_published(device):
    head, following, out = (torch.zeros(n, dtype=torch.int32, device=device) for n in (1, 6, 6))
    push_kernel[(5,)](head, following, out)


@triton.jit
def exchange_kernel(x_ptr, n, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    other = i ^ STRIDE
    a, b = tl.load(x_ptr + i, i < n), tl.load(x_ptr + other, other < n)
    tl.store(x_ptr + i, tl.where(i < other, tl.minimum(a, b), tl.maximum(a, b)), i < n)


@racy("x_ptr", "read/write", "both ends of a pair are compared by two programs, which each store one of them")
def bitonic_step_in_place(device):
    exchange_kernel[(4,)](integers(128).to(device), 128, STRIDE=32, BLOCK=32)


@triton.jit
def lazy_kernel(ready_ptr, table_ptr, out_ptr, BLOCK: tl.constexpr):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    if tl.load(ready_ptr) == 0:
        tl.store(table_ptr + cols, cols * cols)
        tl.debug_barrier()
        tl.atomic_xchg(ready_ptr, 1, sem="release")
    tl.store(out_ptr + pid * BLOCK + cols, tl.load(table_ptr + cols))


@racy("ready_ptr,table_ptr", "read/write,atomic/read,same value", "a plain look at the flag orders nothing behind it")
def table_made_at_first_use(device):
    ready, table = (torch.zeros(n, dtype=torch.int32, device=device) for n in (1, 16))
    lazy_kernel[(4,)](ready, table, torch.zeros(64, dtype=torch.int32, device=device), BLOCK=16)


@triton.jit
def two_words_kernel(x_ptr, wide_ptr, narrow_ptr, out_ptr):
    pid = tl.program_id(0)
    tl.atomic_add(wide_ptr, tl.load(x_ptr + pid))
    tl.store(out_ptr + pid, tl.load(narrow_ptr + 1))


@racy("narrow_ptr,wide_ptr", "atomic/read", "half of a counter of 64 bits is read as a word of its own")
def upper_half_of_a_counter(device):
    x, wide = torch.full((6,), 1 << 31, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    two_words_kernel[(6,)](x, wide, wide.view(torch.int32), torch.zeros(6, dtype=torch.int32, device=device))


@triton.jit
def compact_kernel(x_ptr, offset_ptr, out_ptr, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, other=0)
    kept = (x > 0).to(tl.int32)
    rank = tl.cumsum(kept, 0)  # counts itself, as offsets do not
    tl.store(out_ptr + tl.load(offset_ptr + pid) + rank, x, kept == 1)
    tl.store(out_ptr + tl.load(offset_ptr + pid), tl.sum(tl.where(i == pid * BLOCK, x, 0)))


@racy("out_ptr", "write/write", "ranks begin at 1 and offsets at 0: the last of a block is where the next one begins")
def compacted_off_by_one(device):
    x = torch.arange(1, 65, dtype=torch.int32, device=device)
    offsets = torch.arange(0, 64, 16, dtype=torch.int32, device=device)
    compact_kernel[(4,)](x, offsets, torch.zeros(80, dtype=torch.int32, device=device), 64, BLOCK=16)


@triton.jit
def readers_kernel(data_ptr, readers_ptr, writer_ptr, out_ptr, BLOCK: tl.constexpr, NOTED: tl.constexpr = False):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    if NOTED:
        tl.store(out_ptr, 1)
    if pid == 0:
        tl.atomic_xchg(writer_ptr, 1, sem="acq_rel")
        while tl.atomic_add(readers_ptr, 0, sem="relaxed") != 0:
            pass
        tl.debug_barrier()
        tl.store(data_ptr + cols, cols)
        tl.debug_barrier()
        tl.atomic_xchg(writer_ptr, 0, sem="release")
    else:
        while tl.atomic_add(writer_ptr, 0, sem="acquire") != 0:
            pass
        tl.atomic_add(readers_ptr, 1, sem="acquire")  # the writer may have come in between
        tl.debug_barrier()
        tl.store(out_ptr + pid * BLOCK + cols, tl.load(data_ptr + cols))
        tl.debug_barrier()
        tl.atomic_add(readers_ptr, -1, sem="release")


@racy("data_ptr", "read/write", "a reader looks for the writer before it counts itself, and the writer is in by then")
def lock_of_readers_that_look_first(device, noted=False):
    data, readers, writer, out = (torch.zeros(n, dtype=torch.int32, device=device) for n in (16, 1, 1, 64))
    readers_kernel[(4,)](data, readers, writer, out, BLOCK=16, NOTED=noted)


@racy("data_ptr", "read/write,same value", "the same, where all programs store the same word as well, which is a note")
def lock_of_readers_that_look_first_beside_a_note(device):
    lock_of_readers_that_look_first(device, noted=True)


@triton.jit
def halves_kernel(words_ptr, halves_ptr):
    pid = tl.program_id(0)
    if pid % 2 == 0:
        tl.atomic_add(words_ptr, 1)
    else:
        tl.atomic_add(halves_ptr, 1)


@racy("words_ptr,halves_ptr", "atomic/atomic", "atomics of 32 bits are not atomic to those of 64 on the same bytes")
def words_counted_whole_and_by_halves(device):
    words = torch.zeros(1, dtype=torch.int64, device=device)
    halves_kernel[(6,)](words, words.view(torch.int32))


@triton.jit
def other_word_kernel(data_ptr, flag_ptr, word_ptr, out_ptr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    if tl.program_id(0) == 0:
        tl.store(data_ptr + cols, cols)
        tl.debug_barrier()
        tl.atomic_xchg(flag_ptr, 1, sem="release")
    else:
        while tl.atomic_or(flag_ptr, 0, sem="relaxed") == 0:
            pass
        tl.atomic_or(word_ptr, 0, sem="acquire")
        tl.debug_barrier()
        tl.store(out_ptr + cols, tl.load(data_ptr + cols))


@racy("data_ptr", "read/write", "after relaxed looks at the flag another word is acquired, which nobody has released")
def word_acquired_that_nobody_released(device):
    data, flag, word, out = (torch.zeros(n, dtype=torch.int32, device=device) for n in (16, 1, 1, 16))
    other_word_kernel[(2,)](data, flag, word, out, BLOCK=16)
