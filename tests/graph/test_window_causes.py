"""Windows that changed, and what follows from them: rows of a dense layer, moments, sums of gradients, what a loop reads."""

from __future__ import annotations

import pytest

from retrograd import graph


def told(a: str, b: str) -> list[str]:
    return [cause.what for cause in graph.diff(graph.parse(a, "A")[0], graph.parse(b, "B")[0]).causes]


ADD = "sum {\n  l = f32[] parameter(0)\n  r = f32[] parameter(1)\n  ROOT s = f32[] add(l, r)\n}\n"


def pooled(step: int = 2, wide: int = 3, image: int = 8) -> str:
    """A pool, flattened, a dense layer, its gradient and its momentum."""
    n = (image - 2) // step + 1
    flat, out = f"f32[2,{n * n}]", f"f32[2,{wide}]"
    matrix = f"f32[{n * n},{wide}]"
    return f"""HloModule m

{ADD}
ENTRY e {{
  x = f32[2,{image},{image}] parameter(0)
  w = {matrix} parameter(1)
  m = {matrix} parameter(2)
  z = f32[] constant(0)
  p = f32[2,{n},{n}] reduce-window(x, z), window={{size=1x2x2 stride=1x{step}x{step}}}, to_apply=sum
  h = {flat} reshape(p)
  y = {out} dot(h, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  t = {out} tanh(y)
  g = {matrix} dot(h, t), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}
  rate = f32[] constant(0.9)
  rates = {matrix} broadcast(rate), dimensions={{}}
  old = {matrix} multiply(m, rates)
  new = {matrix} add(old, g)
  v = {matrix} subtract(w, new)
  ROOT r = ({matrix}, {matrix}) tuple(v, new)
}}
"""


STRIDE = "reduce-window f32[2,4,4] window={size=1x2x2 stride=1x2x2} -> window={size=1x2x2 stride=1x1x1}"


def test_what_a_window_leaves_explains_the_layer_that_reads_it_and_its_momentum() -> None:
    assert told(pooled(), pooled(step=1)) == [STRIDE]


def test_a_window_that_nobody_reads_explains_nothing() -> None:
    both = [
        pooled(wide=wide).replace(
            "  h = ",
            f"  d = f32[2,{n},{n}] reduce-window(x, z), window={{size=1x2x2 stride=1x{s}x{s}}}, to_apply=sum\n  h = ",
        )
        for wide, s, n in ((3, 2, 4), (5, 1, 7))
    ]
    assert told(*both) == ["parameters 1 w f32[16,3] -> f32[16,5]; 2 m f32[16,3] -> f32[16,5]"]


def test_a_layer_of_another_width_is_told_and_so_is_another_image() -> None:
    assert told(pooled(), pooled(wide=5)) == ["parameters 1 w f32[16,3] -> f32[16,5]; 2 m f32[16,3] -> f32[16,5]"]
    assert told(pooled(), pooled(image=10))[0].startswith("parameters 0 x f32[2,8,8] -> f32[2,10,10]")


def test_a_width_that_no_window_explains_is_told_beside_it() -> None:
    both = told(pooled(), pooled(step=1, wide=5))
    assert both == ["parameters 1 w f32[16,3] -> f32[49,5]; 2 m f32[16,3] -> f32[49,5]", STRIDE]


def looped(step: int = 2, wide: int = 3) -> str:
    """The same in a loop, which reads the layer's parameter; its momentum is added behind the loop."""
    n = 6 // step + 1
    matrix = f"f32[{n * n},{wide}]"
    state = f"(s32[], f32[2,8,8], {matrix}, f32[2,{wide}])"
    return f"""HloModule m

{ADD}
body {{
  t = {state} parameter(0)
  i = s32[] get-tuple-element(t), index=0
  x = f32[2,8,8] get-tuple-element(t), index=1
  w = {matrix} get-tuple-element(t), index=2
  c = f32[2,{wide}] get-tuple-element(t), index=3
  z = f32[] constant(0)
  p = f32[2,{n},{n}] reduce-window(x, z), window={{size=1x2x2 stride=1x{step}x{step}}}, to_apply=sum
  h = f32[2,{n * n}] reshape(p)
  y = f32[2,{wide}] dot(h, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  s = f32[2,{wide}] add(c, y)
  one = s32[] constant(1)
  next = s32[] add(i, one)
  ROOT r = {state} tuple(next, x, w, s)
}}

condition {{
  t.1 = {state} parameter(0)
  i.1 = s32[] get-tuple-element(t.1), index=0
  last = s32[] constant(3)
  ROOT go = pred[] compare(i.1, last), direction=LT
}}

ENTRY e {{
  x.1 = f32[2,8,8] parameter(0)
  w.1 = {matrix} parameter(1)
  c.1 = f32[2,{wide}] parameter(2)
  m = {matrix} parameter(3)
  i.2 = s32[] constant(0)
  t.2 = {state} tuple(i.2, x.1, w.1, c.1)
  l = {state} while(t.2), condition=condition, body=body
  out = f32[2,{wide}] get-tuple-element(l), index=3
  new = {matrix} add(w.1, m)
  ROOT r.1 = (f32[2,{wide}], {matrix}) tuple(out, new)
}}
"""


def test_a_window_in_a_loop_explains_what_the_loop_is_given() -> None:
    assert told(looped(), looped(step=1)) == [f"in the body of while l: {STRIDE}"]
    assert told(looped(), looped(wide=5))[0].startswith("parameters 1 w f32[16,3] -> f32[16,5]")


