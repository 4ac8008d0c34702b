"""One seed for every global source of random numbers that a test may draw from."""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
from collections.abc import Iterator


def seed_all(seed: int) -> None:
    """Seed Python's `random`, and NumPy's and PyTorch's global generators (every device) if they are imported.

    Generators that a test makes itself are its own: `numpy.random.default_rng()` without a seed stays uncontrolled.
    """
    random.seed(seed)
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    if torch is not None:
        torch.manual_seed(seed)


def seed_imports() -> None:
    """Before tests are imported: what their modules draw on import is then the same in every process."""
    with contextlib.suppress(ImportError):
        importlib.import_module("numpy")
    seed_all(0)


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Leave the global generators as they were."""
    saved = random.getstate()
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    arrays = numpy.random.get_state() if numpy else None
    with torch.random.fork_rng() if torch else contextlib.nullcontext():
        try:
            yield
        finally:
            random.setstate(saved)
            if numpy:
                numpy.random.set_state(arrays)
