"""Specs of OpInfos: each sample input of PyTorch's op database, or of a list like it, as an op for `verify`.

An OpInfo is whatever has `name`, `op`, `dtypes` and `sample_inputs(device, dtype, requires_grad=...)`; what else it
says (`variant_test_name`, `supports_autograd`, `backward_dtypes`, `supports_gradgrad`, `gradcheck_nondet_tol`,
`gradcheck_wrapper`, `inplace_variant`, `supports_inplace_autograd`) is used where it is there. The reference of an op
is the op itself, which the checker runs in float64: what is proved is that its backward belongs to its forward in the
dtype under test.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retrograd.core import torch_installed  # noqa: F401 (first: it names the extra)  # isort: skip
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from retrograd.check.draws import alike, in_double
from retrograd.check.spec import OpSpec, dtype_name, op
from retrograd.compat.torch_dispatch import tree_flatten, tree_leaves, tree_unflatten
from retrograd.errors import UsageError

__all__ = ["SampleSpec", "SplitSample", "full_name", "sample_specs", "specs", "split", "unsupported"]

_COMPLEX = {torch.float16: torch.complex32, torch.float32: torch.complex64, torch.float64: torch.complex128}


@dataclass(frozen=True)
class SplitSample:
    """A sample input taken apart: the tensors that `verify` gets as inputs, and how to call a function with them.

    Attributes:
        inputs: the tensors that require a gradient, by name: "input", "arg0", "weight"; "input_0" in a list. One that
            stands in several places is one input.
        call: `call(fn, *tensors)` puts tensors into the places of the inputs and everything else where it was, and
            calls `fn` so. Other tensors are fresh copies at each call, as `fn` may write to them; those in the dtype of
            the sample follow the dtype of the inputs, as does that dtype where it is an argument.
        unsupported: why `verify` cannot take them; "" if it can.
    """

    inputs: Mapping[str, torch.Tensor]
    call: Callable[..., Any]
    unsupported: str = ""


@dataclass(frozen=True)
class SampleSpec:
    """One sample input: its number in the order of `sample_inputs`, and its spec or why there is none."""

    number: int
    spec: OpSpec | None
    reason: str = ""


def full_name(opinfo: Any) -> str:
    """The name of an OpInfo with its variant, if it has one: "nn.functional.pad.circular"."""
    variant = getattr(opinfo, "variant_test_name", "")
    return f"{opinfo.name}.{variant}" if variant else opinfo.name


def unsupported(opinfo: Any, dtype: Any = "float32", *, inplace: bool = False) -> str:
    """Why no sample of this OpInfo can be verified in this dtype; "" if they can.

    Args:
        opinfo: an OpInfo, or something like it.
        dtype: a torch dtype or its name.
        inplace: ask of the variant that works in place.
    """
    kind, label = _torch_dtype(dtype), str(dtype).removeprefix("torch.")
    if not getattr(opinfo, "supports_autograd", True):
        return "it has no autograd"
    if kind not in opinfo.dtypes:
        return f"it does not take {label}"
    backward = getattr(opinfo, "backward_dtypes", None)
    if backward is not None and kind not in backward:
        return f"its backward does not take {label}"
    if inplace and getattr(opinfo, "inplace_variant", None) is None:
        return "it has no variant that works in place"
    if inplace and getattr(opinfo, "supports_inplace_autograd", None) is False:
        return "its variant that works in place has no autograd"
    return ""


def split(sample: Any, dtype: Any = "float32") -> SplitSample:
    """Decide which tensors of a sample input are inputs for `verify`, and which are part of the call.

    Args:
        sample: has `input`, `args` and `kwargs`, with tensors anywhere in tuples, lists and dicts.
        dtype: of the sample.

    Returns:
        The tensors that are floating or complex and require a gradient as inputs; all else is closed over.
    """
    kind = _torch_dtype(dtype)
    positional = [("input", sample.input), *((f"arg{i}", value) for i, value in enumerate(sample.args))]
    inputs: dict[str, torch.Tensor] = {}
    names: list[str] = []  # of each leaf: the input that stands there, if any
    leaves, tree = tree_flatten(((sample.input, *sample.args), dict(sample.kwargs)))
    for label, leaf in zip(_labels([*positional, *sample.kwargs.items()]), leaves, strict=True):
        if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
            names.append("")
            continue
        known = next((name for name, tensor in inputs.items() if tensor is leaf), "")
        names.append(known or (f"{label}_" if label in inputs else label))
        inputs.setdefault(names[-1], leaf)
    inputs = {name: tensor.detach() for name, tensor in inputs.items()}
    order = {name: place for place, name in enumerate(inputs)}

    def call(fn: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        arriving = (tensors[0].dtype if tensors else kind).to_real()
        wide = None if arriving == kind.to_real() else arriving
        values = []
        for name, leaf in zip(names, leaves, strict=True):
            if name:
                tensor = tensors[order[name]]
                values.append(tensor if wide or tensor.dtype == leaf.dtype else tensor.to(leaf.dtype))
            else:
                values.append(_constant(leaf, kind, wide))
        args, kwargs = tree_unflatten(values, tree)
        return fn(*args, **kwargs)

    return SplitSample(inputs, call, _refusal(leaves, inputs))


def _labels(parts: Sequence[tuple[str, Any]]) -> Iterator[str]:
    """A name for each leaf: the argument's own, with a number behind it if it is a collection."""
    for name, value in parts:
        leaves, _ = tree_flatten(value)
        alone = len(leaves) == 1 and leaves[0] is value
        yield from [name] if alone else (f"{name}_{i}" for i in range(len(leaves)))


