"""The learned model of the model-based SGFT: an ensemble of small networks that predict the next observation.

Everything is for one lane (seed); parameters, batches, keys and learning rates may be `vmap`ped over more.
Members are stacked on the leading axis `E` of every parameter. A network is a description, static under jit.

On CPU a rollout runs near the machine's peak while its rows (lanes * members * candidates) number a few
thousand, and four times slower beyond, when activations leave the cache: `lax.map` over states then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax

from core.errors import UserError
from core.nn.mlp import MLP, scaled_normal

__all__ = [
    "Dynamics",
    "DynamicsState",
    "elites",
    "gaussian_nll",
    "init",
    "layer_norm_affine",
    "loss",
    "member_losses",
    "predict",
    "rollout_step",
    "soft_clamp",
    "train_block",
    "train_step",
]

Array = jax.Array
Params = Any
_adam = optax.scale_by_adam()


class Dynamics(nn.Module):
    """One member: observation `[..., O]`, action `[..., A]` -> change of the observation in units of `scale`.

    Returns (mean `[..., O]`, log variance `[..., O]` or, if not probabilistic, None).

    Attributes:
      scale: O numbers, the typical size of one step's change of each observation.
      hidden: widths of the hidden layers.
      activation: elementwise function.
      layer_norm: LayerNorm without scale and bias before each activation.
      probabilistic: predict a variance as well, and train by likelihood instead of squared error.
      log_var_bounds: soft limits of the log variance (where the learned ones start).
      learned_bounds: train the limits, one pair for each observation.
      adapter: hidden widths of a network that turns a real action into the simulated one of the same effect,
        given the observation; () has none. With it, an action ends in one more number: 1 real, 0 simulated.
    """

    scale: tuple[float, ...]
    hidden: tuple[int, ...] = (128, 128)
    activation: Callable[[Array], Array] = nn.relu
    layer_norm: bool = True
    probabilistic: bool = False
    log_var_bounds: tuple[float, float] = (-10.0, 0.5)
    learned_bounds: bool = False
    adapter: tuple[int, ...] = ()

    @nn.compact
    def __call__(self, observation: Array, action: Array) -> tuple[Array, Array | None]:
        size = len(self.scale)
        if observation.shape[-1] != size:
            raise UserError(
                f"observations have {observation.shape[-1]} numbers, but the dynamics' scale has {size}"
            )
        if self.adapter:
            # Robot and simulator differ mostly in what an action does. Correcting the action keeps what
            # simulation taught about contact in force; correcting the outcome would not.
            action, real = action[..., :-1], action[..., -1:]
            widths, small = (*self.adapter, action.shape[-1]), scaled_normal(0.01)
            shift = MLP(widths, nn.tanh, final_kernel_init=small, name="adapter")
            action = action + real * shift(jnp.concatenate([observation, action], axis=-1))
        x = jnp.concatenate([observation, action], axis=-1)
        for layer, width in enumerate(self.hidden):
            kernel, bias = self._affine(f"hidden_{layer}", x.shape[-1], width, scaled_normal())
            x = layer_norm_affine(x, kernel, bias) if self.layer_norm else x @ kernel + bias
            x = self.activation(x)
        outputs = 2 * size if self.probabilistic else size
        kernel, bias = self._affine("output", x.shape[-1], outputs, nn.initializers.lecun_normal())
        x = x @ kernel + bias
        if not self.probabilistic:
            return x, None
        low, high = self.log_var_bounds
        if self.learned_bounds:
            low = self.param("min_log_var", nn.initializers.constant(low), (size,))
            high = self.param("max_log_var", nn.initializers.constant(high), (size,))
        return x[..., :size], soft_clamp(x[..., size:], low, high)

    def _affine(self, name, inputs, outputs, kernel_init):
        kernel = self.param(f"{name}_kernel", kernel_init, (inputs, outputs))
        return kernel, self.param(f"{name}_bias", nn.initializers.zeros, (outputs,))


class DynamicsState(flax.struct.PyTreeNode):
    """Parameters (leaves `[E, ...]`) and Adam's moments: all that training changes."""

    params: Params
    opt_state: optax.OptState


def init(key: Array, *, network: Dynamics, action_size: int, members: int = 3) -> DynamicsState:
    """Fresh parameters for `members` networks, each from its own key (leaves `[members, ...]`)."""
    example = jnp.zeros(len(network.scale)), jnp.zeros(action_size)
    params = jax.vmap(lambda k: network.init(k, *example))(jax.random.split(key, members))
    return DynamicsState(params, _adam.init(params))


def rollout_step(params: Params, observation: Array, action: Array, *, network: Dynamics) -> Array:
    """Each member's next observation on its own branch: the step of a model rollout.

    Args:
      params: leaves `[E, ...]`.
      observation: `[E, ..., O]`, the branch of each member.
      action: `[..., A]` in [-1, 1], the same for all members.

    Returns:
      `[E, ..., O]` expected next observations.
    """

    def member(params, observation):
        change, _ = network.apply(params, observation, action)
        return observation + change * jnp.asarray(network.scale, change.dtype)

    return jax.vmap(member)(params, observation)


