"""Models of transformers with random weights: losses and gradients as before, undone, saved, loaded, compiled."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from torch.testing import assert_close

from retrograd import patch

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install transformers")

_TEXT = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0,
)  # fmt: skip
_MODELS = {
    "Llama": _TEXT, "Mistral": _TEXT, "Qwen2": _TEXT, "Qwen3": _TEXT, "Gemma": _TEXT, "Gemma2": _TEXT,
    "Gemma3Text": _TEXT, "Phi": _TEXT, "Phi3": _TEXT,  "Olmo2": _TEXT, "Cohere": _TEXT, "GPTNeoX": _TEXT,
    "StableLm": _TEXT, "Starcoder2": _TEXT,  "Glm4": _TEXT, "Helium": _TEXT,
    "T5": dict(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4),
    "Bert": _TEXT,
    "ViT": dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=8),
}  # fmt: skip


def _model(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name.removesuffix('Text')}{'TextConfig' if name.endswith('Text') else 'Config'}")
    kind = "T5EncoderModel" if name == "T5" else f"{name}Model"
    model = getattr(transformers, kind)(config(**_MODELS[name])).eval()
    with torch.no_grad():  # norms begin as ones and zeros, which hide an offset or a missing product
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def _results(model: torch.nn.Module, name: str) -> list[torch.Tensor]:
    """The loss and its gradients of all parameters that it has any of."""
    generator = torch.Generator().manual_seed(1)
    if name == "ViT":
        given = dict(pixel_values=torch.randn(2, 3, 16, 16, generator=generator, dtype=model.dtype))
    else:
        given = dict(input_ids=torch.randint(1, 64, (2, 9), generator=generator))
    out = model(**given).last_hidden_state
    loss = (out * torch.randn(out.shape, generator=generator, dtype=out.dtype)).sum()
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [out.detach(), *(g for g in gradients if g is not None)]


def _assert_as_exact(after: list[torch.Tensor], before: list[torch.Tensor], truth: list[torch.Tensor]) -> None:
    for got, stock, want in zip(after, before, truth, strict=True):
        # Neither is exact: ours may be as far from float64 as theirs in another order of sums, or as rounding the
        # largest element. Another eps or offset is 1000 times that.
        error = (got - want).abs().max()
        assert error <= 4 * (stock - want).abs().max() + 4 * torch.finfo(torch.float32).eps * want.abs().max()


@pytest.mark.parametrize("name", _MODELS)
def test_loss_and_gradients_stay(name: str) -> None:
    model = _model(name)
    truth = _results(copy.deepcopy(model).double(), name)
    before = _results(model, name)
    handle = patch.norms(model)
    norms = {n for n, m in model.named_modules() if "Norm" in type(m).__name__ and not list(m.children())}
    assert set(handle.names) == norms  # nothing of these models is left
    assert handle.names
    after = _results(model, name)
    _assert_as_exact(after, before, truth)
    handle.undo()
    for got, want in zip(_results(model, name), before, strict=True):
        assert torch.equal(got, want)


def test_saved_loaded_compiled_and_copied(tmp_path) -> None:
    model = _model("Llama")
    before = _results(model, "Llama")
    with patch.norms(model):
        after = _results(model, "Llama")
        model.save_pretrained(tmp_path)
        loaded = transformers.LlamaModel.from_pretrained(tmp_path)
        twin = copy.deepcopy(model)
        compiled = torch.compile(model, backend="aot_eager")
        assert_close(_results(compiled, "Llama"), after)
    assert all(torch.equal(a, b) for a, b in zip(_results(loaded, "Llama"), before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(_results(twin, "Llama"), after, strict=True))


def test_gated_norms_are_left_and_told() -> None:
    """N1 of all silent wrong results: a gate that a change of class would have dropped."""
    theirs = importlib.import_module("transformers.models.mamba2.modeling_mamba2")
    model = torch.nn.Sequential(theirs.MambaRMSNormGated(16, 16))
    handle = patch.norms(model)
    assert (handle.names, dict(handle.left)) == ((), {"0": "its forward takes more than x: gate"})
    with pytest.raises(ValueError, match="takes more than x: gate"):
        patch.norms(model, {"MambaRMSNormGated": patch.RmsLike()})


@pytest.mark.parametrize("first", ["patch", "adapters"])
def test_adapters_of_low_rank(first: str) -> None:
    """LoRA put over patched norms, and norms patched below LoRA, one of them trained beside its adapters."""
    peft = pytest.importorskip("peft", reason="needs peft: pip install peft")

    def adapted(dtype: torch.dtype, patched: bool) -> list[torch.Tensor]:
        model = _model("Llama")
        if patched and first == "patch":
            assert len(patch.norms(model).names) == 5
        torch.manual_seed(2)
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"], init_lora_weights=False)
        model = peft.get_peft_model(model, config).to(dtype)
        if patched and first == "adapters":
            assert len(patch.norms(model).names) == 10  # norms that are trained are there twice
        results = _results(model, "Llama")
        assert len(results) == 1 + 2 * 2 + 5  # two matrices of two layers, five norms whose names end so
        return [*results, _results(model.merge_and_unload(), "Llama")[0]]

    truth = adapted(torch.float64, patched=False)
    _assert_as_exact(adapted(torch.float32, patched=True), adapted(torch.float32, patched=False), truth)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "convnext_atto", "swin_tiny_patch4_window7_224"])
def test_norms_of_timm(name: str) -> None:
    timm = pytest.importorskip("timm", reason="needs timm: pip install timm")
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3).eval()
    x = torch.randn(1, 3, 224, 224)

    def results(of: torch.nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
        y = of(x.to(dtype))
        return [y.detach(), *torch.autograd.grad(y.square().sum(), list(of.parameters()))]

    truth = results(copy.deepcopy(model).double(), torch.float64)
    before = results(model, torch.float32)
    with patch.norms(model) as handle:
        norms = {n for n, m in model.named_modules() if "norm" in type(m).__name__.lower() and not list(m.children())}
        assert set(handle.names) | set(handle.left) == norms
        assert bool(handle.names) == ("convnext" not in name)  # whose LayerNorm2d has channels first
        _assert_as_exact(results(model, torch.float32), before, truth)
    assert all(torch.equal(got, want) for got, want in zip(results(model, torch.float32), before, strict=True))
