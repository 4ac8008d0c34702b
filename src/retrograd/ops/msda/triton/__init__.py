"""Triton kernels of deformable attention and their launchers; importing this package imports triton."""

from retrograd.ops.msda.triton.launch import msda_bwd, msda_fwd, recipe
from retrograd.ops.msda.triton.points_launch import recipe_of, sampled, sampled_bwd

__all__ = ["msda_bwd", "msda_fwd", "recipe", "recipe_of", "sampled", "sampled_bwd"]
