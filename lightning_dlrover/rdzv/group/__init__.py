"""`World`: the process groups of a job's rounds, formed and replaced within running workers."""
