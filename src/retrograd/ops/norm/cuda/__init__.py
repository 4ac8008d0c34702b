"""The norms over wide rows in CUDA C++, compiled at first use; importing this package compiles nothing."""

from retrograd.ops.norm.cuda.backward import norm_bwd_wide
from retrograd.ops.norm.cuda.forward import WidePlan, fits_wide, norm_fwd_wide, plan_wide

__all__ = ["WidePlan", "fits_wide", "norm_bwd_wide", "norm_fwd_wide", "plan_wide"]
