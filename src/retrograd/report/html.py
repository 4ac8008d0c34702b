"""The report as one HTML page that needs no network: charts are inline SVG, the record is embedded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from retrograd.check.schema import Profile, Report, StageResult
from retrograd.errors import MissingExtraError
from retrograd.flake.schema import FlakeReport
from retrograd.report import charts, flake, wording

# Enough to see the pattern; the embedded record has all of them.
_MOST_PROFILES = 12

_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Figure:
    """The pictures of one profile, as SVG that may go into the page unescaped."""

    stage: StageResult
    profile: Profile
    heat_map: str
    histogram: str


def require() -> None:
    """Raise MissingExtraError unless the package that draws the charts is there."""
    try:
        import vl_convert  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError:
        raise MissingExtraError("vl-convert-python", "html", "an HTML report") from None


def render(report: Report) -> str:
    """The page as text.

    Raises:
        MissingExtraError: vl-convert-python is not installed.
    """
    require()
    from markupsafe import Markup

    chosen = profiles(report)
    return template("report.html.j2").render(
        report=report,
        words=wording,
        figures=[_figure(stage, profile, Markup) for stage, profile in chosen[:_MOST_PROFILES]],
        left_out=max(len(chosen) - _MOST_PROFILES, 0),
        notes=[*report.notes, *(f"{s.id}: {note}" for s in report.stages for note in s.notes)],
        record=Markup(island(report)),
    )


def render_flake(report: FlakeReport) -> str:
    """The page of a flake report as text.

    Raises:
        MissingExtraError: vl-convert-python is not installed.
    """
    require()
    from markupsafe import Markup

    figures: list[str] = []
    for found in report.flakes:
        chart = charts.margins([(run.outcome, m.worst) for run in found.runs for m in run.margins])
        figures.append(Markup(_svg(chart)) if chart else "")
    return template("flake.html.j2").render(
        report=report, flake=flake, words=wording, figures=figures, record=Markup(island(report))
    )


def template(name: str) -> Any:
    """A template of this folder, which escapes everything."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def profiles(report: Report) -> list[tuple[StageResult, Profile]]:
    """What is drawn: the profiles of failed stages, then those of the stage that compares with the oracle."""
    failed = [s for s in report.stages if s.status == "failed"]
    oracle = [s for s in report.stages if s.id == "oracle" and s.status != "failed"]
    return [(stage, profile) for stage in (*failed, *oracle) for profile in stage.profiles]


class _Record(Protocol):
    def to_json(self) -> str: ...


def island(report: _Record) -> str:
    """The record as JSON in which no text can end the script element or open a comment in it."""
    return report.to_json().replace("<", "\\u003c")


def _figure(stage: StageResult, profile: Profile, safe: Any) -> Figure:
    heat = _svg(charts.heat_map(profile)) if any(profile.ratio) else ""
    bars = _svg(charts.ulp_histogram(profile)) if any(profile.ulp_counts) else ""
    return Figure(stage, profile, safe(heat), safe(bars))


def _svg(chart: dict[str, Any]) -> str:
    import vl_convert

    # HTML needs no namespaces, and a page without any address is easily seen to load nothing.
    return re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", vl_convert.vegalite_to_svg(chart))
