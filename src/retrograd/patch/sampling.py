"""Functions that sample feature maps as `ms_deform_attn` does, under other names and orders of arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from retrograd.check.runner import verify
from retrograd.check.spec import op, tensor
from retrograd.errors import RetrogradError
from retrograd.ops import ms_deform_attn
from retrograd.ops.msda.shapes import beside

_LEVELS = [(3, 5), (2, 3)]
_POINTS = 2
_ROLES = {
    "value": "value", "spatial_shapes": "shapes", "value_spatial_shapes": "shapes",
    "value_spatial_shapes_list": "listed", "spatial_shapes_list": "listed",
    "level_start_index": "start", "value_level_start_index": "start", "sampling_locations": "locations",
    "attention_weights": "weights", "num_points_list": "points", "im2col_step": "step",
}  # fmt: skip
_NEEDED = {"value", "shapes", "locations", "weights"}


@dataclass(frozen=True, eq=False)
class Sampler:
    """A function, a module's forward or an autograd function of another library, and which argument is which.

    Attributes:
        call: calls it.
        names: its parameters in order.
        roles: parameter by role: value, shapes, locations, weights, and where it has them listed, points, start, step.
        options: defaults of parameters that have no role here.
    """

    call: Callable[..., Any]
    names: tuple[str, ...]
    roles: dict[str, str]
    options: dict[str, Any]

    def ours(self, *args: Any, **named: Any) -> torch.Tensor:
        """What `call` computes, by `ms_deform_attn`; by `call` itself where an option is not the default."""
        at = {**dict(zip(self.names, args, strict=False)), **named}
        if any(at.get(name, usual) != usual for name, usual in self.options.items()):
            return self.call(*args, **named)
        by_role: dict[str, Any] = {role: at.get(name) for role, name in self.roles.items()}
        value, shapes, points = by_role["value"], by_role["shapes"], by_role.get("points")
        shapes = shapes if by_role.get("listed") is None else by_role["listed"]
        locations, weights = beside(by_role["locations"], value), beside(by_role["weights"], value)
        return ms_deform_attn(value, shapes, locations, weights, points_per_level=points).flatten(2)


def sampler(function: Any, skip: int = 0) -> Sampler | None:
    """What `function` takes, if that is feature maps, points and weights; None for everything else.

    Args:
        function: a function, or a class of torch.autograd.Function, which is called by `apply`.
        skip: leading parameters that are not looked at: 1 for a method that is not bound.
    """
    node = isinstance(function, type) and issubclass(function, torch.autograd.Function)
    return _read(function, skip, node) if node or inspect.isfunction(function) else None


@cache
def _read(function: Any, skip: int, node: bool) -> Sampler | None:
    parameters = list(inspect.signature(function.forward if node else function).parameters.values())[skip + node :]
    roles = {_ROLES[p.name]: p.name for p in parameters if p.name in _ROLES}
    options = {p.name: p.default for p in parameters if p.name not in _ROLES}
    if not roles.keys() >= _NEEDED or inspect.Parameter.empty in options.values():
        return None
    return Sampler(function.apply if node else function, tuple(p.name for p in parameters), roles, options)


def differs(theirs: Sampler, device: torch.device) -> str:
    """How ours differs from it beyond the attainable error, forward or backward; "" if it does not.

    Both are run at random points inside and outside of two levels, a tenth of a pixel or more from where the
    derivative jumps, in float32 and bfloat16.
    """
    names = [name for name in theirs.names if name in _ROLES]

    def by_role(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(value: torch.Tensor, locations: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            sizes = torch.tensor(_LEVELS, device=value.device)
            area = sizes.prod(dim=-1)
            if "points" in theirs.roles:
                locations, weights = locations.flatten(3, 4), weights.flatten(3, 4)
            arguments = dict(
                value=value, locations=locations, weights=weights, listed=_LEVELS, start=area.cumsum(0) - area, step=64,
                shapes=sizes if {"listed", "start"} & theirs.roles.keys() else _LEVELS, points=[_POINTS] * len(_LEVELS),
            )  # fmt: skip
            return call(*(arguments[_ROLES[name]] for name in names))  # an autograd function takes no names

        return run

    ours, reference = by_role(theirs.ours), by_role(theirs.call)
    spec = op(ours, reference, _inputs(), dtypes=("float32", "bfloat16"), name="sampling")
    try:
        report = verify(spec, level="quick", only=["contract", "oracle"], device=str(device))
    except RetrogradError as error:
        return f"it cannot be run on {device}: {error}"
    if report.findings:
        return f"what it computes is not ms_deform_attn: {report.findings[0].what}"
    return "" if report.verdict == "proved" else f"it could not be compared: {report.verdict}"


def _inputs() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    batch, queries, heads, channels = 2, 7, 2, 3
    shape = (batch, queries, heads, len(_LEVELS), _POINTS)
    size = torch.tensor(_LEVELS).flip(1)[:, None]  # [L, 1, 2] (width, height)
    cell = (torch.rand((*shape, 2), generator=generator, dtype=torch.float64) * (size + 2)).floor() - 1
    pixel = cell + 0.1 + 0.8 * torch.rand((*shape, 2), generator=generator, dtype=torch.float64)
    pixels = sum(height * width for height, width in _LEVELS)
    return dict(
        value=tensor(torch.randn(batch, pixels, heads, channels, generator=generator)),
        locations=tensor((pixel + 0.5) / size),
        weights=tensor(torch.rand(shape, generator=generator)),
    )
