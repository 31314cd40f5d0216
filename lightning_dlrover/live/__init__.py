"""A fit that continues while workers join and leave."""
