"""What `retrograd graph` says: text, annotations, JSON and pages; the page of a difference in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import fake_graph as fake
import pytest

from retrograd.errors import UsageError
from retrograd.graph import messages as graph
from retrograd.graph.schema import Diff, Follow, Unique
from retrograd.report import check_paths, document, load, to_github, to_text, write
from retrograd.report.html import to_html

RECORDS = [fake.diff(fake.STRAY, fake.CONSTANT), fake.diff(), fake.unique(), fake.follow(), fake.follow(dead=True)]
IDS = ["different", "same", "unique", "follow", "dead"]


def page_of(record: Diff | Unique | Follow) -> str:
    return to_html(document(record), record.to_json())


# Text.


def test_causes_come_first_with_line_and_advice() -> None:
    lines = to_text(fake.diff(fake.STRAY, fake.CONSTANT)).splitlines()
    assert lines[0] == "different: 2 causes"
    assert lines[1] == "A  a.txt: 12 instructions, 2 parameters, 1 output, 1 collective, 3 dead"
    first = next(k for k, line in enumerate(lines) if line.startswith("1. "))
    assert lines[first] == f"1. + output 3 f32[] made by {fake.EVIL}"
    assert lines[first + 1].split() == ["at", "train.py:79"]
    assert "mul.6" in lines[first + 2]
    assert "100 %" in lines[first + 3]
    assert "2. constant 0.01 -> 0.02  (4 places)" in lines
    assert "harmless:" in lines
    assert lines[-1] == "10 values match, 2 differ only because something below them does; 0.25 s"


@pytest.mark.parametrize(
    ("notes", "said"),
    [
        ((), "same computation"),
        ((fake.DEAD,), "same computation; only dead code differ"),
        ((fake.DEAD, fake.DEAD), "same computation; only dead code differ"),
    ],
)
def test_verdict_of_the_same(notes: tuple, said: str) -> None:
    assert graph.verdict(fake.diff(notes=notes)) == said


def test_many_causes_and_names_are_cut_unless_all_are_asked_for() -> None:
    many = fake.diff(*[fake.CONSTANT] * 30, fake.Cause("op", "last", a=tuple(f"n{k}" for k in range(50))))
    short, full = (to_text(many, everything=all) for all in (False, True))
    assert "11 more causes; --all prints them" in short
    assert "31. last" not in short
    assert "31. last" in full
    assert "n49" in full


def test_who_has_which_graph() -> None:
    text = to_text(fake.unique())
    assert text.startswith("2 different computations in 3 graphs\n")
    assert "1  up to the order of parameters" in text
    assert "2  by the keys recorded with them" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["s.txt#1", "B", "B", "B", "A", "llllllllllll", "13", "2", "2"] in rows
    assert [row[:5] for row in rows if row[:1] == ["s.txt"]] == [["s.txt", "A", "A", "A", "A"]]


@pytest.mark.parametrize(("number", "letter"), [(0, "A"), (25, "Z"), (26, "AA"), (701, "ZZ"), (702, "AAA")])
def test_letters_never_run_out(number: int, letter: str) -> None:
    assert graph.letter(number) == letter


def test_a_trail() -> None:
    lines = to_text(fake.follow(), everything=False).splitlines()
    assert lines[0] == "p30 = p.30: reaches 4 of 9 outputs, through 1 collective"
    assert lines[2] == (
        "  into rs.2 (reduce-scatter 2 of 3, collective 5 of 6): operand 1 of 2 -> result 1, the value itself  at x.py:3"
    )
    assert lines[3] == "  goes into outputs 0-2, 7"
    trail = lines[5:]
    assert trail[0].startswith("p.30  parameter f32[8]")
    assert trail[1].startswith("rs.2[1]  reduce-scatter")
    assert trail[1].endswith("[via tuple.1[1]]")
    assert trail[2] == "- neg.3  negate f32[4], operand 0  (ends here: nobody uses it)"
    assert trail[3].endswith("operand 0, 1  at y.py:9  => outputs 0-2, 7")
    assert trail[4] == "... and 4 more steps; --all prints them"
    assert to_text(fake.follow(dead=True)).startswith("p30 = p.30: dead: nobody uses it\n")


def test_the_whole_trail_of_a_long_chain_is_printed_at_one_depth() -> None:
    steps = [fake.FlowStep("p.0", "parameter", "f32[]")]
    steps += [fake.FlowStep(f"n.{k}", "negate", "f32[]", "", (0,), "", k, "used") for k in range(3000)]
    found = Follow("t", "p0", "p.0", "parameter", "f32[]", "", tuple(steps), len(steps))
    lines = to_text(found).splitlines()
    assert lines[-1] == "n.2999  negate f32[], operand 0"
    assert len(lines) == 3001 + 3


def test_names_cannot_command_the_terminal() -> None:
    text = to_text(fake.diff(fake.Cause("output_added", "made by \x1b[2Jadd\r\x07", "a.py:1")))
    assert "made by \\x1b[2Jadd\\r\\x07" in text
    assert "\x1b" not in text


# GitHub.


def test_annotations_stand_at_lines_of_the_user_only() -> None:
    first, second, last = to_github(fake.diff(fake.STRAY, fake.CONSTANT)).splitlines()
    assert first.startswith("::error file=train.py,line=79,title=output added::+ output 3")
    assert first.endswith("drop the last reference to it, 100 %25 of them%0Aand all")
    assert second == "::error title=constant changed::constant 0.01 -> 0.02%0Atorch/optim/sgd.py:3"
    assert last == "::notice title=retrograd graph diff a.txt b.txt::different: 2 causes"


@pytest.mark.parametrize("record", RECORDS, ids=IDS)
def test_every_record_has_an_annotation(record: Diff | Unique | Follow) -> None:
    assert to_github(record).splitlines()[-1].startswith("::notice title=retrograd graph")


# Files.


@pytest.mark.parametrize("record", RECORDS, ids=IDS)
def test_files_can_be_read_and_rendered_again(record: Diff | Unique | Follow, tmp_path: Path) -> None:
    write(record, tmp_path / "r.json", tmp_path / "r.txt", tmp_path / "r.html")
    back = load(tmp_path / "r.json")
    assert back == record
    assert (tmp_path / "r.txt").read_text() == to_text(record)
    write(back, tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text() == (tmp_path / "r.html").read_text()


def test_pages_need_no_package_that_draws_charts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "vl_convert", None)
    write(fake.diff(fake.STRAY), tmp_path / "d.html")
    assert "<!doctype html>" in (tmp_path / "d.html").read_text()


@pytest.mark.parametrize("kind", [Diff, Unique, Follow])
def test_there_is_no_junit_of_a_graph(kind: type, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only `verify` has JUnit XML"):
        check_paths(tmp_path / "x.xml", of=kind)


# Pages.


class _Page(HTMLParser):
    """Collects attributes, and what stands in scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts[-1] += data
        elif self.inside != "style":
            self.text += data


