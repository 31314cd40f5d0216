"""Embedding tables that are sharded over the workers, and stay so while workers come and go."""
