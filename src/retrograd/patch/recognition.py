"""Recognition of norms: which of our norms a module of any class computes, told by running it beside ours."""

# torch types attributes of modules as Tensor or Module.
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportReturnType=false

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, NamedTuple

import torch

from retrograd.check import tolerance
from retrograd.ops import layer_norm, rms_norm

_SHAPES = ((2, 3), (4, 5))  # leading dimensions of what is tried; the second where a row has 2 or 3 elements
_DTYPES = (torch.float32, torch.bfloat16)
_OTHER_NORMS = (
    torch.nn.GroupNorm, torch.nn.SyncBatchNorm, torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d,
    torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d,
)  # fmt: skip
# Results of 16 bits may be rounded at each of so many operators: x * rstd, its storing, * weight, + bias, the sum.
_ROUNDINGS = 6


@dataclass(frozen=True)
class RmsLike:
    """How an RMSNorm that is not torch's own is to be read.

    Attributes:
        eps: name of the attribute that holds eps.
        weight_offset: added to the weight: 1.0 for Gemma.
        promotes: y has the promoted dtype of x and weight (Llama multiplies by the weight last), else that of x;
            "weight": that of the weight, as T5's.
    """

    eps: str = "variance_epsilon"
    weight_offset: float = 0.0
    promotes: bool | Literal["weight"] = True


@dataclass(frozen=True)
class LayerLike:
    """How a LayerNorm that is not torch's own is to be read: as RmsLike, with a bias or none.

    Attributes:
        eps: name of the attribute that holds eps.
        weight_offset: added to the weight.
        promotes: see RmsLike.
    """

    eps: str = "eps"
    weight_offset: float = 0.0
    promotes: bool | Literal["weight"] = True


NormLike = RmsLike | LayerLike


def compute(x: torch.Tensor, module: torch.nn.Module, like: NormLike, **options: Any) -> torch.Tensor:
    """y [..., N] of our norm with the parameters of `module`, in the dtype that `like` says unless options do."""
    weight, bias = (getattr(module, name, None) for name in ("weight", "bias"))
    if like.promotes and weight is not None:
        y_dtype = weight.dtype if like.promotes == "weight" else torch.promote_types(x.dtype, weight.dtype)
        options.setdefault("out_dtype", y_dtype)
    offset = like.weight_offset if weight is not None else 0.0
    norm = rms_norm if isinstance(like, RmsLike) else layer_norm
    return norm(x, weight, bias, eps=float(getattr(module, like.eps)), weight_offset=offset, **options)


def recognise(module: torch.nn.Module) -> NormLike | str:
    """How to read the module, or why it cannot be replaced.

    It is run on random rows of several scales, in float32 and bfloat16, forward and backward, beside our norms: the
    first whose values, gradients and dtypes agree within rounding is what it computes. The module is not changed.
    """
    reason = _obstacle(module)
    if reason:
        return reason
    names = [name for name, value in vars(module).items() if "eps" in name.lower() and isinstance(value, float)]
    if not names:
        return "no attribute with `eps` in its name holds a number"
    closest = _Difference(torch.inf, "")
    for eps, kind, offset in product(names, (RmsLike, LayerLike), (0.0, 1.0)):
        like = _with_dtypes(module, kind(eps, offset))
        difference = _difference(module, like)
        if difference is None:
            return like
        if not closest.text or difference.size < closest.size:
            closest = _Difference(
                difference.size, f"as {like}: {difference.text}" if difference.alike else difference.text
            )
    return closest.text


def _obstacle(module: torch.nn.Module) -> str:
    """Why the module cannot be one of our norms, by what it has; "" if it can."""
    if isinstance(module, _OTHER_NORMS):
        return "it is neither an RMSNorm nor a LayerNorm"
    forward = inspect.signature(type(module).forward)
    others = list(forward.parameters)[2:]
    if others:
        return f"its forward takes more than x: {', '.join(others)}"
    tensors = {name: t for name, t in module._parameters.items() if t is not None}
    if surplus := [name for name in (*tensors, *dict(module.named_buffers())) if name not in ("weight", "bias")]:
        return f"it has `{'`, `'.join(surplus)}` beside weight and bias"
    if wide := [name for name, t in tensors.items() if t.dim() != 1]:
        return f"its `{wide[0]}` has {tensors[wide[0]].dim()} dimensions, not one"
    return "" if tensors else "it has no weight that tells the length of a row"


def _with_dtypes(module: torch.nn.Module, like: NormLike) -> NormLike:
    """`like` with the `promotes` that gives the dtypes of y that the module has, where it computes any."""
    pairs = []
    for weight_dtype, x_dtype in product(_DTYPES, _DTYPES):
        with suppress(Exception):  # _difference() says what it raises
            pairs.append((x_dtype, weight_dtype, _stand_in(module, weight_dtype)(_rows(module, like, x_dtype)).dtype))
    if all(y == torch.promote_types(x, weight) for x, weight, y in pairs):
        return replace(like, promotes=True)
    return replace(like, promotes="weight" if all(y == weight for _, weight, y in pairs) else False)


