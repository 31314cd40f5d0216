"""A job's controller: it adds, replaces and ends nodes until the job is over."""
