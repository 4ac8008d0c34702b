"""A survey as aligned text: groups, one line a fact, hazards behind a `!`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Lines = list[tuple[str, str]]


def as_text(facts: Mapping[str, Any]) -> str:
    """The record of `survey` for a person."""
    marks: dict[str, str] = {}
    for hazard in facts["hazards"]:
        marks.setdefault(hazard["where"], hazard["what"])
    groups: list[tuple[str, Lines]] = [
        ("versions", [("python", facts["python"]["version"]), *_versions(facts["packages"])]),
        ("machine", _machine(facts["machine"])),
        ("devices", _devices(facts)),
        ("compilers", [(t["name"], _tool(t)) for t in facts["compilers"]]),
        ("torch's flags", _flags(facts)),
        ("variables", list(facts["variables"].items()) or [("(none that matters is set)", "")]),
        ("settings of retrograd", [(s["name"], _setting(s)) for s in facts["settings"]]),
        ("caches", [(c["name"], _cache(c)) for c in facts["caches"]]),
        (
            "compatibility: what rests on private names of frameworks (--self-test tests it)",
            [(p["part"], _part(p)) for p in facts["compatibility"]],
        ),
    ]
    width = max(len(name) for _, lines in groups for name, _ in lines)
    parts = [
        "\n".join([title, *(_line(name, value, width, marks) for name, value in lines)]) for title, lines in groups
    ]
    # A variable that is not set has no line of its own.
    shown = {name for _, lines in groups for name, _ in lines}
    rest = [f"  ! {where}: {mark}" for where, mark in marks.items() if where not in shown]
    return "\n\n".join([*parts, *["\n".join(rest)] * bool(rest)])


def _line(name: str, value: str, width: int, marks: dict[str, str]) -> str:
    line = f"  {name:<{width}}  {value}".rstrip()
    return f"{line}  ! {marks.pop(name)}" if name in marks else line


def _versions(packages: Mapping[str, str | None]) -> Iterable[tuple[str, str]]:
    missing = [name for name, version in packages.items() if version is None]
    yield from ((name, version) for name, version in packages.items() if version is not None)
    if missing:
        yield "not installed", ", ".join(missing)


def _machine(machine: Mapping[str, Any]) -> Lines:
    cache, memory = machine["cache_bytes"], machine["memory_bytes"]
    cpu = f"{machine['cpu']}, {machine['cpus']} CPUs" + (f", {cache / 2**20:.0f} MiB of cache" if cache else "")
    lines = [("platform", machine["platform"]), ("cpu", cpu)]
    return lines + ([("memory", f"{memory / 2**30:.1f} GiB")] if memory else [])


def _devices(facts: Mapping[str, Any]) -> Lines:
    lines = [
        (f"gpu {g['index']}", f"{g['name']}, capability {g['capability']}, {g['memory_mib']} MiB, driver {g['driver']}")
        for g in facts["gpus"]
    ]
    lines = lines or [("gpu", "none that nvidia-smi knows")]
    built = facts["toolkits"]
    if built is None:
        return [*lines, ("torch", facts["torch"])]
    names = {"cuda": "CUDA", "hip": "ROCm", "cudnn": "cuDNN", "nccl": "NCCL"}
    with_ = [f"{names[key]} {built[key]}" for key in names if built[key]]
    return [*lines, ("torch is built with", ", ".join(with_) or "neither CUDA nor ROCm"), ("it sees", built["devices"])]


def _tool(tool: Mapping[str, str | None]) -> str:
    return f"{tool['version'] or 'version unknown'}  {tool['path']}" if tool["path"] else "not found"


def _flags(facts: Mapping[str, Any]) -> Lines:
    if facts["flags"] is None:
        return [("(unknown)", f"torch: {facts['torch']}")]
    return [(name, str(value)) for name, value in facts["flags"].items() if value is not None]


def _setting(setting: Mapping[str, str]) -> str:
    return f"{setting['value']}  ({setting['source']})  {setting['meaning']}"


def _cache(cache: Mapping[str, Any]) -> str:
    if not cache["files"]:
        return f"empty  {cache['path']}"
    more = "" if cache["complete"] else " or more"
    return f"{cache['bytes'] / 2**20:.1f} MiB in {cache['files']} files{more}  {cache['path']}"


def _part(part: Mapping[str, Any]) -> str:
    state = {"not used": "not tested here"}.get(part["state"], part["state"])
    installed = f"{part['package']} {part['installed'] or 'not installed'}"
    ran = f"(ran on {', '.join(part['ran'])})"
    return f"{state:<15}  {installed} {ran}: retrograd {part['purpose']}"
