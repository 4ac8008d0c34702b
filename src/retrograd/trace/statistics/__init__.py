"""What is counted of a tensor, where it lives: one Triton kernel on a GPU, torch operations elsewhere."""
