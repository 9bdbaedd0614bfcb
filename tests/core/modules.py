"""Flax modules under jit: one compile in place of one per operation."""

import functools

import jax


@functools.partial(jax.jit, static_argnames="module")
def start(module, *inputs):
    """Variables of `module` for inputs like these, from key 0."""
    return module.init(jax.random.key(0), *inputs)


@functools.partial(jax.jit, static_argnames="module")
def run(module, variables, *inputs):
    """`module.apply`."""
    return module.apply(variables, *inputs)
