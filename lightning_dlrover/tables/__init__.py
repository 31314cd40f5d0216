"""Embedding tables sharded over the workers, also while workers join and leave."""
