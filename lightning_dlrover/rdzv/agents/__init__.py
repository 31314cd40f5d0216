"""TorchElastic's side: rendezvous handler, rounds of agents, their c10d store."""
