"""Deformable attention over several levels, zeros outside, not aligned: its shapes, data and truth.

Inputs by name: value [B, S, H, C], locations [B, Q, H, L, P, 2] and weights [B, Q, H, L, P]; result out [B, Q, H, C].
Of the fused form: value, references [B, Q, L, 2], offsets [B, Q, H, L, P, 2] in pixels and logits [B, Q, H, L * P].
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from retrograd.bench.benchmark import Benchmark, Data, Implementation, Pieces, Problem, Tensors
from retrograd.errors import UsageError

if TYPE_CHECKING:
    import torch

OP, FUSED = "ms_deform_attn", "ms_deform_attn_fused"
BASE = "grid_sample"  # the peer that runs everywhere, which times are held against
LEAVES = ("value", "locations", "weights")
FUSED_LEAVES = ("value", "offsets", "logits")
_SPELLED = re.compile(r"B(\d+)-Q(\d+)-H(\d+)-C(\d+)-P(\d+)-(\d+x\d+(?:\+\d+x\d+)*)")
# Few queries of one image: a call that the device answers faster than the host asks.
HOST_SHAPE = "B1-Q300-H8-C32-P4-40x40+20x20"
# Pixels that each point keeps from the borders of its cell: the derivative jumps there and libraries round otherwise.
_MARGIN = 2.0**-10
_SIGMA = 2.0
# In units of 2^-24: sums of products, and for each pixel of the largest side what placing a point otherwise may cost.
# grid_sample at 2 p - 1 is off by 4e-7 in levels of up to 167 pixels, where this allows 6e-6.
_SUMS, _PLACE = 8, 0.25
_CHUNK_ELEMENTS = 2**24
# 16-bit atomics lose up to this in the sums of hundreds of terms; beyond it a term is missing or wrong.
_COARSE = 0.1


@dataclass(frozen=True)
class Shape:
    """B batch, levels (height, width), Q queries, H heads, C channels a head, P points a level."""

    batch: int
    levels: tuple[tuple[int, int], ...]
    queries: int
    heads: int = 8
    channels: int = 32
    points: int = 4
    # Each query is a pixel of a level and its points lie 2 pixels (standard deviation) around it, as in an encoder;
    # else points are uniform over the levels.
    pixels: bool = False

    @property
    def size(self) -> int:
        """S, pixels of all levels."""
        return sum(h * w for h, w in self.levels)

    def bytes_moved(self, direction: str, dtype: str, beside: str) -> int:
        """The least that "fwd" or "bwd" must move, each number once.

        Forward: value, locations, weights, out. Backward: the same with grad_out for out, and the gradients of the
        first three. Of value only pixels that are needed are read, at most four a sample; its gradient is written
        in full. `dtype` is that of value and out, `beside` that of locations and weights.
        """
        wide, narrow = Benchmark.element_bytes[dtype], Benchmark.element_bytes[beside]
        pixel = self.batch * self.heads * self.channels * wide
        read = pixel * sum(min(h * w, 4 * self.queries * self.points) for h, w in self.levels)
        places = 3 * self.batch * self.queries * self.heads * len(self.levels) * self.points * narrow
        out = pixel * self.queries
        return read + places + out + (pixel * self.size + places if direction == "bwd" else 0)


def _encoder(batch: int, levels: tuple[tuple[int, int], ...]) -> Shape:
    return Shape(batch, levels, sum(h * w for h, w in levels), pixels=True)


def _squares(*sides: int) -> tuple[tuple[int, int], ...]:
    return tuple((side, side) for side in sides)


# A feature pyramid of an image of 800 x 1333.
_DETR = ((100, 167), (50, 84), (25, 42), (13, 21))
SHAPES = {
    "enc800": _encoder(4, _DETR),
    "enc800b1": _encoder(1, _DETR),
    "bench10k": Shape(4, _squares(64, 32, 16, 8), 10000),
    "dec300": Shape(4, _DETR, 300),
    "dec900b16": Shape(16, _DETR, 900),
}
# On a CPU: one image each.
CPU_SHAPES = ("B1-Q5000-H8-C32-P4-64x64+32x32+16x16+8x8", "enc800b1")
# Measured when asked for by name. The first ones are decoders of one and two images.
MORE_SHAPES = {
    **{f"dec{queries}b{batch}": Shape(batch, _DETR, queries) for queries in (300, 900) for batch in (1, 2)},
    "rtdetr": Shape(16, _squares(80, 40, 20), 300),
    "rfdetr": Shape(4, _squares(40), 3900, heads=16, channels=16, points=2),
    "mask2former": _encoder(2, _squares(128, 64, 32)),
}


def shape_of(name: str) -> Shape:
    """A shape by its name, or spelled out as B4-Q300-H8-C32-P4-64x64+32x32 (levels height x width); else UsageError."""
    known = {**SHAPES, **MORE_SHAPES}
    if name in known:
        return known[name]
    spelled = _SPELLED.fullmatch(name)
    if not spelled:
        raise UsageError(
            f"`--shapes` has {name!r}, expected some of {', '.join(known)}, "
            "or sizes such as B4-Q300-H8-C32-P4-64x64+32x32"
        )
    batch, queries, heads, channels, points = map(int, spelled.groups()[:5])
    levels = tuple((int(h), int(w)) for h, w in (level.split("x") for level in spelled[6].split("+")))
    if not all((batch, queries, heads, channels, points, *(side for level in levels for side in level))):
        raise UsageError(f"`--shapes` has {name!r}, expected sizes above 0")
    return Shape(batch, levels, queries, heads, channels, points)


@dataclass(frozen=True)
class DeformableAttention(Benchmark):
    """`ms_deform_attn`, or its fused form, beside what modules of others do: locations, softmax, call."""

    name: str
    signature: str
    inputs: tuple[str, ...]
    leaves: tuple[str, ...]
    usual_shapes: Mapping[str, tuple[str, ...]]
    usual_dtypes: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **{"cuda": ("float32", "bfloat16"), "cpu": ("float32", "bfloat16")},
    }
    group: ClassVar[str] = "msda"
    fields: ClassVar[tuple[str, ...]] = (
        *("shape", "dtype", "beside", "provider", "op", "fwd_extra_bytes", "bwd_extra_bytes"),
    )
    packages: ClassVar[Mapping[str, str]] = {
        name: name for name in ("torch", "triton", "msda-triton", "mmcv", "kernels", "dcnv4")
    }

    def beside(self, dtype: str, locations: str) -> str:
        """Dtype of locations and weights: 16 bits place a point by up to half a pixel, so float32 is usual."""
        return dtype if locations == "same" else "float32"

    def bytes_moved(self, direction: str, shape: str, dtype: str, beside: str) -> int:
        return shape_of(shape).bytes_moved(direction, dtype, beside)  # references are a hundredth of it

    def parameters(self, shape: str, dtype: str) -> Shape:
        """Implementations know the levels before they are called."""
        return shape_of(shape)

    def by_user(self, function: Callable[..., torch.Tensor]) -> Callable[[Shape], Implementation]:
        """The maker for a person's function; levels are (height, width)."""

        def make(shape: Shape) -> Implementation:
            levels = list(shape.levels)
            return Implementation(lambda t: (function(t["value"], levels, *(t[name] for name in self.inputs[1:])),))

        return make

    def problem(self, shape: str, dtype: str, beside: str, device: str) -> Problem:
        """An error may be what float32 costs: its sums, and the roundings of a coordinate in which libraries differ."""
        sizes = shape_of(shape)
        kept: Tensors = {}

        def once(inputs: Tensors, grads: Tensors) -> Pieces:
            if not kept:
                # On the CPU while others are timed: it is larger than all inputs.
                kept.update({name: tensor.cpu() for name, tensor in truth(sizes, inputs, grads).items()})
            return ((name, slice(None), tensor.to(device)) for name, tensor in kept.items())

        fwd, bwd = (sizes.bytes_moved(direction, dtype, beside) for direction in ("fwd", "bwd"))
        largest = max(side for level in sizes.levels for side in level)
        return Problem(
            leaves=self.leaves,
            results=("out",),
            data=lambda: make_data(sizes, dtype, beside, device, self.name == FUSED),
            truth=once,
            bytes_moved=(fwd, bwd),
            slack=(_SUMS + _PLACE * largest) * 2.0**-24,
            coarse=_COARSE,
        )