@pytest.mark.parametrize("record", RECORDS, ids=IDS)
def test_a_page_loads_nothing_and_no_name_breaks_out(record: Diff | Unique | Follow) -> None:
    text = page_of(record)
    page = _Page(text)
    loads = ("src", "href", "xlink:href", "data", "action", "srcset")
    assert not [a for a in page.attributes if a[1] in loads or a[1].startswith("on")]
    assert not re.search(r"https?://|@import|url\((?!#)", text.replace("`url(#", "`"))
    assert "<script>alert" not in text
    assert json.loads(page.scripts[0]) == json.loads(record.to_json())
    assert len(page.scripts) == (2 if isinstance(record, Diff) else 1)
    assert "prefers-color-scheme: dark" in text


def test_the_policy_of_the_page_allows_its_own_script_only() -> None:
    page = _Page(page_of(fake.diff(fake.STRAY)))
    from base64 import b64encode
    from hashlib import sha256

    hashed = b64encode(sha256(page.scripts[1].encode()).digest()).decode()
    (policy,) = [a[2] for a in page.attributes if a[1] == "content" and "default-src" in a[2]]
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{hashed}'"


def test_the_page_says_what_the_text_says_without_its_script() -> None:
    shown = _Page(page_of(fake.diff(fake.STRAY, fake.CONSTANT))).text
    for text in ("Different: 2 causes", "train.py:79", "drop the last reference", "constant 0.01 -> 0.02", fake.EVIL):
        assert text in shown, text
    assert "Same computation; only dead code differ" in _Page(page_of(fake.diff())).text


