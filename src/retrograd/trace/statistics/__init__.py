"""Statistics of tensors, where they live: one Triton kernel on a GPU, NumPy on CPU, torch operations elsewhere."""