def truth(shape: Shape, inputs: Tensors, grads: Tensors) -> dict[str, torch.Tensor]:
    """Result and gradients in float64, points in the cells where float32 finds them; a few queries at a time."""
    import torch

    from retrograd.ops.msda import ms_deform_attn_reference

    fused = "references" in inputs
    value = inputs["value"].detach().double().requires_grad_()
    names = (FUSED_LEAVES if fused else LEAVES)[1:]
    kept: dict[str, list[torch.Tensor]] = {name: [] for name in ("out", *(f"grad_{name}" for name in names))}
    total = torch.zeros_like(value)
    a_query = shape.batch * shape.heads * len(shape.levels) * shape.points * shape.channels
    step = max(_CHUNK_ELEMENTS // a_query, 1)
    for start in range(0, shape.queries, step):
        rows = slice(start, start + step)
        locations, leaf = (inputs[name][:, rows].detach() for name in names)
        if fused:
            sizes = sides(shape, value.device)
            # Rounded as float32 rounds it, since it decides the cell; its derivative is that of the exact sum.
            locations = inputs["references"][:, rows, None, :, None].float() + locations.float() / sizes
        locations, leaf = locations.double().requires_grad_(), leaf.double().requires_grad_()
        weights = leaf.softmax(-1).view(locations.shape[:-1]) if fused else leaf
        out = ms_deform_attn_reference(value, list(shape.levels), locations, weights, coordinates_in=torch.float32)
        gradients = list(torch.autograd.grad(out, (value, locations, leaf), grads["out"][:, rows].double()))
        if fused:
            gradients[1] = gradients[1] / sizes.double()
        total += gradients[0]
        for name, tensor in zip(kept, (out.detach(), *gradients[1:]), strict=True):
            kept[name].append(tensor)
    return {"grad_value": total} | {name: torch.cat(parts, dim=1) for name, parts in kept.items()}


def sides(shape: Shape, device: str | torch.device) -> torch.Tensor:
    """[L, 1, 2] (width, height) of the levels."""
    import torch

    return torch.tensor(shape.levels, device=device).flip(1).float()[:, None]


def make_data(shape: Shape, dtype_name: str, beside_name: str, device: str, fused: bool = False) -> Data:
    """Sets of inputs and gradients of the results without end."""
    import torch

    dtype, beside = getattr(torch, dtype_name), getattr(torch, beside_name)
    # Not torch's own generator: a capture that failed leaves that one unusable.
    generator = torch.Generator(device).manual_seed(0)
    sizes = sides(shape, device)
    places = (shape.batch, shape.queries, shape.heads, len(shape.levels), shape.points)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, generator=generator)

    while True:
        value = normal(shape.batch, shape.size, shape.heads, shape.channels).to(dtype)
        if shape.pixels:
            x = _centres(shape, device)[:, None, None, None] * sizes - 0.5 + _SIGMA * normal(*places, 2)
        else:
            x = torch.rand((*places, 2), device=device, generator=generator) * sizes - 0.5
        x = x.floor() + (x - x.floor()).clamp(_MARGIN, 1 - _MARGIN)
        logits = normal(*places).flatten(3)
        known = {"value": value, "locations": ((x + 0.5) / sizes).to(beside)}
        known["weights"] = logits.softmax(-1).to(beside).view(places)
        if fused:
            centres = (
                _centres(shape, device)
                if shape.pixels
                else torch.rand(shape.queries, 2, device=device, generator=generator)
            )
            references = centres[None, :, None].expand(shape.batch, -1, len(shape.levels), -1).to(beside).contiguous()
            offsets = (x + 0.5 - references[:, :, None, :, None] * sizes).to(beside)
            known = {"value": value, "references": references, "offsets": offsets, "logits": logits.to(beside)}
        grads = {"out": normal(shape.batch, shape.queries, shape.heads, shape.channels).to(dtype)}
        yield {name: tensor.requires_grad_(name != "references") for name, tensor in known.items()}, grads


