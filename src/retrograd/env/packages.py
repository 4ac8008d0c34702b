"""Versions of what is installed, read without importing any of it."""

from __future__ import annotations

from importlib import metadata

# By the question they answer: what computes, what is compared with, what tests and shows.
_NAMES = (
    *("retrograd", "torch", "triton", "numpy", "scipy", "jax", "jaxlib", "torch_xla"),
    *("quack-kernels", "liger-kernel", "msda-triton", "mmcv"),
    *("pytest", "pytest-xdist", "hypothesis", "tensorboard", "vl-convert-python", "click", "rich", "jinja2"),
)


def packages() -> dict[str, str | None]:
    """Versions by name; None: not installed."""
    return {name: _version(name) for name in _NAMES}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        # A checkout on PYTHONPATH has no metadata, yet is there.
        return "checkout" if name == "retrograd" else None
