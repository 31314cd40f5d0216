"""Simulate a cluster of elastic jobs: traces, policies and costs of a resize, one simulation for each combination."""
