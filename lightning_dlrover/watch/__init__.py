"""Detects workers that hang, stragglers and growing memory, and acts on them."""