class _Difference(NamedTuple):
    size: float  # how many times what rounding explains; inf where nothing can be compared
    text: str
    alike: bool = False  # whether both compute something, so that it depends on the reading how far they are apart


def differs(module: torch.nn.Module, like: NormLike) -> str:
    """Where the module and our norm, read so, differ by more than rounding explains; "" if nowhere.

    Random rows [2, 3, N] of scales from sqrt(eps), where eps counts as much as the row, to 100. In float32 y and the
    gradients of x, weight and bias; with bfloat16 rows or parameters y and every dtype. Parameters of another dtype
    than the rows' are no difference where the module refuses them.
    """
    difference = _difference(module, like)
    return "" if difference is None else difference.text


def _difference(module: torch.nn.Module, like: NormLike) -> _Difference | None:
    for weight_dtype, x_dtype in product(_DTYPES, _DTYPES):
        copy, x = _stand_in(module, weight_dtype), _rows(module, like, x_dtype)
        try:
            theirs = _results(copy, x, copy)
        except Exception as error:
            if weight_dtype != x_dtype:
                continue
            rows = f"{_name(x_dtype)} rows [{', '.join(map(str, x.shape))}]"
            return _Difference(torch.inf, f"{type(module).__name__} of {rows} raises {type(error).__name__}: {error}")
        ours = _results(lambda t, copy=copy: compute(t, copy, like, impl="torch"), x, copy)
        wide = weight_dtype == x_dtype == torch.float32
        bounds = _bounds(copy, x, like, wide)
        for name, want in theirs.items():
            got = ours[name]
            if got.dtype != want.dtype or got.shape != want.shape:
                text = (
                    f"{name} of {_name(x_dtype)} x and {_name(weight_dtype)} parameters is {_name(want.dtype)} "
                    f"{list(want.shape)}, ours {_name(got.dtype)} {list(got.shape)}"
                )
                return _Difference(0.0, text, True)
            excess = ((got.double() - want.double()).abs() / bounds[name]).nan_to_num(torch.inf, torch.inf)
            if (wide or name == "y") and bool((excess > 1).any()):
                at = int(excess.argmax())
                values = f"{want.flatten()[at]:.6g}, ours {got.flatten()[at]:.6g}"
                # Where y agrees and a gradient does not, no other reading is closer.
                size = float(excess.max()) if name == "y" else 1.0
                return _Difference(size, f"{name} is {values}, in {_name(x_dtype)}", True)
    return _difference_by_rank(module, like)


def _difference_by_rank(module: torch.nn.Module, like: NormLike) -> _Difference | None:
    """As _difference, for y of rows of other numbers of dimensions: some norms of images look at x.dim()."""
    n = next(module.parameters()).numel()
    # [1, N, 1, N] has channels first and last; beyond 4,096 channels it would be more than 64 MiB.
    for leading in ((), (5,), (1, n, 1) if n <= 4096 else (1, 1, 1)):
        copy = _stand_in(module, torch.float32)
        x = _random((*leading, n), module, 0)
        with torch.no_grad():
            try:
                want = copy(x)
            except Exception:  # rows that the module refuses reach it in no model
                continue
            got = compute(x, copy, like, impl="torch")
        rows = f"y of x [{', '.join(map(str, x.shape))}]"
        if got.shape != want.shape or got.dtype != want.dtype:
            return _Difference(0.0, f"{rows} is {_name(want.dtype)} {list(want.shape)}", True)
        excess = ((got.double() - want.double()).abs() / _bounds(copy, x, like, True)["y"]).nan_to_num(torch.inf)
        if bool((excess > 1).any()):
            at = int(excess.argmax())
            return _Difference(0.0, f"{rows} is {want.flatten()[at]:.6g}, ours {got.flatten()[at]:.6g}", True)
    return None


def same_by_attributes(module: torch.nn.Module) -> tuple[Any, ...] | None:
    """A key that modules share which compute the same of equal parameters; None where an attribute hides what it is."""
    own = {name: value for name, value in vars(module).items() if name not in vars(torch.nn.Module())}
    plain = (type(None), bool, int, float, str, torch.dtype, torch.Size)
    for value in own.values():
        if not all(isinstance(item, plain) for item in (value if isinstance(value, (tuple, list)) else [value])):
            return None
    shapes = tuple((name, None if t is None else tuple(t.shape)) for name, t in module._parameters.items())
    buffers = tuple(module._buffers)
    return type(module), module.training, shapes, buffers, tuple(sorted((k, repr(v)) for k, v in own.items()))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device(module: torch.nn.Module) -> torch.device:
    """Where the module is tried: where its parameters are, and on the CPU if they are nowhere yet."""
    device = next(module.parameters()).device
    return torch.device("cpu") if device.type == "meta" else device


