"""Effects of FX operations: which change a tensor, draw random numbers or set a state, and who reads what they changed.

Dynamo's graphs change tensors in place. Read as values, `y.add_(1)` is the new y: whoever reads y, or what may be a
view of it, from then on reads the result. An operator has no effect only if it is known to have none
(`pure_operators.txt`, from the schemas of torch); of all others every argument may be changed, and they keep their
order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from retrograd.graph.ir import Instruction

# Functions of Python that have no operator of their own; the second ones return views.
_PURE_NAMES = """
    cross_entropy normalize interpolate unfold fold softsign softmin tanhshrink gaussian_nll_loss size dim ndim
    numel nelement element_size stride storage_offset is_contiguous is_floating_point item tolist tensor sym_int
    sym_float sym_max sym_min sym_not sym_ite sym_sqrt sym_sum len abs min max int float bool range
    convert_element_type iota unwrap_maybe_dynamic_int broadcast_shapes
"""
_PURE = frozenset(_PURE_NAMES.split())
_VIEWS_NAMES = """
    getattr get-tuple-element getitem float half double bfloat16 long short char byte cpu cuda type T mT H mH
    data broadcast_in_dim view_of collapse_view wait_tensor updated device_put
"""
_VIEWS = frozenset(_VIEWS_NAMES.split())
_FUNCTIONS = (
    "torch.nn.functional.", "torch._C._nn.", "torch._C._linalg.", "torch._C._special.", "torch._C._fft.",
    "torch.functional.", "torch.",
)  # fmt: skip
_BACKWARD = "torch__dynamo_compiled_autograd_ops_"  # formulas of autograd in compiled autograd
_IN_PLACE_NAMES = """
    setitem delitem iadd iand iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor
"""
_IN_PLACE = frozenset(f"operator.{name}" for name in _IN_PLACE_NAMES.split())


@dataclass(frozen=True, slots=True)
class Effect:
    """What an operation does beside its value. `writes`: its first argument ("first"), "out" or "all"; "" for none."""

    writes: str = ""
    draws: bool = False
    view: bool = False
    ordered: bool = False


_UNKNOWN = Effect("all", view=True, ordered=True)


@cache
def _operators() -> dict[str, tuple[bool, bool]]:
    """Of each known operator, and of its overloads, whether it draws and whether it returns a view."""
    table: dict[str, tuple[bool, bool]] = {}
    for entry in Path(__file__).with_name("pure_operators.txt").read_text().split():
        name, _, overload = entry.strip("~*").partition(".")
        facts = entry.startswith("~"), entry.endswith("*")
        table[name if not overload else f"{name}.{overload}"] = facts
        table.setdefault(f"{name}.", facts)  # some overload of it
    return table


@cache
def effect_of(opcode: str) -> Effect:
    """The effect of an operation by its name alone; see `Effects.record` for `out=` and `inplace=`."""
    if opcode in _IN_PLACE:
        return Effect("first")
    if opcode.startswith("operator."):
        return Effect(view=opcode == "operator.getitem")
    if opcode in ("parameter", "tuple", "constant", "get_attr") or opcode.startswith((_BACKWARD, "math.", "math_")):
        return Effect()
    if opcode.startswith("_c10d_functional.") and not opcode.partition(".")[2].partition(".")[0].endswith("_"):
        return Effect(view="wait_tensor" in opcode, ordered=True)
    name, overload = _name(opcode)
    if name in _VIEWS:
        return Effect(view=True)
    if name in _PURE:
        return Effect()
    facts = _facts(name, overload)
    if facts:
        return Effect(draws=facts[0], view=facts[1])
    changed = _facts(name.removesuffix("_"), overload) if name.endswith("_") and not name.endswith("__") else None
    return Effect("first", draws=changed[0]) if changed else _UNKNOWN


def _facts(name: str, overload: str) -> tuple[bool, bool] | None:
    table = _operators()
    return table.get(name) or table.get(f"{name}.{overload}")


def _name(opcode: str) -> tuple[str, str]:
    """Name and overload of an operator of ATen that a call is; ("", "") if it is none."""
    if opcode.startswith(("aten.", "prims.")):
        name, _, overload = opcode.partition(".")[2].partition(".")
        return ("", "") if "out" in overload.lower() else (name, overload)
    if opcode.startswith("method."):
        return opcode.partition(".")[2], ""
    prefix = next((prefix for prefix in _FUNCTIONS if opcode.startswith(prefix)), None)
    name = opcode.removeprefix(prefix) if prefix else opcode.removeprefix("torch__dynamo_external_utils_")
    return (name, "") if "." not in name else ("", "")


class Effects:
    """The state of a body in the making: what may share memory with what, and what changed it last.

    `add` appends an instruction to the body and returns its place.
    """

    def __init__(self, instructions: list[Instruction], add: Callable[[Instruction], int]) -> None:
        self.instructions = instructions
        self.add = add
        self.leader: dict[int, int] = {}
        self.changed: dict[int, int] = {}  # leader of what shares memory -> who changed it last
        self.targets: dict[int, int] = {}  # an operation that changed a tensor and returns it -> that tensor
        self.renewed: dict[tuple[int, int], int] = {}
        self.members: dict[str, int] = {}
        self.states: set[int] = set()
        self.last: dict[str, int] = {}  # of "state", "draw" and "order"

    def read(self, places: Iterable[int]) -> tuple[int, ...]:
        """The values that are read under these places now."""
        return tuple([self.now(place) if self.changed else place for place in places])

    def now(self, place: int) -> int:
        change = self.changed.get(self.find(place), -1)
        if place >= change:
            return place
        if self.target(place) == self.targets.get(change):
            return change
        new = self.renewed.get((place, change))
        if new is None:
            old = self.instructions[place]
            name = f"{old.name}@{self.instructions[change].name}"
            new = self.renewed[place, change] = self.add(Instruction(name, "updated", old.shape, (place, change)))
            self.join(new, place)
        return new

    def find(self, place: int) -> int:
        while (above := self.leader.get(place, place)) != place:
            place = above
        return place

    def join(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            self.leader[a] = b
            if a in self.changed:
                self.changed[b] = max(self.changed.pop(a), self.changed.get(b, -1))

    def target(self, place: int) -> int:
        return self.targets.get(place, place)

    def record(self, place: int, args: list[int], first: list[int], out: list[int], inplace: bool) -> None:
        """Note what an instruction does; `first` and `out` are the values in its first and in its `out` argument."""
        ins = self.instructions[place]
        effect = effect_of(ins.opcode)
        if (effect is _UNKNOWN and args and self.states.issuperset(args)) or (effect is _UNKNOWN and not args):
            self.states.add(place)
            ins.has_effect, ins.after = True, self.latest("state", "order")
            self.last["state"] = place
            return
        written = {"first": first, "all": args}.get(effect.writes, [])
        written = [*written, *out, *(first if inplace else [])]
        chains = ["draw"] * effect.draws + ["order"] * effect.ordered
        ins.after = self.latest("state", *chains)
        ins.has_effect = bool(written or chains)
        self.last.update(dict.fromkeys(chains, place))
        if effect.view:
            for value in args[:1] if effect is not _UNKNOWN else args:
                self.join(place, value)
        if ins.opcode == "get_attr":
            self.join(place, self.members.setdefault(ins.attrs, place))
        if written:
            if len(first) == 1 and written == first:
                self.targets[place] = self.target(first[0])
                self.join(place, first[0])
            for value in written:
                self.changed[self.find(value)] = place

    def latest(self, *chains: str) -> tuple[int, ...]:
        return tuple(sorted({self.last[chain] for chain in chains if chain in self.last}))
