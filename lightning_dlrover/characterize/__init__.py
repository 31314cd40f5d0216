"""Measure where the training time of a DLRM goes on this machine, and what that means. See docs/characterize.md."""
