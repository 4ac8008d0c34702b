"""Binary dumps as text, and StableHLO as HLO: what jaxlib (extra `jax`) prints in a child process.

    python -m retrograd.graph.readers.binary FOLDER KIND

Its C++ may end the process that hands it a damaged file.
"""

# jaxlib ships its bindings without types.
# pyright: basic

from __future__ import annotations

import re
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from retrograd.compat import jaxlib_programs
from retrograd.core import subprocesses
from retrograd.errors import GraphError, MissingExtraError

_TIMEOUT_S = 120
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1f]")  # in no text; in a protocol buffer from its second field on
_SHOWN = 4096
_NOUNS = {"hlo": "binary HLO", "mlir": "MLIR bytecode", "stablehlo": "StableHLO that can be translated to HLO"}


def kind_of(start: bytes) -> str:
    """ "hlo" or "mlir" by the first bytes of a file; "" for a text or another binary file."""
    if start.startswith(jaxlib_programs.MLIR_MAGIC):
        return "mlir"
    # An HloProto and an HloModuleProto begin with their field 1.
    return "hlo" if start.startswith(b"\n") and _CONTROL.search(start[:_SHOWN]) else ""


def text_of(data: bytes, kind: str, name: str) -> str:
    """The text of a binary dump, or HLO of StableHLO (`kind` "stablehlo").

    Raises:
        GraphError: it is damaged.
        MissingExtraError: jaxlib is not installed.
    """
    if find_spec("jaxlib") is None:
        raise MissingExtraError("jaxlib", "jax", f"reading {_NOUNS[kind]}")
    with tempfile.TemporaryDirectory(prefix="retrograd-") as folder:
        Path(folder, "input").write_bytes(data)
        with subprocesses.Child([sys.executable, "-m", "retrograd.graph.readers.binary", folder, kind]) as child:
            ended = child.wait(_TIMEOUT_S)
            if ended is None:
                raise GraphError(f"{name}: jaxlib took more than {_TIMEOUT_S} s to read it")
            result = Path(folder, "result")
            if child.process.returncode or not result.exists():
                reason = f"jaxlib could not read it ({child.output().rpartition(chr(10))[2] or ended})"
                raise GraphError(f"{name}: this is no {_NOUNS[kind]}, or it is damaged or cut off: {reason}")
        return result.read_bytes().decode("utf-8", "replace")


def _main(folder: str, kind: str) -> None:
    from jaxlib.mlir.ir import MLIRError

    from retrograd.graph.readers.mlir import open_context

    data = Path(folder, "input").read_bytes()
    try:
        if kind == "mlir":
            text = jaxlib_programs.mlir_text(data, open_context()[1])
        else:
            text = jaxlib_programs.hlo_text(data) if kind == "hlo" else jaxlib_programs.as_hlo(data.decode())
    except (RuntimeError, ValueError, MLIRError) as error:
        sys.exit(" ".join(str(error).split())[:200])
    Path(folder, "result").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    _main(*sys.argv[1:])
