"""The `dlrover` command."""
