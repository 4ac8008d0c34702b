"""Types and attributes of StableHLO as HLO writes them: what belongs to what is computed, and what to how."""

# jaxlib ships MLIR's bindings without types.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOptionalCall=false

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from retrograd.graph import brackets
from retrograd.graph.keys import text_key

_TENSOR = re.compile(r"tensor<((?:[0-9?]+x)*)([^,>]+(?:<[^>]*>)?)(?:, (.*))?>\Z")
_DENSE = re.compile(r"dense<(.*)> : tensor<.*>\Z", re.DOTALL)
_ARRAY = re.compile(r"array<\w+(?:: (.*))?>\Z")
_BLOB = re.compile(r'([\w.$\-]++|"[^"\n]*+") *+: *+"(0x[0-9A-Fa-f]*+)"')
RESOURCE = re.compile(r'dense_resource<([\w.$\-]++|"[^"\n]*+")>')
_ENUM = re.compile(r"#stablehlo<\w+ (\w+)>")
_INTEGER = re.compile(r"(-?[0-9]+) : [sui]+[0-9]+\Z")
_ELEMENTS = {"i1": "pred", "index": "s64", "complex<f32>": "c64", "complex<f64>": "c128"}
# Read elsewhere: what is called, and channels.
_READ = ("channel_handle", "callee", "called_computations")
# What the compiled program depends on and the result does not; of a custom call the first may be arguments.
_PLACEMENT = ("mhlo.frontend_attributes", "result_layouts", "operand_layouts", "mhlo.sharding", "sdy.sharding")


def shape_of(text: str) -> str:
    """An MLIR type as HLO writes shapes: "tensor<8x32xf32>" -> "f32[8,32]"."""
    if text.startswith("tuple<"):
        parts = brackets.split(text[6:-1].replace("<", "(<").replace(">", ">)"))
        return "(" + ",".join(shape_of(part.replace("(<", "<").replace(">)", ">")) for part in parts) + ")"
    if text.endswith(".token"):
        return "token[]"
    match = _TENSOR.match(text)
    if not match:
        return text
    element = _ELEMENTS.get(match[2]) or re.sub(r"^(?:i|si)(?=[0-9])", "s", match[2]).replace("ui", "u").lower()
    encoding = f"{{{match[3]}}}" if match[3] else ""  # bounds of dynamic sizes, sparsity
    return f"{element}[{match[1].rstrip('x').replace('x', ',')}]{encoding}"


def attributes_of(attributes: dict[str, Any], opcode: str) -> tuple[str, str]:
    """What belongs to what is computed, and what to where and how."""
    kept: list[str] = []
    placed: list[str] = []
    for name, value in attributes.items():
        text = value_of(value)
        # The default precision stands in bytecode and not in text.
        if name in _READ or (name == "precision_config" and not text.replace("DEFAULT", "").strip("[, ]")):
            continue
        if name in _PLACEMENT and not (opcode == "custom-call" and _argues(attributes, name)):
            placed.append(f"{name.removeprefix('mhlo.')}={text}")
            continue
        if (opcode == "constant" and name == "value") or (opcode == "get-tuple-element" and name == "index"):
            kept.insert(0, text)
        else:
            kept.append(f"{name.removeprefix('mhlo.')}={text}")
    return ", ".join(kept), ", ".join(placed)


def _argues(attributes: dict[str, Any], name: str) -> bool:
    """May an attribute be an argument of a custom call? A sharding is one where it says which part a device takes."""
    return name == _PLACEMENT[0] or (
        name.endswith("sharding") and "SPMD" in string_of(attributes.get("call_target_name"))
    )


def value_of(attribute: Any) -> str:
    """An attribute as text without the types that MLIR repeats: `dense<[[0, 1]]> : tensor<1x2xi64>` -> `{{0,1}}`."""
    text = str(attribute)
    if match := _DENSE.match(text):
        return match[1].replace("[", "{").replace("]", "}").replace(", ", ",") if "[" in match[1] else match[1]
    if match := _ARRAY.match(text):
        return "{" + (match[1] or "").replace(" ", "") + "}"
    if match := _INTEGER.match(text):
        return match[1]
    return _ENUM.sub(r"\1", text)


def blobs_of(text: str) -> dict[str, str]:
    """Of each resource of a module, whose numbers stand at its end, a text that is another for other numbers."""
    section = text.rpartition("dialect_resources")[2] if "dense_resource<" in text else ""
    return {name: f"resource of {len(data) // 2} bytes {text_key(data)}" for name, data in _BLOB.findall(section)}


def items_of(attributes: Any, operation: Any = None) -> Iterable[tuple[str, Any]]:
    """Names and values of an attribute dictionary; older bindings yield pairs, newer ones names."""
    for entry in attributes:
        if not isinstance(entry, str):
            yield entry.name, entry.attr
            continue
        try:
            value = attributes[entry]
        except TypeError:  # jaxlib 0.10.2 has no class for arrays of complex numbers
            value = _printed(operation, entry)
        yield entry, value


def _printed(operation: Any, name: str) -> str:
    """An attribute as the operation is printed: `"stablehlo.constant"() <{value = dense<(2.0,0.0)> : ...}> : ...`."""
    text = operation.get_asm(print_generic_op_form=True)
    start = text.index("<{") + 1
    parts = brackets.split(text[start + 1 : brackets.closing(text, start)])
    return next(part.partition(" = ")[2] for part in parts if part.startswith(f"{name} = "))


def get_attribute(attributes: Any, name: str) -> Any:
    return attributes[name] if name in attributes else None  # noqa: SIM401 (the bindings have no .get)


def string_of(attribute: Any) -> str:
    return "" if attribute is None else str(attribute).strip('"')


def symbols_of(attribute: Any) -> list[str]:
    return [] if attribute is None else re.findall(r"@([\w.\-$]+)", str(attribute))
