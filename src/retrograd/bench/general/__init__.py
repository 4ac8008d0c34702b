"""Ops of any kind beside each other: a person's own, and the sum over ranks. `rows` and `table` need no torch."""
