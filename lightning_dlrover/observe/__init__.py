"""Measurements of steps, of the model and of a worker's resource use."""
