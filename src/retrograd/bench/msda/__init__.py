"""The benchmark of multi-scale deformable attention: `shapes`, `rows`, `earlier` and `table` need no torch."""
