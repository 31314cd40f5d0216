"""Reports on what happened in a job."""
