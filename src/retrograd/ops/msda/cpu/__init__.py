"""Deformable attention in C++ for the CPU, compiled at first use; importing this package compiles nothing."""

from retrograd.ops.msda.cpu.launch import msda_bwd, msda_fwd, why_not

__all__ = ["msda_bwd", "msda_fwd", "why_not"]
