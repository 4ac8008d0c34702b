"""host.cpp as an extension module: compiled against the installed torch, found again, loaded."""

from __future__ import annotations

from pathlib import Path

from retrograd.runtime.cpp.extension import Extension

SOURCE = Path(__file__).with_name("host.cpp")
_EXTENSION = Extension(SOURCE, "retrograd_norm_host", "norm-host", "retrograd.ops.norm.host.build(again=True)")
build, find, load, file_name = _EXTENSION.build, _EXTENSION.find, _EXTENSION.load, _EXTENSION.file_name
