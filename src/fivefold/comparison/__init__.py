"""`fivefold compare`: train configurations alternately, and tabulate their throughput, scaling and loss.

Every run is one of `fivefold train`, in a folder of its own. No torch here: the workers import it.
"""
