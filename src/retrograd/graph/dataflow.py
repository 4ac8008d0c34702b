"""Dataflow of one value of a graph: through tuples, barriers, called computations and collectives, to the outputs.

A value in a tuple is followed by its element, a value in a called computation back to the call that it came through: a
computation that is called from several places does not mix their values up. That is a reachability problem over states
(calling context, instruction, element); every computation is walked once for each context, and after `_MAX_CONTEXTS`
of them once for all others together, so that the work stays linear in the size of the graph.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from retrograd.graph.form import elements
from retrograd.graph.ir import PER_OPERAND, Computation, Graph, Instruction
from retrograd.graph.ordinals import collective, numbered
from retrograd.graph.schema import Crossing, FlowStep, Follow, Reached
from retrograd.graph.tokens import adds_token, tokens
from retrograd.graph.value_names import ValueRef, find, name_of

Path = tuple[int, ...]

# Ways into one computation that are told apart: a scanned layer has a handful, a helper such as `closed_call` may have
# hundreds, and each is a walk through the whole computation.
_MAX_CONTEXTS = 8

_MOVES = frozenset({"bitcast", "copy", "reshape"})
# Operands of these become parameters of what they call; a reduction's `to_apply` is not meant.
_CALLS = frozenset({"async-start", "call", "fusion", "while", "conditional"})


def follow(graph: Graph, value: str, limit: int | None = 400) -> Follow:
    """What `retrograd.graph.follow` returns, of a graph that is read."""
    target = find(graph, value)
    walk = _Walk(graph)
    walk.run(target)
    return walk.record(target, value, limit)


@dataclass(slots=True)
class _Context:
    """One calling context of a computation: to which calls its root returns."""

    computation: Computation
    # (way, place of the call, role) -> state
    callers: dict[tuple[int, int, str], int] = field(default_factory=dict[tuple[int, int, str], int])
    roots: list[int] = field(default_factory=list[int])


@dataclass(slots=True)
class _State:
    context: int
    place: int
    path: Path
    parent: int
    flow: str
    exact: bool
    operands: list[int]
    outputs: list[int] = field(default_factory=list[int])
    continues: bool = False


class _Walk:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.users: dict[str, list[list[tuple[int, int]]]] = {}
        self.tokens: dict[str, tuple[frozenset[int], frozenset[int]]] = {}
        self.contexts: list[_Context] = []
        self.known_contexts: dict[tuple[object, ...], int] = {}
        self.contexts_of: dict[str, int] = {}
        self.states: list[_State] = []
        self.known: dict[tuple[int, int, Path], int] = {}
        # Operands of collectives, by way, place and number: the state of the result; does the value itself come in?
        self.crossed: dict[tuple[int, int, int], tuple[int, bool]] = {}
        # Exact ones first, so that a value counts as unchanged wherever there is a way on which it is.
        self.exact: deque[int] = deque()
        self.computed: deque[int] = deque()
        self.merged: set[str] = set()

    def run(self, target: ValueRef) -> None:
        context = self.context((target.computation.name, "start"), target.computation)
        if target.computation is not self.graph.main:
            self.callers_of(target.computation, context)
        self.add_state(context, target.place, target.path, -1, 0, "start", True)
        while self.exact or self.computed:
            self.propagate(self.exact.popleft() if self.exact else self.computed.popleft())

    # Ways into computations.

    def context(self, key: tuple[object, ...], computation: Computation) -> int:
        number = self.known_contexts.get(key)
        if number is None:
            number = self.known_contexts[key] = len(self.contexts)
            self.contexts.append(_Context(computation))
            if computation.name not in self.users:
                self.users[computation.name] = _users(computation)
                self.tokens[computation.name] = tokens(computation)
        return number

    def callers_of(self, computation: Computation, context: int) -> None:
        """A value inside a called computation leaves it to every call of it, and so on up to the entry."""
        calls = _calls(self.graph)
        pending = [(computation, context)]
        while pending:
            inner, inner_context = pending.pop()
            for outer, place, role in calls.get(inner.name, ()):
                new = (outer.name, "start") not in self.known_contexts
                outer_context = self.context((outer.name, "start"), outer)
                self.contexts[inner_context].callers.setdefault((outer_context, place, role), -1)
                if new and outer is not self.graph.main:
                    pending.append((outer, outer_context))

    def enter_call(self, state: int, user: int, role: str, name: str, parameter: int, path: Path) -> None:
        """Into a called computation, as one of its parameters."""
        at = self.states[state]
        computation = self.graph.computations[name]
        if parameter >= len(computation.parameters):
            self.add_state(at.context, user, (), state, parameter, "used", False)
            return
        # The elements that a loop carries share one way: they come back to the same loop.
        key: tuple[object, ...] = (name, at.context, user) if role in ("body", "condition") else (name, parameter, path)
        if key not in self.known_contexts:
            self.contexts_of[name] = self.contexts_of.get(name, 0) + 1
            if self.contexts_of[name] > _MAX_CONTEXTS:
                self.merged.add(name)
                key = (name,)
        context = self.context(key, computation)
        at.continues = True
        caller = (at.context, user, role)
        if caller not in self.contexts[context].callers:
            self.contexts[context].callers[caller] = state
            for root in tuple(self.contexts[context].roots):
                self.return_to_caller(caller, state, root)
        self.add_state(context, computation.parameters[parameter], path, state, parameter, "packaging", at.exact)

    def return_to_caller(self, caller: tuple[int, int, str], entered: int, root: int) -> None:
        """From the root of a called computation to the result of the call."""
        context, place, role = caller
        at = self.states[root]
        at.continues = True
        first = entered < 0 or next(iter(self.contexts[at.context].callers)) == caller
        parent = root if first else entered
        exact = at.exact and (entered < 0 or self.states[entered].exact)
        ins = self.contexts[context].computation.instructions[place]
        if role == "condition":
            # How often the loop runs decides all of its result.
            self.add_state(context, place, (), parent, -1, "used", False)
            return
        path = (1, *at.path) if ins.opcode == "async-start" else at.path
        self.add_state(context, place, path, parent, -1, "packaging", exact)
        if role == "body":
            # Once more around.
            for again, name in ins.called:
                self.enter_call(self.known[context, place, path], place, again, name, 0, path)

    # States.

    def add_state(
        self, context: int, place: int, path: Path, parent: int, operand: int, flow: str, exact: bool
    ) -> None:
        if parent >= 0:
            self.states[parent].continues = True
        key = (context, place, path)
        existing = self.known.get(key)
        if operand >= 0 and parent >= 0 and collective(self.contexts[context].computation.instructions[place]):
            into = len(self.states) if existing is None else existing
            self.crossed.setdefault((context, place, operand), (into, self.states[parent].exact))
        if existing is not None:
            known = self.states[existing]
            if operand >= 0 and known.parent == parent and operand not in known.operands:
                known.operands.append(operand)
            return
        self.known[key] = len(self.states)
        (self.exact if exact else self.computed).append(len(self.states))
        operands = [operand] if parent >= 0 and operand >= 0 else []
        self.states.append(_State(context, place, path, parent, flow, exact, operands))

    def propagate(self, state: int) -> None:
        at = self.states[state]
        context = self.contexts[at.context]
        if at.flow == "order":
            return
        for user, operand in self.users[context.computation.name][at.place]:
            self.propagate_to_user(state, context.computation, user, operand)
        if at.place == context.computation.root:
            self.return_from(state, context)

    def return_from(self, state: int, context: _Context) -> None:
        at = self.states[state]
        if context.computation is self.graph.main:
            shape = context.computation.instructions[at.place].shape
            at.outputs += [at.path[0]] if at.path else range(len(elements(shape)))
            return
        context.roots.append(state)
        for caller, entered in tuple(context.callers.items()):
            self.return_to_caller(caller, entered, state)

    def propagate_to_user(self, state: int, computation: Computation, user: int, k: int) -> None:
        at, ins = self.states[state], computation.instructions[user]
        opcode, path = ins.opcode, at.path
        if opcode == "tuple":
            if user == computation.root and computation is self.graph.main:
                at.outputs.append(k)
            else:
                self.add_state(at.context, user, (k, *path), state, k, "packaging", at.exact)
        elif opcode == "get-tuple-element":
            if not path or ins.attrs == str(path[0]):
                self.add_state(at.context, user, path[1:], state, k, "packaging", at.exact)
        elif opcode == "opt-barrier":
            inner = (k, *path) if len(ins.operands) > 1 else path
            self.add_state(at.context, user, inner, state, k, "packaging", at.exact)
        elif opcode in _MOVES:
            self.add_state(at.context, user, path, state, k, "moved", at.exact)
        elif ins.called and opcode in _CALLS:
            self.call(state, user, ins, k)
        elif opcode.endswith(("-start", "-done", "-update")):
            self.asynchronous(state, user, ins, k)
        elif opcode in PER_OPERAND and len(ins.operands) > 1:
            self.add_state(at.context, user, (k,), state, k, "used", False)
        else:
            gathers, chain = self.tokens[computation.name]
            if adds_token(computation, chain, ins, k):
                self.add_state(at.context, user, path, state, k, "moved", at.exact)
            else:
                only = user in gathers and all(u in chain for u, _ in self.users[computation.name][user])
                self.add_state(at.context, user, (), state, k, "order" if only else "used", False)

    def call(self, state: int, user: int, ins: Instruction, k: int) -> None:
        at = self.states[state]
        if ins.opcode == "conditional":
            if k == 0:
                self.add_state(at.context, user, (), state, 0, "used", False)
            elif k <= len(ins.called):
                self.enter_call(state, user, *ins.called[k - 1], 0, at.path)
            return
        for role, name in ins.called:
            self.enter_call(state, user, role, name, k, at.path)

    def asynchronous(self, state: int, user: int, ins: Instruction, k: int) -> None:
        """The tuple of a start holds what it was given and the result to be; its done takes the result out."""
        at = self.states[state]
        base, _, part = ins.opcode.rpartition("-")
        if part == "start" and base == "copy":
            self.add_state(at.context, user, (0, *at.path), state, k, "moved", at.exact)
        elif part == "start":
            self.add_state(at.context, user, _start_path(ins, base, k), state, k, "used", False)
        elif part == "update" or not at.path or base == "all-reduce":
            self.add_state(at.context, user, at.path, state, k, "packaging", at.exact)
        elif at.path[0] == (0 if base == "copy" else 1):
            self.add_state(at.context, user, at.path[1:], state, k, "packaging", at.exact)

    # The record.

    def record(self, target: ValueRef, value: str, limit: int | None) -> Follow:
        kept = self.states if limit is None else self.states[: max(limit, 1)]
        crossings = self.crossings()
        ordinals = {crossing.id: crossing.ordinal for crossing in crossings}
        notes = [*target.notes]
        if self.merged:
            names = ", ".join(sorted(self.merged))
            notes.append(f"{names}: called in more than {_MAX_CONTEXTS} ways, which are told apart only up to there")
        ins = target.instruction
        return Follow(
            self.graph.title,
            value,
            name_of(self.graph, target.computation, ins),
            ins.opcode,
            target.shape,
            str(self.graph.where(ins)),
            tuple(self.step(state, ordinals) for state in kept),
            len(self.states),
            self.reached(),
            len(_outputs(self.graph)),
            crossings,
            self.named(s for s in self.states if self.is_end(s)),
            self.named(s for s in self.states if self.instruction(s).has_effect),
            tuple(notes),
        )

    def instruction(self, state: _State) -> Instruction:
        return self.contexts[state.context].computation.instructions[state.place]

    def id(self, state: _State) -> str:
        return name_of(self.graph, self.contexts[state.context].computation, self.instruction(state))

    def named(self, states: object) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.id(state) for state in states))  # type: ignore[attr-defined]

    def is_end(self, state: _State) -> bool:
        return not (state.continues or state.outputs or state.flow == "order" or self.instruction(state).has_effect)

    def step(self, state: _State, ordinals: dict[str, int]) -> FlowStep:
        ins, name = self.instruction(state), self.id(state)
        return FlowStep(
            name,
            ins.opcode,
            ins.shape,
            str(self.graph.where(ins)),
            tuple(state.operands),
            ".".join(map(str, state.path)),
            state.parent,
            state.flow,  # type: ignore[arg-type]
            state.exact,
            tuple(sorted(set(state.outputs))),
            self.is_end(state),
            ordinals.get(name, 0),
        )

    def reached(self) -> tuple[Reached, ...]:
        outputs = _outputs(self.graph)
        reached: dict[int, Reached] = {}
        for state in self.states:
            for index in state.outputs:
                if index not in reached or (state.exact and not reached[index].exact):
                    ins = self.instruction(state)
                    where = str(self.graph.where(ins))
                    reached[index] = Reached(index, outputs[index], self.id(state), where, state.exact)
        return tuple(reached[index] for index in sorted(reached))

    def crossings(self) -> tuple[Crossing, ...]:
        """Every collective that was come to, an operand each, in the order of the text."""
        numbers = numbered(self.graph) if self.crossed else {}
        crossings: dict[tuple[int, int], tuple[int, Crossing]] = {}
        for (context, place, operand), (state, exact) in self.crossed.items():
            computation = self.contexts[context].computation
            ins, path = computation.instructions[place], self.states[state].path
            several = len(ins.operands) > 1
            crossing = Crossing(
                name_of(self.graph, computation, ins),
                collective(ins),
                *numbers[id(ins)],
                operand,
                len(ins.operands),
                0 if not several else path[-1] if path else -1,
                str(self.graph.where(ins)),
                exact,
            )
            crossings.setdefault((id(ins), operand), (ins.line, crossing))
        return tuple(c for _, c in sorted(crossings.values(), key=lambda pair: (pair[0], pair[1].operand)))


def _calls(graph: Graph) -> dict[str, list[tuple[Computation, int, str]]]:
    """Who calls each computation: the caller, the place of the call, and as what."""
    calls: dict[str, list[tuple[Computation, int, str]]] = {}
    for outer in graph:
        for place, ins in enumerate(outer.instructions):
            if ins.called and ins.opcode in _CALLS:
                for role, name in ins.called:
                    calls.setdefault(name, []).append((outer, place, role))
    return calls


def _users(computation: Computation) -> list[list[tuple[int, int]]]:
    users: list[list[tuple[int, int]]] = [[] for _ in computation.instructions]
    for place, ins in enumerate(computation.instructions):
        for k, operand in enumerate(ins.operands):
            users[operand].append((place, k))
    return users


def _start_path(ins: Instruction, base: str, k: int) -> Path:
    """Where the tuple of a start holds the result of operand k: all-reduce's is the result, others' (given, result)."""
    several = (k,) if base in PER_OPERAND and len(ins.operands) > 1 else ()
    return several if base == "all-reduce" else (1, *several)


def _outputs(graph: Graph) -> list[str]:
    """The shapes of what the graph returns; FX prints none of a value that it has not run."""
    main = graph.main
    root = main.instructions[main.root]
    return [main.instructions[o].shape for o in root.operands] if root.opcode == "tuple" else list(elements(root.shape))
