"""Shares of this machine for each node."""
