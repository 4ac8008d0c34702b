"""Runs a program with the watcher on: `python -m retrograd.graph.watching.run OPTIONS.json train.py ...`.

What `retrograd graph watch -- python train.py` starts, and what goes between torchrun and a script. Steps are calls of
the first optimizer (torch.optim) or cuts (torch_xla.sync), unless the program calls retrograd.graph.step() itself. It
is run as `__main__`, with its own arguments and folder, as Python runs it.
"""

# pyright: basic

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrograd.core import run_program
from retrograd.core.import_hook import AfterImport
from retrograd.errors import RetrogradError
from retrograd.graph.watching import backends, files, lock
from retrograd.graph.watching.watch import Watch, watch

_USAGE = "SCRIPT, -m MODULE or -c CODE"
_OF_XLA = ("threshold", "gc_before_cut", "texts")


class Program:
    """The watch of a program that is run here, begun when its framework has been imported."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.report, self.save, self.lock = (options.pop(name, None) for name in ("report", "save", "lock"))
        self.options = options
        self.wanted = options.pop("backend", "auto")
        self.watches: list[Watch] = []

    def imported(self, module: str) -> None:
        """Begin to watch a framework."""
        name = next(n for n, m in backends.MODULES.items() if m == module)
        if self.wanted not in ("auto", name) or (name == "compile" and self.wanted == "xla"):
            return
        own = {key: value for key, value in self.options.items() if name == "xla" or key not in _OF_XLA}
        watcher = watch(name, **own)
        watcher.__enter__()
        self.watches.append(watcher)
        if name == "compile":
            self._steps_of_torch(watcher)
        elif name == "xla":
            watcher.backends[0].after = lambda: watcher.marked or watcher.step()  # type: ignore[attr-defined]

    def _steps_of_torch(self, watcher: Watch) -> None:
        """A step ends with the first optimizer of the program, unless the program marks its steps itself."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        first: list[int] = []

        def stepped(optimizer: object, *_: object) -> None:
            first[:] = first or [id(optimizer)]
            if not watcher.marked and first[0] == id(optimizer):
                watcher.step()

        register_optimizer_step_post_hook(stepped)

    def __enter__(self) -> None:
        sys.meta_path.insert(0, AfterImport(tuple(backends.MODULES.values()), self.imported))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Stop, write the reports, keep the graphs, hold them to the lock file."""
        if isinstance(error, SystemExit) and not error.code:
            error = None
        for watcher in reversed(self.watches):
            watcher.session.notes.append(_steps(watcher))
            watcher.__exit__(type(error) if error else None, error, None)
        if self.report:
            reports = [watcher.report().to_json() for watcher in self.watches]
            Path(self.report).write_text(json.dumps(reports), encoding="utf-8")
        # A program for torch_xla imports torch too, but what it compiles is torch_xla's.
        sessions = [watcher.session for watcher in self.watches if watcher.session.entries]
        for session in sessions:
            if self.save:
                folder = Path(self.save)
                files.save(session, folder if len(sessions) == 1 else folder / session.backends[0])
        if self.lock and error is None:
            lock.hold(self.lock, *sessions)


def _steps(watcher: Watch) -> str:
    """What counted as a step."""
    if watcher.marked:
        return "each call of retrograd.graph.step() counts as a step"
    if watcher.backends[0].name == "compile" and watcher.session.now:
        return "each call of the program's first optimizer counts as a step"
    if watcher.backends[0].name == "xla":
        return "each cut counts as a step"
    mark = "call retrograd.graph.step() at the end of each"
    if watcher.backends[0].name == "jax":  # from the second call on, jit runs what it compiled without any Python
        return f"JAX tells nobody when a compiled function is called, so all graphs stand in step 0; {mark}"
    return f"the program marks no steps, so it counts as one; {mark}"


def main(arguments: Sequence[str]) -> None:
    """Read the options, watch, run; ends as the program does."""
    try:
        options = json.loads(arguments[0])
    except (IndexError, json.JSONDecodeError):
        raise SystemExit("retrograd: expected options as JSON ({} for none), then the program to run") from None
    del sys.path[0]  # the folder that `-m` put there; the program's own takes its place
    command = run_program.command_of(arguments[1:], _USAGE)
    sys.exit(run_program.run(command, Program(options)))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except RetrogradError as error:
        raise SystemExit(f"retrograd: {error}") from None
