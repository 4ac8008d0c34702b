"""How fast the shipped ops are, beside torch and other libraries.

`rows`, `table` and `plot` read and show results and need no torch; `timing`, `providers`, `correct` and `norm`
measure.
"""
