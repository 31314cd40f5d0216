"""Measurements of steps, of the model and of what a worker uses."""
