"""Compiling for absent GPUs, machine code and relaunches: each private name with a broken specimen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import IO

import pytest

pytest.importorskip("triton")

from retrograd.compat.triton_compile import hash_ahead

# Kernels are compiled in processes of their own: this one interprets them where there is no GPU. They are forked by one
# that has imported all, which takes 4 to 10 s of a core, and has run none of it.
SERVER = """
import json, os, sys, traceback
import torch
from retrograd.compat import cuda_tools, registry, triton_autotuning, triton_compile, triton_launch, triton_relaunch
from retrograd.errors import RetrogradError
for line in sys.stdin:
    if not (child := os.fork()):
        try:
            exec(json.loads(line), globals())
        except BaseException:
            traceback.print_exc(file=sys.stdout)
            sys.stdout.flush()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    print("-- ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
ENDED = "-- ended "


def until_ended(output: IO[str]) -> Iterator[str]:
    for line in output:
        yield line
        if line.startswith(ENDED):
            return


@pytest.fixture(scope="module")
def said() -> Iterator[Callable[[str], str]]:
    """What code prints in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, "-c", SERVER], env=environment, **pipes) as server:

        def run(code: str) -> str:
            server.stdin.write(json.dumps(code) + "\n")
            server.stdin.flush()
            *lines, end = until_ended(server.stdout)
            assert end == f"{ENDED}0\n", "".join(lines)
            return "".join(lines).strip()

        yield run
        server.stdin.close()


def test_code_that_fails_or_dies_is_not_taken_for_said(said) -> None:
    for code, text in (
        ("print('as wanted'); 1 / 0", "ZeroDivisionError"),
        ("print('as wanted', flush=True); os.abort()", "as wanted"),
    ):
        with pytest.raises(AssertionError, match=text):
            said(code)
    assert said("print(registry.__name__)") == "retrograd.compat.registry"


def test_every_part_works_here(said) -> None:
    code = """
parts = triton_compile.COMPILE, triton_relaunch.RELAUNCH, cuda_tools.TOOLS, triton_launch.HOOK, triton_autotuning.TUNING
for part in parts:
    print(part.id, registry.status(part).state, registry.status(part).difference)
"""
    assert said(code).splitlines() == [
        "triton.compile works ", "triton.relaunch works ", "triton.cuda_tools works ", "triton.launch_hook works ",
        "triton.autotuning works",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        ("del triton.runtime.driver.__class__.set_active", "set_active"),
        ("triton.knobs.runtime.__class__.jit_cache_hook = property(lambda self: None, lambda self, hook: None)", ""),
        ("triton.runtime.jit.MockTensor.wrap_dtype = staticmethod(lambda value: value)", ""),
    ],
    ids=["renamed", "not asked", "other meaning"],
)
def test_compiling_is_refused_in_words(breaks: str, says: str, said) -> None:
    code = f"""
import triton
{breaks}
from retrograd import codegen
try:
    with codegen.recording("sm_90"):
        print("recorded")
except RetrogradError as error:
    print(error)
"""
    text = said(code)
    assert says in text
    assert text.endswith("nothing is compiled; `retrograd codegen --run` reads what a GPU of this machine has loaded")


@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        ("_run = cuda_tools._run; cuda_tools._run = lambda *c: _run(*c).replace('REG:', 'REGISTERS:')", "resources"),
        ("_run = cuda_tools._run; cuda_tools._run = lambda *c: _run(*c).replace('LDG.E.128', 'LOAD.128')", "LOAD"),
        ("_run = cuda_tools._run; cuda_tools._run = lambda *c: _run(*c).replace('## File', '## Source')", "no file"),
        ("cuda_tools._tool = lambda name: '/nowhere/' + name", "/nowhere/cuobjdump"),
    ],
    ids=["resources", "instructions", "lines", "program"],
)
def test_another_output_of_the_tools_is_refused_in_words(breaks: str, says: str, said) -> None:
    code = f"""
{breaks}
try:
    cuda_tools.disassemble(b"")
except RetrogradError as error:
    print(error)
"""
    text = said(code)
    assert says in text
    assert text.endswith("machine code for NVIDIA GPUs is not read; name AMD ones, gfx942 and gfx950")


@pytest.mark.parametrize("order", ["(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10)", "(0, 1, 2, 3, 5, 4, 6, 7, 8, 9, 10)"])
def test_a_launcher_that_takes_another_order_is_not_called_by_place(order: str, said) -> None:
    code = f"""
from types import SimpleNamespace
from triton.runtime.jit import JITFunction
run = JITFunction.run
def changed(self, *args, **kwargs):
    compiled = self._do_compile()
    stock = compiled.run
    compiled.run = lambda *a: stock(*[a[i] for i in {order}])
    return run(self, *args, **kwargs)
JITFunction.run = changed
compiled = SimpleNamespace(function=1, run=print, packed_metadata=(4, 1, 0))
print(triton_relaunch.loaded_kernel(compiled, (3,)) is not None, [each.note for each in registry.statuses() if each.note])
"""
    held, _, notes = said(code).partition(" ")
    assert held == str(order.startswith("(0, 1, 2, 3, 4, 5"))
    assert ("each launch goes through Triton" in notes) == (held == "False")


@pytest.mark.parametrize(
    ("metadata", "plain"),
    [
        ({}, True),
        ({"instrumentation_mode": "", "global_scratch_size": 0, "tensordesc_meta": []}, True),
        ({"instrumentation_mode": "gsan"}, False),
        ({"global_scratch_size": 128}, False),
        ({"launch_cooperative_grid": True}, False),
        ({"tensordesc_meta": [{"swizzle": 3}]}, False),
    ],
)
def test_hidden_arguments_are_known(metadata: dict, plain: bool) -> None:
    from retrograd.compat.triton_relaunch import has_plain_arguments

    assert has_plain_arguments(SimpleNamespace(metadata=SimpleNamespace(**metadata))) is plain


def test_triton_hashes_itself_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton.runtime.cache as cache

    where: list[str] = []
    monkeypatch.setattr(cache, "triton_key", lambda: where.append(threading.current_thread().name))
    hash_ahead().join()
    assert where == ["retrograd.hash_ahead"]
    monkeypatch.setattr(threading, "excepthook", where.append)
    monkeypatch.setattr(cache, "triton_key", lambda folder: where.append(folder))  # as a later release may
    hash_ahead().join()
    monkeypatch.delattr(cache, "triton_key")  # or elsewhere
    hash_ahead().join()
    assert where == ["retrograd.hash_ahead"]
