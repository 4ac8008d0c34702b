"""StableHLO text -> Graph through jaxlib's MLIR parser: what `stablehlo` starts in a child process.

    python -m retrograd.graph.readers.mlir FOLDER SOURCE FIRST_LINE

What `stablehlo_text` does not read: MLIR's text has a syntax of its own for nearly every operation, and dialects.
"""

# jaxlib ships MLIR's bindings without types.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOptionalCall=false

from __future__ import annotations

import marshal
import re
import sys
from pathlib import Path
from typing import Any

from retrograd.compat.jax import register_dialects
from retrograd.core import gc_pause
from retrograd.errors import GraphError
from retrograd.graph import brackets
from retrograd.graph.ir import Graph
from retrograd.graph.readers.mlir_attributes import blobs_of
from retrograd.graph.readers.mlir_module import ModuleReader
from retrograd.graph.readers.stablehlo import packed

_AT = re.compile(r'"-":([0-9]{1,9}):[0-9]')


def parse(text: str, source: str = "", first: int = 1) -> Graph:
    """One module of StableHLO text, read in this process."""
    ir, context = open_context()
    with context:
        try:
            module = ir.Module.parse(text, context=context)
        except (ir.MLIRError, ValueError) as error:
            raise _damaged(str(error), text, source, first) from None
        try:
            state = ir.AsmState(module.operation) if hasattr(ir, "AsmState") else None
            return ModuleReader(module, source, first, state).graph(blobs_of(text))
        except RecursionError:
            raise brackets.error(source or "StableHLO text", first, "functions call each other too deep") from None


def open_context() -> tuple[Any, Any]:
    """MLIR's module and a context with the dialects of JAX."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import chlo, sdy, stablehlo

    registry = ir.DialectRegistry()
    register_dialects(registry)
    context = ir.Context()
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    stablehlo.register_dialect(context)
    sdy.register_dialect(context)
    getattr(chlo, "register_dialect", getattr(chlo, "register_chlo_dialect", None))(context)
    context.allow_unregistered_dialects = True
    return ir, context


def _damaged(message: str, text: str, source: str, first: int) -> GraphError:
    match = _AT.search(message)
    line = int(match[1]) if match else 1
    lines = brackets.lines(text)
    shown = lines[line - 1] if line <= len(lines) else ""
    errors = [part for part in brackets.lines(message) if "error:" in part]
    reason = _AT.sub("", errors[0]).split("error:")[-1].lstrip(" 0123456789:") if errors else "it is not MLIR text"
    return brackets.error(
        source or "StableHLO text", first + line - 1, f"this is no StableHLO ({reason.strip()})", shown
    )


def _main(arguments: list[str]) -> int:
    folder, source, first = arguments
    text = Path(folder, "module.mlir").read_bytes().decode()
    with gc_pause.paused():
        try:
            result = packed(parse(text, source, int(first))), ""
        except GraphError as error:
            result = None, str(error)
        Path(folder, "result").write_bytes(marshal.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
