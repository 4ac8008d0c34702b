"""`retrograd env` without its command line: python -m retrograd.env [--json]."""

from __future__ import annotations

import json
import sys

from retrograd.env import survey
from retrograd.env.text import as_text

record = survey()
print(json.dumps(record, indent=1) if "--json" in sys.argv[1:] else as_text(record))
