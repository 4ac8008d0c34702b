"""Diagnosis of a wrong tensor: which of its elements are wrong, and which known mistake gives the same numbers."""

from __future__ import annotations

from dataclasses import replace

from retrograd.check import tolerance
from retrograd.check.diagnosis.elements import describe
from retrograd.check.diagnosis.known_mistakes import Evidence, suspects
from retrograd.check.oracle import Oracle
from retrograd.check.reference import NotApplicable, OpRaised
from retrograd.check.schema import Finding
from retrograd.check.sizes import size_of
from retrograd.check.spec import OpSpec
from retrograd.check.tensor_comparison import compare
from retrograd.errors import RetrogradError


def diagnose(oracle: Oracle, finding: Finding, is_dear: bool = False) -> Finding:
    """The finding with `elements` and `looks_like`, where running its case once shows the wrong value again.

    A mistake is named only if all elements of the tensor are what it would give, to the error that the op may make.
    Of a reference that `is_dear` fewer operators and parts of grad_out are looked at.
    """
    if finding.kind != "wrong-value" or oracle.runner.spec.reference is None:
        return finding
    try:
        run, truth = oracle.runner.run(finding.case), oracle.truth(finding.case)
        got, want = run.tensors.get(finding.tensor), truth.want.get(finding.tensor)
        if got is None or want is None or got.shape != want.shape:
            return finding
        wrong = compare(got, want, truth.tol[finding.tensor]).ratio > 1
        if not bool(wrong.any()):
            return finding  # the stage did more than run the case
        evidence = Evidence(oracle.runner, finding.case, finding.tensor, got.detach().double(), want, truth, is_dear)
        like = next((suspect.text for suspect in suspects(evidence) if evidence.shows(suspect)), "")
        like = like or tolerance.lower_precision_noise(evidence.got, want)
    except (NotApplicable, OpRaised, RetrogradError):
        return finding
    return replace(finding, elements=describe(wrong, axes(oracle.runner.spec, finding, wrong.ndim)), looks_like=like)


def axes(spec: OpSpec, finding: Finding, ndim: int) -> list[str]:
    """Names of a gradient's axes, as the spec of its input has them, else "axis 0" and so on."""
    tensor = spec.tensors.get(finding.tensor.removeprefix("grad "))
    names: list[str] = []
    for dim in tensor.dims if tensor else ():
        size = size_of(dim, finding.case)
        name = dim.removesuffix("...") if isinstance(dim, str) else f"axis {len(names)}"
        many = len(size) if isinstance(size, tuple) else 1
        names += [name] if many == 1 else [f"{name}[{i}]" for i in range(many)]
    return names if len(names) == ndim else [f"axis {i}" for i in range(ndim)]
