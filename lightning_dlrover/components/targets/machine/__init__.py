"""What each node gets of this machine."""
