"""Compiling CUDA C++ at first use and launching it, without any formula in it; importing this package loads nothing."""
