"""Multi-scale deformable attention with broken backwards, emulated in torch operations; two small, non-square levels.

Ids are those of the reports and classes of bug that each names. The formula is Deformable-DETR's: a sample is the
bilinear value at a location, with zeros outside; each query sums its samples with attention weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from retrograd.check.spec import OpSpec, op, tensor

LEVELS = ((3, 2), (2, 4))  # height, width
POINTS = 2
PIXELS = sum(h * w for h, w in LEVELS)
CORNERS = torch.tensor([(0, 0), (1, 0), (0, 1), (1, 1)])  # x, y
SIZES = torch.tensor([(w, h) for h, w in LEVELS for _ in range(POINTS)])  # of the level of each sample


class Attention:
    """The right op in steps, of which each mutant below replaces one in its backward.

    value [B, S, H, C], locations [B, Q, H, K, 2] as (x, y), weights [B, Q, H, K]; K runs over levels, then points.
    The four corners of a sample's cell are one more axis behind K.
    """

    starts = (0, LEVELS[0][0] * LEVELS[0][1])  # first pixel of each level

    def position(self, locations: Tensor) -> Tensor:
        return locations * SIZES - 0.5

    def cell(self, position: Tensor) -> Tensor:
        return position.detach().floor()

    def inside(self, pixel: Tensor, size: Tensor) -> Tensor:
        return ((pixel >= 0) & (pixel < size)).all(-1)

    def shares(self, side: Tensor) -> Tensor:
        """Weights of the corners, from how near the sample is to each in x and in y."""
        return side[..., 0] * side[..., 1]

    def slopes(self, side: Tensor) -> Tensor:
        """Derivatives of the shares by x and y, in pixels."""
        return (2 * CORNERS - 1) * side.flip(-1)

    def corners(self, locations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """How near each corner is in x and y, its pixel, and whether there is one."""
        position = self.position(locations)
        cell = self.cell(position)
        fraction = (position - cell)[..., None, :]
        side = torch.where(CORNERS == 1, fraction, 1 - fraction)
        pixel = cell[..., None, :].to(torch.int64) + CORNERS
        size = SIZES[:, None]
        x, y = torch.minimum(pixel.clamp_min(0), size - 1).unbind(-1)
        starts = torch.tensor(self.starts).repeat_interleave(POINTS)[:, None]
        return side, starts + y * size[..., 0] + x, self.inside(pixel, size)

    def place(self, value: Tensor, pixel: Tensor) -> tuple[Tensor, ...]:
        batch, heads = torch.arange(value.shape[0]), torch.arange(value.shape[2])
        return batch[:, None, None, None, None], pixel, heads[:, None, None]

    def forward(self, value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
        locations, weights = locations.flatten(3, 4), weights.flatten(3, 4)
        side, pixel, there = self.corners(locations)
        sample = torch.where(there[..., None], value[self.place(value, pixel)], 0)
        return ((weights[..., None] * self.shares(side))[..., None] * sample).sum((3, 4))

    def scale(self, slope: Tensor) -> Tensor:
        """From a slope per pixel to one per unit of location."""
        return slope * SIZES

    def scatter(self, value: Tensor, place: tuple[Tensor, ...], terms: Tensor) -> Tensor:
        return torch.zeros_like(value).index_put_(place, terms, accumulate=True)

    def incoming(self, dy: Tensor) -> Tensor:
        """grad_out as the backward reads it, [B, Q, H, C]."""
        return dy

    def weight(self, weights: Tensor) -> Tensor:
        """The factor of what goes to value."""
        return weights

    def backward(self, dy: Tensor, value: Tensor, locations: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        shape, locations, weights = locations.shape, locations.flatten(3, 4), weights.flatten(3, 4)
        dy = self.incoming(dy)[..., None, None, :]  # [B, Q, H, 1, 1, C]
        side, pixel, there = self.corners(locations)
        share, place, there = self.shares(side), self.place(value, pixel), there[..., None]
        terms = torch.where(there, (self.weight(weights)[..., None] * share)[..., None] * dy, 0)
        product = (torch.where(there, value[place], 0) * dy).sum(-1)
        slope = weights[..., None] * (self.slopes(side) * product[..., None]).sum(-2)
        grad_weights = (share * product).sum(-1)
        return self.scatter(value, place, terms), self.scale(slope).reshape(shape), grad_weights.reshape(shape[:-1])


RIGHT = Attention()

_INPUTS = dict(
    value=tensor("B", PIXELS, "H", "C"),
    locations=tensor("B", "Q", "H", len(LEVELS), POINTS, 2, low=-0.2, high=1.2),
    weights=tensor("B", "Q", "H", len(LEVELS), POINTS),
)
_SIZES = dict(B=(1, 2), H=(1, 2), C=(1, 7), Q=(1, 5))


def attention(name: str, broken: Attention) -> OpSpec:
    """The op whose backward is that of `broken`."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:
            ctx.save_for_backward(*inputs)
            return RIGHT.forward(*inputs)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            grads = broken.backward(dy, *ctx.saved_tensors)
            return tuple(g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=True))

    return op(lambda *inputs: Function.apply(*inputs), RIGHT.forward, _INPUTS, sizes=_SIZES, name=name)


