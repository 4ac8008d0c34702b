"""Text of source lines: a statement over several lines is shown as one, a line of its own as it is."""

from __future__ import annotations

import pytest

from retrograd.core.source_text import statement

SOURCE = """\
def kernel(x_ptr, n):
    # a comment
    x = tl.load(
        x_ptr + offsets,  # where
        mask=mask,
    )
    if (
        n > 0
    ):
        y = x + 1  # one
    for i in range(n):
        tl.store(x_ptr + i, [
            1,
        ])
"""


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (3, "x = tl.load(x_ptr + offsets, mask=mask)"),
        (5, "x = tl.load(x_ptr + offsets, mask=mask)"),
        (8, "if (n > 0):"),
        (10, "y = x + 1"),
        (11, "for i in range(n):"),
        (13, "tl.store(x_ptr + i, [1])"),
        (2, ""),
        (99, ""),
    ],
)
def test_a_statement_is_one_line(tmp_path, line, text):
    (tmp_path / "kernel.py").write_text(SOURCE)
    assert statement(str(tmp_path / "kernel.py"), line) == text


def test_a_file_that_is_not_python_has_its_lines(tmp_path):
    (tmp_path / "notes").write_text("a )\nb (c )\n")
    assert statement(str(tmp_path / "notes"), 2) == "b (c )"
    assert statement(str(tmp_path / "none"), 1) == ""


def test_a_long_statement_is_cut(tmp_path):
    (tmp_path / "long.py").write_text("f(\n" + "    argument,\n" * 40 + ")\n")
    text = statement(str(tmp_path / "long.py"), 7)
    assert text.startswith("f(argument, argument")
    assert text.endswith(" ...")
    assert len(text) == 164