def _refusal(leaves: Sequence[Any], inputs: Mapping[str, torch.Tensor]) -> str:
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if any(tensor.layout != torch.strided for tensor in tensors):
        return "sparse tensors"
    if any(tensor.is_nested for tensor in tensors):
        return "nested tensors"
    return "" if inputs else "no tensor of the sample requires a gradient"


def _constant(leaf: Any, kind: torch.dtype, wide: torch.dtype | None) -> Any:
    """A leaf that is no input: tensors as copies; what has the dtype of the sample, or is it, in that of the inputs."""
    narrow = kind.to_real()
    widened = {} if wide is None else {narrow: wide, _COMPLEX.get(narrow): _COMPLEX.get(wide)}
    if not isinstance(leaf, torch.Tensor):
        return widened[kind] if widened and leaf is kind else leaf
    return leaf.detach().to(widened.get(leaf.dtype) or leaf.dtype, copy=True)


def sample_specs(
    opinfo: Any, dtype: Any = "float32", samples: int | Sequence[int] | str = "all", *,
    seed: int = 0, device: str = "cpu", inplace: bool = False,
) -> Iterator[SampleSpec]:  # fmt: skip
    """Every chosen sample of an OpInfo with its spec, or with the reason why there is none; arguments as in `specs`."""
    if unsupported(opinfo, dtype, inplace=inplace):
        return
    for number, sample in _drawn(opinfo, _torch_dtype(dtype), _numbers(samples), seed, device):
        spec, reason = _spec(opinfo, sample, number, dtype, device, inplace)
        yield SampleSpec(number, spec, reason)


def specs(
    opinfo: Any, dtype: Any = "float32", samples: int | Sequence[int] | str = "all",
    *, seed: int = 0, device: str = "cpu", inplace: bool = False,
) -> Iterator[OpSpec]:  # fmt: skip
    """The samples of an OpInfo as ops for `verify`.

    An op that draws gets torch's global generator seeded before each call, and put back afterwards, so that
    all calls draw the same; its inputs are made contiguous, since draws go in the order of memory. Where its draws
    depend on the dtype, float64 says nothing of float32, and there is no spec.

    Args:
        opinfo: an OpInfo, or something like it.
        dtype: of the samples, a torch dtype or its name.
        samples: "all", how many of the first, or their numbers.
        seed: of torch's and Python's generators when samples are drawn, both of which are put back.
        device: where the samples are made.
        inplace: instead of `opinfo.op` check `opinfo.inplace_variant`, on a copy of the first input, with `opinfo.op`
            as the reference. Samples that `broadcasts_input` are left out.

    Yields:
        A spec for each sample, named "add#3"; none for what `unsupported` tells, and for samples without a tensor that
        requires a gradient. `sample_specs` has the reasons.

    Raises:
        UsageError: `dtype` is none that `verify` checks, or `samples` is malformed.
    """
    every = sample_specs(opinfo, dtype, samples, seed=seed, device=device, inplace=inplace)
    return (each.spec for each in every if each.spec is not None)


def _numbers(samples: int | Sequence[int] | str) -> Callable[[int], bool | None]:
    """Whether the sample of a number is wanted; None if it and all later ones are not."""
    if samples == "all":
        return lambda number: True
    if isinstance(samples, str) or (isinstance(samples, int) and samples < 0):
        raise UsageError(f"`samples` is {samples!r}, expected 'all', how many of the first, or a list of numbers")
    wanted = frozenset(range(samples) if isinstance(samples, int) else samples)
    most = max(wanted, default=-1)
    return lambda number: None if number > most else number in wanted


def _drawn(
    opinfo: Any, dtype: torch.dtype, wanted: Callable[[int], bool | None], seed: int, device: str
) -> list[tuple[int, Any]]:
    state = random.getstate()
    with _forked(device):
        random.seed(seed)
        torch.manual_seed(seed)
        try:
            every = enumerate(opinfo.sample_inputs(device, dtype, requires_grad=True))
            chosen = itertools.takewhile(lambda pair: wanted(pair[0]) is not None, every)
            return [(number, sample) for number, sample in chosen if wanted(number)]
        finally:
            random.setstate(state)


def _forked(device: str) -> contextlib.AbstractContextManager[Any]:
    place = torch.device(device)
    return torch.random.fork_rng([] if place.type == "cpu" else [place.index or 0])


