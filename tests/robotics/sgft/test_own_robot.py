"""`finetune.fit` on systems of one's own: what is sent, what comes back, and what is refused."""

import functools
import json
import logging

import flax.linen as nn
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from core import export
from core.errors import NonFiniteError, UserError
from core.rl import normalize
from core.rl.networks import Actor
from core.run import Run
from robotics.sgft import finetune
from robotics.sgft.gymnasium_robot import GymnasiumRobot, command
from robotics.sgft.own_robot import InMemory, Policy

SMALL = {"features": (8,), "batch": 8, "utd": 1, "policy_delay": 1, "warmup_steps": 5, "prefit_updates": 4}
PLANNING = {"members": 2, "hidden": (8,), "candidates": 8, "pretrain_updates": 4, "updates": 2}


class Cart:
    """A point on a line with Gymnasium's interface, and nothing more; episodes of 7 steps; remembers all."""

    def __init__(self, low=-2.0, high=3.0):
        self.action_space = gymnasium.spaces.Box(low, high, (1,), np.float32)
        self.sent, self.seeds = [], []

    def reset(self, *, seed=None):
        self.seeds.append(seed)
        self.count, self.state = 0, np.array([0.5, 0.0])
        return self.state, {}

    def step(self, action):
        self.sent.append(np.array(action))
        self.count += 1
        self.state = np.clip(self.state + 0.1 * np.array([self.state[1], action[0]]), -1, 1)
        return self.state, -abs(self.state[0]), False, self.count == 7, {}


def value(observation):
    return -np.abs(observation[..., 0])


def reward(observation):
    return -jnp.abs(observation[..., 0])


@pytest.fixture(scope="module")
def policy():
    actor = Actor(1, (8,), nn.tanh, final_gain=3.0)
    variables = jax.jit(actor.init)(jax.random.key(0), np.zeros((1, 2)))
    return Policy(actor, variables, normalize.update(normalize.init(2), np.array([[-1.0, -1.0], [1.0, 1.0]])))


@pytest.fixture(scope="module")
def simulated():
    rng = np.random.default_rng(0)
    observation = rng.uniform(-1, 1, (50, 2))
    action = rng.uniform(-1, 1, (50, 1))
    reached = observation + 0.1 * np.concatenate([observation[:, 1:], action], axis=1)
    return {
        "observation": observation,
        "action": action,
        "reward": value(reached),
        "next_observation": reached,
        "terminated": np.zeros(50, bool),
    }


@pytest.fixture(scope="module")
def adapted(policy, simulated, tmp_path_factory):
    """SGFT-SAC with a window of 3 on the cart, recorded: (result, cart, workdir)."""
    cart, workdir = Cart(), tmp_path_factory.mktemp("own") / "run"
    run = Run(ConfigDict({"name": "cart", "mesh": {"data": -1}}), workdir, quiet=True)
    options = {"gamma": 0.9, "steps": 20, "block": 10, "horizon": 3, "settings": SMALL}
    result = finetune.fit(
        cart, policy, value, value_gamma=0.9, limits=(-0.5, 0.1), simulated=simulated, run=run, **options
    )
    run.close()
    return result, cart, workdir


def test_nothing_is_sent_outside_the_limits(adapted):
    _, cart, _ = adapted
    assert len(cart.sent) == 20
    sent = np.concatenate(cart.sent).astype(np.float64)
    assert (sent >= -0.5).all() and (sent <= 0.1).all()
    assert sent.max() == np.nextafter(np.float32(0.1), np.float32(0))  # the policy wanted more


def test_episodes_are_seeded_once_and_their_returns_kept(adapted):
    result, cart, _ = adapted
    assert cart.seeds[0] is not None and cart.seeds[1:] == [None, None]
    assert result.steps == 20 and len(result.episode_returns) == 2
    assert all(-7 < total < 0 for total in result.episode_returns)


def test_a_recorded_run_has_metrics_and_a_checkpoint(adapted):
    *_, workdir = adapted
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [10, 20] and "finetune/critic_loss" in records[0]
    assert (workdir / "checkpoints" / "finetune" / "2").is_dir()


def test_the_policy_serves_single_and_many_observations(adapted):
    result, *_ = adapted
    many = np.random.default_rng(1).uniform(-1, 1, (6, 2))
    actions = result.policy(many)
    assert actions.shape == (6, 1) and result.policy(many[0]).shape == (1,)
    np.testing.assert_allclose(result.policy(many[0]), actions[0], rtol=1e-6)
    assert (actions >= -0.5).all() and (actions <= 0.1).all()


