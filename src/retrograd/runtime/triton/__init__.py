"""Parts that every Triton op of this package needs around a launch; no kernels."""
