"""The kernel that measures tensors on a GPU."""
