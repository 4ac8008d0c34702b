"""JUnit XML of a document, as CI systems show it: a case each, one failure a finding."""

from __future__ import annotations

import re
from xml.etree import ElementTree as Xml

from retrograd.core.document import Suite, SuiteCase

# XML 1.0 has no way to write these, not even escaped.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(suite: Suite) -> str:
    """JUnit XML; a case that cannot be decided is an error, one that did not run is skipped."""
    states = [case.status for case in suite.cases]
    attributes = {
        "name": _plain(suite.name),
        "tests": str(len(states)),
        "failures": str(states.count("failed")),
        "errors": str(states.count("undecided")),
        "skipped": str(states.count("skipped")),
        "time": f"{suite.seconds:.3f}",
        "timestamp": suite.started,
    }
    root = Xml.Element("testsuites")
    element = Xml.SubElement(root, "testsuite", attributes)
    for case in suite.cases:
        _add(element, case, suite.classname)
    Xml.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + Xml.tostring(root, encoding="unicode") + "\n"


def _add(suite: Xml.Element, case: SuiteCase, classname: str) -> None:
    attributes = {"classname": _plain(classname), "name": case.name, "time": f"{case.seconds:.3f}"}
    element = Xml.SubElement(suite, "testcase", attributes)
    for kind, message, details in case.failures:
        failure = Xml.SubElement(element, "failure", {"type": kind, "message": _plain(message)})
        failure.text = _plain(details)
    if case.status == "skipped":
        Xml.SubElement(element, "skipped", {"message": _plain(case.reason)})
    if case.status == "undecided":
        Xml.SubElement(element, "error", {"type": "undecided", "message": _plain(case.reason)})
    if case.notes:
        Xml.SubElement(element, "system-out").text = _plain("\n".join(case.notes))


def _plain(text: str) -> str:
    return _FORBIDDEN.sub("?", text)
