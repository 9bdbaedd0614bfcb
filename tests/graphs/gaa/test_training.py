"""Every method's run under jit, vmap, pmap and on a mesh; a scan is its blocks; it lowers elsewhere."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from core import config as configs
from core.mesh import make_mesh
from graphs.gaa import rows, training
from tests.graphs.gaa import small

CONFIG = configs.load("configs/gaa.py:smoke")[0]
# Those that compile for long, or are like another one in what is tested here, run with the slow tests.
NAMES = tuple(
    name if name in ("gaa", "strurw") else pytest.param(name, marks=pytest.mark.slow) for name in CONFIG.rows
)
LANES = 8


@functools.cache
def problem():
    return small.pair()


@functools.cache
def made(name):
    return rows.make(CONFIG.rows[name], classes=small.CLASSES, hidden=4)


@functools.cache
def program(name):
    row = made(name)
    return functools.partial(training.train, method=row.method, steps=4, score_every=2, classes=small.CLASSES)


def arguments(name, lanes=None):
    source, target = problem()
    labelled = jnp.arange(12) % 4 > 0
    key = jax.random.key(0) if lanes is None else jax.random.split(jax.random.key(0), lanes)
    return key, source, target, labelled, made(name).hyper


@functools.cache
def many(name):
    fn = jax.jit(jax.vmap(program(name), (0, None, None, None, None)))
    return jax.device_get(numbers(fn(*arguments(name, LANES))))


def numbers(result):
    """Scores and losses: parameters whose gradient is rounding alone are left to Adam's whim."""
    return result[1]


def close(actual, expected, rtol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-5), actual, expected)


@pytest.mark.parametrize("name", NAMES)
def test_lanes_of_a_vmap_are_single_runs(name):
    keys, *rest = arguments(name, LANES)
    single = jax.jit(program(name))
    for i in (0, 5):
        found = jax.device_get(numbers(single(keys[i], *rest)))
        close(found, jax.tree.map(lambda leaf, i=i: leaf[i], many(name)))


@pytest.mark.parametrize("name", NAMES)
def test_lanes_on_eight_devices_equal_one(name):
    mesh = make_mesh({"data": 8, "fsdp": 1, "tensor": 1})
    keys, *rest = arguments(name, LANES)
    fn = jax.jit(jax.vmap(program(name), (0, None, None, None, None)))
    keys = jax.device_put(keys, NamedSharding(mesh, P("data")))
    rest = jax.device_put(rest, NamedSharding(mesh, P()))
    close(jax.device_get(numbers(fn(keys, *rest))), many(name))


@pytest.mark.parametrize("name", ["gaa"])
def test_pmap(name):
    keys, *rest = arguments(name, LANES)
    fn = jax.pmap(program(name), in_axes=(0, None, None, None, None))
    close(jax.device_get(numbers(fn(keys, *rest))), many(name))


@pytest.mark.parametrize("name", NAMES)
def test_blocks_one_by_one_are_the_whole_run(name):
    key, source, target, labelled, hyper = arguments(name)
    row = made(name)
    init_key, run_key = jax.random.split(key)
    state = training.TrainState(row.method.init(init_key, source, target), jnp.int32(0), run_key)
    options = {"source": source, "target": target, "labelled": labelled, "hyper": hyper}
    block = jax.jit(
        functools.partial(training.advance, method=row.method, steps=4, n=2, classes=small.CLASSES)
    )
    state, first = block(state, **options)
    state, second = block(state, **options)
    whole = jax.jit(program(name))(key, source, target, labelled, hyper)
    close(jax.tree.map(lambda a, b: jnp.stack([a, b]), first, second), whole[1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_a_run_lowers_for_accelerators(name, platform):
    fn = jax.jit(jax.vmap(program(name), (0, None, None, None, None)))
    keys, *rest = arguments(name, 2)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (keys, *rest))
    assert export.export(fn, platforms=[platform])(*shapes).platforms == (platform,)


@pytest.mark.parametrize("name", NAMES)
def test_training_fits_the_source(name):
    key, source, target, _, hyper = arguments(name)
    everyone = jnp.ones(12, bool)
    changes = {"lr": 0.03, "dropout": 0.0, "weight": 0.1}
    hyper = hyper | {key: jnp.float32(value) for key, value in changes.items() if key in hyper}
    train = functools.partial(training.train, method=made(name).method, steps=80, score_every=40)
    _, (_, metrics) = jax.jit(functools.partial(train, classes=small.CLASSES))(
        key, source, target, everyone, hyper
    )
    assert metrics["source_loss"][-1] < 0.7 * np.log(small.CLASSES)


def test_weight_decay_joins_the_gradient():
    learner = training.Learner({"w": jnp.array([2.0])}, training._adam.init({"w": jnp.array([2.0])}))
    found = training.adam(learner, {"w": jnp.array([0.0])}, lr=0.1, weight_decay=0.5)
    np.testing.assert_allclose(found.params["w"], [1.9], rtol=1e-5)  # Adam's first step has length lr
