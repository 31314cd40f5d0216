"""Where nodes run: this machine, Slurm, Kubernetes."""
