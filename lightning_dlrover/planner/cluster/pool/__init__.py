"""Sizes of the jobs that share a budget, decided again and again while jobs come, learn and go. Pure."""
