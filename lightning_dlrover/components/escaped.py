"""Escape arguments so that they reach `dlrover run` unchanged through TorchX."""

__all__ = ["ESCAPED"]

ESCAPED = "--escaped"
"""First argument of `dlrover run` if all others are percent-encoded. Otherwise TorchX or its scheduler would expand parts of
them.
"""
