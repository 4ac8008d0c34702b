"""The pytest plugin. Outside the package and free of torch, so that loading it costs nothing until it is used.

    @pytest.mark.retrograd(spec, level="quick")
    def test_rms_norm(retrograd_stage):
        retrograd_stage.assert_passes()

gives one test a stage: test_rms_norm[contract], test_rms_norm[mutation], ... For a single comparison use
`retrograd.assert_backward`. How often something fails over seeds is asserted by

    def test_rarely_off(bwd):
        bwd.flake_rate(lambda seed: err_over_tol(seed), seeds=300).assert_below(0.01, confidence=0.95)

A test that compiles more graphs than it may fails with what changed:

    @pytest.mark.retrograd_graphs(max=2)
    def test_steps(retrograd_watch):
        for batch in batches:
            train_step(batch)
            retrograd_watch.step()

Collectives in another order, between steps or ranks, fail a test that asks for it:

    def test_order(retrograd_order):
        with retrograd_order.record() as log:
            train(steps=3)
        retrograd_order.assert_same(log)  # or the files that all ranks saved

What the tests of a module are worth is one more test where `pytest --retrograd-mutate` asks for it:

    pytestmark = pytest.mark.retrograd_mutate(spec, count=50, fail_under=90)
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pytest

_VERIFIERS = pytest.StashKey[dict]()
_WATCH = pytest.StashKey[Any]()
_RESULTS = pytest.StashKey[dict]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """--retrograd-level, -seed, -baseline, -write-baseline, -flake-seed, -mutate, -mutate-budget."""
    group = parser.getgroup("retrograd", "verification of backward passes")
    group.addoption("--retrograd-level", choices=["quick", "full"], help="level of every retrograd mark")
    group.addoption("--retrograd-seed", type=int, help="seed of every retrograd mark (default 0)")
    text = "accepted findings (default: retrograd-baseline.toml of the rootdir, if it is there)"
    group.addoption("--retrograd-baseline", metavar="FILE", help=text)
    text = "accept what every retrograd mark finds: write it to the baseline"
    group.addoption("--retrograd-write-baseline", action="store_true", help=text)
    text = "seed random, NumPy and torch before each test, as retrograd flake does"
    group.addoption("--retrograd-flake-seed", type=int, help=text)
    text = "one more test of each module marked with retrograd_mutate: how many mutants its tests notice"
    group.addoption("--retrograd-mutate", action="store_true", help=text)
    text = "begin no mutant of a module after this time; the next run goes on"
    group.addoption("--retrograd-mutate-budget", metavar="5m", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks."""
    text = "retrograd(spec, **options): verify an op; the test takes the fixture `retrograd_stage`, one test a stage"
    config.addinivalue_line("markers", text)
    text = "retrograd_graphs(max, **options): the test may compile `max` graphs; options as of retrograd.graph.watch"
    config.addinivalue_line("markers", text)
    text = "retrograd_mutate(spec, **options): of a module; options as of `retrograd mutate`: count=50, fail_under=90"
    config.addinivalue_line("markers", text)
    config.stash[_VERIFIERS], config.stash[_RESULTS] = {}, {}
    seed = config.getoption("--retrograd-flake-seed")
    if seed is not None:
        config.pluginmanager.register(_Seeded(seed), "retrograd-seeded")