def predict(params: Params, observation: Array, action: Array, *, network: Dynamics) -> Array:
    """Every member's next observation `[E, ..., O]` from one `observation [..., O]` and `action [..., A]`."""
    members = jax.tree.leaves(params)[0].shape[0]
    shared = jnp.broadcast_to(observation, (members, *observation.shape))
    return rollout_step(params, shared, action, network=network)


def layer_norm_affine(x: Array, kernel: Array, bias: Array, *, epsilon: float = 1e-6) -> Array:
    """LayerNorm without scale and bias of x @ kernel + bias: `[..., I]` -> `[..., W]`.

    Centring the weights centres the output, and a product with ones sums the squares: the row reductions that
    this avoids are not vectorised by XLA on CPU.
    """
    x = x @ (kernel - kernel.mean(axis=-1, keepdims=True)) + (bias - bias.mean())
    ones = jnp.full((x.shape[-1], 1), 1 / x.shape[-1], x.dtype)
    return x * jax.lax.rsqrt(jnp.dot(jnp.square(x), ones, precision="highest") + epsilon)


def soft_clamp(raw: Array, low: Array | float, high: Array | float) -> Array:
    """Bounds `raw [...]` smoothly to about (low, high): first from above, then from below, by softplus."""
    capped = high - jax.nn.softplus(high - raw)
    return low + jax.nn.softplus(capped - low)


def gaussian_nll(x: Array, mean: Array, log_var: Array) -> Array:
    """sum_dims (x - mean)^2 exp(-log_var) + log_var, no factor 1/2 and no constant: `[..., D]` -> `[...]`."""
    return jnp.sum(jnp.square(x - mean) * jnp.exp(-log_var) + log_var, axis=-1)


def member_losses(params: Params, batch: Any, *, network: Dynamics) -> Array:
    """Mean error of each member: squared error per observation number, or `gaussian_nll` if probabilistic.

    Args:
      params: leaves `[E, ...]`.
      batch: anything with `observation`, `action`, `next_observation`, such as core.rl.replay.Transition;
        leaves `[B, ...]` for all members, or `[E, B, ...]` with a batch for each.

    Returns:
      `[E]` losses in units of `network.scale`.
    """

    def member(params, observation, action, next_observation):
        change = (next_observation - observation) / jnp.asarray(network.scale, observation.dtype)
        mean, log_var = network.apply(params, observation, action)
        if log_var is None:
            return jnp.mean(jnp.square(change - mean))
        return jnp.mean(gaussian_nll(change, mean, log_var))

    axis = 0 if batch.observation.ndim == 3 else None
    return jax.vmap(member, (0, axis, axis, axis))(
        params, batch.observation, batch.action, batch.next_observation
    )


def loss(params: Params, batch: Any, *, network: Dynamics, bound_penalty: float = 0.01) -> Array:
    """Sum `[]` of `member_losses`: no member's gradient depends on how many there are.

    Learned bounds add bound_penalty * sum(max_log_var - min_log_var). Batch `[B, ...]` or `[E, B, ...]`.
    """
    total = jnp.sum(member_losses(params, batch, network=network))
    if network.probabilistic and network.learned_bounds:
        bounds = params["params"]
        total += bound_penalty * jnp.sum(bounds["max_log_var"] - bounds["min_log_var"])
    return total


def train_step(
    state: DynamicsState, batch: Any, lr: Array | float, *, network: Dynamics
) -> tuple[DynamicsState, dict[str, Array]]:
    """One Adam step (Kingma & Ba, 2015) of every member with learning rate `lr []`; batch as `member_losses`.

    Returns:
      the new state and {"dynamics_loss": `[]` mean over members, before the step}.
    """
    members = jax.tree.leaves(state.params)[0].shape[0]
    value, gradient = jax.value_and_grad(loss)(state.params, batch, network=network)
    updates, opt_state = _adam.update(gradient, state.opt_state)
    params = jax.tree.map(lambda p, u: p - lr * u, state.params, updates)
    return DynamicsState(params, opt_state), {"dynamics_loss": value / members}


def train_block(
    state: DynamicsState,
    key: Array,
    sample: Callable[[Array], Any],
    lr: Array | float,
    *,
    network: Dynamics,
    n: int,
    own_batches: bool = False,
) -> tuple[DynamicsState, dict[str, Array]]:
    """`n` training steps in one scan.

    Args:
      sample: key -> batch with leaves `[B, ...]`; mixing real with simulated transitions is its business.
      lr: `[]` learning rate.
      n: number of steps, static.
      own_batches: draw a batch for each member instead of one for all.

    Returns:
      state and metrics averaged over the block.
    """
    members = jax.tree.leaves(state.params)[0].shape[0]

    def step(state, key):
        batch = jax.vmap(sample)(jax.random.split(key, members)) if own_batches else sample(key)
        return train_step(state, batch, lr, network=network)

    state, metrics = jax.lax.scan(step, state, jax.random.split(key, n))
    return state, jax.tree.map(jnp.mean, metrics)


def elites(params: Params, holdout: Any, count: int, *, network: Dynamics) -> Params:
    """Parameters `[count, ...]` of the members with the lowest loss on the `holdout` batch, best first."""
    best = jnp.argsort(member_losses(params, holdout, network=network))[:count]
    return jax.tree.map(lambda leaf: leaf[best], params)
