"""Source line and module of an operator, read from the frames that call it.

No hook is registered on a module and nothing of PyTorch is replaced, so compiled and patched models stay as they are.
Only the locals of `Module._call_impl` are looked at: to look at a person's frame would keep their tensors alive.
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from retrograd.compat.torch_dynamo import is_of_compiler
from retrograd.compat.torch_tensors import own_members, storage_id
from retrograd.core.program_lines import PACKAGES, folders, is_program

_MAX_FRAMES = 400  # frames looked at: a deep model calls 3 a level
_USER, _MODULE, _ENGINE, _GENERATED, _OTHER, _GRAPH, _COMPILER = range(7)  # as in tape.cpp
_TORCH = folders(torch.__file__)

Line = tuple[CodeType, int]


class SourceLocator:
    """Reads frames; resolves lines to text later.

    Args:
        model: names are those of its modules; None takes the outermost module at work.
    """

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self._roles: dict[CodeType, int] = {}
        self._files: dict[str, str] = {}
        self._texts: dict[tuple[CodeType, int], tuple[str, str]] = {}
        self.module_paths: dict[int, str] = {}  # of the modules known so far, by their id
        self.has_new_root = False  # whether a root has come since somebody set this back
        self.in_generated_code = False  # whether code that torch.compile generated was among the callers, the last time
        self.roots: list[torch.nn.Module] = []  # kept: an id must not come to mean another module
        self._modules: list[torch.nn.Module] = []  # all in the roots, kept likewise
        self._members: list[Any] = []  # what each of them holds, as it changes,
        self._held: list[Any] = []  # and held when `_named` was made
        self._named: list[tuple[str, torch.Tensor]] = []
        self._count, self._wrapping = 0, False  # of roots then, and whether a tensor wrapped another
        if model is not None:
            self._add(model)

    def locate(self, frame: FrameType | None) -> tuple[Line | None, str | None]:
        """The innermost line of a person and path of the innermost module; None for what there is not.

        The walk ends where autograd's engine was called, so in a backward the line is one of a custom backward or hook.
        """
        line = inner = outer = None
        self.in_generated_code = in_graph = False
        roles = self._roles
        for _ in range(_MAX_FRAMES):
            if frame is None:
                break
            code = frame.f_code
            role = roles.get(code)
            if role is None:
                role = roles[code] = code_role(code)
            if role == _USER:
                if line is None:
                    line = code, frame.f_lineno
            elif role == _MODULE:
                outer = frame.f_locals["self"]
                if inner is None:
                    inner = outer
            elif role == _GENERATED:
                self.in_generated_code = True
            elif role == _GRAPH:
                in_graph = True
            elif role == _COMPILER:
                # A graph that torch.compile calls is compiled; one of torch.export or torch.fx runs as any module does.
                self.in_generated_code |= in_graph
            elif role == _ENGINE:
                break
            if line is not None and inner is not None and id(inner) in self.module_paths:
                break
            frame = frame.f_back
        return line, None if inner is None else self.module_path(inner, outer)

    def waiting_line(self, thread: int) -> Line | None:
        """The line that waits for the backward of this thread: the innermost of a person past autograd's engine.

        Args:
            thread: where to look if the engine runs on a thread of its own.
        """
        frames = sys._current_frames()
        for number in (threading.get_ident(), thread):
            frame, past = frames.get(number), False
            while frame is not None:
                role = self._roles.get(frame.f_code)
                if role is None:
                    role = self._roles[frame.f_code] = code_role(frame.f_code)
                if role == _USER and past:
                    return frame.f_code, frame.f_lineno
                past = past or role == _ENGINE
                frame = frame.f_back
        return None

    def module_path(self, inner: Any, outer: Any) -> str:
        """The path of a module at work; `outer` is the outermost at work, known from then on."""
        if id(inner) not in self.module_paths:
            self._add(outer)
        return self.module_paths.get(id(inner), type(inner).__name__)

    def text(self, line: Line | None) -> tuple[str, str]:
        """ "file.py:12" and that line of source, stripped; "" for what is not there."""
        if line is None:
            return "", ""
        text = self._texts.get(line)
        if text is None:
            file = line[0].co_filename
            if file not in self._files:
                self._files[file] = _short(file)
            text = self._texts[line] = f"{self._files[file]}:{line[1]}", linecache.getline(file, line[1]).strip()
        return text

    def named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Parameters and buffers with their names; the same list as long as no module holds another.

        Of one that wraps a shard, as a DTensor does, the shard, which may be replaced at any time.
        """
        if self._wrapping or self._holding() != self._held or len(self.roots) != self._count:
            self._count, self._modules = len(self.roots), [m for root in self.roots for m in root.modules()]
            self._members = [members for module in self._modules for members in own_members(module)]
            self._held = self._holding()
            named = [pair for root in self.roots for pair in (*root.named_parameters(), *root.named_buffers())]
            self._wrapping = any(hasattr(tensor, "_local_tensor") for _, tensor in named)
            self._named = [(name, getattr(tensor, "_local_tensor", tensor)) for name, tensor in named]
        return self._named

    def _holding(self) -> list[Any]:
        """Names and ids: a walk over a model's modules takes ten times as long."""
        return [part for held in self._members for name, member in held.items() for part in (name, id(member))]

    def tensor_names(self) -> dict[int, tuple[str, int]]:
        """Name and elements of parameters and buffers, by the address of the storage object they lie in."""
        names: dict[int, tuple[str, int]] = {}
        for name, tensor in self.named_tensors():
            try:
                names.setdefault(storage_id(tensor.untyped_storage()), (name, tensor.numel()))
            except (RuntimeError, NotImplementedError, ValueError):  # without memory, as lazy parameters
                continue
        return names

    def _add(self, root: Any) -> None:
        # A second model beside the first is told by its class.
        prefix = f"{type(root).__name__}" if self.roots else ""
        self.roots.append(root)
        self.has_new_root = True
        for name, module in root.named_modules():
            self.module_paths.setdefault(id(module), ".".join(filter(None, (prefix, name))))