class _Seeded:
    """Seeds every test as `retrograd flake` does; registered only if asked for."""

    def __init__(self, seed: int) -> None:
        from retrograd.flake.seeding import seed_all, seed_imports

        self.seed, self.seed_all = seed, seed_all
        seed_imports()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Before any fixture draws."""
        self.seed_all(self.seed)


class BackwardCheck:
    """What the fixture `bwd` offers."""

    def flake_rate(self, function: Callable[..., Any], seeds: int = 100, **options: Any) -> Any:
        """`retrograd.flake_rate`."""
        from retrograd.flake.in_process import flake_rate

        return flake_rate(function, seeds, **options)


@pytest.fixture
def bwd() -> BackwardCheck:
    """Statements about backward passes that are not of one run: `bwd.flake_rate(fn, seeds=300).assert_below(0.01)`."""
    return BackwardCheck()


def _watch(item: pytest.Item) -> Any:
    """The watch of a marked test, not yet entered."""
    if _WATCH not in item.stash:
        from retrograd.graph.watching.watch import watch

        mark = item.get_closest_marker("retrograd_graphs")
        if mark is None:
            raise pytest.UsageError("the fixture retrograd_watch needs @pytest.mark.retrograd_graphs(max=N)")
        options = dict(mark.kwargs)
        most = mark.args[0] if len(mark.args) == 1 else options.pop("max", None)
        if len(mark.args) > 1 or (most is None and "warmup" not in options and "lock" not in options):
            raise pytest.UsageError(
                "retrograd_graphs needs max=N (how many graphs), or warmup=N, or lock='graphs.lock'"
            )
        options.setdefault("on_extra", "raise")
        item.stash[_WATCH] = watch(expect=most, **options)
    return item.stash[_WATCH]


@pytest.fixture
def retrograd_watch(request: pytest.FixtureRequest) -> Any:
    """The `retrograd.graph.Watch` of a test marked with retrograd_graphs; `step()` ends a step."""
    return _watch(request.node)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """Watch a marked test; what follows its last step() is one more step."""
    if item.get_closest_marker("retrograd_graphs") is None:
        return (yield)
    with _watch(item) as watch:
        result = yield
        watch.step()
    return result


class OrderCheck:
    """What the fixture `retrograd_order` offers."""

    def __init__(self) -> None:
        self.logs: list[Any] = []

    def record(self, model: Any = None, **options: Any) -> Any:
        """`retrograd.fsdp.record_collectives`, which here raises where a step differs from those before it."""
        from retrograd.fsdp.recorder import record_collectives

        options.setdefault("on_change", "raise")
        self.logs.append(record_collectives(model, **options))
        return self.logs[-1]

    def assert_same(self, *logs: Any) -> None:
        """`retrograd.fsdp.assert_same_order`."""
        from retrograd.fsdp.check_command import assert_same_order

        assert_same_order(*logs)


@pytest.fixture
def retrograd_order() -> Iterator[OrderCheck]:
    """Same collectives in the same order over steps and ranks: `record()` and `assert_same(*logs)`."""
    check = OrderCheck()
    yield check
    for log in check.logs:
        log.stop()


class StageCheck:
    """One stage of one spec, run when asked.

    `run()` returns the retrograd.check.schema.StageResult; `assert_passes()` raises VerificationError with what,
    where and repro, and skips the test with the reason if the stage does not apply.
    """

    def __init__(self, verifier: Any, stage: Any, node: pytest.Item, named: bool) -> None:
        self.verifier, self.stage, self.node = verifier, stage, node
        self._named = named  # whether the command line has a name for the spec

    def run(self) -> Any:
        """Run the stage; UndecidedError if nothing can be concluded."""
        from retrograd.check.acceptance import settled

        return settled(self.verifier.run_stage(self.stage), self.verifier.acceptances)

    def assert_passes(self) -> None:
        """Fail with the findings, skip with the reason; what is accepted stands in the test's report."""
        __tracebackhide__ = True
        from retrograd.errors import RetrogradError, VerificationError

        try:
            result = self.run()
        except RetrogradError as error:
            raise error.with_traceback(None) from None  # the message says where; the checker's own lines do not
        config = self.node.config
        config.stash[_RESULTS].setdefault(self.verifier, []).append(result)
        for finding in result.accepted:
            self.node.user_properties.append(("retrograd accepted", f"{finding.accepted} | {finding.text()}"))
        if result.findings and not config.getoption("--retrograd-write-baseline"):
            raise VerificationError("\n".join(self._again(f).text() for f in result.findings))
        if result.status == "skipped":
            pytest.skip(result.reason)

    def _again(self, finding: Any) -> Any:
        """The finding; where the command line has no name for the spec, with this test as what shows it again."""
        if self._named or not finding.repro:
            return finding
        options = ["--retrograd-level", self.verifier.level, "--retrograd-seed", str(self.verifier.seed)]
        return replace(finding, repro=shlex.join(["pytest", self.node.nodeid, *options]))


