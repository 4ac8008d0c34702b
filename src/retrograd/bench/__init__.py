"""How fast ops are, beside torch and other libraries.

`registry` says who offers what; `rows`, `spread`, `table`, `plot`, `compare` and `families` read and show results and
need no torch; `timing`, `cpu`, `deviation` and `harness` measure any op; `providers`, `correct` and `norm` the norms,
`msda` deformable attention, `general` anything else; `session` is what the command runs.
"""

from retrograd.bench.registry import register as register

__all__ = ["register"]
