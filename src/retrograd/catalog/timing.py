"""An op spec as the benchmark wants it: the same inputs that the checker draws, only larger."""

from __future__ import annotations

import math

from retrograd.bench import registry
from retrograd.bench.benchmark import DEVICES
from retrograd.bench.ops.any_spec import Drawn, ReferencedOp, providers
from retrograd.check import inputs, sizes
from retrograd.check.schema import Case
from retrograd.check.spec import OpSpec
from retrograd.errors import SpecError, UsageError

# Elements of the largest tensor where the user names no shape: 16 MiB of float32.
_ELEMENTS = 2**22
_SEED = 0


def offer(spec: OpSpec) -> str:
    """Add an op to what can be measured: itself, its reference, and its reference compiled; returns its name.

    Raises:
        SpecError: it has no reference to be held against.
    """
    if spec.reference is None:
        raise SpecError(
            f"{spec.name} has no reference, and nothing is timed that nothing was compared with; give "
            "rg.op(fn, reference=...)"
        )
    taken = registry.BENCHMARKS.get(spec.name)
    name = f"{spec.name} (spec)" if taken and taken.signature else spec.name  # an op of the project has that name
    registry.BENCHMARKS[name] = ReferencedOp(
        name=name,
        usual_shapes=dict.fromkeys((*DEVICES, "host"), (usual_shape(spec),)),
        usual_dtypes=dict.fromkeys(DEVICES, spec.dtypes),
        draw=lambda shape, dtype: _drawn(spec, shape, dtype),
        reference=spec.reference,
        keywords=lambda shape, dtype: dict(_case(spec, shape, dtype).params),
    )
    registry.add(*providers(name, spec.fn, spec.reference))
    return name


def usual_shape(spec: OpSpec) -> str:
    """A case as `--case` has it: free sizes are powers of two, with a largest tensor of about four million elements."""
    case = inputs.base_case(spec, spec.dtypes[0])
    free = [name for name in spec.size_names if inputs.allows(spec, name, 1) and inputs.allows(spec, name, 2)]
    for name in free:
        case = case.with_size(name, 1)
    grew = True
    while grew and spec.tensor_specs:
        grew = False
        for name in reversed(free):
            larger = case.with_size(name, 2 * sizes.elements(case.size(name)))
            fits = inputs.allows(spec, name, larger.size(name)) and inputs.fitted(spec, larger) == larger
            if fits and _elements(spec, larger) <= _ELEMENTS:
                case, grew = larger, True
    return case.text()


def _elements(spec: OpSpec, case: Case) -> int:
    """Of the largest tensor."""
    return max((math.prod(sizes.shape(tensor.dims, case)) for tensor in spec.tensors.values()), default=0)


def _case(spec: OpSpec, shape: str, dtype: str) -> Case:
    try:
        return inputs.parse_case(spec, dtype, shape)
    except UsageError as error:
        raise UsageError(str(error).replace("`--case`", "`--shapes`")) from None


def _drawn(spec: OpSpec, shape: str, dtype: str) -> Drawn:
    case = _case(spec, shape, dtype)
    drawn = inputs.place(inputs.draw(spec, case, _SEED), case, "cpu")
    return drawn, tuple(inputs.differentiable(spec, drawn))
