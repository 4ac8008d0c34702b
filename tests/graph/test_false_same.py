"""Edits in places where few look that change what is computed or compiled: never "same"; beside them some that say nothing."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from retrograd import graph
from retrograd.graph.keys import compiled_key, strict_key
from retrograd.graph.schema import COMPILES_AGAIN

HLO = """HloModule m, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

goes {
  i.1 = (s32[], pred[]) parameter(0)
  ROOT p.1 = pred[] get-tuple-element(i.1), index=1
}

steps {
  i.2 = (s32[], pred[]) parameter(0)
  ROOT t.2 = (s32[], pred[]) copy(i.2)
}

first {
  a.3 = f32[] parameter(0)
  b.3 = f32[] parameter(1)
  ROOT c.3 = pred[] compare(a.3, b.3), direction=GE
}

plus {
  a.4 = f32[] parameter(0)
  b.4 = f32[] parameter(1)
  ROOT c.4 = f32[] add(a.4, b.4)
}

ENTRY main {
  x = f32[8]{0} parameter(0)
  zero = f32[] constant(-0)
  part = f32[8]{0} custom-call(x), custom_call_target="SPMDFullToShardShape", sharding={manual}
  picked = f32[8]{0} select-and-scatter(part, part, zero), window={size=1}, select=first, scatter=plus
  held = f32[8]{0} opt-barrier(picked)
  kept = f32[8]{0} copy(held), metadata={op_name="copy" preserve_layout=true}
  begun = (f32[8]{0}, f32[8]{0}, u32[]) copy-start(kept), cross_program_prefetch_index=0
  done = f32[8]{0} copy-done(begun)
  k = s32[] constant(0)
  p = pred[] constant(true)
  w = (s32[], pred[]) tuple(k, p)
  loop = (s32[], pred[]) while(w), condition=goes, body=steps
  n = s32[] get-tuple-element(loop), index=0
  ROOT out = f32[8]{0} custom-call(done, held, n), custom_call_target="f", metadata={op_name="sum"}
}
"""
STABLEHLO = """module @m {
  sdy.mesh @mesh = <["data"=2, "model"=2]>
  func.func public @main(%arg0: tensor<8xf32>) -> tensor<8xf32> {
    %t = stablehlo.constant dense_resource<blob> : tensor<8xf32>
    %0 = stablehlo.add %arg0, %t : tensor<8xf32>
    %1 = stablehlo.custom_call @SPMDFullToShardShape(%0) {mhlo.sharding = "{manual}"} : (tensor<8xf32>) -> tensor<8xf32>
    %2 = "stablehlo.all_reduce"(%1) <{channel_handle = #stablehlo.channel_handle<handle = 3, type = 1>,
        replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>}> ({
    ^bb0(%x: tensor<f32>, %y: tensor<f32>):
      %z = stablehlo.add %x, %y : tensor<f32>
      stablehlo.return %z : tensor<f32>
    }) : (tensor<8xf32>) -> tensor<8xf32>
    return %2 : tensor<8xf32>
  }
}
{-#
  dialect_resources: {
    builtin: {
      blob: "0x0400000000000000000000000000000000000000000000000000000000000000000000FF"
    }
  }
#-}
"""
FX = """class GraphModule(torch.nn.Module):
    def forward(self, x: "f32[4]"):
        held: "f32[4]" = self.NAME
        mul: "f32[4]" = torch.mul(x, held)
        return (mul,)
"""


def verdict(a: str, b: str) -> str:
    return graph.diff(graph.parse(a, "A")[0], graph.parse(b, "B")[0]).verdict


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("select=first, scatter=plus", "scatter=first, select=plus"),
        ("condition=goes, body=steps", "body=goes, condition=steps"),
        ("{manual}", "{replicated}"),
        ("constant(-0)", "constant(0)"),
        (" preserve_layout=true", ""),
        ("prefetch_index=0", "prefetch_index=1"),
        ("custom-call(done, held, n)", "custom-call(done, picked, n)"),
    ],
)
def test_an_edit_of_hlo_is_no_same(old: str, new: str) -> None:
    assert old in HLO
    assert verdict(HLO, HLO.replace(old, new)) == "different"


def test_another_name_of_an_operation_is_the_same() -> None:
    assert verdict(HLO, HLO.replace('op_name="sum"', 'op_name="total"')) == "same"


def test_a_comment_in_the_layout_of_the_entry_is_none_of_the_program() -> None:
    texts = [HLO.replace("{(f32[8]{0})", f"{{({comment}f32[8]{{0}})") for comment in ("", "/*index=5*/")]
    assert len({compiled_key(graph.parse(text)[0]) for text in texts}) == 1


def test_a_sharding_that_says_which_part_a_device_takes_is_computed() -> None:
    texts = HLO, HLO.replace("{manual}", "{replicated}")
    assert len({strict_key(graph.parse(text)[0]) for text in texts}) == 2


@pytest.mark.skipif(find_spec("jaxlib") is None, reason="StableHLO is read by jaxlib")
@pytest.mark.parametrize(
    ("old", "new"), [("00FF", "01FF"), ("{manual}", "{replicated}"), ("handle = 3", "handle = 0"), ("=2, ", "=4, ")]
)
def test_an_edit_of_stablehlo_is_no_same(old: str, new: str) -> None:
    assert old in STABLEHLO
    assert verdict(STABLEHLO, STABLEHLO.replace(old, new)) == "different"


@pytest.mark.skipif(find_spec("jaxlib") is None, reason="StableHLO is read by jaxlib")
def test_the_number_of_a_channel_says_nothing() -> None:
    assert verdict(STABLEHLO, STABLEHLO.replace("handle = 3", "handle = 7")) == "same"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("_frozen_param0", "cannot tell"), ("_tensor_constant0", "cannot tell"), ("layer_weight", "same")],
)
def test_a_tensor_whose_name_is_a_number_cannot_be_told(name: str, expected: str) -> None:
    text = FX.replace("NAME", name)
    assert verdict(text, text + "\n") == expected


def test_an_operation_that_a_checkpoint_computes_again_compiles_again() -> None:
    """A joint graph has the policy in a comment; the partitioner saves another tensor by it."""
    line = '        mul: "f32[4]"'
    where = "File: t.py:3 in f, code: x * w"
    plain, tagged = (
        FX.replace("NAME", "w").replace(line, f"        # {tag}{where}\n{line}")
        for tag in ("", "ac_graph_id: 2 - MUST_SAVE ")
    )
    diff = graph.diff(graph.parse(plain, "A")[0], graph.parse(tagged, "B")[0])
    assert "recompute=MUST_SAVE" in diff.causes[0].what
    assert diff.computes_the_same
    assert verdict(tagged, tagged.replace("id: 2", "id: 5")) == "same"


CAPTURED = """class GraphModule(torch.nn.Module):
    def forward(self, L_x_: "f32[4]"):
        l_x_ = L_x_
        _tensor_constant0: "f32[4]" = self._tensor_constant0
        add: "f32[4]" = l_x_ + _tensor_constant0
        _tensor_constant1: "f32[4]" = self._tensor_constant1
        mul: "f32[4]" = add * _tensor_constant1
        return (mul,)
"""


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ("self._tensor_constant", "self._tensor_constant1", "cannot tell"),  # other numbers, as another trace gives
        ("self._tensor_constant1", "self._tensor_constant0", "different"),  # one tensor is read twice
        ("self._tensor_constant1", "self.scale", "different"),
    ],
)
def test_tensors_that_a_function_closes_over(old: str, new: str, verdict: str) -> None:
    a, b = (graph.parse(text)[0] for text in (CAPTURED, CAPTURED.replace(old, new)))
    assert graph.diff(a, b).verdict == verdict
    assert graph.diff(a, a).verdict in ("same", "cannot tell")


EXPORTED = """ExportedProgram:
    class GraphModule(torch.nn.Module):
        def forward(self, p_w: "f32[4]", b_count: "f32[4]", x: "f32[4]"):
            mul: "f32[4]" = torch.ops.aten.mul.Tensor(x, p_w);  x = p_w = None
            add: "f32[4]" = torch.ops.aten.add.Tensor(b_count, 1);  b_count = None
            return (add, mul)

Graph signature:
    # inputs
    p_w: PARAMETER target='w'
    b_count: BUFFER target='count' persistent=True
    x: USER_INPUT

    # outputs
    add: BUFFER_MUTATION target='count'
    mul: USER_OUTPUT

Range constraints: {}
"""


@pytest.mark.parametrize(
    ("old", "new", "computes"),
    [
        ("BUFFER_MUTATION target='count'", "USER_OUTPUT", True),
        ("BUFFER_MUTATION target='count'", "BUFFER_MUTATION target='sum'", True),
        ("mul: USER_OUTPUT", "mul: LOSS_OUTPUT", True),
        ("PARAMETER target='w'", "PARAMETER target='v'", False),
        ("persistent=True", "persistent=False", False),
        ("{}", "{s0: VR[2, 9]}", False),
        ("    # inputs\n", "    (in another form)\n", False),
    ],
)
def test_signature_of_an_exported_program_counts(old, new, computes):
    edited = EXPORTED.replace(old, new)
    diff = graph.diff(*(graph.parse(text)[0] for text in (EXPORTED, edited)))
    assert edited != EXPORTED
    assert diff.verdict == "different"
    assert any(c.kind in COMPILES_AGAIN for c in diff.causes) != computes


def test_names_in_the_signature_of_an_exported_program_say_nothing():
    renamed = EXPORTED.replace("mul:", "product:").replace("p_w", "p_v").replace(" mul)", " product)")
    assert graph.diff(*(graph.parse(text)[0] for text in (EXPORTED, renamed))).verdict == "same"
