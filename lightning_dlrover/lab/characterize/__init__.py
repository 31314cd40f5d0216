"""Measure where the training time of a DLRM goes on this machine, and put it into words. See docs/lab/characterize.md."""
