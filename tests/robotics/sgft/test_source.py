"""What one stage hands to the other: V_sim frozen, refused where it is no potential, kept in a file."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.errors import UserError
from robotics.sgft import source as sources
from robotics.sgft.source import check_transfer, policy_action, sim_value


def test_v_sim_sees_observations_as_they_are_and_is_scaled_back(source, networks, lane, experience):
    one, observation = lane(source), experience.transition.observation[0]
    raw = networks.value.apply(one.value, observation).mean(axis=0)
    np.testing.assert_allclose(sim_value(one, observation, networks=networks), 0.5 + 2.0 * raw, rtol=1e-6)
    action = policy_action(one, observation, networks=networks)
    assert action.shape == (10, 2) and (jnp.abs(action) < 1).all()


def test_no_gradient_reaches_v_sim(source, networks, lane, experience):
    one, observation = lane(source), experience.transition.observation[0]

    def total(value, observation):
        return jnp.sum(sim_value(one.replace(value=value), observation, networks=networks))

    to_value, to_observation = jax.grad(total, argnums=(0, 1))(one.value, observation)
    chex.assert_trees_all_equal(to_value, jax.tree.map(jnp.zeros_like, to_value))
    assert (to_observation != 0).any()  # a planner may still follow it


def test_another_discount_or_observation_is_refused():
    check = functools.partial(check_transfer, value_size=8, observation_size=8)
    check(value_gamma=np.float32(0.97), gamma=0.97)
    message = (
        "V_sim was trained with gamma 0.97 but the real task uses gamma 0.99: the shaping would be wrong"
    )
    with pytest.raises(UserError, match=message):
        check(value_gamma=0.97, gamma=0.99)
    with pytest.raises(UserError, match="reads observations of size 8 but the real task gives 6"):
        check_transfer(value_gamma=0.9, gamma=0.9, value_size=8, observation_size=6)


@pytest.fixture
def stored(source, lane, tmp_path):
    sources.save(tmp_path / "simulation.npz", lane(source), reward="push")
    return tmp_path / "simulation.npz"


def read(path, networks, **changes):
    return sources.load(
        path, **{"networks": networks, "observation_size": 8, "gamma": 0.97, "reward": "push", **changes}
    )


def test_a_file_keeps_all_that_makes_the_potential(stored, source, lane, networks):
    chex.assert_trees_all_equal(read(stored, networks), lane(source).replace(simulated=None))


def test_a_file_that_does_not_fit_is_refused(stored, networks):
    with pytest.raises(UserError, match=r"trained with gamma 0\.97 but the real task uses gamma 0\.9:"):
        read(stored, networks, gamma=0.9)
    with pytest.raises(UserError, match=r"obs_stats/mean is float32\[8\] in the file and float32\[5\] in"):
        read(stored, networks, observation_size=5)
    with pytest.raises(UserError, match=r"trained with another reward than 'pull': the shaping would be"):
        read(stored, networks, reward="pull")
    with np.load(stored) as file:
        kept = {name: file[name] for name in file.files if not name.startswith("obs_stats")}
    np.savez(stored, **kept)
    with pytest.raises(UserError, match="missing: obs_stats/count, obs_stats/m2, obs_stats/mean"):
        read(stored, networks)
