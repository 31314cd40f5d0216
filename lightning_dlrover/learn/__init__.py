"""Turns measurements into samples, plans and a history for later jobs."""
