"""Process groups that are formed and replaced within running workers."""
