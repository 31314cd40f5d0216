"""The records of a job."""
