"""Measure where the training time of a DLRM goes on this machine, and describe the findings. See docs/lab/characterize.md."""
