"""Embedding tables sharded over the workers: resharded when workers join or leave, restored from snapshots after a loss."""
