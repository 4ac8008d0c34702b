"""Ops that are timed, a file each: shapes, bytes that must move, providers, and the truth in float64."""
