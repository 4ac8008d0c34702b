"""Repeating: sampled steps of a long run, in which each operator is executed once more and compared bit for bit."""
