"""Every operator of a training step with what its tensors held: NaN provenance, first divergence, precision."""

from retrograd.trace.record import Op, Stats, Trace

__all__ = ["Op", "Stats", "Trace"]
