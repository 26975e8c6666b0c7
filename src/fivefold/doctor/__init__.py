"""What `fivefold doctor` finds: about this machine, and about how a model would be parallelized."""
