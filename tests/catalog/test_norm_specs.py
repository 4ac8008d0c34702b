"""The shipped specs of the norms: every name resolves, names and specs agree, and each runs once against its truth."""

from __future__ import annotations

import pytest

from retrograd.catalog import SHIPPED, norm, norm_names, resolve
from retrograd.check.runner import verify
from retrograd.check.stages import StageContext
from retrograd.check.stages.oracle import judged


@pytest.mark.parametrize("name", [n for n in SHIPPED if n in norm_names()])
def test_spec_runs_and_agrees_with_its_reference(name: str, device: str) -> None:
    spec = resolve(name)
    assert spec.name == name
    if name.endswith(("_cpu", "_torch")):
        device = "cpu"
    context = StageContext.of(spec, spec.dtypes[-1], device=device)
    assert judged(context, context.base).findings == []


def test_names_and_specs_agree() -> None:
    assert list(norm.SPECS) == list(norm_names())
    assert {parts[1] for parts in norm_names().values()} == set(norm._VARIANTS)


def test_every_implementation_promises_to_compile_and_torch_operations_to_vmap() -> None:
    for name, (_, _, impl) in norm_names().items():
        assert norm.SPECS[name].transforms == (("compile", "vmap") if impl == "torch" else ("compile",))


@pytest.mark.parametrize("name", ["rms_norm_residual_cpu", "layer_norm_heads_torch"])
def test_the_compiler_stage_compiles_and_transforms_shipped_norms(name: str) -> None:
    report = verify(resolve(name), level="full", only=["compiler"])
    assert report, [f.what for f in report.findings]
    assert "compile" in report.stage("compiler").power_text
    assert ("vmap" in report.stage("compiler").power_text) is name.endswith("_torch")
