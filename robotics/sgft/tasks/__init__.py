"""The tasks of the sim-to-real experiments."""
