"""How arguments reach `dlrover run` unchanged through TorchX."""

__all__ = ["ESCAPED"]

ESCAPED = "--escaped"
"""What follows this first argument of `dlrover run` is percent-encoded: others would take a part of it for theirs."""