# In a browser. Clicks are made by a script that the test adds, and the page is looked at when all has run.

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


def look(record: Diff, folder: Path, *clicks: str, address: str = "") -> str:
    """The text of both sides after `clicks` (expressions of JavaScript), as `A: ... B: ...`; errors fail the test."""
    page = page_of(record)
    script = """
    const shown = (s) => { const r = document.getElementById("side-" + s); return {
      boxes: [...r.querySelectorAll("g.box")].map((g) => g.dataset.id + "|" + g.getAttribute("aria-label")),
      chosen: r.querySelector("g.chosen")?.dataset.id ?? null, detail: r.querySelector(".detail").textContent,
      message: r.querySelector(".message").textContent, edges: r.querySelectorAll("path.edge").length }; };
    const find = (s, text) => [...document.querySelectorAll(s)].find((e) => e.textContent.includes(text));
    const out = document.createElement("pre"); out.id = "seen"; let wrong = "";
    try { CLICKS } catch (error) { wrong = String(error); }
    out.textContent = JSON.stringify({ a: shown("a"), b: shown("b"), wrong, wide: document.documentElement.scrollWidth - innerWidth });
    document.body.append(out);
    """.replace("CLICKS", ";".join(clicks))
    # The page's own policy would, rightly, not run this.
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    file = folder / "page.html"
    file.write_text(page.replace("</body>", f"<script>{script}</script></body>"))
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--window-size=500,900"]
    arguments += [f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=2000"]
    ran = subprocess.run(
        [str(CHROMIUM), *arguments, "--dump-dom", file.as_uri() + address], capture_output=True, text=True, timeout=120
    )
    assert not re.search(r"CONSOLE.*(Uncaught|Error)", ran.stderr), ran.stderr
    parser = _Page(ran.stdout)
    found = re.search(r'<pre id="seen">(.*?)</pre>', ran.stdout, re.DOTALL)
    assert found, ran.stderr[-2000:]
    assert "alert(1)" not in "".join(parser.scripts[1:2])
    from html import unescape

    seen = json.loads(unescape(found[1]))
    assert seen["wrong"] == ""
    assert seen["wide"] <= 0
    return seen


@browser
def test_the_first_cause_is_drawn_with_what_is_near_it_on_the_other_side(tmp_path: Path) -> None:
    seen = look(fake.diff(fake.STRAY, fake.CONSTANT), tmp_path)
    assert seen["b"]["chosen"] == fake.EVIL
    assert any("only in B, cause 1" in box for box in seen["b"]["boxes"])
    assert seen["a"]["chosen"] == "p.0"
    assert "no counterpart here; this is the nearest place" in seen["a"]["message"]


@browser
def test_walking_along_operands_takes_the_other_side_along(tmp_path: Path) -> None:
    seen = look(
        fake.diff(fake.CONSTANT),
        tmp_path,
        "if (shown('b').chosen !== 'c.2' || shown('a').chosen !== 'c.1') throw 'start'",
        "find('#side-b .detail .node', 'neg.2').click()",
        "find('#side-b .detail .node', '0: p.0').click()",
    )
    assert (seen["a"]["chosen"], seen["b"]["chosen"]) == ("p.0", "p.0")
    assert "far.9  (not in this page)" in seen["a"]["detail"]
    assert [box.partition("|")[0] for box in seen["a"]["boxes"]] == ["p.0", "neg.1", "c.1"]
    assert seen["a"]["edges"] == 2


@browser
def test_clicks_on_boxes_keys_back_radius_and_search(tmp_path: Path) -> None:
    seen = look(
        fake.diff(fake.CONSTANT),
        tmp_path,
        "const radius = document.getElementById('radius')",
        "radius.value = 1; radius.dispatchEvent(new Event('input'))",
        "if (shown('b').boxes.length !== 2) throw 'radius ' + shown('b').boxes",
        "find('#side-b g.box', 'neg.2').dispatchEvent(new Event('click'))",
        "if (shown('a').chosen !== 'neg.1') throw 'box ' + shown('a').chosen",
        "find('#side-b g.box', 'p.0').dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter'}))",
        "if (shown('a').chosen !== 'p.0') throw 'key'",
        "document.getElementById('back').click()",
        "if (shown('a').chosen !== 'neg.1') throw 'back'",
        "const find_ = document.getElementById('find'); find_.value = 'mul.6'; find_.dispatchEvent(new Event('change'))",
    )
    assert seen["b"]["chosen"] == "mul.6"
    assert "no counterpart" in seen["a"]["message"]


@browser
def test_nodes_of_one_instruction_are_one_box(tmp_path: Path) -> None:
    nodes = [fake._node(f"p.{k}", "parameter", "", "rs.1", "same") for k in range(3)]
    nodes += [fake._node("rs.1", "reduce-scatter", f"p.{k}", "", "added" if k == 1 else "same") for k in range(3)]
    record = Diff(fake.A, fake.B, (fake.Cause("collective_inserted", "x", b=("rs.1",)),), nodes_b=tuple(nodes))
    seen = look(record, tmp_path)["b"]
    assert len(seen["boxes"]) == 4
    assert "Operands (3)0: p.0" in seen["detail"]
    assert "Status+ only in B, cause 1" in seen["detail"]


@browser
def test_differences_of_the_chosen_node_are_written_out(tmp_path: Path) -> None:
    seen = look(fake.diff(fake.CONSTANT), tmp_path)
    assert "Attributes0.01 in B: 0.02" in seen["a"]["detail"]
    assert "Status~ changed, cause 1" in seen["a"]["detail"]


@browser
def test_an_address_opens_a_place_and_a_bad_one_does_not_matter(tmp_path: Path) -> None:
    assert look(fake.diff(fake.CONSTANT), tmp_path, address="#b=mul.6")["b"]["chosen"] == "mul.6"
    assert look(fake.diff(fake.CONSTANT), tmp_path, address="#b=%E0%A4%A")["b"]["chosen"] == "c.2"


@browser
def test_five_hundred_causes_are_walked_by_keys_and_filtered(tmp_path: Path) -> None:
    nodes = [fake._node(f"n{k}", "negate", f"n{k - 1}" if k else "", "", "added") for k in range(500)]
    causes = tuple(fake.Cause("instruction_inserted", f"+ negate at place {k}", b=(f"n{k}",)) for k in range(500))
    seen = look(
        Diff(fake.A, fake.B, causes, nodes_b=tuple(nodes)),
        tmp_path,
        "const key = (k) => document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: k, bubbles: true}))",
        "const at = () => document.getElementById('cause-shown').textContent + ' ' + shown('b').chosen",
        "const open = () => [...document.querySelectorAll('details[open]')].map((d) => d.dataset.cause).join()",
        "if (at() !== 'cause 1 of 500 n0') throw at()",
        "key('n'); key('n'); if (at() !== 'cause 3 of 500 n2' || open() !== '3') throw at() + open()",
        "key('p'); if (at() !== 'cause 2 of 500 n1') throw at()",
        "key('/'); document.activeElement.value = 'PLACE 49'",
        "document.activeElement.dispatchEvent(new Event('input')); document.activeElement.blur()",
        "const left = document.querySelectorAll('details[data-cause]:not([hidden])').length",
        "if (left !== 11) throw left",
        "key('n')",
    )
    assert seen["b"]["chosen"] == "n49"


@browser
def test_thousands_of_nodes_are_drawn_in_part(tmp_path: Path) -> None:
    nodes = [fake._node("p", "parameter", "", " ".join(f"n{k}" for k in range(1500)), "same")]
    nodes += [fake._node(f"n{k}", "negate", f"p n{k - 1}" if k else "p", "", "same") for k in range(1500)]
    nodes.append(fake._node("late", "add", "p n7", "", "added"))
    record = Diff(fake.A, fake.B, (fake.Cause("output_added", "x", b=("p",)),), nodes_b=tuple(nodes))
    seen = look(record, tmp_path)
    assert seen["b"]["chosen"] == "p"
    assert len(seen["b"]["boxes"]) <= 60
    assert any(box.startswith("late|") for box in seen["b"]["boxes"]), "differences are drawn first"
    assert "more neighbours are not drawn" in seen["b"]["message"]
