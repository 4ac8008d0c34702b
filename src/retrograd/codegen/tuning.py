"""`@triton.autotune` while launches are recorded: every configuration instead of the fastest, which nobody can time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from retrograd.codegen.schema import Tuning

_USUAL = (("num_ctas", 1), ("maxnreg", None), ("ir_override", None))
# The innermost autotuned launch last; None for one of the runs that are compared.
_NOW: list[Tuning | None] = []


def current() -> Tuning | None:
    """The configuration that is launched at this moment; None outside of an autotuned kernel."""
    return _NOW[-1] if _NOW else None


def under_way() -> bool:
    """Whether the launch at this moment is one of those that are compared."""
    return bool(_NOW) and _NOW[-1] is None


def described(tuner: Any, config: Any, configs: int) -> Tuning:
    """What a record keeps of an Autotuner of Triton's and of one of its configurations."""
    hooks = bool(getattr(tuner, "user_defined_pre_hook", False) or getattr(tuner, "user_defined_post_hook", False))
    return Tuning(
        configs,
        {name: value for name, value in config.all_kwargs().items() if (name, value) not in _USUAL},
        tuple(tuner.reset_to_zero),
        tuple(tuner.restore_value),
        hooks or config.pre_hook is not None,
    )


@contextmanager
def every_configuration() -> Iterator[None]:
    """Launch an autotuned kernel once with each configuration that its own pruning leaves."""
    from triton.runtime.autotuner import Autotuner

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        configs = list(self.prune_configs(kwargs))
        for config in configs:
            if config.pre_hook is not None:  # sets the block shapes of descriptors
                config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
            _NOW.append(described(self, config, len(configs)))
            try:
                self.fn.run(*args, **kwargs, **config.all_kwargs())
            finally:
                _NOW.pop()
        self.nargs = None

    stock = Autotuner.run
    Autotuner.run = run
    try:
        yield
    finally:
        Autotuner.run = stock


@contextmanager
def chosen_configuration() -> Iterator[None]:
    """Around launches on a GPU: while a kernel is tuned `under_way` is true; then `current` is what was chosen."""
    from triton.runtime.autotuner import Autotuner

    stock = Autotuner.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        inner = self.fn.run

        def launch(*args: Any, **kwargs: Any) -> Any:
            # Until it has been tuned there is no best configuration of this call.
            config = self.best_config
            _NOW.append(None if config is None else described(self, config, len(self.configs)))
            try:
                return inner(*args, **kwargs)
            finally:
                _NOW.pop()

        self.best_config = None
        self.fn.run = launch
        try:
            return stock(self, *args, **kwargs)
        finally:
            del self.fn.run

    Autotuner.run = run
    try:
        yield
    finally:
        Autotuner.run = stock
