"""Pairs of dumps with one planted difference (`data/trust/pairs.toml`), and what a text that leaves things out proves."""

from __future__ import annotations

import gzip
import tomllib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from retrograd import graph
from retrograd.cli import main
from retrograd.errors import UndecidedError
from retrograd.graph.readers.fx_effects import effect_of
from retrograd.graph.schema import Diff
from retrograd.graph.watching import lock
from retrograd.graph.watching.events import Compiled
from retrograd.graph.watching.session import WatchSession

TRUST = Path(__file__).parent / "data" / "trust"
PAIRS = tomllib.loads((TRUST / "pairs.toml").read_text())["pair"]
FX = "class GraphModule(torch.nn.Module):\n    def forward(self, x: 'f32[4]', y: 'f32[4]'):\n"


@cache
def text_of(name: str) -> str:
    return gzip.decompress((TRUST / name).read_bytes()).decode()


def diff(a: str, b: str) -> Diff:
    return graph.diff(graph.parse(a, "A")[0], graph.parse(b, "B")[0])


def fx(*lines: str) -> str:
    return FX + "".join(f"        {line}\n" for line in lines)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair["name"])
def test_no_pair_is_called_the_same(pair: dict) -> None:
    if "mlir" in pair["a"] and find_spec("jaxlib") is None:
        pytest.skip("StableHLO is read by jaxlib")
    a = text_of(pair["a"])
    b = text_of(pair["b"]) if "b" in pair else a.replace(*pair["edit"])
    assert a != b
    found = diff(a, b)
    assert found.verdict == pair["verdict"]
    assert found.exit_code == {"different": 1, "cannot tell": 3}[pair["verdict"]]


def test_elided_constants_cannot_be_told_or_locked(tmp_path: Path) -> None:
    for name in ("tab.opt.txt.gz", "tab2.opt.txt.gz"):
        (tmp_path / name).write_bytes((TRUST / name).read_bytes())
    a, b = (str(tmp_path / name) for name in ("tab.opt.txt.gz", "tab2.opt.txt.gz"))
    assert graph.diff(a, a)  # one and the same file
    copied = tmp_path / "copy.txt.gz"
    copied.write_bytes(Path(a).read_bytes())
    assert graph.diff(a, str(copied)).verdict == "cannot tell"
    assert "print_large_constants" in graph.diff(a, b).text()
    assert graph.unique([a, b]).level("parameter order").unique == 2
    with pytest.raises(UndecidedError, match=r"cannot be locked or checked.*xla_dump_large_constants"):
        lock.of_files([a])
    assert UndecidedError.exit_code == 3


def test_a_watched_graph_with_elided_constants_is_never_the_same() -> None:
    session = WatchSession(warmup=9, say=lambda text: None)
    texts = [text_of("tab.opt.txt.gz"), text_of("tab.opt.txt.gz"), text_of("tab.hlo.txt.gz"), text_of("tab.hlo.txt.gz")]
    session.step([Compiled("step", "hlo", text, "", "step", str(k)) for k, text in enumerate(texts)])
    graphs = session.report().graphs
    assert [g.same_as for g in graphs] == [None, None, None, 2]
    assert "cannot be told" in graphs[1].notes[0]
    with pytest.raises(UndecidedError):
        lock.of_session(session)


def test_a_layout_is_not_locked_away(tmp_path: Path) -> None:
    whole = text_of("attr_base.hlo.gz").replace("{...}", "{ { 1 } }")
    path = tmp_path / "step.hlo"
    path.write_text(whole)
    locked = lock.of_files([path])
    path.write_text(whole.replace("f32[8,8]{1,0} dot(", "f32[8,8]{1,0:S(5)} dot("))
    [changed] = lock.check(lock.of_files([path]), locked).graphs
    assert changed.causes[0].kind == "placement_changed"
    path.write_text(whole.replace("%cv", "%cv.7").replace("channel_id=2", "channel_id=7"))
    assert lock.check(lock.of_files([path]), locked)


