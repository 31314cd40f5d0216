"""Targets, the places where nodes run: this machine, Slurm, Kubernetes."""
