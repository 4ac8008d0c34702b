"""Compiling and loading C++ sources at first use, without any formula in it."""
