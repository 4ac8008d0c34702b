"""The only reader of os.environ. Standard library only. What we listen to stands in `settings`.

Set by us: PYTHONHASHSEED for the processes of `retrograd flake`, unless the user has set it; XLA_SAVE_TENSORS_FILE and
XLA_SAVE_TENSORS_FMT (torch_xla's: where it saves the graph of each step, and as what) during cuts that
`retrograd.graph.watch` looks at, unless the user has; PYTHONPYCACHEPREFIX and PYTHONDONTWRITEBYTECODE for commands and
their processes where torch has no bytecode; RETROGRAD_AT_START, RETROGRAD_AT_START_OPTIONS and PYTHONPATH for the
program of `retrograd fsdp check` and the tests of `retrograd mutate`, which sets CUDA_VISIBLE_DEVICES for itself, and
while a program of `retrograd run-kernel` runs.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from retrograd.errors import UsageError


def interpreting() -> bool:
    """Whether Triton kernels of this process run in Triton's interpreter (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def in_ci() -> bool:
    """Whether a continuous-integration system runs this process."""
    return bool(os.environ.get("CI"))


def cxx() -> str | None:
    """The C++ compiler that the user chose, a command line; None leaves the choice to us."""
    return os.environ.get("CXX") or None


def host() -> str:
    """What to do about the C++ paths of eager ops: "auto", "build" or "off".

    "auto" takes them, and has one compiled in the background when its op first sees a GPU; "build" waits for that;
    "off" leaves them alone.

    Raises:
        UsageError: RETROGRAD_HOST is something else.
    """
    return _way("RETROGRAD_HOST")


def pdl() -> bool:
    """Whether kernels may be launched while the one ahead of them ends (programmatic dependent launch).

    "auto" launches norms so where GPU and driver can, "off" after it; read once for each GPU.

    Raises:
        UsageError: RETROGRAD_PDL is neither "auto" nor "off".
    """
    return _way("RETROGRAD_PDL", ("auto", "off")) == "auto"


def tape() -> str:
    """What to do about the compiled recorder of traces: "auto", "build" or "off".

    "auto" takes it where it has been built, and builds it: where there is a GPU at once, else in the background;
    "build" builds it at once anywhere, "off" leaves it alone.

    Raises:
        UsageError: RETROGRAD_TAPE is something else.
    """
    return _way("RETROGRAD_TAPE")


def _way(name: str, ways: tuple[str, ...] = ("auto", "build", "off")) -> str:
    chosen = os.environ.get(name) or "auto"
    if chosen not in ways:
        raise UsageError(f"{name} is {chosen!r}, expected one of {', '.join(map(repr, ways))}; or unset it")
    return chosen


def cache_home() -> Path:
    """The folder that programs keep re-creatable files in."""
    chosen = os.environ.get("XDG_CACHE_HOME")
    return Path(chosen) if chosen else Path.home() / ".cache"


def keep_bytecode(package: str) -> None:
    """Have this process, and those that it starts, keep bytecode in the user's cache where a package has none.

    Where none may be written beside it, as in an image that was made without, every process compiles what it imports:
    torch and what it needs take 8 s instead of 3.
    """
    spec = find_spec(package)
    if spec is None or spec.origin is None or sys.pycache_prefix is not None:
        return
    kept = Path(cache_from_source(spec.origin))
    if not kept.exists() and (sys.dont_write_bytecode or not os.access(kept.parents[1], os.W_OK)):
        sys.pycache_prefix, sys.dont_write_bytecode = str(cache_home() / "retrograd" / "bytecode"), False
        os.environ["PYTHONPYCACHEPREFIX"], os.environ["PYTHONDONTWRITEBYTECODE"] = sys.pycache_prefix, ""


_hidden: list[str | None] = []  # CUDA_VISIBLE_DEVICES as it was, where GPUs are hidden


def hide_gpus() -> None:
    """Have torch see no GPU in this process, unless it is imported already; those that it starts see them."""
    if "torch" not in sys.modules and not _hidden:
        _hidden.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def gpus_hidden() -> bool:
    """Whether this process has hidden GPUs from itself."""
    return bool(_hidden)


