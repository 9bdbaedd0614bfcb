"""Two stages: statistics of the inputs, then logistic regression by lax.scan: all an experiment may use."""

import functools
import time

import flax.struct
import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax

from core.check import Function
from core.errors import UserError
from core.run import Claim


class State(flax.struct.PyTreeNode):
    params: dict
    opt_state: optax.OptState
    rng: jax.Array


class Batches:
    """A data iterator with a position, in the manner of grain."""

    def __init__(self, size, batch):
        self.size, self.batch, self.position = size, batch, 0

    def __next__(self):
        self.position += 1
        return (np.arange(self.batch) * 7 + self.position * self.batch) % self.size

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]


def validate(config):
    if not 0 < config.optimizer.momentum < 1:
        raise UserError(f"config.optimizer.momentum is {config.optimizer.momentum}: between 0 and 1")


def apply(params, x):
    return x @ params["w"] + params["b"]


def example(config):
    return (jax.ShapeDtypeStruct((1, 3), jnp.float32),)


def dataset(seed):
    x = jax.random.normal(jax.random.key(seed), (512, 3))
    return x, (x @ jnp.array([1.0, -2.0, 0.5]) > 0).astype(jnp.float32)


def optimizer(config):
    return optax.sgd(config.optimizer.lr, config.optimizer.momentum, config.optimizer.nesterov)


def loss(params, x, y):
    return optax.sigmoid_binary_cross_entropy(apply(params, x), y).mean()


def make_block(config, updates=10):
    tx = optimizer(config)

    def update(state, batch):
        rng, key = jax.random.split(state.rng)
        noise = 0.01 * jax.random.normal(key, batch[0].shape)
        value, grads = jax.value_and_grad(loss)(state.params, batch[0] + noise, batch[1])
        step, opt_state = tx.update(grads, state.opt_state)
        return State(optax.apply_updates(state.params, step), opt_state, rng), value

    @functools.partial(jax.jit, donate_argnums=0)
    def block(state, x, y):
        return jax.lax.scan(lambda s, _: update(s, (x, y)), state, length=updates)

    return block


def init(config):
    params = {"w": jnp.zeros(3), "b": jnp.zeros(())}
    return State(params, optimizer(config).init(params), jax.random.key(config.seed))


def run(config, run):
    x, y = dataset(config.seed)

    def moments(state, i):
        part = x[i * 128 : (i + 1) * 128]
        run.log(i, {"mean": part.mean()}, group="moments")
        return {"sum": state["sum"] + np.asarray(part.sum(0)), "count": state["count"] + len(part)}

    total = run.loop(
        "moments",
        init=lambda: {"sum": np.zeros(3, np.float32), "count": 0},
        step=moments,
        total=4,
        checkpoint_every=2,
    )
    run.log(0, {"mean_norm": np.linalg.norm(total["sum"] / total["count"])}, group="between")

    block, batches = make_block(config), Batches(len(x), config.batch)

    def step(state, i):
        rows = next(batches)
        state, losses = block(state, x[rows], y[rows])
        run.log(10 * (i + 1), {"loss": losses.mean(), "position": batches.position}, group="train")
        time.sleep(config.pause)
        return state

    state = run.loop(
        "fit",
        init=lambda: init(config),
        step=step,
        total=config.iterations,
        checkpoint_every=config.checkpoint_every,
        iterator=batches,
        progress="fitting the line",
    )
    accuracy = float(((apply(state.params, x) > 0) == (y > 0.5)).mean())
    figure = matplotlib.figure.Figure()
    figure.subplots().plot(np.asarray(state.params["w"]))
    run.figure("weights", figure, "The fitted weights.")
    run.summary(
        claims=[Claim("accurate", "the line is found", accuracy, (accuracy - 0.1, 1.0), 0.95, ">=", 0.9)],
        metrics={"accuracy": accuracy, "w": state.params["w"]},
        seeds=[config.seed],
    )
    return {"accuracy": accuracy}


def load(config, run):
    state = run.restore("fit", init(config))
    if state is None:
        raise UserError(f"no checkpoint of fit in {run.workdir}: train first")
    return state.params, apply


def evaluate(config, run):
    params, predict = load(config, run)
    x, y = dataset(config.seed + 1)
    return {"accuracy": float(((predict(params, x) > 0) == (y > 0.5)).mean())}


def functions(config, mesh):
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def place(tree, sharding):
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)

    state = place(jax.eval_shape(functools.partial(init, config)), whole)
    x = place(jax.ShapeDtypeStruct((config.batch, 3), jnp.float32), rows)
    y = place(jax.ShapeDtypeStruct((config.batch,), jnp.float32), rows)
    return [
        Function("train", make_block(config), (state, x, y), 4, None),
        Function("evaluate", apply, (state.params, x), 4, 2.0 * 3 * config.batch),
    ]


def data(config):
    return [config.data] if config.data else []
