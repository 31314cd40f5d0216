"""Shows what happened in a job."""
