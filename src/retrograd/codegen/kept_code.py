"""Machine code as text, in the user's cache: where Triton has a kernel compiled already, nvdisasm takes the time."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import zlib

from retrograd.compat.cuda_tools import TOOLS, disassemble
from retrograd.compat.registry import require
from retrograd.runtime import disk_cache


def disassembled(cubin: bytes) -> tuple[str, str]:
    """(resource usage, machine code with source lines) of a cubin, as `disassemble` gives them.

    Raises:
        UnsupportedVersionError: the programs of this Triton write something else.
    """
    import triton

    require(TOOLS)
    name = hashlib.sha256(triton.__version__.encode() + b"\0" + cubin).hexdigest()
    path = disk_cache.folder("machine_code") / f"{name}.gz"
    with contextlib.suppress(OSError, EOFError, ValueError, zlib.error):  # not there, or damaged
        usage, code = json.loads(gzip.decompress(path.read_bytes()))
        return usage, code
    usage, code = disassemble(cubin)
    with contextlib.suppress(OSError), disk_cache.replacing(path) as file:
        file.write_bytes(gzip.compress(json.dumps([usage, code]).encode(), 1))
    return usage, code
