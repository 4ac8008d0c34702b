"""Versions: the tests that depend on releases of torch, Triton, NumPy, jax and Python, in an environment of their own.

    python tools/versions.py newest [--whole | --rotate DAY] [pytest's options]   # without our pins
    python tools/versions.py oldest [--whole] [pytest's options]   # the lower bounds of pyproject.toml

`newest` takes the newest Python here that torch has wheels for, and Triton's warnings are failures: they announce what
the next release changes. `oldest` takes the lowest release of every direct dependency on the oldest Python. Without
--whole the files in `SENSITIVE` run and none in `TEXTS`; with --rotate those in `DAILY` and a seventh of the others, by
the number of the day.

Exit code: pytest's, and 1 where an environment cannot be set up.

PyPI has torch for CUDA alone, 6 GB installed; UV_TORCH_BACKEND=cpu takes the build for CPUs from download.pytorch.org.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = ROOT / ".uv" / "bin" / "uv"

# What touches a framework in more than its public operators: private names, compilers, intermediate code, C++
# extensions. The gate of the norms compiles for six minutes, which would be a third of it: it runs with --whole.
SENSITIVE = (
    "tests/check/test_compiler.py", "tests/check/test_bounds.py", "tests/check/test_state.py",
    "tests/check/test_higher_order.py", "tests/check/test_poison_operators.py", "tests/check/test_verify.py",
    "tests/codegen", "--ignore=tests/codegen/test_norm_gate.py", "tests/compat", "tests/env", "tests/fsdp",
    "tests/graph", "tests/trace", "tests/ttir", "tests/cli/test_cli_targets.py", "tests/flake/test_flake_margins.py",
    "tests/ops/norm/test_compile.py", "tests/ops/norm/test_host.py", "tests/ops/norm/test_native.py",
    "tests/ops/norm/test_rms_norm.py", "tests/ops/norm/test_subclasses.py", "tests/ops/norm/test_dtensor.py",
    "tests/ops/norm/test_wide.py", "tests/ops/msda/test_msda_compile.py", "tests/ops/msda/test_msda_native.py",
    "tests/ops/msda/test_msda_triton.py", "tests/nn", "tests/patch",
)  # fmt: skip
# Of these folders, what reads texts and our own source: no framework takes part, and of another Python --whole tells.
TEXTS = (
    "tests/compat/test_rooms.py", "tests/graph/test_causes_in_order.py", "tests/graph/test_compilations.py",
    "tests/graph/test_diff.py", "tests/graph/test_follow.py", "tests/graph/test_keys.py",
    "tests/graph/test_read_damaged.py", "tests/graph/test_read_files.py", "tests/graph/test_read_hlo.py",
    "tests/graph/test_read_jaxpr.py", "tests/graph/test_replaced_causes.py", "tests/graph/test_watch_lock.py",
)  # fmt: skip
# What says first that a release is different: the self-test of every mechanism that rests on private names. Of the
# other files continuous integration runs another seventh each day, all in a week: a quarter took 7 to 10 minutes.
DAILY = ("tests/compat", "tests/env", "tests/check/test_verify.py", "tests/cli/test_cli_targets.py")
PARTS = 7
# Those that take longest, most of the time of all, are dealt first, so that days are about as long.
LONGEST = (
    "tests/codegen/test_msda_gate.py", "tests/trace/test_nan_causes.py", "tests/fsdp/test_record_check.py",
    "tests/fsdp/test_buckets_ranks.py", "tests/trace/test_trace_compiled.py", "tests/graph/test_watch_command.py",
    "tests/fsdp/test_recipes.py", "tests/fsdp/test_culprit.py", "tests/ops/norm/test_host.py",
    "tests/ttir/test_races.py", "tests/fsdp/test_record_parallel.py", "tests/ttir/test_verified_ops.py",
    "tests/fsdp/test_ordered_steps.py", "tests/trace/test_trace_tape.py", "tests/ttir/test_memory_use.py",
    "tests/codegen/test_examined.py", "tests/codegen/test_recompilation.py", "tests/graph/test_mechanical_edits.py",
    "tests/trace/test_trace_diff_command.py", "tests/codegen/test_facts.py", "tests/graph/test_watch_plugin.py",
    "tests/trace/test_trace_terminated.py", "tests/trace/test_nan_programs.py", "tests/trace/test_trace_shards.py",
    "tests/ttir/test_tuned_ops.py", "tests/fsdp/test_record_logs.py",
)  # fmt: skip
# The field for the module is a regular expression here, unlike on pytest's command line.
STRICT = "error::UserWarning:triton.*"
# Tests launch kernels as people write them, which leave this open: what Triton 3.9 warns of and 3.10 changes. That our
# own launchers pin it is tested under every release (tests/ops/test_pinned_options.py).
ANNOUNCED = {"TRITON_DEFAULT_FP_FUSION": "1"}


def python(which: str) -> str:
    """An interpreter for an environment: of the newest or oldest Python among the classifiers that is installed here.

    Raises:
        SystemExit: none is.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    minors = [
        c.rsplit(" ", 1)[1] for c in project["classifiers"] if c.startswith("Programming Language :: Python :: 3.")
    ]
    for version in reversed(minors) if which == "newest" else minors:
        # pyenv first: its shims are on PATH for every version and refuse to run all but the chosen ones.
        for installed in sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")):
            return str(installed)
        search = [UV, "python", "find", "--no-project", "--no-python-downloads", version]
        answer = subprocess.run(search, capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            return answer.stdout.strip()
    raise SystemExit(f"no Python of {', '.join(minors)} is installed; install one of them")


def environment(which: str) -> Path:
    """The interpreter of an environment with this tree in it, brought up to date.

    Raises:
        SystemExit: it cannot be set up. What an older environment has is not tested in its place.
    """
    folder = ROOT / f".venv-{which}"
    interpreter = folder / "bin" / "python"
    resolution = ["--upgrade"] if which == "newest" else ["--resolution", "lowest-direct"]
    install = [UV, "pip", "install", "-q", "-p", folder, *resolution, "-e", f"{ROOT}[all,jax]"]
    begin = time.monotonic()
    try:
        if not interpreter.exists():
            subprocess.run([UV, "venv", "-q", "-p", python(which), folder], check=True)
        subprocess.run([*install, "--group", f"{ROOT / 'pyproject.toml'}:test"], check=True)
    except subprocess.CalledProcessError:
        raise SystemExit(
            f"the {which} torch, Triton, NumPy and jax cannot be installed here (see uv's message above): no test ran"
        ) from None
    print(f"{folder.name}: set up in {time.monotonic() - begin:.0f} s")
    return interpreter


def files(day: int | None) -> list[str]:
    """What is sensitive to versions: all of it, or the part of a day and what runs on every day."""
    left_out = {*TEXTS, *(entry.removeprefix("--ignore=") for entry in SENSITIVE if entry.startswith("--"))}
    collected = [name for entry in SENSITIVE if not entry.startswith("--") for name in _tests(entry)]
    sensitive = [name for name in collected if name not in left_out]
    if day is None:
        return sensitive
    daily = {name for entry in DAILY for name in _tests(entry)}
    rest = sorted((name for name in sensitive if name not in daily), key=lambda name: (_rank(name), name))
    return [name for name in sensitive if name in daily] + rest[day % PARTS :: PARTS]


def _tests(entry: str) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in sorted((ROOT / entry).rglob("test_*.py"))] or [entry]


def _rank(name: str) -> int:
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


def main() -> int:
    """Set up the environment and run the tests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", choices=("newest", "oldest"))
    parser.add_argument("--whole", action="store_true", help="the whole suite instead of what is sensitive to versions")
    parser.add_argument(
        "--rotate", type=int, metavar="DAY", help="what runs every day, and another seventh of the rest each day"
    )
    options, rest = parser.parse_known_args()
    interpreter = environment(options.which)
    subprocess.run([interpreter, "-m", "retrograd", "env"], check=True)
    subprocess.run([interpreter, "-m", "compileall", "-q", "src"], cwd=ROOT, check=True)  # as `make bytecode`
    strict = ["-o", f"filterwarnings={STRICT}"] if options.which == "newest" else []
    tests = ["tests"] if options.whole else files(options.rotate)
    if options.rotate is not None:  # of a file that comes each fourth day another part each time
        rest += ["--rotate", str(options.rotate // PARTS)]
    command = [interpreter, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", *strict, *rest, *tests]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **ANNOUNCED}
    return subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
