"""Unsupported scripts and arguments, refused when the Trainer starts."""
