"""The methods that GAA is compared with, each a `training.Method` of its own."""
