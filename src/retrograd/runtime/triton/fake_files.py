"""Files of tensors that are read where a GPU is pretended: to it, and to where they were."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from retrograd.runtime.triton.fake_places import is_cuda


def file_answers(
    placed: Callable[[Any], Any], reading: Callable[[], AbstractContextManager[None]]
) -> list[tuple[Any, dict[str, Any]]]:
    """Names of torch by their owners.

    Args:
        placed: takes a storage for one on the GPU.
        reading: makes a context in which the CPU is a place that nobody has asked for.
    """
    stock_restored, stock_load = torch.serialization.default_restore_location, torch.load

    def restored(storage: Any, location: Any) -> Any:
        """A storage of a file; where there is no GPU, torch has none for a place on one."""
        return placed(storage) if is_cuda(location) else stock_restored(storage, location)

    @functools.wraps(stock_load)
    def load(*args: Any, **kwargs: Any) -> Any:
        """Tensors of a file that was written here say the CPU; who asks for no place wants them where they were."""
        asked = args[1] if len(args) > 1 else kwargs.get("map_location")
        with reading() if asked is None or is_cuda(asked) else nullcontext():
            return stock_load(*args, **kwargs)

    return [(torch.serialization, dict(default_restore_location=restored, load=load)), (torch, dict(load=load))]
