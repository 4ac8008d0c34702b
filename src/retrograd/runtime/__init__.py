"""Compiling, loading and launching kernels, without any formula; importing this package loads nothing."""
