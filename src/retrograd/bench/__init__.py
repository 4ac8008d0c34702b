"""How fast the shipped ops are, beside torch and other libraries.

`rows`, `table` and `plot` read and show results and need no torch; `timing`, `deviation` and `harness` measure any op,
`providers`, `correct` and `norm` the norms, `msda` deformable attention.
"""
