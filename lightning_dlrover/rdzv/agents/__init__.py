"""The elastic agents of torchrun: rendezvous handler, rounds of agents, their c10d store."""
