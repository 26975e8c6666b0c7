"""`fivefold compare`: configurations trained by turns, and one table of their throughput, scaling and loss.

Every run is that of `fivefold train`, in a folder of its own. No torch here: the workers import it.
"""
