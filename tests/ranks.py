"""Two processes that talk through gloo and run functions of test modules side by side: real collectives on CPU."""

from __future__ import annotations

import datetime
import faulthandler
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

# A collective that waits for longer hangs; the processes are told first, so that the error names the collective.
COLLECTIVE, CALL, START = 60, 90, 180


class Ranks:
    """The processes of a group; started once, since each imports torch.

    Args:
        size: how many.
        store: file through which they find each other; must not exist.
    """

    def __init__(self, size: int, store: Path) -> None:
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(size)]
        self.ends = [ours for ours, _ in pairs]
        self.processes = [
            context.Process(target=_serve, args=(rank, size, str(store), theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process, (_, theirs) in zip(self.processes, pairs, strict=True):
            # FSDP computes on the accelerator that it sees; gloo groups are on the CPU.
            with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": ""}):
                process.start()
            theirs.close()  # so that the end of a process is the end of its pipe
        self._answers(START)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What function(*args) returns on each rank; it must be at the top of a module and return what pickles.

        Raises:
            RuntimeError: it raised somewhere or did not end in time, which ends the group.
        """
        for end in self.ends:
            _send(end, (function, args))
        return self._answers(CALL)

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()

    @property
    def alive(self) -> bool:
        """Whether the group can still be used."""
        return all(process.is_alive() for process in self.processes)

    def _answers(self, seconds: float) -> list[Any]:
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < len(self.ends):
            missing = [end for rank, end in enumerate(self.ends) if rank not in answers]
            ready = wait(missing, seconds)
            try:
                if not ready:
                    raise RuntimeError(
                        f"ranks {[self.ends.index(end) for end in missing]} said nothing for {seconds} s"
                    )
                answers |= {self.ends.index(end): _receive(end) for end in ready}
            except (EOFError, RuntimeError) as error:
                # A rank that died has its exit code soon after its pipe closes; one that lives has none.
                codes = [(process.join(1), process.exitcode)[1] for process in self.processes]
                self.close()
                told = "".join(text for ok, text in answers.values() if not ok)
                ended = f"the group ended, exit codes {codes}: {type(error).__name__} {error}\n{told}"
                raise RuntimeError(ended) from None
        if failed := [f"rank {rank}:\n{answers[rank][1]}" for rank in sorted(answers) if not answers[rank][0]]:
            self.close()  # their collectives may be out of step
            raise RuntimeError("\n".join(failed))
        return [answers[rank][1] for rank in range(len(self.ends))]


def _serve(rank: int, size: int, store: str, end: Connection) -> None:
    faulthandler.enable()  # a crash in a collective says where, on the error stream of the tests
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=COLLECTIVE)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    _send(end, (True, None))
    while True:
        try:
            function, args = _receive(end)
        except EOFError:
            return
        try:
            answer = (True, function(*args))
        except Exception:
            answer = (False, traceback.format_exc())
        _send(end, answer)


def _send(end: Connection, thing: Any) -> None:
    # Connection.send would let the processes share the memory of tensors.
    end.send_bytes(pickle.dumps(thing))


def _receive(end: Connection) -> Any:
    return pickle.loads(end.recv_bytes())
