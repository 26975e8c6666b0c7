"""`fivefold calibrate`: measure this machine, or learn from a finished run, and write the planner's hardware file."""
