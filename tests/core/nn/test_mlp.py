import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.nn import MLP, Ensemble, scaled_normal, split_members, stack_members
from tests.core.modules import run, start


def test_an_ensemble_is_its_members_side_by_side():
    ensemble = Ensemble(3, (5, 4, 2), layer_norm=True)
    x = jax.random.normal(jax.random.key(0), (7, 6))
    params = start(ensemble, x)
    together = run(ensemble, params, x)
    members = split_members(params["params"]["members"], 3)
    alone = [run(MLP((5, 4, 2), layer_norm=True), {"params": member}, x) for member in members]
    assert together.shape == (3, 7, 2)
    np.testing.assert_allclose(together, jnp.stack(alone), rtol=1e-5, atol=1e-6)
    assert not np.allclose(together[0], together[1])


def test_split_then_stack_gives_the_tree_back():
    tree = {"a": jnp.arange(6.0).reshape(3, 2), "b": jnp.arange(3)}
    assert len(split_members(tree, 3)) == 3
    jax.tree.map(np.testing.assert_array_equal, stack_members(split_members(tree, 3)), tree)


@pytest.mark.parametrize("gain", [1.0, 0.01])
def test_kernels_start_with_variance_two_over_fan_in(gain):
    kernel = scaled_normal(gain)(jax.random.key(0), (400, 500), jnp.float32)
    np.testing.assert_allclose(kernel.std(), gain * np.sqrt(2 / 400), rtol=0.02)
    assert abs(kernel).max() > 3 * kernel.std()


def test_layer_norm_makes_the_output_blind_to_the_input_scale():
    x = jax.random.normal(jax.random.key(0), (4, 6))
    for layer_norm in (True, False):
        mlp = MLP((64, 1), layer_norm=layer_norm)
        params = start(mlp, x)
        same = np.allclose(run(mlp, params, 100 * x), run(mlp, params, 1000 * x), rtol=1e-3)
        assert same == layer_norm


def test_layer_norm_survives_a_large_common_offset():
    mlp = MLP((32, 1), layer_norm=True)
    x = jax.random.normal(jax.random.key(0), (4, 6)) + 1e4
    assert np.isfinite(run(mlp, start(mlp, x), x)).all()
