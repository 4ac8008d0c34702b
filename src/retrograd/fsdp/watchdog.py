"""Watchdog thread: says which ranks are gone, and what is due when this one does nothing for too long. Loads no torch.

Every rank with a watchdog tells the others where it is, so each can say who is behind, who died, and where the
sequences part.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from retrograd.core.program_lines import innermost
from retrograd.fsdp.rank_verification import RankVerifier, packed, unpacked
from retrograd.fsdp.termination import Termination

_BEAT = 1.0  # seconds between two signs of life, or a quarter of the timeout


@dataclass
class Watchdog:
    # Gives the verifier as soon as there is a process group; until then there is nobody to hang with.
    verifier: Callable[[], RankVerifier | None]
    seconds: float | None  # a rank that issues nothing for so long is reported, once until it goes on
    say: Callable[[str], None]  # is given the message
    end: Callable[[], None] = lambda: None  # called when the other ranks have had time to say theirs

    def __post_init__(self) -> None:
        self._beats = 0
        self.last = time.monotonic()
        self._main = threading.get_ident()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="retrograd.fsdp.watchdog", daemon=True)
        self._termination = Termination(self._terminated)
        self._met: RankVerifier | None = None  # asking for it may wait for a store
        self._said = 0.0
        self._gone: set[int] = set()

    def start(self) -> None:
        self._thread.start()
        self._termination.start()

    def progress(self) -> None:
        """A collective was issued, or a step ended."""
        self.last = time.monotonic()

    def stop(self) -> None:
        self._end.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=self.seconds or _BEAT)

    def close(self) -> None:
        """Stop, and leave SIGTERM as it was."""
        self._termination.stop()
        self.stop()

    def _terminated(self) -> None:
        """SIGTERM has come: tell what this rank knows of the others, if anything was wrong before."""
        if self._met is not None and (peers := self._met.peers) is not None:
            idle = time.monotonic() - self.last
            if text := peers.terminated(idle, self._place(), ends=self._termination.ends):
                self.say(text)

    def _watch(self) -> None:
        beat = _BEAT / 2 if self.seconds is None else min(_BEAT, self.seconds / 4)
        while not self._end.wait(beat):
            verifier = self.verifier()
            if verifier is None:
                continue
            self._met = verifier
            try:
                self._look(verifier, beat)
                if self.seconds is not None:
                    self._stall(verifier, beat, self.seconds)
            except RuntimeError as error:  # the store is gone: the rank that held it has ended
                self.say(f"{self._waiting(verifier)}; {type(error).__name__}: the store of the job does not answer")
                self.end()
                return

    def _look(self, verifier: RankVerifier, beat: float) -> None:
        """Tell where this rank is, and which ranks of this machine are gone, unless that has ended this one too."""
        if (peers := verifier.peers) is None:
            return
        if time.monotonic() - self.last > beat:
            peers.own.say([peers.own.head.issued, self._place()], place=True)
        if gone := set(peers.gone()) - self._gone:
            self._gone |= gone
            if not self._end.wait(2 * beat):
                texts = (f"rank {rank} {peers.end_of(rank)}" for rank in sorted(gone))
                self.say("; ".join([*texts, self._waiting(verifier)]))

    def _stall(self, verifier: RankVerifier, beat: float, seconds: float) -> None:
        self._tell(verifier)
        if time.monotonic() - self.last >= seconds and self._said != self.last:
            self._said = self.last
            self._pause(verifier, 2 * beat)  # the others notice within a beat
            self.say(self._sentence(verifier, beat))
            self._pause(verifier, 4 * beat)
            self.end()

    def _pause(self, verifier: RankVerifier, seconds: float) -> None:
        """Wait, and go on giving signs of life."""
        for _ in range(4):
            self._end.wait(seconds / 4)
            self._tell(verifier)

    def _tell(self, verifier: RankVerifier) -> None:
        journal, idle = verifier.journal, time.monotonic() - self.last
        self._beats += 1
        last = journal.last
        life = {
            "beat": self._beats,
            "step": journal.total,
            "issued": journal.issued,
            "idle": round(idle, 1),
            "last": last.name if last is not None else "nothing",
            "at": self._place() if idle >= (self.seconds or 0) / 2 else "",
        }
        verifier.exchange.post("life", json.dumps(life))
        if idle >= (self.seconds or 0) / 2:
            verifier.exchange.post("stalled", packed(journal))

    def _waiting(self, verifier: RankVerifier) -> str:
        journal = verifier.journal
        last = journal.last
        where = f"after {last.name}" if last is not None else "before any collective"
        return (
            f"rank {verifier.exchange.rank} has issued nothing for {time.monotonic() - self.last:.0f} s, {where} "
            f"({journal.place()}), at {self._place()}"
        )

    def _sentence(self, verifier: RankVerifier, beat: float) -> str:
        parts = [self._waiting(verifier)]
        before = {r: self._life(verifier, r) for r in verifier.others}
        # A rank without signs of life for 3 beats is gone, or its interpreter stands still.
        self._pause(verifier, 3 * beat)
        failures = verifier.failures()
        parts += [self._other(verifier, rank, before[rank], failures.get(rank)) for rank in verifier.others]
        return "; ".join(parts)

    def _other(self, verifier: RankVerifier, rank: int, before: dict[str, Any], failed: str | None) -> str:
        now = self._life(verifier, rank)
        last = "it has never said anything"
        if now:
            last = f"its last collective was {now['last']}" if now["last"] != "nothing" else "its first is due"
        if failed is not None:
            return f"rank {rank} {failed}"
        if not now or now["beat"] == before.get("beat"):
            return f"rank {rank} gives no sign of life: it died or is stopped; {last}"
        journal = verifier.journal
        theirs = verifier.exchange.look("stalled", rank) if now["idle"] >= (self.seconds or 0) / 2 else None
        parted = verifier.sentence(rank, unpacked(theirs)) if theirs is not None else ""
        behind = (now["step"], now["issued"]) < (journal.total, journal.issued)
        if behind and journal.last is not None:
            place = f" and is at {now['at']}" if now["at"] else ""
            due = f"rank {verifier.exchange.rank} is waiting in {journal.last.name}, which is due on rank {rank}"
            return f"{due}: it has issued {now['issued']} collectives of step {now['step']}, {last}{place}" + (
                f"; {parted}" if parted and "does nothing more" not in parted else ""
            )
        if parted and "does nothing more" not in parted:
            return parted
        if (now["step"], now["issued"]) > (journal.total, journal.issued):
            return f"rank {rank} is waiting in {now['last']}, which is due here"
        return f"rank {rank} is at the same collective, {now['last']}"

    def _life(self, verifier: RankVerifier, rank: int) -> dict[str, Any]:
        life = verifier.exchange.look("life", rank)
        return json.loads(life) if life is not None else {}

    def _place(self) -> str:
        """The line of the program at which the thread that started us is."""
        frame = sys._current_frames().get(self._main)  # pyright: ignore[reportPrivateUsage]  # documented, for debuggers
        return innermost(frame) or "an unknown line"


def to_stderr(text: str) -> None:
    """Say it to the person at the terminal, at once."""
    sys.stderr.write(f"retrograd.fsdp: {text}\n")
    sys.stderr.flush()
