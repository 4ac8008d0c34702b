"""Workflow commands of GitHub Actions: the annotations of a document, one a line."""

from __future__ import annotations

from retrograd.core.document import Annotation, Document


def to_github(document: Document) -> str:
    """One line an annotation."""
    return "".join(f"{_command(annotation)}\n" for annotation in document.annotations)


def _command(annotation: Annotation) -> str:
    file, _, line = annotation.place.rpartition(":")
    properties = {"file": file, "line": line} if file else {}
    text = ",".join(f"{k}={_escaped(v, property=True)}" for k, v in {**properties, "title": annotation.title}.items())
    return f"::{annotation.level} {text}::{_escaped(annotation.text)}"


def _escaped(text: str, *, property: bool = False) -> str:
    for char, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A"), *(((":", "%3A"), (",", "%2C")) if property else ())):
        text = text.replace(char, code)
    return text
