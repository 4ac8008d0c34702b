"""Comparison of two graphs: values are numbered, nodes matched, and what differs is found by kind (`compare`)."""