def show_gpu(number: str) -> None:
    """Have this process see one GPU alone, unless it has used some already."""
    os.environ["CUDA_VISIBLE_DEVICES"] = number


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that this one starts, with variables changed."""
    own = dict(os.environ)
    for value in _hidden:
        own.pop("CUDA_VISIBLE_DEVICES")
        own |= {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    return own | dict(changes)


def hash_seed(chosen: int) -> dict[str, str]:
    """PYTHONHASHSEED for a process that is started, unless the user has set it for all of them."""
    return {} if os.environ.get("PYTHONHASHSEED") else {"PYTHONHASHSEED": str(chosen)}


def saved_graphs() -> str | None:
    """The file that the user lets torch_xla save its graphs in, None if none.

    Raises:
        UsageError: they are saved as something else than HLO.
    """
    chosen = os.environ.get("XLA_SAVE_TENSORS_FILE") or None
    shape = os.environ.get("XLA_SAVE_TENSORS_FMT", "text")
    if chosen and shape != "hlo":
        raise UsageError(
            f"XLA_SAVE_TENSORS_FMT is {shape!r}, expected 'hlo' to read the graphs in {chosen!r}; set or unset both"
        )
    return chosen


_saving = [0]
_saving_lock = threading.Lock()


@contextmanager
def saving_graphs(path: Path) -> Generator[None, None, None]:
    """Let torch_xla save its graphs as HLO in a file, if this is the first cut of the thread: it looks only then.

    Only meanwhile: processes that the program starts later would write to the same file. Threads may overlap.
    """
    with _saving_lock:
        _saving[0] += 1
        os.environ["XLA_SAVE_TENSORS_FILE"] = str(path)
        os.environ["XLA_SAVE_TENSORS_FMT"] = "hlo"
    try:
        yield
    finally:
        with _saving_lock:
            _saving[0] -= 1
            if not _saving[0]:
                os.environ.pop("XLA_SAVE_TENSORS_FILE", None)
                os.environ.pop("XLA_SAVE_TENSORS_FMT", None)


def rank() -> tuple[int, int] | None:
    """Number of this process and of all, as torchrun and its like set them; None outside of a job."""
    number, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(number), int(size)) if number.isdecimal() and size.isdecimal() else None


# The folder of our `sitecustomize`, and the one in which this package lies.
_AT_START, _PACKAGE = Path(__file__).parent / "core" / "at_start", Path(__file__).resolve().parents[1]


def at_start() -> tuple[str, str] | None:
    """The module whose `begin` this process calls before its program, and what with; None where nobody asked for it."""
    module = os.environ.get("RETROGRAD_AT_START")
    return (module, os.environ.get("RETROGRAD_AT_START_OPTIONS", "")) if module else None


def request_at_start(module: str, options: str) -> dict[str, str]:
    """Variables by which each Python process that is started calls `begin(options)` of one of our modules first.

    Our `sitecustomize` stands before all others and runs the one that it hides; the package is found after all others.
    """
    path = [str(_AT_START), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), str(_PACKAGE)]
    return {
        "RETROGRAD_AT_START": module,
        "RETROGRAD_AT_START_OPTIONS": options,
        "PYTHONPATH": os.pathsep.join(path),
    }


@contextmanager
def requested_at_start(module: str, options: str) -> Generator[None]:
    """Inside, each Python process that this one starts, and those that these start, call `begin(options)` first."""
    changes = request_at_start(module, options)
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


def variables(names: Iterable[str], prefixes: Iterable[str] = ()) -> dict[str, str]:
    """Those of these variables that are set, and all whose names begin with a prefix; for `retrograd env`."""
    starts = tuple(prefixes)
    wanted = [*names, *sorted(name for name in os.environ if starts and name.startswith(starts))]
    return {name: os.environ[name] for name in dict.fromkeys(wanted) if name in os.environ}


@dataclass(frozen=True)
class Setting:
    """One of our own settings: what it is now, where that comes from, and what it decides."""

    name: str
    value: str
    source: str
    meaning: str


def settings() -> list[Setting]:
    """Every variable that retrograd itself listens to; a value that is refused is told as it is."""
    at_start = "our module that this process begins with, RETROGRAD_AT_START_OPTIONS what for"
    listened = (
        ("TRITON_INTERPRET", "0", "Triton kernels run in Triton's interpreter, on CPU tensors"),
        ("RETROGRAD_HOST", "auto", "C++ paths of eager ops on CUDA: auto, build or off"),
        ("RETROGRAD_PDL", "auto", "norms launched while the kernel ahead ends (Hopper and later): auto or off"),
        ("RETROGRAD_TAPE", "auto", "C++ recorder of traces: auto, build or off"),
        ("CXX", "found on PATH", "C++ compiler of CPU kernels"),
        ("XDG_CACHE_HOME", str(Path.home() / ".cache"), "where compiled files are kept"),
        ("CI", "unset", "no live progress"),
        ("PYTHONHASHSEED", "random", "hash seed; `retrograd flake` sets it where it is unset"),
        ("RETROGRAD_AT_START", "unset", at_start),
        ("XLA_SAVE_TENSORS_FILE", "unset", "torch_xla's graphs, which `retrograd graph watch` reads"),
    )
    chosen = {name: os.environ.get(name) for name, _, _ in listened}
    return [
        Setting(name, chosen[name] or default, "environment" if chosen[name] else "default", meaning)
        for name, default, meaning in listened
    ]
