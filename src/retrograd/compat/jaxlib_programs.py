"""Programs in binary, and as HLO, by jaxlib's undocumented bindings. Run in a child: its C++ may end the process."""

# jaxlib ships its bindings without types.
# pyright: basic

from __future__ import annotations

from typing import Any

from retrograd.compat.registry import part

MLIR_MAGIC = b"ML\xefR"
_ARTIFACT = b"StableHLO_v"  # what jax.export writes, in MLIR's dialect of versions


def hlo_text(data: bytes) -> str:
    """The text of an HloModuleProto, alone or in an HloProto or HloSnapshot; RuntimeError if it is none."""
    from jaxlib._hlo import HloModule, HloPrintOptions

    options = HloPrintOptions()
    options.print_large_constants = True
    inner = _first_field(data)
    # The module is the first field of an HloProto, which is the first field of an HloSnapshot.
    for candidate in (_first_field(inner), inner):
        try:
            return HloModule.from_serialized_hlo_module_proto(candidate).to_string(options)
        except RuntimeError:
            continue
    return HloModule.from_serialized_hlo_module_proto(data).to_string(options)


def _first_field(data: bytes) -> bytes:
    """What a protocol buffer holds in its field 1, if it begins with one of bytes; else nothing."""
    size = shift = 0
    for at, byte in enumerate(data[1:11], 2):
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return data[at : at + size] if data[0] == 0x0A else b""
    return b""


def mlir_text(data: bytes, context: Any) -> str:
    """The text of MLIR bytecode with its source lines, an artifact of jax.export as StableHLO.

    Raises:
        ValueError: it is damaged, or of a newer version.
        jaxlib.mlir.ir.MLIRError: the same.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    with context:
        artifact = data[len(MLIR_MAGIC) + 1 :].startswith(_ARTIFACT)
        module = stablehlo.deserialize_portable_artifact(context, data) if artifact else ir.Module.parse(data, context)
        return str(module.operation.get_asm(enable_debug_info=True))


def as_hlo(text: str) -> str:
    """A module of StableHLO as HLO, by the translation that JAX itself compiles with; RuntimeError if it is none."""
    from jaxlib._jax import mlir

    return mlir.mlir_module_to_xla_computation(text, False, False).as_hlo_text(True)


@part(
    "jax.programs",
    "reads binary HLO and MLIR, and compares StableHLO with HLO",
    "text is read without it: dump with --xla_dump_hlo_as_text",
    names=(
        "jaxlib._hlo.HloModule.from_serialized_hlo_module_proto",
        "jaxlib._hlo.HloPrintOptions",
        "jaxlib._jax.mlir.mlir_module_to_xla_computation",
        "jaxlib.mlir.dialects.stablehlo.deserialize_portable_artifact",
    ),
    refuses=True,
)
def PART() -> str:
    """Translate a module, write it in binary, read it again."""
    from jaxlib._hlo import hlo_module_from_text

    text = as_hlo("module @m { func.func @main(%a: tensor<f32>) -> tensor<f32> { return %a : tensor<f32> } }")
    again = hlo_text(hlo_module_from_text(text).as_serialized_hlo_module_proto())
    return "" if "ROOT" in text and "parameter(0)" in again else "a module is another one after it was read again"
