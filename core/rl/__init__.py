"""Reinforcement learning as pure functions of one lane (seed): `vmap` them for more."""
