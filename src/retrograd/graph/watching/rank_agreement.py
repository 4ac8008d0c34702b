"""Agreement of ranks on a graph, before it runs: different graphs hang in their collectives."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from retrograd.core.order_registry import Order
from retrograd.core.rank_store import FolderStore, RankStore
from retrograd.errors import RanksDifferError, UsageError
from retrograd.graph import readers
from retrograd.graph.diffing.compare import compare
from retrograd.graph.watching import order_changes
from retrograd.graph.watching.events import Compiled
from retrograd.graph.watching.graph_text import known, packed, unpacked

_LIVE = "live"  # the format of what is alive before a cut of torch_xla, a tensor a line
_MOST = 4  # tensors named of each rank
_MISSING = "nothing"  # what a rank is said to compile that compiles nothing


class Comparison:
    """Compares graph n of this rank with graph n of the others, by strict key.

    Args:
        through: how ranks tell each other.
        seconds: how long to wait for the others.
    """

    def __init__(self, through: RankStore, seconds: float) -> None:
        self.through, self.seconds = through, seconds
        self.step = 0
        self.count = 0
        self.found: RanksDifferError | None = None

    def graph(self, compiled: Compiled) -> None:
        """Before a graph runs.

        Raises:
            RanksDifferError: another rank has another graph here, or none in time.
        """
        key = compiled.digest if compiled.format == _LIVE else known(compiled.text, compiled.format).computes
        name = f"step-{self.step}/graph-{self.count}"
        self.count += 1
        self._ask(name, f"{compiled.role} {key}", compiled.text, compiled)

    def end_of_step(self, held: Sequence[Order] = ()) -> None:
        """At the cut: a rank that compiled fewer graphs says so here, and which orders beside the graphs it keeps to.

        Raises:
            RanksDifferError: the ranks compiled different numbers of graphs, or keep to different orders.
        """
        mine = " ".join([_MISSING, *(order.key for order in held)])
        self._ask(f"step-{self.step}/graph-{self.count}", mine, order_changes.packed(held) if held else "", None)
        self.step += 1
        self.count = 0

    def _ask(self, name: str, mine: str, text: str, compiled: Compiled | None) -> None:
        through = self.through
        if through.size == 1:
            return
        if text:
            through.post(f"{name}/text", packed(text))
        through.post(f"{name}/key", mine)
        for rank in range(through.size):
            if rank == through.rank:
                continue
            theirs = through.wait(f"{name}/key", rank, self.seconds)
            if theirs != mine:
                sentence = (
                    self._orders(name, rank, text, theirs)
                    if theirs is not None and _idle(mine) and _idle(theirs)
                    else self._sentence(name, rank, mine, theirs, compiled)
                )
                self.found = RanksDifferError(sentence)
                raise self.found

    def _sentence(self, name: str, rank: int, mine: str, theirs: str | None, compiled: Compiled | None) -> str:
        own = f"rank {self.through.rank} {_compiles(mine)}"
        if theirs is None:
            return (
                f"step {self.step}: {own}, rank {rank} said nothing for {self.seconds:g} s: it runs a graph that "
                "it has, or hangs. Compiling for one rank alone ends in a collective that never returns"
            )
        why = "" if _idle(mine) or _idle(theirs) else self._difference(name, rank, compiled)
        return f"step {self.step}: {own}, rank {rank} {_compiles(theirs)}: their collectives would hang{why}"

    def _orders(self, name: str, rank: int, mine: str, told: str) -> str:
        """What differs in the orders that two ranks keep to; a rank that keeps to none gives no text of them."""
        answer = self.through.wait(f"{name}/text", rank, self.seconds) if told != _MISSING else None
        none = order_changes.packed(())
        theirs = unpacked(answer) if answer is not None else none
        difference = order_changes.between_ranks(self.through.rank, mine or none, rank, theirs)
        return f"step {self.step}: the ranks keep to different orders beside their graphs: {difference}"

    def _difference(self, name: str, rank: int, compiled: Compiled | None) -> str:
        """What differs first, from the text of the other rank."""
        theirs = self.through.wait(f"{name}/text", rank, self.seconds) if compiled and compiled.text else None
        if compiled is None or theirs is None:
            return ""
        if compiled.format == _LIVE:
            return _alive(self.through.rank, compiled.text, rank, unpacked(theirs))
        try:
            own, other = (readers.parse(t, format=compiled.format)[0] for t in (compiled.text, unpacked(theirs)))
            causes = compare(own, other, pictured=False).causes
        except Exception as error:  # that the ranks differ is to be said in any case
            return f". The graphs cannot be compared further: {type(error).__name__} {error}"
        return f". From rank {self.through.rank} to rank {rank}: {causes[0].text()}" if causes else ""


def store_of(ranks: str | Path | RankStore | None, number: tuple[int, int] | None) -> RankStore | None:
    """The store that `ranks=` means.

    Args:
        ranks: None for none, "compare" for torch.distributed's store, a folder, or a store.
        number: (rank, size) as the launcher says, for a folder.

    Raises:
        UsageError: there is no process group, or nobody says which rank this is.
    """
    if ranks is None or isinstance(ranks, RankStore):
        return ranks
    if ranks == "compare":
        return _default_store()
    if number is None:
        raise UsageError(
            f"`ranks` is the folder {str(ranks)!r}, but RANK and WORLD_SIZE are not set; set them as torchrun does, "
            "or give retrograd.core.rank_store.RankStore(FolderStore(path), rank, size)"
        )
    return RankStore(FolderStore(ranks), *number)


def _default_store() -> RankStore:
    group = getattr(sys.modules.get("torch"), "distributed", None)
    if group is None or not group.is_available() or not group.is_initialized():
        raise UsageError(
            "`ranks` is 'compare', but torch.distributed has no process group; initialise it before "
            "retrograd.graph.watch, or give a folder that all ranks see"
        )
    from retrograd.compat.c10d_collectives import rank_store

    # A job of one rank has nobody to ask, and waits for nobody.
    return rank_store("graphs") or RankStore(None, 0, 1)


def _alive(rank: int, mine: str, other: int, theirs: str) -> str:
    """Which tensors only one of two ranks has."""
    here, there = (Counter(text.splitlines()) for text in (mine, theirs))
    sides = ((rank, here - there), (other, there - here))
    only = [f"only rank {who} has {line}" for who, lines in sides for line in list(lines.elements())[:_MOST]]
    return ". Alive at the cut: " + "; ".join(only) if only else ""


def _idle(told: str) -> bool:
    """Does a rank say that it compiles nothing more in this step?"""
    return told.partition(" ")[0] == _MISSING


def _compiles(told: str) -> str:
    if _idle(told):
        return "compiles no further graph"
    role, _, key = told.partition(" ")
    return f"is about to run the {role} graph {key[:8]}"
