"""Point-to-point messages of one rank, and whether those of another rank fit: sizes by channel. Pure.

Ranks of a pipeline send and receive in orders of their own, and may have sent what is not received yet: neither is
compared. What is: no message on a channel may be larger than the memory it is received in. Gloo ends the process with a
C++ error where one is; NCCL hangs or writes past the end.
"""

from __future__ import annotations

from typing import Any

Channel = tuple[str, int, int, int]  # process group, sender (-1 for any), receiver, tag
# Messages on each side before sizes count: a recording may begin between a message and the next, which may have
# another size (torch.distributed.send_object_list sends 8 bytes, then the object).
_ENOUGH = 3


class Channels:
    """Messages of one rank by channel: how many, the smallest that was sent or the largest received, in bytes."""

    def __init__(self) -> None:
        self._sizes: dict[Channel, tuple[int, int]] = {}

    def add(self, channel: Channel, kind: str, nbytes: int) -> None:
        """A message that is about to be sent or received."""
        count, size = self._sizes.get(channel, (0, nbytes))
        self._sizes[channel] = count + 1, (min if kind == "send" else max)(size, nbytes)

    def packed(self) -> list[Any]:
        """As plain data for another rank."""
        return [[*channel, *sizes] for channel, sizes in self._sizes.items()]

    def misfit(self, theirs: list[Any], rank: int, me: int) -> str:
        """In words, between which ranks every message is larger than the memory it is received in; "" if nowhere."""
        other = {tuple(row[:4]): (row[4], row[5]) for row in theirs}
        for channel in other.keys() & self._sizes.keys():
            group, sender, receiver, tag = channel
            sides = [self._sizes, other] if sender == me else [other, self._sizes]
            if {sender, receiver} != {rank, me} or (group, -1, receiver, tag) in sides[1]:
                continue
            (sent, least), (received, most) = (side[channel] for side in sides)
            if least > most and min(sent, received) >= _ENOUGH:
                return (
                    f"rank {sender} sends rank {receiver} messages of at least {least} bytes, and rank {receiver} "
                    f"receives them in at most {most}"
                )
        return ""
