"""Verification that ranks issue the same collectives: at the end of steps by hashes, or before each. Loads no torch.

A hash is 8 bytes a group, rolling over the whole run: a difference between two comparisons is found at the next.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

from retrograd.core.rank_store import RankStore
from retrograd.core.schema import decode, plain
from retrograd.errors import RanksDifferError, VerificationError
from retrograd.fsdp.log_diff import Difference, first_difference, shared
from retrograd.fsdp.schema import POINT_TO_POINT, Collective
from retrograd.fsdp.step_patterns import Journal

_FAILED = "failed"
_LOOK = 0.25  # seconds between two looks for ranks that failed


class RankVerifier:
    """Compares this rank, which writes its journal, with the others; waits so many seconds for them."""

    def __init__(self, exchange: RankStore, journal: Journal, seconds: float) -> None:
        self.exchange, self.journal, self.seconds = exchange, journal, seconds
        self.others = [r for r in range(exchange.size) if r != exchange.rank]
        self.count = 0
        self.bad = ""  # what this rank gave that is not finite
        self._sequence: dict[tuple[int, ...], int] = {}

    def check(self) -> None:
        """Compare what was issued so far with all ranks.

        RanksDifferError if one issued other collectives or says nothing in time; VerificationError if one gave NaN or
        Inf to a reduction.
        """
        name = f"check/{self.count}"
        mine = {_key(ranks): digest.hex() for ranks, digest in self.journal.groups.items()}
        messages = self.journal.channels.packed()
        state = {"step": self.journal.total, "bad": self.bad, "groups": mine, "messages": messages}
        self.exchange.post(name, json.dumps(state))
        answers = {r: json.loads(text) for r, text in self._gather(name, self.others, "the end of the step").items()}
        for rank, answer in answers.items():
            if answer["step"] != self.journal.total:
                raise RanksDifferError(f"rank {rank} ends step {answer['step']} where {self._me} ends {state['step']}")
        differing = [r for r, a in answers.items() if self._differs(a["groups"], r)]
        if differing:
            rank, name = differing[0], f"why/{self.count}"
            self.exchange.post(name, packed(self.journal))
            answer = self.exchange.gather(name, [rank], self.seconds).get(rank)
            other = f"step {self.journal.total}: rank {rank} issued other collectives than {self._me}"
            sentence = "" if answer is None else self.sentence(rank, unpacked(answer))
            raise RanksDifferError(sentence or f"{other}, earlier than what is kept; {_ADVICE}")
        for rank, answer in answers.items():
            if misfit := self.journal.channels.misfit(answer["messages"], rank, self.exchange.rank):
                raise RanksDifferError(f"step {self.journal.total}: {misfit}")
        spoiled = {self.exchange.rank: self.bad} | {r: a["bad"] for r, a in answers.items()}
        if any(spoiled.values()):
            sentences = (f"rank {rank} gives NaN or Inf to {bad}" for rank, bad in sorted(spoiled.items()) if bad)
            raise VerificationError("; ".join(sentences) + "; the reduced gradients of all ranks are spoiled")
        if self.count:
            # Everybody has answered, so everybody has read what came before.
            self.exchange.forget(f"check/{self.count - 1}")
        self.count += 1
        self.journal.agreed()

    @property
    def _me(self) -> str:
        return f"rank {self.exchange.rank}"

    def _differs(self, theirs: dict[str, str], rank: int) -> bool:
        for ranks, digest in self.journal.groups.items():
            if rank in ranks and theirs.get(_key(ranks)) != digest.hex():
                return True
        known = {_key(ranks) for ranks in self.journal.groups}
        both = {str(rank), str(self.exchange.rank)}
        return any(both <= set(key.split(",")) for key in set(theirs) - known)

    def sentence(self, rank: int, theirs: Sequence[tuple[int, Collective]]) -> str:
        """Where this rank and another part; "" if they do not, as far as is kept."""
        me = self.exchange.rank
        mine = [(step, self.journal.entries[n]) for step, n in self.journal.since]
        pairs = sorted({me: mine, rank: theirs}.items())
        low, high = ([(s, c) for s, c in issued if shared([c], me, rank)] for _, issued in pairs)
        difference = first_difference([c for _, c in low], [c for _, c in high])
        if difference is None:
            return ""
        numbers = [s for s, _ in (low if difference.first is not None else high)]
        step = numbers[difference.index]
        words = difference.text(*(f"rank {who}" for who, _ in pairs))
        return f"step {step}, collective {difference.index - numbers.index(step)}: {words}; {_ADVICE}"

    def before(self, collective: Collective) -> None:
        """RanksDifferError if a rank of the group is about to issue another collective, or none in time."""
        if collective.kind not in POINT_TO_POINT:
            self._agree(collective.ranks, collective)

    def end_of_step(self) -> None:
        """A rank that issues less than the others says so here: RanksDifferError if one is about to issue one more."""
        for ranks in sorted({tuple(range(self.exchange.size)), *self.journal.groups}):
            self._agree(ranks, None)

    def _agree(self, ranks: tuple[int, ...], collective: Collective | None) -> None:
        number = self._sequence.get(ranks, 0)
        self._sequence[ranks] = number + 1
        name, me = f"each/{_key(ranks)}/{number}", self.exchange.rank
        self.exchange.post(name, json.dumps(None if collective is None else plain(collective)))
        others = [r for r in ranks if r != me]
        due = collective.name if collective is not None else "the end of the step"
        for rank, text in self._gather(name, others, due).items():
            data = json.loads(text)
            theirs = None if data is None else decode(Collective, data)
            low, high = sorted(((me, collective), (rank, theirs)), key=lambda pair: pair[0])
            if first_difference(*([c] if c is not None else [] for _, c in (low, high))) is not None:
                sentence = Difference(0, low[1], high[1], "other").text(f"rank {low[0]}", f"rank {high[0]}")
                raise RanksDifferError(f"{self.journal.place()}: {sentence}; it was not started; {_ADVICE}")
        if number:
            self.exchange.forget(f"each/{_key(ranks)}/{number - 1}")

    def _gather(self, name: str, ranks: Sequence[int], due: str) -> dict[int, str]:
        answers = self.exchange.gather(name, ranks, self.seconds, self._somebody_failed())
        missing = [r for r in ranks if r not in answers]
        if missing:
            failed = self.exchange.look(_FAILED, missing[0])
            silent = f"said nothing for {self.seconds:g} s: it hangs, died, or waits in another collective"
            sentence = f"{self._me} is at {due}, rank {missing[0]} {silent if failed is None else failed}"
            raise RanksDifferError(f"{self.journal.place()}: {sentence}")
        return answers

    def _somebody_failed(self) -> Callable[[], bool]:
        last = time.monotonic()

        def failed() -> bool:
            nonlocal last
            if time.monotonic() - last < _LOOK:
                return False
            last = time.monotonic()
            return bool(self.failures())

        return failed

    def failures(self) -> dict[int, str]:
        """What other ranks said when they ended with an error."""
        posted = ((rank, self.exchange.look(_FAILED, rank)) for rank in self.others)
        return {rank: text for rank, text in posted if text is not None}

    def fail(self, text: str) -> None:
        self.exchange.post(_FAILED, text)


_ADVICE = "issue collectives in the same order on every rank (module order, sets, data-dependent branches)"


def _key(ranks: tuple[int, ...]) -> str:
    return ",".join(map(str, ranks))


def packed(journal: Journal) -> str:
    """What a rank did since the ranks agreed, as JSON."""
    numbers = sorted({n for _, n in journal.since})
    table = {n: plain(journal.entries[n]) for n in numbers}
    return json.dumps({"table": table, "since": list(journal.since)})


def unpacked(text: str) -> list[tuple[int, Collective]]:
    """Pairs of step and collective."""
    data = json.loads(text)
    table = decode(dict[int, Collective], data["table"])
    return [(step, table[n]) for step, n in data["since"]]
