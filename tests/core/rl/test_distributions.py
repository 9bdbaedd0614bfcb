import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from core.rl import distributions
from tests.core.rl.golden import GOLDEN, precision


@pytest.mark.parametrize("file", GOLDEN)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_golden_action_and_log_prob(file, dtype):
    with precision(file, dtype) as (golden, tolerance):
        mean, log_std = golden["sac_mu"], golden["sac_log_std"]
        action, pre_tanh = distributions.squash(golden["sac_eps"], mean, log_std)
        log_prob = distributions.log_prob(pre_tanh, mean, log_std)
        assert log_prob.dtype == dtype
        np.testing.assert_allclose(action, golden["sac_action"], **tolerance)
        np.testing.assert_allclose(log_prob, golden["sac_logp"], **tolerance)


def test_log_prob_stays_exact_where_tanh_saturates():
    u = jnp.array([[12.0], [-12.0], [40.0]])
    log_prob = distributions.log_prob(u, u, jnp.zeros_like(u))
    wide = np.asarray(u, np.float64)[:, 0]
    slope = np.log(4) - 2 * abs(wide) - 2 * np.log1p(np.exp(-2 * abs(wide)))
    np.testing.assert_allclose(log_prob, stats.norm.logpdf(0) - slope, rtol=1e-6)
    gradient = jax.grad(lambda u: distributions.log_prob(u, jnp.zeros(1), jnp.zeros(1)))(jnp.array([40.0]))
    np.testing.assert_allclose(gradient, -40.0 + 2.0, rtol=1e-6)


def test_density_of_the_action_integrates_to_one():
    action = jnp.linspace(-0.999999, 0.999999, 200_001)[:, None]
    pre_tanh = jnp.arctanh(action)
    density = jnp.exp(distributions.log_prob(pre_tanh, jnp.array([0.3]), jnp.array([-0.5])))
    np.testing.assert_allclose(np.trapezoid(density, action[:, 0]), 1.0, atol=1e-3)


def test_samples_follow_the_gaussian_and_the_mode_is_its_mean():
    mean, log_std = jnp.full((20_000, 2), 0.5), jnp.array([-1.0, 0.0])
    action, pre_tanh = distributions.sample(jax.random.key(0), mean, log_std)
    np.testing.assert_allclose(pre_tanh.std(0), jnp.exp(log_std), rtol=0.03)
    np.testing.assert_allclose(action, jnp.tanh(pre_tanh))
    np.testing.assert_allclose(distributions.mode(mean), np.tanh(0.5), rtol=1e-6)
    np.testing.assert_allclose(
        distributions.gaussian_log_prob(pre_tanh, mean, log_std),
        stats.norm.logpdf(pre_tanh, 0.5, np.exp(log_std)).sum(-1),
        rtol=1e-4,
        atol=1e-4,
    )


def test_entropy_is_the_expected_surprise():
    log_std = jnp.array([-1.0, 0.4])
    u = distributions.sample(jax.random.key(1), jnp.zeros((50_000, 2)), log_std)[1]
    surprise = -distributions.gaussian_log_prob(u, jnp.zeros(2), log_std).mean()
    np.testing.assert_allclose(distributions.gaussian_entropy(log_std), surprise, rtol=0.01)
