"""TTIR of the programs by Triton's own frontend, for an sm_90 that is absent; nothing is executed.

python tests/ttir/frontend.py        # a line of JSON a program: its kernels, or the error
python tests/ttir/frontend.py --machine-code [NAME ...]    # through ptxas as well

A process of its own: the tests' asks for Triton's interpreter before Triton is imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import programs

from retrograd.codegen import tuning
from retrograd.compat.triton_compile import absent_gpu
from retrograd.runtime.gpu_targets import target_named
from retrograd.runtime.triton import fake_gpu

TARGET = target_named("sm_90")


def ttir(src: Any, target: Any, options: dict[str, Any]) -> str:
    """The text of a kernel after the first stage of Triton's compiler."""
    from triton._C.libtriton import ir
    from triton.compiler import make_backend

    backend = make_backend(target)
    parsed = backend.parse_options(dict(options))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
    module = src.make_ir(target, parsed, functions, modules, context)
    return backend.make_ttir(module, {}, parsed, 90).str()


@contextmanager
def instead_of_compiling(compile: Callable[..., Any]) -> Iterator[list[str]]:
    """Call this for each kernel that a launch wants to have compiled; the list fills with their names."""
    names: list[str] = []

    def compiled(src: Any, target: Any = None, options: Any = None, **_: Any) -> Any:
        compile(src, target=target, options=options)
        names.append(src.name)
        return SimpleNamespace(
            run=lambda *_: None, function=None, packed_metadata=None, launch_metadata=lambda *_: None
        )

    with (
        absent_gpu(TARGET),
        fake_gpu.gpu(TARGET),
        tuning.every_configuration(),
        patch("triton.compiler.compile", compiled),
    ):
        yield names


def main() -> None:
    from triton.compiler import compile

    programs.load()
    machine_code = "--machine-code" in sys.argv
    wanted = [name for name in sys.argv[1:] if not name.startswith("--")]
    everything = [
        (kind, p) for kind, ps in (("racy", programs.RACY), ("healthy", programs.HEALTHY)) for p in ps.values()
    ]
    for kind, program in everything:
        if wanted and program.name not in wanted:
            continue
        row: dict[str, Any] = {"name": program.name, "kind": kind}
        try:
            with instead_of_compiling(compile if machine_code else ttir) as row["kernels"]:
                program.run("cpu")
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
