"""Escape arguments so that they reach `dlrover run` unchanged through TorchX."""

__all__ = ["ESCAPED"]

ESCAPED = "--escaped"
"""First argument of `dlrover run` if all others are percent-encoded, which keeps schedulers from expanding parts of them."""
