"""A fit that goes on while workers join and leave."""