def test_the_policy_exports_without_its_data(adapted, tmp_path):
    result, *_ = adapted
    many = np.random.default_rng(2).uniform(-1, 1, (4, 2)).astype(np.float32)
    exported = export.load(result.export(tmp_path / "policy"))
    np.testing.assert_allclose(exported(many), result.policy(many), rtol=1e-6)
    with np.load(tmp_path / "policy" / "params.npz") as file:
        assert sum(file[name].size for name in file.files) < 150  # no replay, no simulated data


def test_planning_on_a_gymnasium_environment(tmp_path):
    actor = Actor(1, (8,))
    variables = actor.init(jax.random.key(0), np.zeros((1, 3)))
    rng = np.random.default_rng(0)
    seen = rng.uniform(-1, 1, (30, 3))
    rows = {"observation": seen, "next_observation": seen + 0.1, "action": rng.uniform(-1, 1, (30, 1))}
    result = finetune.fit(
        gymnasium.make("Pendulum-v1"),
        (actor, variables),
        lambda observation: observation[..., 0],
        gamma=0.9,
        steps=20,
        block=10,
        horizon=2,
        method="model_based",
        reward=lambda observation: observation[..., 0],
        simulated={**rows, "reward": np.zeros(30), "terminated": np.zeros(30)},
        settings={**PLANNING, "real_batch": 8, "sim_batch": 8, "pretrain_batch": 8},
        stop=lambda steps, state: steps == 13,
    )
    assert result.steps == 13
    torque = result.policy(seen)
    assert torque.shape == (30, 1) and (np.abs(torque) <= 2).all() and np.abs(torque).max() > 1
    exported = export.load(result.export(tmp_path / "policy"))
    np.testing.assert_allclose(exported(seen.astype(np.float32)), torque, rtol=1e-5)


def rows(n=4, **changes):
    ends = {name: np.zeros((n, 2)) for name in ("observation", "next_observation")}
    columns = {**ends, "action": np.zeros((n, 1)), "reward": np.zeros(n), "terminated": np.zeros(n)}
    return {"simulated": columns | changes}


