"""Classes with "norm" in their name in transformers, diffusers and timm, each patched and compared with itself.

`python benchmarks/norms_of_libraries.py [transformers diffusers timm]` in an environment that has them. Each is made
with the arguments that its signature asks for and with random parameters, patched by `patch.norms`, and where it was
replaced run beside itself on rows that recognition has not seen: 1 to 5 dimensions, strided, constant and tiny rows,
three dtypes of rows and parameters, training and evaluation, under autocast, gradients included.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import pkgutil
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from io import StringIO
from itertools import product
from types import ModuleType
from typing import Any

import torch

from retrograd import patch

PLACES = {
    "transformers": ("transformers.models", "transformers.pytorch_utils"),
    "diffusers": ("diffusers.models",),
    "timm": ("timm.layers", "timm.models"),
}
SIZE = 16
WORDS = dict(eps=1e-6, epsilon=1e-6, num_groups=4, groups=4, group_size=4, num_heads=4, affine=True, bias=True)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Config:
    """A config that has whatever is asked for."""

    def __init__(self, **own: Any) -> None:
        vars(self).update(own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return 1e-6 if "eps" in name else "silu" if "act" in name else SIZE


def modules(place: str) -> Iterator[ModuleType]:
    """Modules below a place that can be imported."""
    root = importlib.import_module(place)
    yield root
    for info in pkgutil.walk_packages(getattr(root, "__path__", ()), f"{place}."):
        words = info.name.rpartition(".")[2]
        if place == "transformers.models" and not (words.startswith("modeling_") or info.ispkg):
            continue
        try:
            yield importlib.import_module(info.name)
        except Exception as error:  # what it needs is not installed
            print(f"not imported: {info.name}: {type(error).__name__}", file=sys.stderr)


def classes(place: str) -> dict[type, None]:
    """Modules of torch by class that have "norm" in their names."""
    kinds: dict[type, None] = {}
    for module in modules(place):
        for value in vars(module).values():
            if inspect.isclass(value) and issubclass(value, torch.nn.Module) and "norm" in value.__name__.lower():
                kinds[value] = None
    return kinds


def instances(kind: type) -> Iterator[torch.nn.Module]:
    """Modules of a class, by what its signature asks for; with its flags either way."""
    parameters = [p for n, p in inspect.signature(kind.__init__).parameters.items() if n != "self" and p.kind < 2]
    parameters += [p for p in inspect.signature(kind.__init__).parameters.values() if p.kind == p.KEYWORD_ONLY]
    needed = {p.name: p for p in parameters if p.default is p.empty}
    flags = [p.name for p in parameters if isinstance(p.default, bool)]
    if not needed and parameters and parameters[0].name not in flags:
        needed = {parameters[0].name: parameters[0]}
    for numbers in (dict(WORDS), dict(WORDS, config=SIZE)):
        values = {name: numbers.get(name, Config() if "config" in name else SIZE) for name in needed}
        before = len(flags)
        for flips in [(), *((flag,) for flag in flags)]:
            others = {p.name: not p.default for p in parameters if p.name in flips}
            try:
                yield kind(**{**values, **others})
                before = -1
            except Exception:  # other arguments, which are nobody's norm of rows
                continue
        if before < 0:
            return
    for arguments in ((SIZE,), ((SIZE,),), ((SIZE, SIZE),)):  # what *args are, or a shape
        try:
            yield kind(*arguments)
        except Exception:
            continue
        return


def filled(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """A copy with random parameters."""
    module = copy.deepcopy(module).to(dtype)
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(number)) + 0.3)
    return module


def rows(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Rows of 16 of every form."""
    generator = torch.Generator().manual_seed(7)
    for leading in ((), (5,), (3, 7), (2, SIZE, 3), (2, 3, SIZE, 2), (0, 4)):
        x = torch.rand((*leading, SIZE), generator=generator) * 3 - 1
        yield f"{[*x.shape]}", x.to(dtype)
    x = (torch.rand((6, SIZE), generator=generator) * 3 - 1).to(dtype)
    yield "strided", torch.stack((x, x), -1)[..., 0]
    yield "transposed", x.T.contiguous().T
    special = x.clone()
    special[0], special[1], special[2] = 0.5, 0.0, x[2] * 1e-4
    yield "constant, zero and tiny rows", special
    yield "rows of 200", x * 200  # squares beyond float16 where they are not widened
    yield "not a number", torch.where(torch.arange(6)[:, None] == 2, torch.nan, x.float()).to(dtype)


