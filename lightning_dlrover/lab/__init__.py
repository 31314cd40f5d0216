"""Studies of machines and policies: characterize a machine, simulate a cluster, evaluate the models on traces."""
