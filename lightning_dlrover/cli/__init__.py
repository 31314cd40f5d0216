"""The `dlrover` command: its parser, its commands, and their shared options."""
