"""Binary dumps, beside the same programs as text. Needs jaxlib, which `pip install 'retrograd[jax]'` brings."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

import pytest

from retrograd import graph
from retrograd.compat import jaxlib_programs, registry
from retrograd.errors import GraphError, MissingExtraError
from retrograd.graph.readers import binary, read

DATA = Path(__file__).parent / "data" / "formats"
MODULE = DATA / "xla" / "module_0001.jit_step"


@pytest.fixture(autouse=True, scope="module")
def _needs_jaxlib() -> None:
    pytest.importorskip("jaxlib", reason="jaxlib reads binary dumps; it comes with retrograd[jax]")


@pytest.mark.parametrize("stage", ["before_optimizations", "cpu_after_optimizations"])
def test_a_proto_is_the_module_that_its_text_is(stage: str) -> None:
    diff = graph.diff(f"{MODULE}.{stage}.hlo.pb.gz", f"{MODULE}.{stage}.txt.gz")
    # The rest of the header is the compiler's configuration, which an HloProto does not hold.
    assert diff.computes_the_same
    assert {cause.what.partition(" of the module")[0] for cause in diff.causes} == {
        f"allow_spmd_sharding_propagation_to_{side}" for side in ("output", "parameters")
    }


def test_bytecode_is_the_module_that_its_text_is() -> None:
    assert graph.diff(DATA / "step.mlir.gz", DATA / "step.mlirbc.gz").verdict == "same"


def test_an_artifact_of_jax_export_is_read_as_stablehlo() -> None:
    [module] = read(DATA / "step.export.mlirbc.gz")
    [text] = read(DATA / "step.mlir.gz")
    computed, exported = (Counter(i.opcode for c in g for i in c.instructions) for g in (text, module))
    # jax.export keeps constants of loops in front of them.
    assert {opcode for opcode in computed if computed[opcode] != exported[opcode]} == {"constant", "parameter"}
    assert any("dump_formats.py" in str(module.where(i)) for i in module.main.instructions)


def _kept(name: str) -> bytes:
    return gzip.decompress((DATA / name).read_bytes())


@pytest.mark.parametrize("name", [f"xla/{MODULE.name}.before_optimizations.hlo.pb.gz", "step.mlirbc.gz"])
def test_what_is_cut_off_or_damaged(name: str, tmp_path: Path) -> None:
    data = _kept(name)
    for number, damaged in enumerate((data[: len(data) // 2], data[:40] + b"\xff" * 40 + data[80:])):
        path = tmp_path / str(number)
        path.write_bytes(damaged)
        with pytest.raises(GraphError, match="or it is damaged or cut off: jaxlib could not read it"):
            read(path)


def test_a_proto_is_never_the_proto_of_another_program(tmp_path: Path) -> None:
    data = _kept(f"xla/{MODULE.name}.before_optimizations.hlo.pb.gz")
    rate = b"\xcd\xcc\xcc\x3d"  # 0.1
    assert data.count(rate) == 2
    (tmp_path / "a").write_bytes(data)
    (tmp_path / "b").write_bytes(data.replace(rate, b"\xcd\xcc\x4c\x3e"))  # 0.2
    [cause] = graph.diff(tmp_path / "a", tmp_path / "b").causes
    assert "0.1 -> 0.2" in cause.what


def test_without_jaxlib_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binary, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"reading MLIR bytecode.*pip install 'retrograd\[jax\]'"):
        read(DATA / "step.mlirbc.gz")


def test_the_part_works_here() -> None:
    assert registry.status(jaxlib_programs.PART).difference == ""
