"""Bisection of a mismatch with a reference: the operators that need higher precision."""