def kernel(size: int, pad: int) -> str:
    """A convolution and the gradient of its kernel, which is a window of the same image."""
    own = f"f32[{size},{size},1,1]"
    return f"""HloModule m

ENTRY e {{
  x = f32[1,8,8,1] parameter(0)
  k = {own} parameter(1)
  y = f32[1,8,8,1] convolution(x, k), window={{size={size}x{size} pad={pad}_{pad}x{pad}_{pad}}}, dim_labels=b01f_01io->b01f
  t = f32[1,8,8,1] tanh(y)
  g = {own} convolution(x, t), window={{size=8x8 pad={pad}_{pad}x{pad}_{pad}}}, dim_labels=f01b_i01o->01bf
  ROOT v = {own} subtract(k, g)
}}
"""


def test_the_gradient_of_a_larger_kernel_explains_nothing() -> None:
    assert told(kernel(3, 1), kernel(5, 2))[0] == "parameter 1 k f32[3,3,1,1] -> f32[5,5,1,1]"


def cut(places: int) -> str:
    """Places of a longer table cut to the length of a sentence: the sentence says how many."""
    return f"""HloModule m

ENTRY e {{
  x = f32[{places},4] parameter(0)
  table = f32[9,4] parameter(1)
  own = f32[{places},4] slice(table), slice={{[0:{places}], [0:4]}}
  ROOT h = f32[{places},4] add(x, own)
}}
"""


def test_a_slice_explains_no_parameter() -> None:
    assert told(cut(6), cut(5)) == ["parameter 0 x f32[6,4] -> f32[5,4]"]


def padded(size: int, flat: bool = True, wide: int = 3) -> str:
    """A border around images that are flattened, or around rows: one factor of a layer's rows, or all of them."""
    rows = size * size if flat else size
    before, after = ("f32[2,4,4]", f"f32[2,{size},{size}]") if flat else ("f32[2,4]", f"f32[2,{size}]")
    edges = f"0_0x0_{size - 4}" + f"x0_{size - 4}" * flat
    return f"""HloModule m

ENTRY e {{
  x = {before} parameter(0)
  w = f32[{rows},{wide}] parameter(1)
  z = f32[] constant(0)
  p = {after} pad(x, z), padding={edges}
  h = f32[2,{rows}] reshape(p)
  y = f32[2,{wide}] dot(h, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  g = f32[{rows},{wide}] dot(h, y), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}
  ROOT v = f32[{rows},{wide}] subtract(w, g)
}}
"""


def test_a_border_explains_rows_of_which_it_is_a_factor_and_none_that_it_may_be_cut_to() -> None:
    assert told(padded(5), padded(6)) == ["pad f32[2,5,5] padding=0_0x0_1x0_1 -> padding=0_0x0_2x0_2"]
    assert told(padded(5, flat=False), padded(6, flat=False)) == ["parameter 1 w f32[5,3] -> f32[6,3]"]
    assert told(padded(5), padded(6, wide=4))[0] == "parameter 1 w f32[25,3] -> f32[36,4]"


def pooled_by_torch(step: int, wide: int = 3) -> str:
    """A pool of ATen with two results, of which FX prints no shape."""
    n = (8 - 2) // step + 1
    rows, image = n * n, f"f32[2, 1, {n}, {n}]"
    return f'''class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[2, 1, 8, 8]", primals_2: "f32[{wide}, {rows}]"):
        pool = torch.ops.aten.max_pool2d_with_indices.default(primals_1, [2, 2], [{step}, {step}])
        getitem: "{image}" = pool[0]
        view: "f32[2, {rows}]" = torch.ops.aten.view.default(getitem, [2, {rows}])
        t: "f32[{rows}, {wide}]" = torch.ops.aten.t.default(primals_2)
        mm: "f32[2, {wide}]" = torch.ops.aten.mm.default(view, t)
        return (mm, view)
'''


@pytest.mark.parametrize("step", [1, 3])
def test_a_window_with_several_results_explains_as_much(step: int) -> None:
    (first,) = told(pooled_by_torch(2), pooled_by_torch(step))
    assert first == (
        f"aten.max_pool2d_with_indices.default  args=(%, [2, 2], [2, 2]) -> args=(%, [2, 2], [{step}, {step}])"
    )
    assert told(pooled_by_torch(2), pooled_by_torch(2, wide=4))[0] == "parameter 1 f32[3,16] -> f32[4,16]"


def residual(step: int, wide: bool = False) -> str:
    """A block whose argument is convolved as well where its result has another shape, or always."""
    n = 8 // step
    shape, image = f"f32[2, 4, {n}, {n}]", "f32[2, 4, 8, 8]"
    own = step > 1 or wide
    operator = "torch.ops.aten.convolution.default"
    around = f'''
        around: "{shape}" = {operator}(x, primals_3, None, [{step}, {step}], [0, 0], [1, 1], False, [0, 0], 1)'''
    return f'''class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "{image}", primals_2: "f32[4, 4, 3, 3]"{', primals_3: "f32[4, 4, 1, 1]"' * own}):
        x: "{image}" = torch.ops.aten.relu.default(primals_1){around * own}
        y: "{shape}" = {operator}(x, primals_2, None, [{step}, {step}], [1, 1], [1, 1], False, [0, 0], 1)
        add: "{shape}" = torch.ops.aten.add.Tensor({"around" if own else "x"}, y)
        out: "{shape}" = torch.ops.aten.relu.default(add)
        return (out,)
'''


def test_what_is_there_for_the_shape_that_a_window_makes_stands_behind_it() -> None:
    first, second = told(residual(2), residual(1))
    assert "[2, 2], [1, 1]" in first
    assert "[1, 1], [1, 1]" in first
    assert second.startswith("- 1 parameter ")
    first, second = told(residual(1), residual(2))
    assert "[1, 1], [1, 1]" in first
    assert second.startswith("+ 1 parameter ")
    assert told(residual(1, wide=True), residual(1))[0].startswith("- 1 parameter ")
