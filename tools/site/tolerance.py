"""The pictures of docs/tolerance.md, from real runs: `python tools/site/tolerance.py` measures and draws them anew.

Writes docs/assets/tolerance-*.svg and docs/assets/tolerance.json, which holds the numbers that the page quotes. Takes
ten seconds on a CPU.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import retrograd as rg
from retrograd.check import tolerance
from retrograd.check.spec import OpSpec
from retrograd.check.stages import StageContext
from retrograd.ops import ms_deform_attn, rms_norm

ASSETS = Path(__file__).resolve().parent.parent.parent / "docs" / "assets"
ROWS, COLUMNS = 64, 1022
ATOL = RTOL = 1e-2  # a common choice for bfloat16
RUNS = 400  # randomly rounded, for the histogram
_BLUE, _RED, _GREY, _GREEN = "#4f8fcb", "#c8442f", "#8a929b", "#3f9a63"


def formula(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """RMSNorm as a paper writes it."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


class OverTheBlock(torch.autograd.Function):
    """RMSNorm whose backward divides by the padded block, 1024, where it should divide by the row, 1022."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return formula(x.float(), weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, weight, g = (t.float() for t in (*ctx.saved_tensors, grad_out))
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        x_hat = x * rstd
        c = (g * weight * x_hat).sum(-1, keepdim=True) / 2 ** math.ceil(math.log2(x.shape[-1]))  # the mistake
        grad_x = rstd * (g * weight - x_hat * c)
        return grad_x.to(grad_out.dtype), (g * x_hat).sum(0).to(grad_out.dtype)


def norm_context(dtype: str) -> tuple[StageContext, dict[str, int]]:
    """The shipped RMSNorm beside the formula, with float32 inside, and the sizes it is run at."""
    inputs = dict(x=rg.tensor("M", "N"), weight=rg.tensor("N"))
    spec = rg.op(rms_norm, formula, inputs, dtypes=[dtype], compute="float32", name="rms_norm")
    return context_of(spec, dtype), dict(M=ROWS, N=COLUMNS)


def context_of(spec: OpSpec, dtype: str) -> StageContext:
    """The op, its truth and its judge on the CPU at level full with seed 0."""
    return StageContext.of(spec, dtype, level="full")


def measure_norm(rows: int = ROWS) -> dict[str, Any]:
    """Every 160th element of the gradient of x: its size, its tolerance, the error of a right and of a wrong op."""
    context, sizes = norm_context("bfloat16")
    case = context.base.but(sizes={**sizes, "M": rows})
    truth = context.oracle.truth(case)
    want, tol = truth.want["grad x"], truth.tol["grad x"]
    right = context.runner.run(case).grads["grad x"]
    mistaken = rg.op(OverTheBlock.apply, formula, context.spec.inputs, dtypes=["bfloat16"], name="over_the_block")
    wrong = context_of(mistaken, "bfloat16").runner.run(case).grads["grad x"]
    errors = {name: (got.double() - want).abs() for name, got in (("right", right), ("wrong", wrong))}
    fixed = ATOL + RTOL * want.abs()
    facts = {
        "elements": want.numel(),
        "worst_right": float((errors["right"] / tol).max()),
        "worst_wrong": float((errors["wrong"] / tol).max()),
        "over_tol_right": int((errors["right"] > tol).sum()),
        "over_tol_wrong": int((errors["wrong"] > tol).sum()),
        "over_fixed_wrong": int((errors["wrong"] > fixed).sum()),
        "power": truth.power,
    }
    columns = [t.flatten()[::160] for t in (want.abs(), tol, errors["right"], errors["wrong"])]
    points = [[float(f"{float(v):.3g}") for v in row] for row in zip(*columns, strict=True)]
    return {**facts, "points": points}


def measure_element(at: int = 30) -> dict[str, Any]:
    """What random rounding to float32 makes of one element, and the terms of its tolerance."""
    context, sizes = norm_context("float32")
    case = context.base.but(sizes=sizes)
    truth = context.oracle.truth(case)
    want = truth.want["grad x"].flatten()[at]
    right = context.runner.run(case).grads["grad x"]
    unit, accumulate = tolerance.units(case.dtype, context.spec.compute)
    rounded = []
    for seed in range(RUNS):
        result = context.runner.reference(case).rounded(unit, accumulate, seed)["grad x"]
        rounded.append(float(result.detach().flatten()[at] - want))
    terms = tolerance.terms(
        float(want), float(truth.floor["grad x"].flatten()[at]), float(truth.tol["grad x"].flatten()[at]), case.dtype
    )
    return {
        "want": float(want),
        "tol": float(truth.tol["grad x"].flatten()[at]),
        "terms": dict(terms),
        "right": float(right.double().flatten()[at] - want),
        "rounded": [float(f"{v:.4g}") for v in rounded],
    }


def measure_kink(steps: Iterable[int] = range(-12, 13)) -> dict[str, Any]:
    """The derivative of a bilinear sample at floats around the centre of a pixel: two programs and the interval."""
    image = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    centre = torch.tensor(17 / 128)
    rows = []
    for step in steps:
        p = centre + step * 2.0**-26  # float32 below 1/4 are 2^-26 apart here

        def kernel(p: torch.Tensor) -> torch.Tensor:
            point = torch.stack([p, torch.full_like(p, 0.3)], -1).view(1, 1, 1, 1, 1, 2)
            return ms_deform_attn(image.view(1, -1, 1, 1), [(64, 64)], point, torch.ones(1, 1, 1, 1, 1)).view(1)

        def sampled(p: torch.Tensor) -> torch.Tensor:
            point = torch.stack([p, torch.full_like(p, 0.3)], -1).view(1, 1, 1, 2)
            return F.grid_sample(image.to(p)[None, None], 2 * point - 1, align_corners=False).view(1)

        spec = rg.op(kernel, sampled, lambda seed, dtype, sizes, p=p: dict(p=p.view(1).to(dtype)), name="sample")
        context = context_of(spec, "float32")
        interval = context.oracle.interval(context.base)
        values = []
        for program in (kernel, sampled):
            leaf = p.view(1).clone().requires_grad_()
            program(leaf).sum().backward()
            values.append(float(leaf.grad))
        # grad_out of the case is not 1: the interval is divided by it.
        scale = float(context.runner.grad_outs(context.base)[0])
        ends = sorted(float(side["grad p"]) / scale for side in (interval.low, interval.high))
        rows.append([step, *values, *ends])
    return {"steps": rows}


_AXIS = {
    "labelColor": "currentColor",
    "titleColor": "currentColor",
    "tickColor": "currentColor",
    "domainColor": "currentColor",
}


def _chart(layers: list[dict[str, Any]], width: int = 620, height: int = 300, **more: Any) -> dict[str, Any]:
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "width": width,
        "height": height,
        **({"layer": layers} if layers else {}),
        **more,
        "config": {
            "aria": False,
            "background": None,
            "font": "system-ui, sans-serif",
            "view": {"stroke": "currentColor", "strokeOpacity": 0.25},
            "axis": {
                **_AXIS,
                "gridOpacity": 0.15,
                "labelFontSize": 12,
                "titleFontSize": 13,
                "titleFontWeight": "normal",
            },
            "legend": {
                **_AXIS,
                "title": None,
                "orient": "top",
                "labelFontSize": 13,
                "symbolOpacity": 1,
                "labelLimit": 400,
                "columnPadding": 36,
            },
            "header": {**_AXIS, "labelFontSize": 14, "title": None},
        },
    }


def draw_elements(data: dict[str, Any]) -> dict[str, Any]:
    """|error| over |gradient| of the right and of the wrong op, with the attainable error and a fixed tolerance."""
    kinds = {"right": "retrograd.ops.rms_norm", "wrong": "mean over the padded block"}
    values, lines = [], []
    for want, tol, right, wrong in data["points"]:
        if want < 1e-3:
            continue
        for (name, title), error in zip(kinds.items(), (right, wrong), strict=True):
            said = "within the attainable error" if error <= tol else "beyond it"
            values.append({"want": want, "error": max(error, 1e-6), "op": title, "what": said, "name": name})
            values.append(
                {"want": want, "error": tol, "op": title, "what": "attainable error of this element", "name": name}
            )
    for title in kinds.values():
        for k in range(41):
            want = 1e-3 * (8e3 ** (k / 40))
            lines.append({"want": want, "error": ATOL + RTOL * want, "op": title})
    x = {
        "field": "want",
        "type": "quantitative",
        "scale": {"type": "log", "domain": [1e-3, 8]},
        "title": "size of the right gradient",
    }
    y = {
        "field": "error",
        "type": "quantitative",
        "scale": {"type": "log", "domain": [1e-6, 0.2]},
        "title": "error of the element",
    }
    for axis in (x, y):
        axis["axis"] = {"tickCount": 5, "format": "~g"}
    names = ["within the attainable error", "beyond it", "attainable error of this element"]
    colour = {"field": "what", "type": "nominal", "scale": {"domain": names, "range": [_BLUE, _RED, _GREY]}}
    points = {"mark": {"type": "circle", "size": 14, "opacity": 0.8}, "encoding": {"x": x, "y": y, "color": colour}}
    rule = {
        "data": {"values": lines},
        "mark": {"type": "line", "strokeDash": [6, 4], "color": _GREEN, "strokeWidth": 2},
        "encoding": {"x": x, "y": y},
    }
    facet = {"field": "op", "type": "nominal", "sort": list(kinds.values())}
    spec = {"width": 380, "height": 300, "layer": [points, {**rule, "data": None}]}
    rule.pop("data")
    for line in lines:
        values.append({**line, "rule": 1})
    points["transform"] = [{"filter": "!datum.rule"}]
    rule["transform"] = [{"filter": "datum.rule == 1"}]
    spec["layer"] = [points, rule]
    chart = _chart([], data={"values": values}, facet={"column": facet}, spec=spec)
    del chart["width"], chart["height"]
    return chart


def draw_element(data: dict[str, Any]) -> dict[str, Any]:
    """A histogram of what random rounding makes of one element, with its tolerance and two implementations."""
    tol, right = 1e6 * data["tol"], 1e6 * data["right"]
    marks = [
        {"at": -tol, "what": "tolerance"},
        {"at": tol, "what": "tolerance"},
        {"at": right, "what": "retrograd.ops.rms_norm"},
    ]
    x = {"field": "at", "type": "quantitative", "title": "distance from the float64 result, in 1e-6"}
    x["axis"] = {"grid": False, "values": list(range(-8, 9, 2))}
    bars = {
        "data": {"values": [{"at": 1e6 * v} for v in data["rounded"]]},
        "mark": {"type": "bar", "color": _GREY, "opacity": 0.7},
        "encoding": {
            "x": {**x, "bin": {"maxbins": 120, "extent": [-1.1 * tol, 1.1 * tol]}},
            "y": {"aggregate": "count", "title": f"of {len(data['rounded'])} randomly rounded runs"},
        },
    }
    names = ["tolerance", "retrograd.ops.rms_norm"]
    rules = {
        "data": {"values": marks},
        "mark": {"type": "rule", "strokeWidth": 2.5},
        "encoding": {
            "x": x,
            "color": {"field": "what", "type": "nominal", "scale": {"domain": names, "range": [_GREEN, _BLUE]}},
        },
    }
    return _chart([bars, rules], height=220)


def draw_kink(data: dict[str, Any]) -> dict[str, Any]:
    """Two derivatives and the interval of right ones, over the distance from a kink in steps of float32."""
    values, band = [], []
    for step, ours, theirs, low, high in data["steps"]:
        band.append({"step": step, "low": low, "high": high})
        values.append({"step": step, "d": ours, "who": "ms_deform_attn"})
        values.append({"step": step, "d": theirs, "who": "grid_sample"})
    x = {
        "field": "step",
        "type": "quantitative",
        "title": "distance of the point from the centre of pixel 8, in float32 numbers",
    }
    x["axis"] = {"grid": False, "tickMinStep": 1, "format": "d"}
    x["scale"] = {"domain": [-13, 13], "nice": False}
    y = {"field": "d", "type": "quantitative", "title": "derivative", "scale": {"domain": [-90, 10], "nice": False}}
    area = {
        "data": {"values": band},
        "mark": {"type": "rule", "color": _GREEN, "opacity": 0.45, "strokeWidth": 20},
        "encoding": {
            "x": x,
            "y": {**y, "field": "low"},
            "y2": {"field": "high"},
        },
    }
    who = {"field": "who", "type": "nominal"}
    dots = {
        "data": {"values": values},
        "mark": {"type": "point", "filled": True, "opacity": 0.95},
        "encoding": {
            "x": x,
            "y": y,
            "size": {**who, "scale": {"domain": ["ms_deform_attn", "grid_sample"], "range": [170, 60]}, "legend": None},
            "color": {**who, "scale": {"domain": ["ms_deform_attn", "grid_sample"], "range": [_BLUE, _RED]}},
            "shape": {**who, "scale": {"domain": ["ms_deform_attn", "grid_sample"], "range": ["circle", "diamond"]}},
        },
    }
    return _chart([area, dots], height=260)


def save(data: dict[str, Any], folder: Path) -> None:
    """Write the numbers and the three pictures, each for light and for dark pages."""
    import vl_convert

    kept = {key: value for key, value in data["norm"].items() if key != "points"}
    element = {key: value for key, value in data["element"].items() if key != "rounded"}
    (folder / "tolerance.json").write_text(json.dumps({"norm": kept, "element": element, "kink": data["kink"]}) + "\n")
    for name, chart in (
        ("elements", draw_elements(data["norm"])),
        ("element", draw_element(data["element"])),
        ("kink", draw_kink(data["kink"])),
    ):
        svg = re.sub(r' (?:d|transform)="[^"]*"', _shorter, vl_convert.vegalite_to_svg(chart))
        for scheme, ink in (("light", "#2b3036"), ("dark", "#d5d9de")):
            svg_of = re.sub(r"currentColor", ink, svg, flags=re.IGNORECASE)
            (folder / f"tolerance-{name}-{scheme}.svg").write_text(svg_of + "\n")


def _shorter(match: re.Match[str]) -> str:
    """Places to a hundredth of a pixel, which halves the files."""
    return re.sub(r"(\.\d\d)\d+", r"\1", match[0])


def main() -> None:
    """Measure, draw, say what was seen."""
    torch.set_num_threads(1)
    data = {"norm": measure_norm(), "element": measure_element(), "kink": measure_kink()}
    save(data, ASSETS)
    print(json.dumps({k: v for k, v in data["norm"].items() if not isinstance(v, (list, dict))}, indent=1))


if __name__ == "__main__":
    main()