def _baseline(config: pytest.Config) -> Path:
    from retrograd.check.acceptance import FILE

    return Path(config.getoption("--retrograd-baseline") or config.rootpath / FILE)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the baseline, if that is asked for."""
    config = session.config
    if config.getoption("--retrograd-write-baseline") and config.stash[_RESULTS]:
        from retrograd.check.acceptance import write_baseline

        results = config.stash[_RESULTS].items()
        write_baseline(_baseline(config), [verifier.report(stages, 0.0) for verifier, stages in results])


def _mark(node: Any) -> pytest.Mark:
    mark = node.get_closest_marker("retrograd")
    if mark is None or len(mark.args) != 1:
        raise pytest.Collector.CollectError(
            f"{node.nodeid}: the fixture retrograd_stage needs @pytest.mark.retrograd(spec, ...) with what "
            "retrograd.op returned, or its place: 'file.py:name'"
        )
    return mark


def _stages(mark: pytest.Mark, nodeid: str) -> list[Any]:
    """The stages that a mark asks for; CollectError where it asks for what there is not, once for all of them."""
    from retrograd.check.levels import check_level
    from retrograd.check.stages import choose
    from retrograd.errors import UsageError

    try:
        check_level(mark.kwargs.get("level", "quick"), mark.kwargs.get("seed", 0))
        return choose(mark.kwargs.get("only", ()), mark.kwargs.get("skip", ()))
    except UsageError as error:
        raise pytest.Collector.CollectError(f"{nodeid}: @pytest.mark.retrograd: {error}") from None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """The line of a failure in the summary begins with what is wrong, not with the name of an exception."""
    report = yield
    error = None if call.excinfo is None else call.excinfo.value
    errors = sys.modules.get("retrograd.errors")
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None and errors is not None and isinstance(error, errors.RetrogradError):
        crash.message = str(error)
    return report


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a stage for tests that take `retrograd_stage`."""
    if "retrograd_stage" not in metafunc.fixturenames:
        return
    stages = _stages(_mark(metafunc.definition), metafunc.definition.nodeid)
    metafunc.parametrize("retrograd_stage", stages, ids=[s.id for s in stages], indirect=True)


