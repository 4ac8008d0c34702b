"""Conditions of a run that decide its numbers: versions, flags of torch, variables, sources; and where runs differ.

Each is text by name, in sections. Of versions and sources only those count that both sides have loaded: one rank alone
may write logs.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from types import ModuleType

from retrograd.core.program_lines import PACKAGES, is_program
from retrograd.env import facts, torch_flags

Conditions = dict[str, dict[str, str]]  # section -> name -> value
VERSIONS, FLAGS, VARIABLES, SOURCES, SEED = "versions", "flags", "variables", "sources", "seed"
_UNSET = "unset"
_CHOSEN = 2**32  # a seed that nobody set is a random number of 64 bits
# What differs between processes or machines as it should: a device, a machine's parts, where files and logs go.
_OWN = re.compile(
    r"VISIBLE_DEVICES|AFFINITY|DEBUG|LOG|TRACE|DUMP|FILE|DIR|PATH|CACHE|HOME|ADDR|PORT|IFNAME|HCA|HOSTID|GID|TOPO"
    r"|NET_|AT_START|^(?:cpu_capability|num_threads|num_interop_threads|OMP_NUM_THREADS|MKL_NUM_THREADS)$"
)


def on_ranks(ranks: list[int]) -> str:
    """ "on ranks 0 1"."""
    return f"on rank{'s' * (len(ranks) > 1)} {' '.join(map(str, ranks))}"


@dataclass(frozen=True)
class ConditionDifference:
    """A condition in which processes differ.

    Attributes:
        section: VERSIONS, FLAGS, VARIABLES, SOURCES or SEED.
        name: which one.
        values: of each process by its number.
        intended: whether it is one that differs between processes as it should.
    """

    section: str
    name: str
    values: Mapping[int, str]
    intended: bool

    def text(self, at: Callable[[list[int]], str] = on_ranks) -> str:
        """ "NCCL_ALGO is Ring on rank 3, unset on ranks 0 1 2": what fewest have comes first."""
        kinds: dict[str, list[int]] = {}
        for number, value in sorted(self.values.items()):
            kinds.setdefault(value, []).append(number)
        rows = sorted(kinds.items(), key=lambda kind: (len(kind[1]), kind[1]))[:4]
        if self.section == SOURCES:  # digests say nothing to people
            return f"the source of {self.name} differs {', '.join(at(numbers) for _, numbers in rows)}"
        words = (f"{value} {at(numbers)}" for value, numbers in rows)
        return f"{self.name} is {', '.join(words)}{', ...' * (len(kinds) > 4)}"


def process_conditions() -> Conditions:
    """Those that stay as they are while a process runs: versions of what is loaded, variables, digests of sources."""
    # Not list(items()): its tuples may set the garbage collector off, and what that warns of imports modules.
    loaded = sys.modules.copy().items()
    modules = [(name, module) for name, module in loaded if isinstance(module, ModuleType)]
    versions = ((name, module.__dict__.get("__version__")) for name, module in modules if "." not in name)
    sources = ((name, module.__dict__.get("__file__")) for name, module in modules)
    return {
        VERSIONS: {"python": platform.python_version()} | {k: str(v) for k, v in versions if isinstance(v, str)},
        VARIABLES: facts.variables(),
        SOURCES: {name: digest for name, file in sources if isinstance(file, str) and (digest := _digest(file))},
    }


def torch_conditions(torch: ModuleType) -> Conditions:
    """Flags of torch as they are now, autocast in this thread among them, and the seed that was set last."""
    flags = {name: _comparable(torch, name, str(value)) for name, value in torch_flags.flags(torch).items()}
    # TF32 that was set by its newer name cannot be read by the older one.
    flags = {name: value for name, value in flags.items() if not value.startswith(torch_flags.UNREADABLE)}
    seed = torch.initial_seed()
    return {FLAGS: flags | autocast(torch), SEED: {"seed": str(seed) if seed < _CHOSEN else "not set"}}


def _comparable(torch: ModuleType, name: str, value: str) -> str:
    """A flag as it works: "none" takes what holds for all backends, and which device of its kind is no difference."""
    if name.endswith("fp32_precision") and value == "none":
        value = torch.backends.fp32_precision
        return "ieee" if value == "none" else value
    return re.sub(r":\d+$", "", value)


def autocast(torch: ModuleType) -> dict[str, str]:
    """The dtype that autocast computes in in this thread, by device; "off"."""
    dtypes = {
        kind: torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else "off" for kind in ("cpu", "cuda")
    }
    return {f"autocast.{kind}": str(dtype).removeprefix("torch.") for kind, dtype in dtypes.items()}


def differences(of: Mapping[int, Conditions]) -> list[ConditionDifference]:
    """Where processes differ, by their numbers, in what they are compared in."""
    rows: list[ConditionDifference] = []
    for section in (VERSIONS, FLAGS, VARIABLES, SOURCES, SEED):
        sides = {number: conditions[section] for number, conditions in of.items() if section in conditions}
        for name in sorted(set[str]().union(*sides.values())):
            default = dict.fromkeys(sides, _UNSET) if section == VARIABLES else {}
            values = default | {number: side[name] for number, side in sides.items() if name in side}
            if len(set(values.values())) > 1:
                rows.append(ConditionDifference(section, name, values, section == SEED or bool(_OWN.search(name))))
    return rows


@cache
def _digest(file: str) -> str:
    """Of a source that belongs neither to Python nor to an installed package; "" of others."""
    if not file.endswith(".py") or PACKAGES in file or not is_program(file):
        return ""
    try:
        return blake2b(Path(file).read_bytes(), digest_size=8).hexdigest()
    except OSError:
        return ""
