"""Forward of the norms over wide rows in CUDA C++, compiled at first use; importing this package compiles nothing."""

from retrograd.ops.norm.cuda.launch import WidePlan, fits_wide, norm_fwd_wide, plan_wide

__all__ = ["WidePlan", "fits_wide", "norm_fwd_wide", "plan_wide"]
