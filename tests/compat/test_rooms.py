"""Private names of frameworks stand in compat alone: imports and attributes with a leading underscore, by syntax."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import retrograd

SRC = Path(retrograd.__file__).parent
FRAMEWORKS = {"torch", "triton", "jax", "jaxlib", "torch_xla"}
# Documented by PyTorch in spite of their module's name: "Extending PyTorch", "Fake tensor".
DOCUMENTED = {
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.fake_tensor.FakeTensorMode",
}
# Of Python's standard library, documented: frames for debuggers, an exit without handlers, named tuples.
STANDARD = {"_getframe", "_current_frames", "_exit", "_replace", "_asdict", "_fields", "_make"}


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def own_names(trees: dict[str, ast.Module]) -> set[str]:
    """Names with a leading underscore that retrograd itself gives: functions, classes, attributes, variables, slots."""
    names: set[str] = set()
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Assign) and "__slots__" in map(ast.unparse, node.targets):
            names |= {each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)}
    return names


def private_names(tree: ast.Module, own: set[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            written = ast.unparse(node)
            of_framework = written.split(".")[0] in FRAMEWORKS and is_private(written)
            private = is_private(node.attr) and node.attr not in own | STANDARD
            if of_framework or private:
                yield node.lineno, written
            continue
        else:
            continue
        for name in names:
            if name.split(".")[0] in FRAMEWORKS and is_private(name) and name not in DOCUMENTED:
                yield node.lineno, name


def trees() -> dict[str, ast.Module]:
    files = [file for file in SRC.rglob("*.py") if "compat" not in file.relative_to(SRC).parts[:1]]
    return {file.relative_to(SRC).as_posix(): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def test_private_names_of_frameworks_stand_in_compat_alone():
    parsed = trees()
    own = own_names(parsed)
    found = [f"{file}:{line}: {name}" for file, tree in parsed.items() for line, name in private_names(tree, own)]
    assert not found, "make a function in retrograd/compat with a Part of these:\n" + "\n".join(sorted(found))


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch.utils._pytree import tree_map", "torch.utils._pytree.tree_map"),
        ("import torch\ntorch._C._dispatch_keys(x)", "torch._C._dispatch_keys"),
        ("def f(tensor):\n    return tensor.storage()._cdata", "tensor.storage()._cdata"),
        ("import jax\njax._src.core", "jax._src"),
    ],
)
def test_a_private_name_is_noticed(code, name):
    assert name in [found for _, found in private_names(ast.parse(code), set())]


def test_documented_names_comments_and_strings_do_not_count():
    code = (
        "from torch.utils._python_dispatch import TorchDispatchMode\nimport sys\n"
        "class A:\n    def f(self):\n        return self._own, sys._getframe(0), 'torch._C'  # torch._dynamo\n"
    )
    tree = ast.parse(code)
    assert list(private_names(tree, own_names({"a": tree}))) == []
