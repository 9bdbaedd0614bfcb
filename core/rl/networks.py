"""Actor, value and critic networks. Observations come in normalised: no module normalises by itself.

A network with `horizon` H > 1 also reads `steps_to_go` (int, 1..H) as a one-hot of width H behind its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from core.nn.mlp import MLP, Ensemble, scaled_normal

__all__ = [
    "Actor",
    "Critic",
    "Value",
    "ValueEnsemble",
    "add_steps_to_go",
    "apply_critic",
    "forward",
    "reset_log_std",
]

Array = jax.Array
Params = Mapping[str, Any]


def _append_steps_to_go(x: Array, steps_to_go: Array | None, horizon: int) -> Array:
    if horizon == 1:
        return x
    if steps_to_go is None:
        raise ValueError(f"a network with horizon={horizon} needs steps_to_go")
    one_hot = jax.nn.one_hot(steps_to_go - 1, horizon, dtype=x.dtype)
    return jnp.concatenate([x, jnp.broadcast_to(one_hot, (*x.shape[:-1], horizon))], axis=-1)


class Actor(nn.Module):
    """Tanh-Gaussian policy: observation `[..., D]` -> (mean, log_std) of the action before tanh, `[..., A]`.

    Attributes:
      action_size: A.
      features: hidden widths.
      log_std: "parameter" (one number per action dimension, as in PPO) or "head" (a network output).
      log_std_init: start value of the parameter, or offset of the head.
      log_std_range: values are clipped into it.
      train_log_std: False keeps log_std fixed in training (meant for "parameter").
      final_gain: gain of the last kernel; small means actions start near 0.
      horizon: H; above 1 `steps_to_go` `[...]` is an input.
    """

    action_size: int
    features: tuple[int, ...] = (256, 256)
    activation: Callable[[Array], Array] = nn.tanh
    layer_norm: bool = False
    log_std: Literal["parameter", "head"] = "parameter"
    log_std_init: float = -0.7
    log_std_range: tuple[float, float] = (-10.0, 2.0)
    train_log_std: bool = True
    final_gain: float = 0.01
    horizon: int = 1

    @nn.compact
    def __call__(self, observation: Array, steps_to_go: Array | None = None) -> tuple[Array, Array]:
        x = _append_steps_to_go(observation, steps_to_go, self.horizon)
        outputs = self.action_size * (2 if self.log_std == "head" else 1)
        x = MLP(
            (*self.features, outputs),
            self.activation,
            self.layer_norm,
            final_kernel_init=scaled_normal(self.final_gain),
            name="body",
        )(x)
        if self.log_std == "head":
            mean, log_std = jnp.split(x, 2, axis=-1)
            log_std = log_std + self.log_std_init
        else:
            mean = x
            log_std = self.param("log_std", nn.initializers.constant(self.log_std_init), (self.action_size,))
            log_std = jnp.broadcast_to(log_std, mean.shape)
        if not self.train_log_std:
            log_std = jax.lax.stop_gradient(log_std)
        return mean, jnp.clip(log_std, *self.log_std_range)


class Value(nn.Module):
    """State value: observation `[..., D]` -> `[...]`."""

    features: tuple[int, ...] = (256, 256)
    activation: Callable[[Array], Array] = nn.tanh
    layer_norm: bool = False
    final_gain: float = 0.01

    @nn.compact
    def __call__(self, observation: Array) -> Array:
        final = scaled_normal(self.final_gain)
        x = MLP((*self.features, 1), self.activation, self.layer_norm, final_kernel_init=final, name="body")
        return jnp.squeeze(x(observation), -1)


class ValueEnsemble(nn.Module):
    """Independent state values on one input: observation `[..., D]` -> `[ensemble, ...]`.

    Parameters are stacked on a leading ensemble axis.
    """

    ensemble: int = 2
    features: tuple[int, ...] = (128, 128)
    activation: Callable[[Array], Array] = nn.relu
    layer_norm: bool = True

    @nn.compact
    def __call__(self, observation: Array) -> Array:
        widths = (*self.features, 1)
        members = Ensemble(self.ensemble, widths, self.activation, self.layer_norm, name="ensemble")
        return jnp.squeeze(members(observation), -1)


class Critic(nn.Module):
    """Ensemble of action values: observation `[..., D]`, action `[..., A]` -> `[ensemble, ...]`.

    Parameters are stacked on a leading ensemble axis. `horizon` as in `Actor`.
    """

    ensemble: int = 2
    features: tuple[int, ...] = (256, 256)
    activation: Callable[[Array], Array] = nn.relu
    layer_norm: bool = True
    horizon: int = 1

    @nn.compact
    def __call__(self, observation: Array, action: Array, steps_to_go: Array | None = None) -> Array:
        x = self.join(observation, action, steps_to_go)
        x = Ensemble(self.ensemble, (*self.features, 1), self.activation, self.layer_norm, name="ensemble")(x)
        return jnp.squeeze(x, -1)

    def join(self, observation: Array, action: Array, steps_to_go: Array | None) -> Array:
        """The members' input, `[..., D + A (+ H)]`."""
        return _append_steps_to_go(jnp.concatenate([observation, action], axis=-1), steps_to_go, self.horizon)


def forward(module: nn.Module, params: Params, *inputs: Array | None) -> Any:
    """`module.apply` on inputs `[...]` for modules without mutable state, whose outputs alone come back."""
    return module.apply(params, *inputs)


def apply_critic(
    critic: Critic,
    params: Params | tuple[Params, ...],
    observation: Array,
    action: Array,
    steps_to_go: Array | None = None,
) -> Array:
    """Action values `[ensemble, ...]`, inputs as `Critic`.

    `params` may also be a tuple of members (`core.nn.split_members`), which are then evaluated one by one.
    """
    if not isinstance(params, tuple):
        return forward(critic, params, observation, action, steps_to_go)
    x = critic.join(observation, action, steps_to_go)
    mlp = MLP((*critic.features, 1), critic.activation, critic.layer_norm)
    members = [{"params": each["params"]["ensemble"]["members"]} for each in params]
    return jnp.stack([jnp.squeeze(forward(mlp, each, x), -1) for each in members])


def reset_log_std(params: Params, value: float | Array) -> Params:
    """Returns the variables of an `Actor(log_std="parameter")` with log_std = `value` (scalar or `[A]`)."""
    inner = dict(params["params"])
    inner["log_std"] = jnp.full_like(inner["log_std"], value)
    return {**params, "params": inner}


def add_steps_to_go(params: Params, horizon: int) -> Params:
    """Turns the variables of an `Actor(horizon=1)` into those of the same actor with `horizon` H inputs more.

    The new rows of the first kernel are 0, so the policy is the same function at every `steps_to_go`.
    Works on stacked parameters too (any leading axes).
    """
    if horizon == 1:
        return params
    inner = dict(params["params"])
    body = dict(inner["body"])
    kernel = body["Dense_0"]["kernel"]
    rows = jnp.zeros((*kernel.shape[:-2], horizon, kernel.shape[-1]), kernel.dtype)
    body["Dense_0"] = {**body["Dense_0"], "kernel": jnp.concatenate([kernel, rows], axis=-2)}
    inner["body"] = body
    return {**params, "params": inner}
