"""Deformable attention by explicit torch operations (impl='torch'): any device, float64 too, closed-form backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from retrograd.compat.torch_dispatch import is_functorch_wrapped
from retrograd.ops.msda.arguments import MsdaGrads, MsdaInputs, MsdaSpec, NeededGrads
from retrograd.ops.msda.shapes import PointLevels, levels_of_points
from retrograd.ops.types import inner_dtype

# Numbers in one [B, q, H, K, C] temporary of a block of queries: 1 MiB in float32.
_BLOCK_ELEMENTS = 1 << 18
_CORNERS = ((0, 0), (0, 1), (1, 0), (1, 1))  # (y, x)


def msda_fwd(inputs: MsdaInputs, spec: MsdaSpec) -> torch.Tensor:
    """The output; see `arguments`. Numerics: inside float32, float64 for float64."""
    value, levels, locations, weights, _ = inputs
    batch, pixels, heads, channels = value.shape
    out = value.new_zeros(batch, locations.shape[1], heads, channels)
    if not value.numel() or not weights.numel():
        return out
    rows, inner = value.contiguous().view(-1, channels), inner_dtype(value)
    if is_functorch_wrapped(value):
        rows = rows.to(inner)  # before rows are picked: under vmap the backward adds in the dtype that it picks from
    where = levels_of_points(levels, spec.points, pixels, value.device)
    for block in _query_blocks(value, weights):
        cells = _find_cells(_dense(locations[:, block], inner), where, spec, pixels)
        terms = _interpolate(_read_corners(rows, cells, inner), cells.shares)  # [B, q, H, K, C]
        terms.mul_(_dense(weights[:, block], inner)[..., None])
        total = torch.zeros_like(terms[..., 0, :])
        for k in range(terms.shape[3]):
            total += terms[..., k, :]
        out[:, block] = total.to(value.dtype)
    return out


def msda_bwd(grad_out: torch.Tensor, inputs: MsdaInputs, spec: MsdaSpec, needed: NeededGrads) -> MsdaGrads:
    """The gradients; see `arguments`.

    Numerics: inside float32, float64 for float64. grad_value is added up in it, on CPU always in one order; on CUDA by
    sorting (index_put) where spec.deterministic, else by atomic additions.
    """
    value, levels, locations, weights, _ = inputs
    batch, pixels, heads, channels = value.shape
    inner = inner_dtype(value)
    sums = torch.zeros(batch * pixels * heads, channels, dtype=inner, device=value.device) if needed.value else None
    grad_locations = locations.new_zeros(locations.shape) if needed.locations else None
    grad_weights = weights.new_zeros(weights.shape) if needed.weights else None
    if value.numel() and weights.numel():
        rows = value.contiguous().view(-1, channels)
        where = levels_of_points(levels, spec.points, pixels, value.device)
        for block in _query_blocks(value, weights):
            cells = _find_cells(_dense(locations[:, block], inner), where, spec, pixels)
            g = _dense(grad_out[:, block], inner)[..., None, :]  # [B, q, H, 1, C]
            a = _dense(weights[:, block], inner)  # [B, q, H, K]
            if sums is not None:
                _add_to_corners(sums, cells, a, g, spec.deterministic)
            if not (needed.locations or needed.weights):
                continue
            corners = _read_corners(rows, cells, inner)
            if grad_weights is not None:
                grad_weights[:, block] = (_interpolate(corners, cells.shares) * g).sum(dim=-1).to(weights.dtype)
            if grad_locations is not None:
                slope = _slopes(corners, cells.fraction, g) * cells.scale * a[..., None]  # [B, q, H, K, 2]
                grad_locations[:, block] = slope.masked_fill(~cells.moves, 0.0).to(locations.dtype)
    grad_value = None if sums is None else sums.view(value.shape).to(value.dtype)
    return MsdaGrads(grad_value, grad_locations, grad_weights)


class _Cells(NamedTuple):
    """Where the points of a block of queries lie."""

    rows: list[torch.Tensor]  # [B, q, H, K] of each corner, its row in value as [B * S * H, C]; 0 outside
    inside: list[torch.Tensor]  # [B, q, H, K] of each corner, whether it is in the level
    fraction: torch.Tensor  # [B, q, H, K, 2] (tx, ty), the place in the cell
    shares: list[torch.Tensor]  # [B, q, H, K] of each corner, its part in the sample
    moves: torch.Tensor  # [B, q, H, K, 2] whether the sample changes with x and y
    scale: torch.Tensor  # [K, 2] pixels per unit of the location


def _dense(block: torch.Tensor, inner: torch.dtype) -> torch.Tensor:
    # Results of elementwise operations inherit strides, and a sum's order depends on them.
    return block.to(inner).contiguous()


def _find_cells(p: torch.Tensor, where: PointLevels, spec: MsdaSpec, pixels: int) -> _Cells:
    batch, _, heads, _, _ = p.shape
    last = (where.size - 1).to(p.dtype)  # [K, 2]
    scale = last if spec.align_corners else where.size.to(p.dtype)
    position = p * scale if spec.align_corners else p * scale - 0.5
    exists = p.isfinite().all(dim=-1, keepdim=True)
    moves = exists
    if spec.border:
        moves = exists & (position > 0) & (position < last)
        position = position.clamp_min(0.0).minimum(last)
    cell = position.floor()
    # Compared as floats: a far position must not reach the conversion to integers.
    reachable = exists & ((cell >= -1) & (cell <= last)).all(dim=-1, keepdim=True)
    fraction = (position - cell).masked_fill(~reachable, 0.0)
    x0, y0 = cell.masked_fill(~reachable, 0.0).to(torch.int64).unbind(dim=-1)  # [B, q, H, K]
    tx, ty = fraction.unbind(dim=-1)
    width, height = where.size.unbind(dim=-1)
    image = torch.arange(batch, device=p.device).view(-1, 1, 1, 1) * pixels
    head = torch.arange(heads, device=p.device).view(-1, 1)
    rows, inside, shares = [], [], []
    for dy, dx in _CORNERS:
        x, y = x0 + dx, y0 + dy
        there = reachable[..., 0] & (x >= 0) & (x < width) & (y >= 0) & (y < height)
        row = (image + where.start + y * width + x) * heads + head
        rows.append(row.masked_fill(~there, 0))
        inside.append(there)
        shares.append((ty if dy else 1 - ty) * (tx if dx else 1 - tx))
    return _Cells(rows, inside, fraction, shares, moves & reachable, scale)


def _read_corners(rows: torch.Tensor, cells: _Cells, inner: torch.dtype) -> list[torch.Tensor]:
    """[B, q, H, K, C] of each corner, zeros outside."""
    return [
        rows[row].to(inner).masked_fill_(~there[..., None], 0.0)
        for row, there in zip(cells.rows, cells.inside, strict=True)
    ]


def _interpolate(corners: list[torch.Tensor], shares: list[torch.Tensor]) -> torch.Tensor:
    """[B, q, H, K, C]; a fresh tensor."""
    sample = corners[0] * shares[0][..., None]
    for corner, share in zip(corners[1:], shares[1:], strict=True):
        sample.addcmul_(corner, share[..., None])
    return sample


def _slopes(corners: list[torch.Tensor], fraction: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """[B, q, H, K, 2] <g, d sample / d(x, y)> a pixel; corners are subtracted before the product, which loses less."""
    v00, v01, v10, v11 = corners
    tx, ty = fraction[..., :1], fraction[..., 1:]  # [B, q, H, K, 1]
    along_x = torch.lerp(v01 - v00, v11 - v10, ty)
    along_y = torch.lerp(v10 - v00, v11 - v01, tx)
    return torch.stack([(along_x * g).sum(dim=-1), (along_y * g).sum(dim=-1)], dim=-1)


def _add_to_corners(sums: torch.Tensor, cells: _Cells, a: torch.Tensor, g: torch.Tensor, deterministic: bool) -> None:
    for row, there, share in zip(cells.rows, cells.inside, cells.shares, strict=True):
        terms = ((a * share)[..., None] * g).masked_fill_(~there[..., None], 0.0).view(-1, sums.shape[1])
        if sums.device.type == "cuda" and deterministic:
            # Sorts the rows and adds each one's terms in their order; index_add_ adds atomically there.
            sums.index_put_((row.view(-1),), terms, accumulate=True)
        else:
            sums.index_add_(0, row.view(-1), terms)


def _query_blocks(value: torch.Tensor, weights: torch.Tensor) -> Iterator[slice]:
    queries = weights.shape[1]
    step = max(1, _BLOCK_ELEMENTS // (value.shape[3] * (weights.numel() // queries)))
    for start in range(0, queries, step):
        yield slice(start, min(start + step, queries))
