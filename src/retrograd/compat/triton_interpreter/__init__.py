"""Triton's interpreter: repairs it needs to give a GPU's results, speed-ups that change none, hooks on its memory."""
