"""Read a finished or running job, and report it: as a timeline, as text, and as one HTML page."""
