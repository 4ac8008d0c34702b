"""Random modules, printed as HLO under random names in a random order, and single edits of them with their true names."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

UNARY = ("tanh", "exponential", "negate", "cosine", "logistic")
BINARY = ("add", "multiply", "subtract", "maximum", "power")
SHAPE = "f32[4,4]"


@dataclass(frozen=True)
class N:
    """An instruction of the model: operands are places."""

    opcode: str
    operands: tuple[int, ...] = ()
    attrs: str = ""
    shape: str = SHAPE
    literal: str = ""


@dataclass
class Module:
    """`order`: the numbers of the parameters. `groups`: collectives that are printed as one instruction."""

    nodes: list[N]
    outputs: list[int]
    parameters: list[int]
    header: dict[str, str] = field(default_factory=dict)
    groups: list[list[int]] = field(default_factory=list)
    scheduled: bool = False

    def copy(self) -> Module:
        return Module(
            list(self.nodes),
            list(self.outputs),
            list(self.parameters),
            dict(self.header),
            [list(g) for g in self.groups],
            self.scheduled,
        )

    def users(self, place: int) -> list[int]:
        return [k for k, n in enumerate(self.nodes) if place in n.operands]

    def uses(self, place: int) -> int:
        """Users and outputs of a node."""
        return sum(n.operands.count(place) for n in self.nodes) + self.outputs.count(place)

    def add(self, node: N) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def change(self, place: int, **changes: object) -> None:
        self.nodes[place] = replace(self.nodes[place], **changes)  # type: ignore[arg-type]

    def redirect(self, old: int, new: int, users: list[int]) -> None:
        for u in users:
            self.change(u, operands=tuple(new if o == old else o for o in self.nodes[u].operands))


def random_module(rng: random.Random, size: int = 40, collectives: int = 0) -> Module:
    """A module in which everything is live: what nobody uses is an output."""
    made = Module([], [], [])
    for _ in range(rng.randrange(3, 7)):
        made.parameters.append(made.add(N("parameter")))
    while len(made.nodes) < size:
        kind = rng.random()
        any_of = [k for k, n in enumerate(made.nodes) if n.shape == SHAPE]
        if kind < 0.1:
            constant = made.add(N("constant", shape="f32[]", literal=f"{rng.randrange(1, 999)}.5"))
            full = made.add(N("broadcast", (constant,), "dimensions={}"))
            made.add(N(rng.choice(BINARY), (rng.choice(any_of), full)))
        elif kind < 0.2:
            start = rng.randrange(2)
            cut = made.add(N("slice", (rng.choice(any_of),), f"slice={{[{start}:{start + 2}], [0:4]}}", "f32[2,4]"))
            zero = made.add(N("constant", shape="f32[]", literal="0"))
            made.add(N("pad", (cut, zero), f"padding={start}_{2 - start}x0_0"))
        elif kind < 0.5:
            made.add(N(rng.choice(UNARY), (rng.choice(any_of[-12:]),)))
        else:
            made.add(N(rng.choice(BINARY), (rng.choice(any_of[-12:]), rng.choice(any_of))))
    for k in range(collectives):
        source = rng.choice([k for k, n in enumerate(made.nodes) if n.shape == SHAPE and n.operands])
        made.groups.append([made.add(N("all-reduce", (source,), "replica_groups={{0,1}}, to_apply=%sum"))])
        made.add(N("tanh", (made.groups[-1][0],), f"tag={k}"))
    made.outputs = [k for k in range(len(made.nodes)) if not made.uses(k)]
    rng.shuffle(made.outputs)
    return random_module(rng, size, collectives) if twins(made) else made


def twins(module: Module) -> bool:
    """Are two instructions the same, constants apart? Then which of them was edited has more than one true answer."""
    seen = [
        (n.opcode, n.operands, n.attrs)
        for n in module.nodes
        if n.operands and module.nodes[n.operands[0]].opcode != "constant"
    ]
    return len(set(seen)) < len(seen)


def text(module: Module, rng: random.Random | None = None) -> str:
    """The module as HLO; with `rng` under random names and in a random order in which operands come first."""
    grouped = {k: g for g in module.groups for k in g}
    order = _order(module, grouped, rng)
    names = {k: f"{module.nodes[k].opcode}.{k if rng is None else rng.randrange(10**6) * 1000 + k}" for k in order}
    lines = []
    for k in order:
        group = grouped.get(k, [k])
        if k != group[-1]:
            continue
        if len(group) == 1:
            lines.append(_line(module, k, names))
            continue
        shape = "(" + ", ".join(module.nodes[g].shape for g in group) + ")"
        operands = ", ".join("%" + names[o] for g in group for o in module.nodes[g].operands)
        whole = f"{names[k]}.all"
        lines.append(f"  %{whole} = {shape} {module.nodes[k].opcode}({operands}), {module.nodes[k].attrs}")
        lines += [
            f"  %{names[g]} = {module.nodes[g].shape} get-tuple-element({shape} %{whole}), index={i}"
            for i, g in enumerate(group)
        ]
    shapes = ", ".join(module.nodes[o].shape for o in module.outputs)
    lines.append(f"  ROOT %out = ({shapes}) tuple({', '.join('%' + names[o] for o in module.outputs)})")
    header = "".join(f", {k}={v}" for k, v in module.header.items()) + (", is_scheduled=true" * module.scheduled)
    add = "%sum (x: f32[], y: f32[]) -> f32[] {\n  %x = f32[] parameter(0)\n  %y = f32[] parameter(1)\n"
    add += "  ROOT %s = f32[] add(%x, %y)\n}\n\n"
    return f"HloModule m{header}\n\n{add}ENTRY %main {{\n" + "\n".join(lines) + "\n}\n"


def _order(module: Module, grouped: dict[int, list[int]], rng: random.Random | None) -> list[int]:
    """A topological order; members of a group stand together, and a schedule is kept."""
    waiting = {k: set(n.operands) for k, n in enumerate(module.nodes)}
    for group in module.groups:
        for k in group:
            waiting[k] = {o for g in group for o in module.nodes[g].operands}
    if module.scheduled:
        for before, after in zip(module.groups, module.groups[1:], strict=False):
            for k in after:
                waiting[k] |= set(before)
    order: list[int] = []
    done: set[int] = set()
    while waiting:
        ready = [k for k, needs in waiting.items() if needs <= done]
        k = ready[0] if rng is None else rng.choice(ready)
        for member in grouped.get(k, [k]):
            order.append(member)
            done.add(member)
            del waiting[member]
    return order


def _line(module: Module, k: int, names: dict[int, str]) -> str:
    node = module.nodes[k]
    inner = ", ".join("%" + names[o] for o in node.operands)
    if node.opcode == "parameter":
        inner = str(module.parameters.index(k))
    elif node.opcode == "constant":
        inner = node.literal
    return f"  %{names[k]} = {node.shape} {node.opcode}({inner}){', ' + node.attrs if node.attrs else ''}"


def _pick(rng: random.Random, module: Module, fits: Callable[[int, N], bool]) -> int | None:
    found = [k for k, n in enumerate(module.nodes) if fits(k, n)]
    return rng.choice(found) if found else None


# Each edit changes its module in one place and returns the kinds that are its true name, or () if the module has no place
# for it.
def constant(m: Module, rng: random.Random) -> tuple[str, ...]:
    k = _pick(rng, m, lambda _, n: n.opcode == "constant" and n.literal != "0")
    if k is None:
        return ()
    m.change(k, literal="7777.25")
    return ("constant_changed",)


def attribute(m: Module, rng: random.Random) -> tuple[str, ...]:
    k = _pick(rng, m, lambda _, n: n.opcode == "slice")
    if k is None:
        return ()
    m.change(k, attrs="slice={[2:4], [0:4]}")
    return ("attribute_changed",)


def replaced(m: Module, rng: random.Random) -> tuple[str, ...]:
    k = _pick(rng, m, lambda _, n: n.opcode in UNARY + BINARY)
    assert k is not None
    m.change(k, opcode="sine" if m.nodes[k].opcode in UNARY else "atan2")
    return ("instruction_replaced",)


def inserted(m: Module, rng: random.Random) -> tuple[str, ...]:
    k = _pick(rng, m, lambda k, n: n.shape == SHAPE and bool(m.users(k)))
    assert k is not None
    users = m.users(k)
    new = m.add(N("sine", (k,)))
    m.redirect(k, new, users if rng.random() < 0.5 else users[:1])
    return ("instruction_inserted",)


def removed(m: Module, rng: random.Random) -> tuple[str, ...]:
    k = _pick(rng, m, lambda k, n: n.opcode in UNARY and k not in m.outputs and bool(m.users(k)))
    if k is None:
        return ()
    m.redirect(k, m.nodes[k].operands[0], m.users(k))
    m.change(k, opcode="dead", operands=())
    _drop(m, k)
    return ("instruction_removed",)


def exchanged(m: Module, rng: random.Random) -> tuple[str, ...]:
    k = _pick(rng, m, lambda _, n: n.opcode in BINARY and n.operands[0] != n.operands[1])
    if k is None:
        return ()
    m.change(k, operands=m.nodes[k].operands[::-1])
    return ("operand_changed",)


def rewired(m: Module, rng: random.Random) -> tuple[str, ...]:
    k = _pick(rng, m, lambda _, n: n.opcode in BINARY and m.uses(n.operands[0]) > 1)
    if k is None:
        return ()
    old = m.nodes[k].operands[0]
    below = [o for o in range(k) if m.nodes[o].shape == SHAPE and o != old and not _reaches(m, o, k)]
    if not below:
        return ()
    m.change(k, operands=(rng.choice(below), m.nodes[k].operands[1]))
    return ("operand_changed",)


def output_of_old(m: Module, rng: random.Random) -> tuple[str, ...]:
    k = _pick(rng, m, lambda k, n: n.shape == SHAPE and bool(n.operands) and k not in m.outputs)
    if k is None:
        return ()
    m.outputs.insert(rng.randrange(len(m.outputs) + 1), k)
    return ("output_added",)


def output_of_new(m: Module, rng: random.Random) -> tuple[str, ...]:
    k = _pick(rng, m, lambda _, n: n.shape == SHAPE)
    assert k is not None
    new = m.add(N("sine", (m.add(N("sine", (k,))),)))
    m.outputs.insert(rng.randrange(len(m.outputs) + 1), new)
    return ("output_added",)


def output_lost(m: Module, rng: random.Random) -> tuple[str, ...]:
    keep = [k for k in m.outputs if m.nodes[k].opcode in UNARY + BINARY]
    if len(m.outputs) < 2 or not keep:
        return ()
    m.outputs.remove(rng.choice(keep))
    return ("output_removed",)


def outputs_exchanged(m: Module, rng: random.Random) -> tuple[str, ...]:
    # Two parameters that are outputs and nothing else may as well have exchanged their numbers.
    places = [i for i, k in enumerate(m.outputs) if m.nodes[k].operands]
    if len(places) < 2:
        return ()
    i, j = rng.sample(places, 2)
    m.outputs[i], m.outputs[j] = m.outputs[j], m.outputs[i]
    return ("output_moved",)


def parameters_exchanged(m: Module, rng: random.Random) -> tuple[str, ...]:
    # A parameter with one use may as well have exchanged that with another.
    used = [p for p in m.parameters if len(set(m.users(p))) > 2]
    if len(used) < 2:
        return ()
    i, j = (m.parameters.index(p) for p in rng.sample(used, 2))
    m.parameters[i], m.parameters[j] = m.parameters[j], m.parameters[i]
    return ("parameter_moved",)


def parameter_more(m: Module, rng: random.Random) -> tuple[str, ...]:
    k = _pick(rng, m, lambda k, n: n.shape == SHAPE and bool(m.users(k)))
    assert k is not None
    users = m.users(k)
    p = m.add(N("parameter"))
    m.parameters.insert(rng.randrange(len(m.parameters) + 1), p)
    m.redirect(k, m.add(N("clamp", (k, p, p))), users)
    return ("parameter_added",)


def another_dtype(m: Module, rng: random.Random) -> tuple[str, ...]:
    p = rng.choice(m.parameters)
    if not m.users(p):
        return ()
    m.change(p, shape="bf16[4,4]")
    for k, n in enumerate(m.nodes):
        if k not in m.parameters and _reaches(m, p, k):
            m.change(k, shape=n.shape.replace("f32", "bf16"))
    return ("dtype_changed",)


def another_size(m: Module, rng: random.Random) -> tuple[str, ...]:
    for k, n in enumerate(m.nodes):
        m.change(k, shape=n.shape.replace("4]", "6]"), attrs=n.attrs.replace("[0:4]", "[0:6]"))
    return ("shape_changed",)


def collective_more(m: Module, rng: random.Random) -> tuple[str, ...]:
    k = _pick(rng, m, lambda k, n: n.shape == SHAPE and bool(m.users(k)))
    assert k is not None
    users = m.users(k)
    new = m.add(N("all-reduce", (k,), "replica_groups={{0,1}}, to_apply=%sum"))
    m.groups.insert(rng.randrange(len(m.groups) + 1) if not m.scheduled else len(m.groups), [new])
    m.redirect(k, new, users)
    return ("collective_inserted", "instruction_inserted")


def coalesced(m: Module, rng: random.Random) -> tuple[str, ...]:
    pairs = [
        (i, j)
        for i in range(len(m.groups))
        for j in range(i + 1, len(m.groups))
        if not any(_reaches(m, x, y) or _reaches(m, y, x) for x in m.groups[i] for y in m.groups[j])
    ]
    if not pairs or m.scheduled:
        return ()
    i, j = rng.choice(pairs)
    m.groups[i] += m.groups.pop(j)
    return ("collective_rebucketed",)


def aliased(m: Module, rng: random.Random) -> tuple[str, ...]:
    m.header["input_output_alias"] = "{ {0}: (0, {}, may-alias) }"
    return ("aliasing_changed",)


def _drop(m: Module, k: int) -> None:
    """Take a node out; every place behind it moves up by one."""
    del m.nodes[k]
    down = lambda i: i - (i > k)  # noqa: E731
    m.nodes = [replace(n, operands=tuple(map(down, n.operands))) for n in m.nodes]
    m.outputs = [down(i) for i in m.outputs]
    m.parameters = [down(i) for i in m.parameters]
    m.groups = [[down(i) for i in g] for g in m.groups]


def _reaches(m: Module, start: int, end: int) -> bool:
    """Does `end` depend on `start`?"""
    pending, seen = [end], set()
    while pending:
        k = pending.pop()
        if k == start:
            return True
        if k not in seen:
            seen.add(k)
            pending += m.nodes[k].operands
    return False


def edited(module: Module, edit: Callable[[Module, random.Random], tuple[str, ...]], rng: random.Random):
    """A copy after an edit and its true names; None where the edit has no place or leaves two instructions the same."""
    copy = module.copy()
    kinds = edit(copy, rng)
    return (copy, kinds) if kinds and not twins(copy) else None


EDITS: tuple[Callable[[Module, random.Random], tuple[str, ...]], ...] = (
    constant,
    attribute,
    replaced,
    inserted,
    removed,
    exchanged,
    rewired,
    output_of_old,
    output_of_new,
    output_lost,
    outputs_exchanged,
    parameters_exchanged,
    parameter_more,
    another_dtype,
    another_size,
    collective_more,
    coalesced,
    aliased,
)