def mutant(kind: type[Attention]) -> OpSpec:
    return attention(kind.__name__.removeprefix("_"), kind())


class _M01(Attention):
    """The gradient of locations is scaled by (H, W) instead of (W, H): right on square maps only."""

    def scale(self, slope):
        return slope * SIZES.flip(-1)


class _M02(Attention):
    """It is not scaled at all (Deformable-DETR's formula has the factor)."""

    def scale(self, slope):
        return slope


class _M03(Attention):
    """The backward takes corners for aligned (class of pytorch/pytorch#23925)."""

    def position(self, locations):
        return locations * (SIZES - 1)


class _M04(Attention):
    """Bounds compare x with the height and y with the width (common; square maps hide it)."""

    def inside(self, pixel, size):
        return super().inside(pixel, size.flip(-1))


class _M05(Attention):
    """Corners outside are clamped to the border and contribute (pytorch/pytorch#23925)."""

    def inside(self, pixel, size):
        return torch.ones_like(pixel[..., 0], dtype=torch.bool)


class _M06(Attention):
    """Values are written where they must be added (class of missing atomics)."""

    def scatter(self, value, place, terms):
        return torch.zeros_like(value).index_put_(place, terms)


class _M07(Attention):
    """The second level begins where the first one does (open-mmlab/mmcv#1823: a pointer changed in the loop)."""

    starts = (0, 0)


class _M09(Attention):
    """What goes to value lacks the attention weight (common)."""

    def weight(self, weights):
        return torch.ones_like(weights)


class _M10(Attention):
    """grad_value is not zeroed where no sample falls (class of Dao-AILab/flash-attention#2324)."""

    def scatter(self, value, place, terms):
        touched = torch.zeros(value.shape[:3], dtype=torch.bool).index_put_(place, torch.tensor(True))
        return torch.where(touched[..., None], super().scatter(value, place, terms), torch.empty_like(value))


class _M11(Attention):
    """Every head reads the first head's grad_out (common)."""

    def incoming(self, dy):
        return dy[:, :, :1].expand_as(dy)


class _M13(Attention):
    """Channels beyond a multiple of the vector width are dropped (class of Deformable-DETR's D=71 and 1025 tests)."""

    def incoming(self, dy):
        return dy * (torch.arange(dy.shape[-1], device=dy.device) < dy.shape[-1] // 4 * 4)


class _M14(Attention):
    """One corner's slope by x has the wrong sign (common)."""

    def slopes(self, side):
        return super().slopes(side) * torch.tensor([(1, 1), (-1, 1), (1, 1), (1, 1)])


class _M15(Attention):
    """The second half of a batch reads the first one's grad_out (im2col_step: open-mmlab/mmcv#1169, #565)."""

    def incoming(self, dy):
        return dy[:1].expand_as(dy)


class _M16(Attention):
    """Coordinates are truncated, not floored: left of the first pixel the cell is another one (class of
    Oneflow-Inc/oneflow#6768).
    """

    def cell(self, position):
        return position.detach().trunc()


class _M22(Attention):
    """Two corners have each other's weight (common)."""

    def shares(self, side):
        return super().shares(side)[..., [0, 2, 1, 3]]


class _M23(Attention):
    """The gradients by x and y are swapped (common)."""

    def scale(self, slope):
        return super().scale(slope).flip(-1)


MUTANTS = {kind.__name__[1:]: mutant(kind) for kind in Attention.__subclasses__()}
