"""Jobs on clusters: one description of a job, and a file an engine that writes it in that engine's words. No torch."""