class MutantsItem(pytest.Item):
    """How many mutants of an op the tests of its module notice, as `retrograd mutate --tests` says.

    It runs in a process of its own, and keeps its results in pytest's cache: until the op, the tests, or a file that
    they import has changed, no mutant is run again.
    """

    def runtest(self) -> None:
        """Fail with the report if less than `fail_under` percent are noticed; skip where there was no time for any."""
        with TemporaryDirectory(prefix="retrograd-") as folder:
            record, printed = Path(folder) / "report.json", Path(folder) / "report.txt"
            with printed.open("w") as stdout:
                child = subprocess.Popen(
                    [*self._command(), "-o", str(record)], stdout=stdout, stderr=subprocess.PIPE, text=True
                )
                lines = [self._progress(line.rstrip("\n")) for line in child.stderr or ()]
            if child.wait():
                text = printed.read_text() if record.exists() else "\n".join(lines[-20:])
                pytest.fail(f"retrograd mutate exits with {child.returncode}\n{text}", pytrace=False)
            self.add_report_section("call", "retrograd mutate", printed.read_text())
            report = json.loads(record.read_text())
        if not report["results"]:
            pytest.skip("; ".join(report["notes"]))

    def _command(self) -> list[str]:
        mark, module = self.get_closest_marker("retrograd_mutate"), self.getparent(pytest.Module)
        assert mark is not None
        assert module is not None
        target = _target(self.path, module.obj, mark.args[0]) if len(mark.args) == 1 else None
        if target is None:
            raise pytest.UsageError("retrograd_mutate needs what retrograd.op returned, under a name of the module")
        words = [sys.executable, "-m", "retrograd", "mutate", target]
        words += ["--tests", shlex.join(["pytest", os.path.relpath(self.path)])]
        for name, value in {"fail_under": 100, **mark.kwargs}.items():
            option = "--function" if name == "functions" else f"--{name.replace('_', '-')}"
            words += [word for each in (value if option == "--function" else [value]) for word in (option, str(each))]
        if budget := self.config.getoption("--retrograd-mutate-budget"):
            words += ["--budget", budget]
        if cache := getattr(self.config, "cache", None):
            words += ["--results", str(cache.mkdir("retrograd") / "mutants.sqlite")]
        return words

    def _progress(self, line: str) -> str:
        reporter, capture = map(self.config.pluginmanager.get_plugin, ("terminalreporter", "capturemanager"))
        with capture.global_and_fixture_disabled() if capture else nullcontext():
            if reporter and reporter.isatty:
                reporter.rewrite(f"{self.name}: {line}", erase=True)
            elif reporter and reporter.verbosity > 0:
                reporter.write_line(line)
        return line

    def reportinfo(self) -> tuple[Path, None, str]:
        """Where it stands."""
        return self.path, None, self.name


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One more test for each marked module, where that is asked for."""
    from retrograd.config import at_start

    if config.getoption("--retrograd-mutate") and at_start() is None:  # else a mutant stands in this process
        modules = dict.fromkeys(item.getparent(pytest.Module) for item in items)
        marked = [m for m in modules if m is not None and m.get_closest_marker("retrograd_mutate")]
        items += [MutantsItem.from_parent(module, name="retrograd_mutate") for module in marked]


def _target(path: Path, module: Any, spec: Any) -> str | None:
    """What the command line calls a spec of a test module, or of one that it imports; None if it has no name there."""
    imported = [value for value in vars(module).values() if isinstance(value, ModuleType)]
    for each in (module, *imported):
        name = next((name for name, value in vars(each).items() if value is spec), None)
        if name and each is module:
            return f"{os.path.relpath(path)}:{name}"
        if name and each.__package__:
            return f"{each.__name__}:{name}"
        if name and each.__file__:
            return f"{os.path.relpath(each.__file__)}:{name}"
    return None


@pytest.fixture
def retrograd_stage(request: pytest.FixtureRequest) -> StageCheck:
    """The stage this test is for; verifiers are shared by the stages of one mark, and with them the truths."""
    __tracebackhide__ = True
    from retrograd.catalog import resolve
    from retrograd.check.verification import Verification
    from retrograd.errors import RetrogradError

    mark = _mark(request.node)
    config = request.config
    options = {k: v for k, v in mark.kwargs.items() if k not in ("only", "skip")}
    if config.getoption("--retrograd-level"):
        options["level"] = config.getoption("--retrograd-level")
    if config.getoption("--retrograd-seed") is not None:
        options["seed"] = config.getoption("--retrograd-seed")
    options.setdefault("level", "quick")
    spec = mark.args[0]
    options.setdefault("name", spec if isinstance(spec, str) else _target(request.node.path, request.module, spec))
    known = config.stash[_VERIFIERS]
    key = request.node.nodeid.split("[")[0]
    if key not in known:
        baseline = _baseline(config)
        if baseline.exists():
            options.setdefault("baseline", baseline)
        elif config.getoption("--retrograd-baseline") and not config.getoption("--retrograd-write-baseline"):
            raise pytest.UsageError(f"--retrograd-baseline is {str(baseline)!r}, which is not there")
        try:
            known[key] = Verification(resolve(spec) if isinstance(spec, str) else spec, **options)
        except RetrogradError as error:
            raise error.with_traceback(None) from None
    return StageCheck(known[key], request.param, request.node, bool(options["name"]))
