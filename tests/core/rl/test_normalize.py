import jax
import jax.numpy as jnp
import numpy as np

from core.rl import normalize


def test_pieces_merge_to_the_statistics_of_the_whole():
    x = np.random.default_rng(0).normal([3.0, -200.0], [0.5, 7.0], (1000, 2)).astype(np.float32)
    stats = normalize.init(2)
    for piece in np.split(x, [1, 10, 400]):
        stats = normalize.update(stats, piece)
    np.testing.assert_allclose(stats.count, 1000)
    np.testing.assert_allclose(stats.mean, x.mean(0), rtol=1e-5)
    np.testing.assert_allclose(stats.m2 / stats.count, x.var(0), rtol=1e-4)
    seen = normalize.apply(stats, x)
    np.testing.assert_allclose(seen.mean(0), 0, atol=1e-3)
    np.testing.assert_allclose(seen.std(0), 1, rtol=1e-3)


def test_a_small_spread_on_a_large_offset_survives_float32():
    x = 1e4 + np.random.default_rng(0).normal(0, 0.1, (64, 100, 1)).astype(np.float64)
    stats = normalize.init(1)
    for piece in x.astype(np.float32):
        stats = normalize.update(stats, piece)
    np.testing.assert_allclose(stats.m2 / stats.count, x.astype(np.float32).astype(float).var(), rtol=0.02)


def test_leading_axes_are_all_samples_and_outliers_are_clipped():
    x = jax.random.normal(jax.random.key(0), (4, 5, 6, 2))
    stats = normalize.update(normalize.init(2), x)
    assert stats.count == 120
    assert normalize.apply(stats, x).shape == x.shape
    np.testing.assert_array_equal(normalize.apply(stats, jnp.full((1, 2), 1e9), clip=5.0), 5.0)


def test_no_samples_and_one_sample_divide_by_one():
    np.testing.assert_allclose(normalize.apply(normalize.init(1), jnp.array([3.0])), 3.0)
    once = normalize.update(normalize.init(1), jnp.array([[2.0]]))
    np.testing.assert_allclose(normalize.apply(once, jnp.array([3.0])), 1.0)


def test_works_per_lane_under_vmap():
    x = jax.random.normal(jax.random.key(0), (3, 50, 2)) * jnp.array([1.0, 2.0, 3.0])[:, None, None]
    lanes = jax.vmap(lambda x: normalize.update(normalize.init(2), x))(x)
    np.testing.assert_allclose(lanes.mean, x.mean(1), rtol=1e-4, atol=1e-6)
