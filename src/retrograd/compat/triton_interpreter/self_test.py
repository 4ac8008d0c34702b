"""Self-test of what is replaced in Triton's interpreter: probe kernels before and after, bit by bit.

Where every replaced function has a source that the suite ran the comparison with, it is not run again. On other
versions it is, once a version and machine; on one newer than the tested, a speed-up whose functions are unknown is off.
"""

from __future__ import annotations

import hashlib
import json
import platform
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from retrograd import config
from retrograd.compat import versions
from retrograd.compat.triton_interpreter.fingerprints import FILES, KNOWN, KNOWN_FILES
from retrograd.compat.triton_interpreter.patches import Patches, fingerprint
from retrograd.compat.triton_launch import unheard

_N, _n = 8, 5
Outputs = dict[str, list[Any]]


def of_repairs(replace: Callable[[], None], patches: Patches) -> str:
    """Replace, and see that a few kernels give what they give on a GPU."""
    replace()
    return "" if not _unknown(patches) else _kept("repairs", lambda: in_plain_thread(_differs_from_gpu))


def of_speed_ups(replace: Callable[[], None], patches: Patches) -> str:
    """Replace, and see that the probes give the bits that they give without, at a first and a second launch."""
    replace()
    unknown = _unknown(patches)
    if not unknown:
        return ""
    if difference := _untested(unknown):
        return difference
    patches.undo()

    def compare() -> str:
        stock = _outputs(0)
        replace()
        return _difference(stock, _outputs(0)) or _difference(stock, _outputs(0))

    return _kept("speed", lambda: in_plain_thread(compare)) or ("" if len(patches) else _replaced(replace))


def of_launch_cache(install: Callable[[Patches, dict[Any, Any]], None]) -> str:
    """Likewise of launches that are kept: recorded, replayed for other numbers, and taken from the cache."""

    def compare() -> str:
        stock = _outputs(0), _outputs(1)
        patches, store = Patches(), dict[Any, Any]()
        try:
            install(patches, store)
            return next((d for seed in (0, 1, 1, 0) if (d := _difference(stock[seed], _outputs(seed)))), "")
        finally:
            patches.undo()

    patches = Patches()
    try:
        install(patches, {})
        unknown = _unknown(patches)
    finally:
        patches.undo()
    if not unknown:
        return ""
    return _untested(unknown) or _kept("launch cache", lambda: in_plain_thread(compare))


def _replaced(replace: Callable[[], None]) -> str:
    replace()
    return ""


def _unknown(patches: Patches) -> list[str]:
    """Replaced functions of another source than any that the comparison ran with; all on another NumPy."""
    functions = patches.functions()
    if versions.is_newer("numpy"):
        return list(functions)
    files = known_files()
    return [
        name
        for name, function in functions.items()
        if function.__code__.co_filename not in files and fingerprint(function) not in KNOWN.get(name, "")
    ]


@cache
def known_files() -> tuple[str, ...]:
    """The files of the interpreter, if they are as one tested version has them: reading a function takes 1 ms."""
    import triton

    files = [Path(triton.__file__).parent / name for name in FILES]
    return (
        tuple(map(str, files))
        if hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:16] in KNOWN_FILES
        else ()
    )


def _untested(unknown: list[str]) -> str:
    return f"{', '.join(unknown)} {'is' if len(unknown) == 1 else 'are'} new" if versions.is_newer("triton") else ""


def _kept(name: str, compare: Callable[[], str]) -> str:
    """What a comparison said on this machine with these versions; it is made where it has not been."""
    package = Path(__file__).parent
    sources = b"".join(path.read_bytes() for path in sorted(package.glob("*.py")))
    numbers = [versions.installed(each) for each in ("triton", "numpy", "torch")] + [platform.python_version()]
    key = hashlib.sha256(" ".join(numbers).encode() + sources).hexdigest()[:16]
    path = config.cache_home() / "retrograd" / "triton-interpreter" / f"{name.replace(' ', '-')}-{key}.json"
    with suppress(OSError, ValueError):
        return str(json.loads(path.read_text())["difference"])
    difference = compare()
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(json.dumps({"difference": difference, "versions": numbers}))
    return difference


def in_plain_thread(compare: Callable[[], str]) -> str:
    """Run in a thread of its own, where no mode of torch's and no listener sees the probes."""
    results: list[Any] = []

    def run() -> None:
        try:
            with unheard():
                results.append(compare())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


def _launch(kernel: Any, dtype: str, seed: int) -> Any:
    """The outputs' bytes, or the name of what was raised."""
    import torch

    kind = getattr(torch, dtype)
    numbers = [[2, 0, -3, 7, 1, 5, -1, 4], [1, 6, -2, 3, 0, -5, 8, 2]]
    low = 0 if dtype == "uint8" else -(10**9)
    x, y = (
        torch.tensor([max(v + seed, low) * (1 if "int" in dtype else 0.7) for v in row], dtype=kind, device="cpu")
        for row in numbers
    )
    out = torch.full((2 * _N,), 9.0, dtype=torch.float32, device="cpu")
    try:
        kernel[(3,)](x, y, out, _n + seed, N=_N)
    except Exception as error:
        cause = error.__cause__ or error
        return f"{type(cause).__name__}: {cause}"
    return out.numpy().tobytes()


def _outputs(seed: int) -> Outputs:
    """Probe -> its outputs."""
    import numpy as np
    from triton.runtime.interpreter import InterpretedFunction

    from retrograd.compat.triton_interpreter.probe_kernels import PROBES

    InterpretedFunction.rewritten_fn.clear()
    with np.errstate(all="ignore"):
        return {
            f"{kernel.fn.__name__} of {dtype}": [_launch(kernel, dtype, seed)]
            for dtype, kernels in PROBES.items()
            for kernel in kernels
        }


def _difference(stock: Outputs, outputs: Outputs) -> str:
    names = [name for name, values in stock.items() if outputs[name] != values]
    more = f" and {len(names) - 3} more" if names[3:] else ""
    return f"other results of {', '.join(names[:3])}{more}" if names else ""


def _differs_from_gpu() -> str:
    """What repaired kernels do not have in common with a GPU."""
    import numpy as np

    from retrograd.compat.triton_interpreter import probe_kernels as probes

    def floats(kernel: Any, dtype: str = "float32") -> Any:
        outputs = _launch(kernel, dtype, 0)
        return outputs if isinstance(outputs, str) else np.frombuffer(outputs, np.float32)

    if "bfloat16 operand" not in str(floats(probes.bfloat16_kernel)):
        return "bfloat16 numbers are added"
    casts, extremes = floats(probes.casts_kernel), floats(probes.nan_kernel)
    if isinstance(casts, str) or casts[3] != np.float32(4.90625) + np.float32(np.float16(4.9)):
        return "float32 is not rounded to the nearest bfloat16"
    # 4.9 is between the bfloat16 numbers 4.875 and 4.90625, nearer to the latter; truncation gives 4.875.
    if isinstance(extremes, str) or extremes[1] != 0 or not np.isnan(extremes[9]):
        return "NaN wins over a number, or does not where it is asked for"
    return ""
