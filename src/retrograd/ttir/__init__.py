"""Triton kernels without a GPU: the TTIR that a GPU would run, executed with NumPy for all programs at once."""
