"""Several jobs on one machine, side by side (docs/colocation.md)."""
