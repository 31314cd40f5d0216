"""A job's controller: decides which nodes to add and to end."""