def frames_to_user(frame: FrameType | None) -> int:
    """How many frames above this one the innermost line of a person is; 0 if there is none."""
    for above in range(_MAX_FRAMES):
        if frame is None:
            break
        if code_role(frame.f_code) == _USER:
            return above
        frame = frame.f_back
    return 0


def code_role(code: CodeType) -> int:
    """Whose code it is: a person's, a module call, autograd's engine, Inductor's, a graph's, torch.compile's, another.

    Of a graph its caller tells whether it was compiled: a person or a module runs what torch.export or torch.fx made.
    """
    file = code.co_filename
    if file.startswith(_TORCH):
        if code.co_name == "_call_impl" and file.endswith(f"nn{os.sep}modules{os.sep}module.py"):
            return _MODULE
        if is_of_compiler(file):
            return _COMPILER
        return _ENGINE if code.co_name == "_engine_run_backward" else _OTHER
    if file.startswith("<eval_with_key"):
        return _GRAPH
    if f"{os.sep}torchinductor_" in file:
        return _GENERATED
    return _USER if is_program(file) and not _calls_compiled(code) else _OTHER


def _calls_compiled(code: CodeType) -> bool:
    """Whether Dynamo made this of a person's function, to call what it compiled of it: its line is that of `def`."""
    whole = not any(name.startswith("__resume_at") for name in code.co_names)
    return whole and any(name.startswith("__compiled_fn") for name in code.co_names)


def _short(file: str) -> str:
    """Relative to the folder of the run, or from the package on: the same on every machine."""
    if PACKAGES in file:
        return file.rpartition(PACKAGES)[2]
    for folder in (os.getcwd(), sys.path[0] if sys.path else ""):  # noqa: PTH109 (a text, compared with texts)
        if folder and file.startswith(folder + os.sep):
            return file[len(folder) + 1 :]
    return Path(file).name