def _random(shape: tuple[int, ...], module: torch.nn.Module, seed: int) -> torch.Tensor:
    """Normal random numbers, the same at every call, that leave torch's own generators as they are."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(_device(module))


def _rows(module: torch.nn.Module, like: NormLike, dtype: torch.dtype) -> torch.Tensor:
    """x [2, 3, N]: rows of scales 1, sqrt(eps), 100 and 0.01 in turn."""
    n = next(module.parameters()).numel()
    leading = _SHAPES[n in _SHAPES[0]]
    scales = torch.tensor([1.0, float(getattr(module, like.eps)) ** 0.5, 100.0, 0.01], device=_device(module))
    rows = leading[0] * leading[1]
    return (_random((rows, n), module, 0) * scales.repeat(rows)[:rows, None]).reshape(*leading, n).to(dtype)


def _stand_in(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """A module of the same class and attributes without hooks, with random parameters of a dtype in place of its own.

    Its own may be sharded, on no device yet or all ones, which would hide an offset or a missing product.
    """
    copy = torch.nn.Module.__new__(type(module))
    torch.nn.Module.__init__(copy)
    own = {name: value for name, value in vars(module).items() if name not in vars(copy)}
    vars(copy).update(own, training=module.training, _buffers=dict(module._buffers))
    for seed, (name, t) in enumerate(module._parameters.items(), start=1):
        values = None if t is None else 0.5 + 0.5 * _random(tuple(t.shape), module, seed)
        copy._parameters[name] = None if values is None else torch.nn.Parameter(values.to(dtype))
    return copy


def _results(forward: Any, x: torch.Tensor, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """y [..., N] and the gradients of x and of each parameter for one random grad_out."""
    x = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        y = forward(x)
        names, inputs = zip(("x", x), *module.named_parameters(), strict=True)
        gradients = torch.autograd.grad(y, inputs, _random(tuple(y.shape), module, 9).to(y.dtype))
    return {"y": y.detach(), **{f"the gradient of {name}": g for name, g in zip(names, gradients, strict=True)}}


def _bounds(module: torch.nn.Module, x: torch.Tensor, like: NormLike, wide: bool) -> dict[str, torch.Tensor]:
    """How far two correct float32 computations of each result may be apart, whatever the order of their sums.

    Each is a sum of products; what is at stake is the sum of their sizes (Higham 2002, section 3.1): sums over a row
    have N terms, over the rows M; mean, variance and rstd follow each other in a gradient.
    """
    x, grad_out = x.double(), _random(tuple(x.shape), module, 9).double()
    weight, bias = (getattr(module, name, None) for name in ("weight", "bias"))
    weight = torch.ones((), device=x.device) if weight is None else weight.detach().double() + like.weight_offset
    centred = x - x.mean(-1, keepdim=True) if isinstance(like, LayerLike) else x
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + float(getattr(module, like.eps)))
    mean_size = x.abs().mean(-1, keepdim=True) if isinstance(like, LayerLike) else 0.0
    unit_rows = (x.abs() + mean_size) * rstd  # |x_hat| at most, and what the mean's own error is relative to
    weighted = (weight * grad_out).abs()
    n, m = x.shape[-1], x.numel() // x.shape[-1]
    row, rows = 2 * tolerance.sum_error(3 * n), 2 * tolerance.sum_error(3 * n + m)
    y = weight.abs() * unit_rows + (0.0 if bias is None else bias.detach().double().abs())
    across = unit_rows * (weighted * unit_rows).mean(-1, keepdim=True)
    grad_x = rstd * (weighted + weighted.mean(-1, keepdim=True) + across)
    every = tuple(range(x.dim() - 1))
    return {
        "y": (row + (0.0 if wide else _ROUNDINGS * tolerance.UNIT["bfloat16"])) * y,
        "the gradient of x": row * grad_x,
        "the gradient of weight": rows * (grad_out.abs() * unit_rows).sum(every),
        "the gradient of bias": rows * grad_out.abs().sum(every),
    }


def looks_like_norm(module: torch.nn.Module) -> bool:
    """Whether a person would expect the module to be replaced: no children and "norm" in its class' name."""
    return "norm" in type(module).__name__.lower() and not any(True for _ in module.children())


def explained(module: torch.nn.Module, like: NormLike) -> Iterator[str]:
    """What is wrong with reading the module so, and how to read it instead."""
    if obstacle := _obstacle(module):
        yield obstacle
    elif difference := differs(module, like):
        yield difference
        instead = recognise(module)
        yield "no RmsLike or LayerLike gives the same" if isinstance(instead, str) else f"{instead} gives the same"
