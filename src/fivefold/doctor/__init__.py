"""`fivefold doctor`: findings about this machine, and about how a model would be parallelized."""
