"""Estimates the peak memory of a training process before its first step."""

from lightning_dlrover.observe.peak_memory.estimate import LoaderShape, MemoryEstimate, MemoryParts, Unknown, estimate_peak
from lightning_dlrover.observe.peak_memory.step import Step, step_of

__all__ = ["LoaderShape", "MemoryEstimate", "MemoryParts", "Step", "Unknown", "estimate_peak", "step_of"]
