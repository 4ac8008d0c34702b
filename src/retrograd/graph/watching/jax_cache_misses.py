"""Misses of JAX's tracing cache: which function, where it was called and why, from jax_explain_cache_misses' log."""

from __future__ import annotations

import re
from dataclasses import dataclass

_HEAD = re.compile(r"TRACING CACHE MISS at (?P<file>.*?):(?P<line>\d+)(?::\d+)? \((?P<caller>.*)\)")
_FOR = re.compile(r"^\s*for (?P<name>\S+) defined at ", re.MULTILINE)
_NEVER = re.compile(r"^\s*(?P<name>\S+) id=\d+ defined at ", re.MULTILINE)
_NOISE = ("all previously seen cache keys differ", "for ")


@dataclass(frozen=True)
class Miss:
    """One miss of the tracing cache: the function, the line that called it ("train.py:24") and JAX's explanation."""

    function: str
    where: str
    why: str


def read(message: str) -> Miss | None:
    """The miss that a log message tells of; None if it tells of something else."""
    head = _HEAD.search(message)
    if head is None:
        return None
    body = message[head.end() :].lstrip(":").strip("\n")
    where = f"{head['file'].rpartition('/')[2]}:{head['line']}"
    never = _NEVER.search(body)
    if never and "never seen function" in body:
        return Miss(never["name"], where, "never seen function")
    name = _FOR.search(body)
    lines = [line.strip() for line in body.splitlines()]
    words = " ".join(line for line in lines if line and not line.startswith(_NOISE))
    return Miss(name["name"] if name else "", where, words)
