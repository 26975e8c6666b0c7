"""The planner: prices and ranks layouts, with hardware as data."""