REFUSED = {
    "gamma": (
        {"value_gamma": 0.97},
        r"V_sim was trained with gamma 0\.97 but the real task uses gamma 0\.9: the shaping would be wrong",
    ),
    "horizon": ({"horizon": 0}, r"the window H \(horizon\) must be at least 1, not 0"),
    "steps": ({"steps": 15}, "steps=15 is not a positive multiple of block=10"),
    "method": ({"method": "model-based"}, "method is 'model-based'; did you mean 'model_based'"),
    "range": ({"settings": {"batch": 0}}, "setting batch must be a whole number, 1 or more, not 0"),
    "fraction": ({"settings": {"utd": 1.5}}, "setting utd must be a whole number, 1 or more, not 1.5"),
    "delay": ({"settings": {"policy_delay": 3}}, r"block \* utd = 40 is not a multiple of policy_delay = 3"),
    "block": ({"block": 0}, "steps=20 is not a positive multiple of block=0"),
    "setting": ({"settings": {"batchsize": 1}}, "no setting 'batchsize'; did you mean 'batch'"),
    "no reward": ({"method": "model_based"}, "SGFT-MB needs reward=, .* and simulated= transitions"),
    "a column": ({"simulated": {"observation": 0}}, "lack action, reward, next_observation, terminated"),
    "no rows": (rows(n=0), r"simulated\['observation'\] has shape \(0, 2\), but \(1, 2\) is needed"),
    "a width": (rows(action=np.zeros((4, 2))), r"simulated\['action'\] has shape \(4, 2\), but \(4, 1\)"),
    "a length": (rows(terminated=np.zeros(3)), r"simulated\['terminated'\] has shape \(3,\), but \(4,\)"),
    "a NaN": (rows(reward=np.full(4, np.nan)), r"simulated\['reward'\] has numbers that are not finite"),
    "limits": ({"limits": (-0.5, 9.0)}, r"limits \[-0\.5\] \.\. \[9\.\] are no range inside the env's"),
    "no range": ({"limits": (1.0, 1.0)}, "are no range inside"),
    "value's input": (
        {"value": lambda observation: observation @ np.ones(3)},
        "V_sim does not take observations of size 2, .* trained on what the robot can observe",
    ),
    "value's output": (
        {"value": lambda observation: observation},
        r"maps observations \(1, 2, 2\) to \(1, 2, 2\)",
    ),
    "untraceable": (
        {"method": "model_based", "value": lambda o: np.abs(o[..., 0]).astype(float), "reward": reward},
        "SGFT-MB plans through V_sim, so JAX must be able to trace it",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_work_is_refused_before_the_robot_moves(case, policy, simulated):
    changes, message = REFUSED[case]
    cart = Cart()
    options = {"value": value, "gamma": 0.9, "steps": 20, "block": 10, **changes}
    if case == "untraceable":
        options["simulated"] = simulated
    with pytest.raises(UserError, match=message):
        finetune.fit(cart, policy, **options)
    assert not cart.sent and not cart.seeds


def test_policies_that_can_not_start_are_refused(policy):
    fit = functools.partial(finetune.fit, value=value, gamma=0.9, steps=20, block=10)
    for actor in (policy.actor.clone(log_std="head"), policy.actor.clone(horizon=3)):
        with pytest.raises(UserError, match='must be an Actor with log_std="parameter" and horizon=1'):
            fit(Cart(), policy._replace(actor=actor))
    with pytest.raises(UserError, match="the policy gives 2 actions, the robot takes 1"):
        fit(Cart(), policy._replace(actor=policy.actor.clone(action_size=2)))


def robot(env=None, **changes):
    return GymnasiumRobot(env or Cart(), **{"observation_size": 2, "action_size": 1, **changes})


def test_what_is_not_finite_is_never_sent():
    cart = Cart()
    one = robot(cart)
    state = one.reset(jax.random.key(0))
    for bad in (np.nan, np.inf):
        with pytest.raises(UserError, match="not finite: nothing was sent"):
            one.auto_reset_step(state, np.array([[bad]]))
    assert not cart.sent


def test_an_action_outside_the_box_is_clipped_and_said_once(caplog):
    cart = Cart()
    one = robot(cart)
    state = one.reset(jax.random.key(0))
    with caplog.at_level(logging.WARNING):
        for action in (0.5, -1.5, 7.0):
            state = one.auto_reset_step(state, np.array([[action]]))
    assert caplog.text.count("outside [-1, 1]") == 1
    np.testing.assert_allclose(np.concatenate(cart.sent), [1.75, -2.0, 3.0])


def test_a_real_system_does_not_go_back_to_a_saved_state():
    one = robot()
    state = one.reset(jax.random.key(0))
    one.auto_reset_step(state, np.zeros((1, 1)))
    with pytest.raises(UserError, match="can not go on from a saved state"):
        one.auto_reset_step(state, np.zeros((1, 1)))


def test_robots_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match=r"observations of size 3, but the robot gives shape \(2,\)"):
        robot(observation_size=3).reset(jax.random.key(0))
    unbounded = Cart(-np.inf, np.inf)
    with pytest.raises(UserError, match="no finite low and high: give limits="):
        robot(unbounded)
    given = robot(unbounded, limits=([-2.0], [2.0])).limits
    np.testing.assert_array_equal([given.low, given.high], [[-2.0], [2.0]])
    lost = Cart()
    one = robot(lost)
    state = one.reset(jax.random.key(0))
    lost.state = np.array([np.nan, 0.0])
    with pytest.raises(UserError, match="reward is nan"):
        one.auto_reset_step(state, np.zeros((1, 1)))
    lost.reset = lambda seed: (np.array([np.nan, 0.0]), {})
    with pytest.raises(UserError, match="observation is not finite"):
        one.reset(jax.random.key(0))


def test_limits_hold_to_the_last_bit():
    limits = robot(limits=([-0.1], [0.1])).limits
    assert np.float64(limits.highest[0]) <= 0.1 and np.float64(limits.lowest[0]) >= -0.1
    for action in (-1.0, 1.0):
        assert abs(float(command(np.float32([action]), limits)[0])) <= 0.1
        np.testing.assert_allclose(command(jnp.float32([action]), limits, xp=jnp), [0.1 * action])


def test_without_a_run_a_loss_that_is_not_finite_still_stops():
    InMemory().log(0, {"critic_loss": 1.0, "q": np.nan}, group="finetune")
    with pytest.raises(NonFiniteError, match="finetune/critic_loss is nan at step 3"):
        InMemory().log(3, {"critic_loss": np.float32(np.nan)}, group="finetune")
