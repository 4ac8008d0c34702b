"""Verification that ranks issue the same collectives: at the end of steps by hashes, or before each. Loads no torch.

A hash is 8 bytes a group, rolling over the whole run: a difference between two comparisons is found at the next.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from retrograd.core.rank_store import RankStore
from retrograd.core.schema import decode, plain
from retrograd.errors import RanksDifferError, VerificationError
from retrograd.fsdp.log_diff import ADVICE, ORDER, Difference, first_difference, rank_difference
from retrograd.fsdp.peers import Peers
from retrograd.fsdp.ring_file import FAILED
from retrograd.fsdp.schema import JOINED, Collective, Lane, token
from retrograd.fsdp.step_patterns import Journal

_FAILED, _ENDED, _JOINED = "failed", "ended", "joined"
_LOOK = 0.25  # seconds between two looks for ranks that failed


class RankVerifier:
    """Compares this rank, which writes its journal, with the others; waits so many seconds for them.

    Those of its machine are its peers, whose files it reads; None if there are no files.
    """

    def __init__(self, exchange: RankStore, journal: Journal, seconds: float, peers: Peers | None = None) -> None:
        self.exchange, self.journal, self.seconds, self.peers = exchange, journal, seconds, peers
        self.others = [r for r in range(exchange.size) if r != exchange.rank]
        self.count = 0
        self.bad = ""  # what this rank gave that is not finite
        self._sequence: dict[Lane, int] = {}
        self._first: dict[Lane, int] = {}
        self._joined = set[int]()  # ranks without input, this one too: their steps are not those of the others any more
        self._parted = ""  # where this rank and another part, if what they issued passed

    def check(self) -> None:
        """Compare what was issued so far with all ranks.

        RanksDifferError if one issued other collectives or says nothing in time; VerificationError if one gave NaN or
        Inf to a reduction.
        """
        if self.exchange.rank in self._joined:
            return
        name = f"check/{self.count}"
        mine = [[*lane, digest.hex()] for lane, digest in self.journal.groups.items()]
        messages = self.journal.channels.packed()
        if self.peers is not None:
            self.peers.own.came()
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
            parted = self._parted or (self.peers.compare_all() if self.peers is not None else "")
            if parted:  # knows lines, and what came in earlier steps
                sentence = f"{parted}{ORDER * (ORDER in sentence)}; {ADVICE}"
            raise RanksDifferError(sentence or f"{other}, earlier than what is kept; {ADVICE}")
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

    def _differs(self, theirs: list[Any], rank: int) -> bool:
        both = {rank, self.exchange.rank}
        other = {(name, tuple(ranks)): digest for name, ranks, digest in theirs}
        lanes = (lane for lane in self.journal.groups.keys() | other.keys() if both.issubset(lane[1]))
        return any(self.journal.groups.get(lane, b"").hex() != other.get(lane) for lane in lanes)

    def sentence(self, rank: int, theirs: Sequence[tuple[int, Collective]]) -> str:
        """Where this rank and another part; "" if they do not, as far as is kept."""
        me = self.exchange.rank
        mine = [(step, self.journal.entries[n]) for step, n in self.journal.since]
        (first, low), (second, high) = sorted([(me, mine), (rank, list(theirs))])
        parted = rank_difference([c for _, c in low], [c for _, c in high], first, second)
        if parted is None:
            return ""
        at, difference = parted
        numbers = [s for s, _ in (low if difference.first is not None else high)]
        words = difference.text(f"rank {first}", f"rank {second}")
        return f"step {numbers[at]}, collective {at - numbers.index(numbers[at])}: {words}; {ADVICE}"

    def look(self, collective: Collective, first: bool) -> None:
        """RanksDifferError if another rank has issued another collective in this place of the group; waits for nobody.

        Two that differ in their names alone pass, since neither hangs: every rank raises at the end of the step. Ranks
        of other machines are looked at through the store, and only in the `first` steps: 0.2 ms a collective.
        """
        if collective.by == JOINED:
            self._join()
        if collective.unordered or collective.by == JOINED:
            return
        passes = self.peers.compare(collective.lane) if self.peers is not None else True
        self._parted = self._parted or (self.peers.parted if self.peers is not None else "")
        first = first and self.exchange.rank not in self._joined
        if first and not self._parted and not (self.peers is not None and self.peers.complete):
            self._parted, passes = self._against_first(collective)
        if not passes:
            raise RanksDifferError(f"{self._parted}; {ADVICE}; the last of them was not started")

    def _against_first(self, collective: Collective) -> tuple[str, bool]:
        """A sentence, if this collective is another than that of the rank that came first; and whether they pass."""
        lane = collective.lane
        number = self._first[lane] = self._first.get(lane, -1) + 1
        mine = json.dumps([self.exchange.rank, plain(collective)])
        rank, data = json.loads(self.exchange.claim(f"first/{lane[0]}/{','.join(map(str, lane[1]))}/{number}", mine))
        theirs = decode(Collective, data)
        if token(theirs) == token(collective):
            return "", True
        (low, here), (high, there) = sorted(((self.exchange.rank, collective), (rank, theirs)), key=lambda p: p[0])
        words = Difference(0, here, there, "other").text(f"rank {low}", f"rank {high}")
        return f"{self.journal.place()}: {words}", theirs.payload == collective.payload

    def before(self, collective: Collective) -> None:
        """RanksDifferError if a rank of the group is about to issue another collective, or none in time."""
        if not collective.unordered and self.exchange.rank not in self._joined:
            self._agree(collective.lane, collective)

    def _join(self) -> None:
        """This rank has no input left: the others are told before they wait for it."""
        if self.exchange.rank not in self._joined:
            self._joined.add(self.exchange.rank)
            self.exchange.post(_JOINED, "")
            self.journal.notes.append(
                f"step {self.journal.total}: no input is left (torch.distributed.algorithms.Join); from here on this "
                "rank shadows what the others do, and its steps are not compared with theirs"
            )

    def end_of_step(self) -> None:
        """A rank that issues less than the others says so here: RanksDifferError if one is about to issue one more."""
        if self.exchange.rank in self._joined:
            return
        for lane in sorted({("", tuple(range(self.exchange.size))), *self.journal.groups}):
            self._agree(lane, None)

    def _agree(self, lane: Lane, collective: Collective | None) -> None:
        ranks, number = lane[1], self._sequence.get(lane, 0)
        self._sequence[lane] = number + 1
        each = f"each/{lane[0]}/{','.join(map(str, ranks))}"
        name, me = f"{each}/{number}", self.exchange.rank
        self.exchange.post(name, json.dumps(None if collective is None else plain(collective)))
        others = [r for r in ranks if r != me]
        due = collective.name if collective is not None else "the end of the step"
        for rank, text in self._gather(name, others, due).items():
            data = json.loads(text)
            theirs = None if data is None else decode(Collective, data)
            low, high = sorted(((me, collective), (rank, theirs)), key=lambda pair: pair[0])
            if first_difference(*([c] if c is not None else [] for _, c in (low, high))) is not None:
                sentence = Difference(0, low[1], high[1], "other").text(f"rank {low[0]}", f"rank {high[0]}")
                raise RanksDifferError(f"{self.journal.place()}: {sentence}; it was not started; {ADVICE}")
        if number:
            self.exchange.forget(f"{each}/{number - 1}")

    def _gather(self, name: str, ranks: Sequence[int], due: str) -> dict[int, str]:
        answers = dict[int, str]()
        while missing := [r for r in ranks if r not in answers and r not in self._joined]:
            answers |= self.exchange.gather(name, missing, self.seconds, self._in_vain(missing))
            missing = [r for r in missing if r not in answers]
            if joined := self._left(missing):
                self._joined |= joined
                continue
            if not missing:
                break
            if sentence := self.peers.ahead(missing) if self.peers is not None else "":
                raise RanksDifferError(f"{sentence}; {ADVICE}")
            failed = self._end_of(missing[0])
            silent = f"said nothing for {self.seconds:g} s: it hangs, died, or waits in another collective"
            sentence = f"{self._me} is at {due}, rank {missing[0]} {silent if failed is None else failed}"
            raise RanksDifferError(f"{self.journal.place()}: {sentence}")
        return answers

    def _end_of(self, rank: int) -> str | None:
        """How a rank has ended; None as far as is known."""
        failed = self.exchange.look(_FAILED, rank)
        return failed if failed is not None or self.peers is None else self.peers.end_of(rank)

    def _in_vain(self, ranks: Sequence[int]) -> Callable[[], bool]:
        """Whether to wait for these ranks makes no sense any more, looked at now and then."""
        last = time.monotonic()

        def in_vain() -> bool:
            nonlocal last
            if time.monotonic() - last < _LOOK:
                return False
            last = time.monotonic()
            if self._left(ranks) or self.failures():
                return True
            return self.peers is not None and bool(self.peers.gone() or self.peers.ahead(ranks))

        return in_vain

    def _left(self, ranks: Sequence[int]) -> set[int]:
        """Which of these ranks have no input left."""
        return {rank for rank in ranks if self.exchange.look(_JOINED, rank) is not None}

    def failures(self) -> dict[int, str]:
        """What other ranks said when they ended with an error."""
        posted = ((rank, self.exchange.look(_FAILED, rank)) for rank in self.others)
        return {rank: text for rank, text in posted if text is not None}

    def fail(self, text: str) -> None:
        """Tell the others that this rank ends, and what it did since they agreed."""
        if self.peers is not None:
            self.peers.own.say(text, FAILED)
        self.exchange.post(_FAILED, text)
        self.exchange.post(_ENDED, packed(self.journal))

    def explain(self, seconds: float) -> list[str]:
        """Where ranks part, and how the others ended or what they do; waits so long until one of them has ended."""
        near = self.peers.explain(seconds) if self.peers is not None else []
        if self.peers is not None and self.peers.complete:
            return near
        known = self.peers.readers if self.peers is not None else {}
        try:
            far = {rank: text for rank, text in self.failures().items() if rank not in known}
            journals = ((rank, self.exchange.look(_ENDED, rank)) for rank in far)
            parted = next(filter(None, (self.sentence(rank, unpacked(text)) for rank, text in journals if text)), "")
        except RuntimeError:
            return near
        return [*near, *filter(None, [parted]), *(f"rank {rank} {text}" for rank, text in far.items())]


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
