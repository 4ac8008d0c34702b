import sys
from pathlib import Path

import pytest

from retrograd.catalog import SHIPPED, resolve
from retrograd.check.spec import OpSpec
from retrograd.errors import MissingExtraError, SpecError, UsageError

HEAD = "from retrograd.check.spec import op, tensor\n"
SPEC = HEAD + "norm = op(lambda x: x, inputs={'x': tensor('N')}, name='mine')\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "op.py") -> str:
        (tmp_path / name).write_text(text)
        return name

    return write


def test_file_and_module(write) -> None:
    write(SPEC, "a_module_of_this_test.py")
    for target in (
        "a_module_of_this_test.py:norm",
        "./a_module_of_this_test.py:norm",
        "a_module_of_this_test:norm",
    ):
        assert resolve(target).name == "mine"
    sys.modules.pop("a_module_of_this_test")


def test_file_sees_its_neighbours_and_leaves_the_path_alone(write) -> None:
    write("VALUE = 'beside'\n", "neighbour_of_this_test.py")
    write(HEAD + "import neighbour_of_this_test as n\nnorm = op(abs, inputs={'x': tensor('N')}, name=n.VALUE)\n")
    before = list(sys.path)
    assert resolve("op.py:norm").name == "beside"
    assert sys.path == before


def test_files_of_one_name_are_two_modules(write, tmp_path: Path) -> None:
    write(SPEC)
    (tmp_path / "sub").mkdir()
    write(SPEC.replace("mine", "other"), "sub/op.py")
    assert [resolve("op.py:norm").name, resolve("sub/op.py:norm").name] == ["mine", "other"]


def test_function_without_arguments_makes_a_spec(write) -> None:
    write(SPEC + "def make():\n    return norm\ndef bad():\n    return 3\ndef ugly():\n    return 1 / 0\n")
    assert isinstance(resolve("op.py:make"), OpSpec)
    with pytest.raises(SpecError, match=r"returned int.*rg\.op\(bad, inputs"):
        resolve("op.py:bad")
    with pytest.raises(SpecError, match=r"op\.py:8: ZeroDivisionError"):
        resolve("op.py:ugly")


@pytest.mark.parametrize("text", ["def f(x): return x\n", "f = lambda *a: a\n", "class f: pass\n"])
def test_an_op_that_is_not_wrapped(write, text: str) -> None:
    with pytest.raises(SpecError, match=r"wrap it: rg\.op\(f, inputs=\.\.\.\), which `retrograd init op\.py:f` writes"):
        resolve(f"{write(text)}:f")


def test_an_object_that_is_no_op(write) -> None:
    with pytest.raises(SpecError, match="is int, expected an op spec"):
        resolve(f"{write('f = 3')}:f")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nimport no_such_module_at_all\n", r"op\.py:2: ModuleNotFoundError: No module named 'no_such"),
        ("x = 1\ny = {}['k']\n", r"op\.py:2: KeyError: 'k'"),
        ("import json\n\njson.loads('{')\n", r"op\.py:3: JSONDecodeError"),
        ("def f(:\n", r"op\.py:1: SyntaxError"),
        ("import sys\nsys.exit(5)\n", r"op\.py:2: SystemExit: 5"),
        (HEAD + "norm = op(3, inputs={})\n", r"op\.py:2: `fn` is int"),
    ],
)
def test_errors_in_the_file_name_its_line(write, text: str, message: str) -> None:
    write(text, "op.py")
    before = {m for m in sys.modules if m.startswith("_retrograd_target")}
    with pytest.raises(SpecError, match=message):
        resolve("op.py:norm")
    write(text, "broken_module_of_this_test.py")
    with pytest.raises(SpecError, match=message.replace("op", "broken_module_of_this_test", 1)):
        resolve("broken_module_of_this_test:norm")
    assert before == {m for m in sys.modules if m.startswith("_retrograd_target")}


def test_what_a_library_does_wrong_with_another_is_told_with_both_lines(write, tmp_path_factory, monkeypatch) -> None:
    library = tmp_path_factory.mktemp("library")
    (library / "library_of_this_test.py").write_text("import json\njson.loads('{')\n")
    monkeypatch.syspath_prepend(library)
    raised = r"op\.py:1: JSONDecodeError: .* \(raised at .*decoder\.py:\d+, called at .*library_of_this_test\.py:2\)$"
    with pytest.raises(SpecError, match=raised):
        resolve(f"{write('import library_of_this_test')}:f")


def test_a_file_that_needs_torch_without_torch(write) -> None:
    with pytest.raises(MissingExtraError, match=r"retrograd\[torch\]"):
        resolve(f"{write('raise ModuleNotFoundError(name=chr(116) + chr(111) + chr(114) + chr(99) + chr(104))')}:f")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("rmsnorm", "did you mean 'rms_norm'"),
        ("zzz", r"shipped: rms_norm, .*NAME_cpu and NAME_torch; expected"),
        ("op.py:", r"op\.py:NAME"),
        ("ob.py:norm", r"no file 'ob\.py'; did you mean 'op\.py'"),
        ("op.py:nrm", r"did you mean 'norm'\?; it has the specs norm"),
        ("no_such_pkg:norm", "no module 'no_such_pkg'"),
        ("no_such_pkg.deep:norm", "no module 'no_such_pkg.deep'"),
        ("json.no_such:norm", "no module 'json.no_such'"),
        ("", "unknown target"),
        (":", "unknown target"),
    ],
)
def test_unknown_targets_are_usage_errors(write, target: str, message: str) -> None:
    write(SPEC)
    with pytest.raises(UsageError, match=message):
        resolve(target)


def test_shipped_names_are_full_targets() -> None:
    assert all(full.startswith("retrograd.catalog.") and ":" in full for full in SHIPPED.values())


def test_a_file_without_a_name_says_which_it_has(write) -> None:
    write(SPEC)
    assert resolve("op.py").name == "mine"
    write(SPEC + "other = norm\n")
    with pytest.raises(UsageError, match=r"'op.py' names no spec, expected op.py:norm; it has the specs norm, other$"):
        resolve("op.py")
    write("VALUE = 1\n", "empty.py")
    with pytest.raises(
        UsageError, match=r"expected empty.py:NAME; it has no op spec; write one with: retrograd init empty.py"
    ):
        resolve("empty.py")