SAME = [
    # Reads on either side of a change of something else.
    (
        ("a = x.add(1)", "x.copy_(a)", "b = y * 2", "return (b,)"),
        ("b = y * 2", "a = x.add(1)", "x.copy_(a)", "return (b,)"),
    ),
    # Names, and values that nobody needs.
    (("a = x.relu()", "b = a.add_(1)", "return (a,)"), ("n = y.sum()", "r = x.relu()", "s = r.add_(1)", "return (r,)")),
]
DIFFERENT = [
    (("a = x.relu()", "b = a + 1", "a.add_(1)", "return (b,)"), ("a = x.relu()", "a.add_(1)", "b = a + 1", "return (b,)")),
    # A view reads what the whole was changed to.
    (("v = x.view(4)", "b = x.add_(1)", "return (v,)"), ("v = x.view(4)", "return (v,)")),
    (("a = x.relu()", "v = a[0]", "w = v.mul_(2)", "return (a,)"), ("a = x.relu()", "v = a[0]", "return (a,)")),
    (("torch.add(x, y, out = y)", "return ()"), ("torch.sub(x, y, out = y)", "return ()")),
    (("r = torch.nn.functional.relu(x, True)", "return ()"), ("r = torch.nn.functional.relu(x, False)", "return ()")),
    # Draws of random numbers keep their order, unread ones too.
    (("a = torch.rand(4)", "b = torch.randn(4)", "return (a,)"), ("b = torch.randn(4)", "a = torch.rand(4)", "return (a,)")),
    (("a = torch.rand(4)", "b = torch.rand(4)", "return (a,)"), ("a = torch.rand(4)", "return (a,)")),
    # Nobody knows what these do.
    (("m_op(x)", "return (x,)"), ("return (x,)",)),
    (("m_op(x)", "n_op(y)", "return ()"), ("n_op(y)", "m_op(x)", "return ()")),
    # States: what runs after them runs in them.
    (("s = torch.manual_seed(1)", "a = torch.rand(4)", "return (a,)"), ("a = torch.rand(4)", "s = torch.manual_seed(1)", "return (a,)")),
]  # fmt: skip


def _assigned(lines: tuple[str, ...]) -> str:
    return fx(
        *[
            line if "=" in line.partition("(")[0] or "return" in line else f"n{k} = {line}"
            for k, line in enumerate(lines)
        ]
    )


@pytest.mark.parametrize(("a", "b"), SAME)
def test_effects_that_do_not_meet_may_stand_in_any_order(a: tuple[str, ...], b: tuple[str, ...]) -> None:
    found = diff(_assigned(a), _assigned(b))
    assert found, [cause.text() for cause in found.causes]


@pytest.mark.parametrize(("a", "b"), DIFFERENT)
def test_effects_count(a: tuple[str, ...], b: tuple[str, ...]) -> None:
    found = diff(_assigned(a), _assigned(b))
    assert found.verdict == "different"
    assert not found.computes_the_same


def test_modules_and_tensors_that_are_not_in_the_text_cannot_be_told() -> None:
    for line in ("a = self.layer(x)", "a = self._tensor_constant0"):
        assert diff(fx(line, "return (a,)"), fx(line, "return (a,)") + "\n").verdict == "cannot tell"
    weight = fx("a = self.weight", "b = x * a", "return (b,)")
    assert diff(weight, weight + "\n")


def test_an_operator_is_pure_only_if_it_is_known_to_be() -> None:
    pure = [
        "aten.add.Tensor",
        "aten.max.dim",
        "method.softmax",
        "torch.relu",
        "operator.and_",
        "torch.nn.functional.gelu",
    ]
    assert not [name for name in pure if effect_of(name).writes or effect_of(name).ordered]
    effects = ["aten.add_.Tensor", "aten.add.out", "aten.native_batch_norm.default", "mylib.op.default", "torch.save",
               "method.backward", "operator.iadd", "aten.set_data.default"]  # fmt: skip
    assert not [name for name in effects if not effect_of(name).writes]
    assert effect_of("torch.nn.functional.dropout").draws
    assert effect_of("aten.view.default").view


def test_the_list_of_pure_operators_is_what_the_schemas_of_torch_say() -> None:
    import subprocess
    import sys

    tool = Path(__file__).parents[2] / "tools" / "pure_operators.py"
    ended = subprocess.run([sys.executable, tool, "--check"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.strip()) == (0, ""), ended.stderr[-500:]


def test_exit_codes_of_the_command() -> None:
    from click.testing import CliRunner

    def code(*args: str) -> int:
        return CliRunner().invoke(main, ["graph", *args]).exit_code

    a, b = (str(TRUST / f"{name}.opt.txt.gz") for name in ("tab", "tab2"))
    assert code("diff", a, b) == 3
    assert code("diff", str(TRUST / "fx_f1.txt.gz"), str(TRUST / "fx_f2.txt.gz")) == 1
    assert code("diff", str(TRUST / "fx_f1.txt.gz"), str(TRUST / "fx_f1.txt.gz")) == 0
