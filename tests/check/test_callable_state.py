"""State that a reference keeps from a run of the checker: put back, or the op, which may be the same module, fails."""

from __future__ import annotations

import pytest
import torch

import retrograd as rg
from retrograd.check.callable_state import without_traces


class _Moving(torch.nn.Module):
    """Moves what it holds to where its input is, in each of the ways that libraries have."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.plain = torch.tensor([0.5, 1.5, 2.5])
        self.register_buffer("buffer", torch.tensor([0.5, 1.5, 2.5]))
        self.weight = torch.nn.Parameter(torch.tensor([0.5, 1.5, 2.5]), requires_grad=False)
        self.cache: dict[str, torch.Tensor] = {}
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "attribute":
            self.plain = self.plain.to(x.device, x.dtype)
            return x * self.plain
        if self.way == "buffer":
            self.buffer = self.buffer.to(x.device, x.dtype)
            return x * self.buffer
        if self.way == "data":
            self.weight.data = self.weight.data.to(x.dtype)
            return x * self.weight.to(x.device)
        if self.way == "list":
            self.seen.append(x.detach() * 0)
            return x * 2 + self.seen[-1] + (self.seen[0] if self.seen[0].shape == x.shape else 0)
        if "factor" not in self.cache:
            self.cache["factor"] = torch.full((3,), 2.0, device=x.device, dtype=x.dtype)
        return x * self.cache["factor"]


WAYS = ("attribute", "buffer", "data", "list", "cache")


@pytest.mark.parametrize("way", WAYS)
def test_a_module_that_is_its_own_reference_is_left_alone(way):
    module = _Moving(way)
    spec = rg.op(module, module, dict(x=rg.tensor("N", 3)), name="moving")
    report = rg.verify(spec, level="quick", only=["contract", "oracle", "shapes", "calls", "kinks", "higher_order"])
    assert report.verdict == "proved", report.findings


@pytest.mark.parametrize("way", WAYS)
def test_what_a_run_on_meta_or_in_float64_left_is_put_back(way):
    module = _Moving(way)
    for x in (torch.ones(2, 3, device="meta"), torch.ones(2, 3, dtype=torch.float64)):
        with without_traces(module):
            module(x)
        kept = [*module.cache.values(), *module.seen, module.plain, module.buffer, module.weight]
        assert {(t.device.type, t.dtype) for t in kept} == {("cpu", torch.float32)}


def test_variables_of_a_closure_and_globals_are_put_back():
    scale = torch.tensor(2.0)

    def call(x):
        nonlocal scale
        global _SCALE
        scale, _SCALE = scale.to(x), _SCALE.to(x)
        return x * scale * _SCALE

    before = scale, _SCALE
    for x in (torch.ones(2, device="meta"), torch.ones(2, dtype=torch.float64)):
        with without_traces(call):
            call(x)
        assert (scale, _SCALE) == before
    torch.vmap(call)(torch.ones(3, 2))  # vmap leaves a tensor of its own kind, which nobody else can use
    with without_traces(call):
        torch.vmap(call)(torch.ones(3, 2))
    assert call(torch.ones(2)).tolist() == [6.0, 6.0]


_SCALE = torch.tensor(3.0)


def test_what_the_op_itself_keeps_is_still_found():
    kept: list[torch.Tensor] = []

    def op(x):
        out = x * 2 + (kept[-1] if kept and kept[-1].shape == x.shape else 0)
        kept[:] = [x.detach() * 0.5]
        return out

    spec = rg.op(op, lambda x: x * 2, dict(x=rg.tensor("N", 3)), name="keeps")
    assert rg.verify(spec, level="quick", only=["state"]).verdict == "finding"


def test_a_tuple_that_has_no_length_is_looked_through():
    class Parts(tuple):
        def __len__(self):
            raise NotImplementedError

    parts = Parts((2.0, torch.ones(1)))

    def scaled(x):
        first, one = tuple.__iter__(parts)
        return first * x * one.to(x)

    report = rg.verify(scaled, reference=scaled, inputs=dict(x=rg.tensor("N")), level="quick", only=["oracle"])
    assert report.verdict == "proved", report


@pytest.mark.parametrize("way", ["global", "new global", "default", "closure", "dict", "list"])
def test_what_a_function_refers_to_from_the_second_call_on_is_put_back_too(way):
    """What was found at the first call is kept, but not what has been bound otherwise since."""
    held: dict[str, dict[str, torch.Tensor]] = {}
    scope: dict[str, object] = {"torch": torch, "settings": held}
    lines = "def reference(x, inner=settings):\n    box['w'] = box.get('w', x) * x\n    return x * box['w']\n"
    box: dict[str, torch.Tensor] = {}
    if way == "closure":

        def reference(x: torch.Tensor) -> torch.Tensor:
            box["w"] = box.get("w", x) * x
            return x * box["w"]

    else:
        if way == "global":
            scope["box"] = {}
        if way in ("default", "dict"):
            lines = lines.replace("box", "inner" if way == "default" else "settings['box']")
        if way == "list":
            scope["settings"] = [{}]
            lines = lines.replace("box", "settings[0]")
        if way == "dict":
            held["box"] = {}
        exec(lines, scope)
        reference = scope["reference"]
    with without_traces(reference):
        pass  # what it refers to is known now
    fresh = dict(w=torch.ones(3))
    if way in ("global", "new global"):
        scope["box"] = fresh
    elif way == "default":
        reference.__defaults__ = (fresh,)
    elif way == "closure":
        box = fresh
    elif way == "dict":
        held["box"] = fresh
    else:
        scope["settings"][0] = fresh
    with without_traces(reference):
        reference(torch.ones(3, dtype=torch.float64))
    assert fresh["w"].dtype == torch.float32
