"""Classes of norms of transformers and diffusers, each beside itself: replaced and the same, or left with a reason."""

from __future__ import annotations

import copy
import importlib
import inspect

import pytest
import torch

from retrograd import patch

_TRANSFORMERS = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "olmo", "olmo2", "t5", "cohere", "gpt_neox",
    "glm4", "helium", "mamba2", "nemotron", "granite", "deepseek_v3", "convnext", "zamba2", "persimmon", "moshi", "vit", "mt5",
)  # fmt: skip
_DIFFUSERS = ("diffusers.models.normalization", "diffusers.models.transformers.transformer_flux")
_SIZE = 16


def _norms(module_name: str) -> list[type]:
    """Classes of a module that say "norm" and are made by a length alone."""
    module = importlib.import_module(module_name)
    classes = [
        value for value in vars(module).values() if inspect.isclass(value) and issubclass(value, torch.nn.Module)
    ]
    return [kind for kind in classes if "norm" in kind.__name__.lower() and kind.__module__ == module_name]


def _made(kind: type) -> torch.nn.Module | None:
    for arguments in ((_SIZE,), (_SIZE, 1e-5)):  # eps is asked for by some
        try:
            return kind(*arguments)
        except Exception:  # it takes a config, or several sizes
            continue
    return None


def _agree(kind: type, before: torch.nn.Module, after: torch.nn.Module) -> None:
    """On rows that recognition has not seen: uniform, off zero, one of them constant."""
    generator = torch.Generator().manual_seed(11)
    x = torch.rand(3, 7, _SIZE, generator=generator) * 3 - 1
    x[0, 0] = 0.5
    grad = torch.rand(x.shape, generator=generator)
    results = []
    for module, dtype in (
        (before, torch.float32),
        (after, torch.float32),
        (copy.deepcopy(before).double(), torch.float64),
    ):
        inputs = x.to(dtype).requires_grad_()
        y = module(inputs)
        leaves = [inputs, *module.parameters()]
        results.append([y.detach(), *torch.autograd.grad(y, leaves, grad.to(y.dtype))])
    for stock, got, want in zip(*results, strict=True):
        # As in test_patch_transformers.py: as near to float64 as theirs, or as rounding the largest element.
        error = (got - want).abs().max()
        assert error <= 4 * (stock - want).abs().max() + 8 * torch.finfo(torch.float32).eps * want.abs().max(), kind


def _compared(names: list[str]) -> tuple[set[type], set[type]]:
    replaced, left = set(), set()
    for kind in dict.fromkeys(kind for name in names for kind in _norms(name)):
        module = _made(kind)
        if module is None or list(module.children()):
            continue
        with torch.no_grad():
            for number, parameter in enumerate(module.parameters()):
                parameter.copy_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(number)) + 0.3)
        model = torch.nn.Sequential(copy.deepcopy(module))
        handle = patch.norms(model)
        assert (handle.names == ("0",)) != ("0" in handle.left), kind  # never both, never silent
        if handle.names:
            _agree(kind, module, model[0])
            replaced.add(kind)
        else:
            assert type(model[0]) is kind
            left.add(kind)
    return replaced, left


def test_norms_of_transformers() -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    replaced, left = _compared([f"transformers.models.{name}.modeling_{name}" for name in _TRANSFORMERS])
    assert len(replaced) >= 20
    assert {"MambaRMSNormGated"} <= {kind.__name__ for kind in left}


def test_norms_of_diffusers() -> None:
    pytest.importorskip("diffusers", reason="needs diffusers: pip install diffusers")
    replaced, left = _compared(list(_DIFFUSERS))
    assert "RMSNorm" in {kind.__name__ for kind in replaced}
    assert "GlobalResponseNorm" in {kind.__name__ for kind in left}
