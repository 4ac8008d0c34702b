"""Arguments that implementations share are never put together by position alone, and keys of launches say all."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from retrograd.ops.norm import arguments, launch_cache
from retrograd.ops.norm.arguments import BackwardTensors, NormGrads, NormResults, NormTensors, WantedGrads, WantedOutput
from retrograd.ops.norm.host import recipes
from retrograd.ops.norm.launch_cache import BackwardKey, ForwardKey
from retrograd.ops.norm.spec import NormSpec

PACKAGE = Path(arguments.__file__).parent
FIELDS = {
    cls.__name__: cls._fields
    for cls in (
        arguments.NormArguments,
        NormTensors,
        WantedOutput,
        NormResults,
        arguments.Float8Results,
        BackwardTensors,
        WantedGrads,
        NormGrads,
    )
}
CODES = {torch.float32: 6, torch.float16: 5, torch.bfloat16: 15}
F32, F16, BF16 = CODES


def by_position(source: str) -> list[str]:
    """Calls that pass by position what is not a variable of the field's name."""
    found = []
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or ast.unparse(call.func).rpartition(".")[2] not in FIELDS:
            continue
        fields = FIELDS[ast.unparse(call.func).rpartition(".")[2]]
        for field, argument in zip(fields, call.args, strict=False):
            if isinstance(argument, ast.Starred):
                break
            if ast.unparse(argument) != field:
                found.append(ast.unparse(call))
                break
    return found


def test_nothing_is_passed_by_position_under_another_name() -> None:
    assert {path.name: bad for path in PACKAGE.rglob("*.py") if (bad := by_position(path.read_text()))} == {}


@pytest.mark.parametrize(
    ("source", "refused"),
    [
        ("NormArguments(False, eps=1e-6)", True),
        ("BackwardTensors(s, grad_out, weight, mean, rstd)", True),
        ("NormTensors(x, weight, bias, residual)", False),
        ("NormTensors(*map(finished, tensors))", False),
        ("WantedGrads(x=dtype)", False),
    ],
)
def test_what_counts_as_passed_by_position(source: str, refused: bool) -> None:
    assert bool(by_position(source)) == refused


def _forward_key() -> ForwardKey:
    x, residual = torch.empty(6, 32, dtype=F16), torch.empty(6, 64)[:, :32]
    tensors = NormTensors(x=x, weight=torch.empty(32), bias=torch.empty(32, dtype=BF16), residual=residual)
    outs = NormResults(y=x, s=residual, mean=None, rstd=None)
    return ForwardKey(
        *launch_cache.forward_key(tensors, outs, NormSpec(False, 0.5, 1.0), WantedOutput(out_dtype=BF16, s_dtype=F32))
    )


def _backward_key() -> BackwardKey:
    grad_out, s, grad_s = torch.empty(6, 32, dtype=F16), torch.empty(6, 32), torch.empty(6, 40, dtype=BF16)[:, :32]
    tensors = BackwardTensors(
        grad_out=grad_out, s=s, weight=torch.empty(32, dtype=BF16), mean=None, rstd=torch.empty(6), grad_s=grad_s
    )
    wanted = WantedGrads(x=F16, weight=BF16, bias=F32, residual=None, heads=2, into_bias=torch.empty(32))
    return BackwardKey(*launch_cache.backward_key(tensors, wanted, NormSpec(True, 0.5)))


def test_fields_of_keys_are_what_their_names_say() -> None:
    key = _forward_key()
    assert key.x == (F16, (6, 32), (32, 1))
    assert key.residual == (F32, (6, 32), (64, 1))
    assert (key.weight[0], key.bias[0], key.out_dtype, key.s_dtype) == (F32, BF16, BF16, F32)
    assert (key.device, key.own_s, key.store_stats, key.spec) == (None, True, False, NormSpec(False, 0.5, 1.0))
    key = _backward_key()
    assert (key.s[0], key.grad_out[0], key.weight[0], key.grad_s) == (F32, F16, BF16, (BF16, (6, 32), (40, 1)))
    assert (key.x_dtype, key.residual_dtype, key.weight_dtype, key.bias_dtype) == (F16, None, BF16, F32)
    assert (key.device, key.heads, key.into_weight, key.into_bias) == (None, 2, None, (F32, (32,), (1,)))
    assert key.spec == NormSpec(True, 0.5)


def test_numbers_of_keys_are_in_the_order_that_the_extension_writes() -> None:
    """The order of host.cpp, word by word; `test_host` sees launches of such keys found by the extension."""
    half, one = 0x3FE0000000000000, 0x3FF0000000000000
    assert recipes.key_numbers(_forward_key(), CODES) == (
        -1,
        *(6 << 8 | 2, 6, 32, 32, 1),  # x
        *(7 << 8 | 2, 6, 32, 64, 1),  # residual
        *(7 << 8 | 1, 32, 1),  # weight
        *(16 << 8 | 1, 32, 1),  # bias
        *(15, 6, 1, 0),  # out_dtype, s_dtype, own_s, store_stats
        *(0, half, one, -1),  # spec
    )
    assert recipes.key_numbers(_backward_key(), CODES) == (
        -1,
        *(7 << 8 | 2, 6, 32, 32, 1),  # s
        *(6 << 8 | 2, 6, 32, 32, 1),  # grad_out
        *(16 << 8 | 1, 32, 1),  # weight
        *(16 << 8 | 2, 6, 32, 40, 1),  # grad_s
        *(5, -1, 15, 6, 2),  # dtypes of the gradients of x, residual, weight, bias; heads
        *(1, half, 0, -1),  # spec
    )


@pytest.mark.parametrize("key", [_forward_key(), _backward_key()], ids=lambda key: type(key).__name__)
def test_every_field_of_a_key_changes_its_numbers(key: ForwardKey | BackwardKey) -> None:
    others = {"spec": NormSpec(True, 0.25), "device": 3, "own_s": False, "store_stats": True, "heads": 5}
    for name, value in key._asdict().items():
        if name in ("into_weight", "into_bias"):
            continue  # the extension does not know such calls
        is_layout = name in ("x", "residual", "weight", "bias", "s", "grad_out", "grad_s")
        other = (F32, (6, 31), (99, 1)) if is_layout else others.get(name, F32 if value is not F32 else F16)
        assert recipes.key_numbers(key._replace(**{name: other}), CODES) != recipes.key_numbers(key, CODES), name
