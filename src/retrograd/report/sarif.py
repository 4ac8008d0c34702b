"""SARIF 2.1.0 of documents, as code scanning reads it: one run, a result an annotation that has a rule."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from urllib.parse import quote

from retrograd.core.document import Annotation, Document

_LEVELS = {"error": "error", "warning": "warning", "notice": "note"}
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def _version() -> str:
    try:
        return version("retrograd")
    except PackageNotFoundError:  # a source tree that is only on PYTHONPATH
        return ""


def to_sarif(documents: Iterable[Document]) -> str:
    """SARIF of all of them as one run, since code scanning takes one of a tool; what is accepted is suppressed."""
    remarks = [(remark, document.file) for document in documents for remark in document.annotations if remark.rule]
    rules = sorted({remark.rule for remark, _ in remarks})
    results = [_result(remark, file, rules) for remark, file in remarks]
    driver = {"name": "retrograd", "version": _version(), "rules": [{"id": rule} for rule in rules]}
    log = {"$schema": _SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}
    return json.dumps(log, indent=1) + "\n"


def _result(remark: Annotation, file: str, rules: list[str]) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": remark.rule,
        "ruleIndex": rules.index(remark.rule),
        "level": _LEVELS[remark.level],
        "message": {"text": f"{remark.title}: {remark.text}"},
        # The format wants them of every result of a run or of none.
        "suppressions": [{"kind": "external", "justification": remark.accepted}] if remark.accepted else [],
    }
    # Code scanning refuses a result without a line.
    place = re.fullmatch(r"(.+?):(\d+)(:.*)?", remark.place or f"{file}:1")
    if place:
        uri = quote(place[1]) if not place[1].startswith("/") else f"file://{quote(place[1])}"
        where = {"artifactLocation": {"uri": uri}, "region": {"startLine": max(int(place[2]), 1)}}
        result["locations"] = [{"physicalLocation": where}]
    return result
