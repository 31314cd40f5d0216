"""Learn from measurements: samples, plans, and a history for later jobs."""
