"""Events of TensorBoard in a folder: one writer for every record that is shown there."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrograd.errors import MissingExtraError, UsageError


class Events:
    """A folder of events that more are appended to.

    Raises:
        MissingExtraError: tensorboard is not installed.
        UsageError: the folder cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("tensorboard"):
                raise
            raise MissingExtraError("tensorboard", "tensorboard", "writing events of TensorBoard") from None
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._writer: Any = EventFileWriter(os.fspath(folder))
        except OSError as error:
            raise UsageError(f"cannot write events to {os.fspath(folder)!r}: {error.strerror or error}") from None

    def add(self, values: Sequence[object], step: int, seconds: float) -> None:
        """Append values (`Summary.Value`) of one step; `seconds` since 1970 are when it was."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._writer.add_event(Event(wall_time=seconds, step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


def seconds(started: str) -> float:
    """A date in ISO form as seconds since 1970; 0 for that of a record that was made by hand."""
    try:
        return datetime.datetime.fromisoformat(started).timestamp()
    except ValueError:
        return 0.0