def _spec(opinfo: Any, sample: Any, number: int, dtype: Any, device: str, inplace: bool) -> tuple[OpSpec | None, str]:
    if inplace and getattr(sample, "broadcasts_input", False):
        return None, "its input is broadcast, which cannot be done in place"
    parts = split(sample, dtype)
    if parts.unsupported:
        return None, parts.unsupported
    process = getattr(sample, "output_process_fn_grad", None)
    wrapper = getattr(opinfo, "gradcheck_wrapper", None)

    def outputs(result: Any) -> Any:
        result = result if process is None else process(result)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        return tensors[0] if len(tensors) == 1 else tuple(tensors)

    def copying(first: Any, *args: Any, **kwargs: Any) -> Any:
        return opinfo.inplace_variant(first.clone(), *args, **kwargs)

    def calling(fn: Callable[..., Any]) -> Callable[..., Any]:
        wrapped = fn if wrapper is None else functools.partial(wrapper, fn)
        return lambda *tensors: outputs(parts.call(wrapped, *tensors))

    functional, in_place = calling(opinfo.op), calling(copying)

    draws = _draws(functional, parts.inputs, device)
    if draws == "by dtype":
        return None, f"random: not comparable across dtypes, its draws in {dtype} are others than in float64"
    fn, reference = in_place if inplace else functional, functional
    if draws:
        fn, reference = _seeded(fn, device), _seeded(reference, device)
    spec = op(
        fn, reference, dict(parts.inputs), dtypes=[dtype_name(dtype)], name=f"{full_name(opinfo)}#{number}",
        deterministic=False if getattr(opinfo, "gradcheck_nondet_tol", 0.0) else None,
        double_backward="right" if _twice(opinfo, _torch_dtype(dtype)) else None,
        transforms=_transforms(opinfo, _torch_dtype(dtype)),
    )  # fmt: skip
    return spec, ""


def _promises(opinfo: Any, dtype: torch.dtype, flag: str, test: str) -> bool:
    """Whether something is promised: where PyTorch tests it, so not in 16 bits, and does not skip the test."""
    if dtype in (torch.float16, torch.bfloat16):
        return False
    skipped = {getattr(decorator, "test_name", "") for decorator in getattr(opinfo, "decorators", ())}
    return getattr(opinfo, flag, None) is True and test not in skipped


def _twice(opinfo: Any, dtype: torch.dtype) -> bool:
    """Whether second derivatives are promised."""
    return _promises(opinfo, dtype, "supports_gradgrad", "test_fn_gradgrad")


def _transforms(opinfo: Any, dtype: torch.dtype) -> list[str]:
    """Transforms that are promised: forward mode, gradients for a batch of grad_outs."""
    flags = (
        ("jvp", "supports_forward_ad", "test_forward_mode_AD"),
        ("batched_grad", "check_batched_grad", "test_fn_grad"),
    )
    return [name for name, flag, test in flags if _promises(opinfo, dtype, flag, test)]


def _seeded(fn: Callable[..., Any], device: str) -> Callable[..., Any]:
    """The function with torch's global generator seeded before each call and put back after it.

    Its inputs are made contiguous: draws go in the order of memory, so that another layout draws another op.
    """

    def seeded(*tensors: torch.Tensor) -> Any:
        with _forked(device):
            torch.manual_seed(0)
            return fn(*(tensor.contiguous() for tensor in tensors))

    return seeded


class _RandomOperators(TorchDispatchMode):
    """Whether any operator ran that draws."""

    supports_higher_order_operators = True
    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        return func(*args, **(kwargs or {}))


def _draws(fn: Callable[..., Any], inputs: Mapping[str, torch.Tensor], device: str) -> str:
    """ "" if a call draws nothing, else "alike" or "by dtype": as float64 draws, or not.

    An op that puts the generator back itself shows by its operators.
    """
    watch = _RandomOperators()
    try:
        with torch.no_grad(), _forked(device):
            before = _state(device)
            with watch:
                fn(*(tensor.clone() for tensor in inputs.values()))
            if not watch.seen and torch.equal(before, _state(device)):
                return ""
        with torch.no_grad():
            plain = _seeded(fn, device)(*(tensor.clone() for tensor in inputs.values()))
            wide = _seeded(fn, device)(*(in_double(tensor) for tensor in inputs.values()))
    except Exception:
        return ""  # what it raises is for `verify` to tell
    return "alike" if all(map(alike, tree_leaves(plain), tree_leaves(wide))) else "by dtype"


def _state(device: str) -> torch.Tensor:
    return torch.get_rng_state() if torch.device(device).type == "cpu" else torch.cuda.get_rng_state(device)


def _torch_dtype(dtype: Any) -> torch.dtype:
    kind = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype), None)
    if not isinstance(kind, torch.dtype):
        raise UsageError(f"`dtype` is {dtype!r}, expected a torch dtype or its name")
    return kind