def results(module: torch.nn.Module, x: torch.Tensor, autocast: bool) -> list[torch.Tensor]:
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        y = module(x)
    grad = torch.rand(y.shape, generator=torch.Generator().manual_seed(3)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], grad)]


def difference(before: torch.nn.Module, after: torch.nn.Module) -> str:
    """Where a replaced module is not what it was, beyond four times its own distance from float64; "" if nowhere."""
    for weights, dtype, training, autocast in product(DTYPES, DTYPES, (True, False), (False, True)):
        stock, ours = (filled(m, weights).train(training) for m in (before, after))
        for name, x in rows(dtype):
            where = f"{name}, {dtype} rows, {weights} parameters{', autocast' * autocast}"
            try:
                want = results(stock, x, autocast)
            except Exception:
                continue
            try:
                got = results(ours, x, autocast)
            except Exception as error:
                return f"{where}: {type(error).__name__}: {error}"
            try:
                exact = results(copy.deepcopy(stock).double(), x.double(), False)
            except Exception as error:
                return f"{where}: no float64: {error}"
            for part, a, b, e in zip(("y", "grad x", "grad w", "grad b"), want, got, exact, strict=False):
                if a.dtype != b.dtype or a.shape != b.shape:
                    return f"{where}: {part} is {a.dtype} {[*a.shape]}, ours {b.dtype} {[*b.shape]}"
                a, b, e = (t.double() for t in (a, b, e))
                if not a.numel():
                    continue
                if not torch.equal(a.isnan(), b.isnan()):
                    if not a[~b.isnan()].isfinite().all() or not e.isfinite().all():
                        continue  # theirs overflows where ours does not
                    return f"{where}: {part} has other NaN"
                a, b, e = (t.nan_to_num() for t in (a, b, e))
                formats = (want[0].dtype, dtype, weights, torch.bfloat16 if autocast else dtype)
                unit = max(torch.finfo(t).eps for t in formats)
                theirs, here = float((a - e).abs().max()), float((b - e).abs().max())
                if here > 4 * theirs + 8 * unit * float(e.abs().max()):
                    return f"{where}: {part} is {here:.3g} from float64, theirs {theirs:.3g}"
    return ""


def main(libraries: list[str]) -> int:
    warnings.simplefilter("ignore")
    wrong = 0
    for library in libraries:
        counts: Counter[str] = Counter()
        reasons: Counter[str] = Counter()
        kinds: dict[type, None] = {}
        for place in PLACES[library]:
            kinds |= classes(place)
        for kind in kinds:
            outcomes: dict[str, None] = {}
            for module in instances(kind):
                if list(module.children()):
                    outcomes["composed"] = None  # the norms in it are modules of their own
                    continue
                model = torch.nn.Sequential(copy.deepcopy(module))
                with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                    handle = patch.norms(model)
                if bool(handle.names) == ("0" in handle.left) and type(model[0]) is not type(module):
                    outcomes["WRONG"] = None
                    print(f"WRONG {kind.__module__}.{kind.__name__}: neither replaced nor left")
                elif not handle.names:
                    outcomes["left"] = None
                    reasons[handle.left.get("0", "NO REASON")] += 1
                    if "0" not in handle.left:
                        print("no reason", kind)
                elif error := difference(module, model[0]):
                    outcomes["WRONG"] = None
                    print(f"WRONG {kind.__module__}.{kind.__name__}: {error}", flush=True)
                else:
                    outcomes["replaced"] = None
                handle.undo()
                if type(model[0]) is not type(module):
                    print(f"WRONG {kind}: not undone")
            outcome = "WRONG" if "WRONG" in outcomes else "+".join(sorted(outcomes)) or "not made"
            wrong += outcome == "WRONG"
            counts[outcome] += 1
            if "-v" in sys.argv:
                print(f"{outcome:20} {kind.__module__}.{kind.__name__}")
        print(f"{library} {importlib.import_module(library).__version__}: {len(kinds)} classes")
        for outcome, count in sorted(counts.items()):
            print(f"  {outcome:32} {count}")
        for reason, count in reasons.most_common(30):
            print(f"     left {count:4}: {reason[:200]}")
    return wrong


if __name__ == "__main__":
    sys.exit(1 if main([a for a in sys.argv[1:] if a != "-v"] or list(PLACES)) else 0)
