"""Statistics of tensors, where they live: one Triton kernel on a GPU, NumPy on the CPU for all else."""
