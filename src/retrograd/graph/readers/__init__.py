"""Files -> graphs: which format it is, and the reader of that format."""

from __future__ import annotations