def _centres(shape: Shape, device: str) -> torch.Tensor:
    """[S, 2] (x, y) in [0, 1] of all pixels of all levels."""
    import torch

    parts = []
    for h, w in shape.levels:
        y, x = torch.meshgrid(torch.arange(h, device=device), torch.arange(w, device=device), indexing="ij")
        parts.append(torch.stack([(x + 0.5) / w, (y + 0.5) / h], dim=-1).view(-1, 2))
    return torch.cat(parts)


# Another run, shown beside a measurement and never mixed with it: the fastest library, microseconds of its forward and
# of the fastest backward; torch 2.11, Triton 3.6, medians of triton.testing.do_bench around eager calls.
EARLIER = "an earlier run on one NVIDIA H200 (torch 2.11, Triton 3.6, medians of eager calls), not measured here"
# In float32, and in 16 bits: of the libraries of that run only grid_sample took bfloat16, so float16 stands for both.
_EARLIER = {
    "enc800": ((950, 3537), (812, 2057)),
    "enc800b1": ((232, 895), (209, 533)),
    "bench10k": ((431, 1618), (369, 1037)),
    "dec300": ((25.5, 119), (19, 243)),
    "dec900b16": ((163, 775), (140, 439)),
}


def earlier(shape: str, dtype: str) -> tuple[str, float, float] | None:
    """Library, microseconds forward and backward of the earlier run; None where nothing was timed."""
    if shape not in _EARLIER:
        return None
    if dtype != "float32":
        return "msda-triton in float16", *_EARLIER[shape][1]
    return f"msda-triton{' / Deformable-DETR CUDA' * (shape == 'dec300')}", *_EARLIER[shape][0]


_SHAPES = {"cuda": tuple(SHAPES), "cpu": CPU_SHAPES, "host": (HOST_SHAPE,)}
_FEW = {**_SHAPES, "cuda": ("dec300b1", "dec900b2", "enc800b1")}
_FUSED_INPUTS = ("value", "references", "offsets", "logits")
BENCHMARKS = (
    DeformableAttention(OP, "f(value, levels, locations, weights) -> out", LEAVES, LEAVES, _SHAPES),
    DeformableAttention(
        FUSED, "f(value, levels, references, offsets, logits) -> out", _FUSED_INPUTS, FUSED_LEAVES, _FEW
    ),
)
