"""Margins of a test: how far from its tolerance each of its own comparisons was, as err / tol.

Used in the process that runs the test, and nowhere else: `MarginRecorder.install` puts a thin layer around
torch.testing.assert_close, torch.allclose, numpy.testing.assert_allclose, numpy.allclose and the comparison of
retrograd.assert_backward. The layer only looks; what a test gets back or catches is not changed.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from retrograd.compat import torch_testing
from retrograd.flake.schema import Margin

_ROOM = str(Path(__file__).resolve().parents[1])
# Frames in these packages are not the test's line.
_INNER = ("torch", "numpy", "_pytest", "contextlib")


class MarginRecorder:
    """Keeps one Margin a line of the test; `take` hands them over and begins the next run."""

    def __init__(self) -> None:
        self.unrecorded = 0  # comparisons that could not be measured, such as those of fake tensors
        # By site and call, with digests of what was compared on both sides.
        self._margins: dict[tuple[str, str], tuple[Margin, list[Any]]] = {}
        self._installed: set[str] = set()

    def install(self) -> None:
        """Wrap the comparisons of every library that is imported by now; names that tests imported are replaced too."""
        replaced: dict[int, Any] = {}
        for name, wrap in (
            (torch_testing.MODULE, self._torch),
            ("numpy.testing", self._numpy),
            ("retrograd.check.tensor_comparison", self._retrograd),
        ):
            module = sys.modules.get(name)
            if module is not None and name not in self._installed:
                self._installed.add(name)
                replaced |= wrap(module)
        if not replaced:
            return
        for module in list(sys.modules.values()):
            for key, value in list(getattr(module, "__dict__", {}).items()):
                if id(value) in replaced and callable(value):
                    setattr(module, key, replaced[id(value)])

    def take(self) -> tuple[Margin, ...]:
        """The margins of the run so far, by site; forgets them."""
        taken, self._margins = sorted(self._margins.items()), {}
        return tuple(
            replace(margin, got_bits=got.hexdigest(), want_bits=want.hexdigest()) for _, (margin, (got, want)) in taken
        )

    def add(self, margin: Margin) -> None:
        """A margin that the test itself states; its bits are its own."""
        digests = [hashlib.blake2b(margin.got_bits.encode(), digest_size=8), hashlib.blake2b(digest_size=8)]
        self._margins[margin.site, margin.call] = margin, digests

    def _torch(self, module: Any) -> dict[int, Any]:
        import torch

        call = "torch.testing.assert_close"
        torch_testing.watch_comparisons(lambda *facts: self._note(call, *facts))
        torch.Tensor.allclose = self._wrapped(torch.Tensor.allclose, "torch.allclose", 1e-5, 1e-8)  # type: ignore[method-assign]
        return {id(torch.allclose): self._wrapped(torch.allclose, "torch.allclose", 1e-5, 1e-8)}

    def _numpy(self, module: Any) -> dict[int, Any]:
        import numpy as np

        strict = self._wrapped(module.assert_allclose, "numpy.testing.assert_allclose", 1e-7, 0.0, True)
        loose = self._wrapped(np.allclose, "numpy.allclose", 1e-5, 1e-8)
        return {id(module.assert_allclose): strict, id(np.allclose): loose}

    def _retrograd(self, module: Any) -> dict[int, Any]:
        inner = module.compare

        @functools.wraps(inner)
        def compare(got: Any, want: Any, tol: Any) -> Any:
            # Its tolerance is one of each element.
            self._note("retrograd.assert_backward", got, want, 0.0, tol, True)
            return inner(got, want, tol)

        return {id(inner): compare}

    def _wrapped(
        self, inner: Callable[..., Any], call: str, rtol: float, atol: float, nan: bool = False
    ) -> Callable[..., Any]:
        """`inner(actual, expected, rtol, atol, equal_nan)`, looked at before it is called."""

        @functools.wraps(inner)
        def around(*args: Any, **named: Any) -> Any:
            positional = [*args[2:5], *(None,) * (3 - len(args[2:5]))]
            chosen = [
                named.get(key, default if value is None else value)
                for key, value, default in zip(
                    ("rtol", "atol", "equal_nan"), positional, (rtol, atol, nan), strict=True
                )
            ]
            pair = list(args[:2])
            pair += [named[key] for key in ("input", "other", "actual", "desired", "a", "b") if key in named]
            if len(pair) == 2:
                self._note(call, *pair, *chosen)
            return inner(*args, **named)

        return around

    def _note(self, call: str, got: Any, want: Any, rtol: float, atol: Any, equal_nan: bool) -> None:
        try:
            got, want, dtype, eps = _arrays(got, want)
            margin = _margin(got, want, rtol, _array(atol), equal_nan, eps)
        except Exception:  # to look at a comparison must never change the test that makes it
            self.unrecorded += 1
            return
        margin = replace(margin, site=_site(), call=call, dtype=dtype)
        key = margin.site, call
        if key in self._margins:
            seen, digests = self._margins[key]
            worse = margin if margin.worst > seen.worst else seen
            counts = dict(wrong=seen.wrong + margin.wrong, total=seen.total + margin.total, calls=seen.calls + 1)
            margin = replace(worse, rest=max(seen.rest, margin.rest), **counts)
        else:
            digests = [hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=8)]
        for digest, value in zip(digests, (got, want), strict=True):
            digest.update(value.tobytes())
        self._margins[key] = margin, digests


def _array(value: Any) -> Any:
    """A NumPy array in float64 (or complex, or whole numbers) of a tensor, an array or a number."""
    import numpy as np

    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach().resolve_conj().resolve_neg().cpu()
        if value.is_floating_point() and value.dtype is not torch.float64:
            value = value.to(torch.float64)
        return np.from_dlpack(value)  # after numpy() the test could not resize it any more
    return np.asarray(value)


def _arrays(got: Any, want: Any) -> tuple[Any, Any, str, float]:
    """Both sides as arrays, and the coarser floating dtype with its relative step (0 for whole numbers)."""
    sides = _array(got), _array(want)
    steps = [(_step(value), str(getattr(value, "dtype", type(value).__name__))) for value in (got, want)]
    eps, name = max(steps)
    return *sides, name.removeprefix("torch."), eps


def _step(value: Any) -> float:
    import numpy as np

    dtype = getattr(value, "dtype", None)
    if isinstance(value, float):
        return float(np.finfo(np.float64).eps)
    if dtype is None:
        return 0.0
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        return float(torch.finfo(dtype).eps) if dtype.is_floating_point or dtype.is_complex else 0.0
    return float(np.finfo(dtype).eps) if dtype.kind in "fc" else 0.0


def _margin(got: Any, want: Any, rtol: float, atol: Any, equal_nan: bool, eps: float) -> Margin:
    import numpy as np

    got, want = np.broadcast_arrays(got, want)
    if not got.size:
        return Margin("", "", 0.0, 0.0, 0, 0)
    with np.errstate(all="ignore"):
        err = np.abs(got.astype(np.result_type(got, np.float64)) - want)
        tol = atol + rtol * np.abs(want.astype(np.result_type(want, np.float64)))
        same = got == want
        if equal_nan:
            same |= np.isnan(got) & np.isnan(want)
        ratio = np.where(same, 0.0, np.nan_to_num(err / tol, nan=np.inf, posinf=np.inf))
    flat = int(ratio.argmax())
    within = ratio <= 1
    tol_at = float(np.broadcast_to(tol, ratio.shape).flat[flat])
    size = eps * abs(complex(want.flat[flat]))
    return Margin(
        "",
        "",
        worst=float(ratio.flat[flat]),
        rest=float(ratio[within].max()) if within.any() else 0.0,
        wrong=int(ratio.size - within.sum()),
        total=int(ratio.size),
        ulps=tol_at / size if size else None,
        got=float(got.flat[flat].real),
        want=float(want.flat[flat].real),
        index=tuple(int(i) for i in np.unravel_index(flat, ratio.shape)),
    )


def _site() -> str:
    """ "file:line" of the line of the test, or of its helper, that compares."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        file, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
        if not file.startswith(_ROOM) and module.partition(".")[0] not in _INNER:
            break
        frame = frame.f_back
    if frame is None:
        return "?"
    file = frame.f_code.co_filename
    near = os.path.relpath(file)
    return f"{file if near.startswith('..') else near}:{frame.f_lineno}"
