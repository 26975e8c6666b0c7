"""`fivefold calibrate`: what this machine does in a second, measured, as the planner's hardware file; and what a
finished run says of it."""
