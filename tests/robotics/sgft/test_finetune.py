"""Stage 2: what the loop sees of the robot and counts, lanes that are alone, resuming to the bit."""

import ast
import functools
from pathlib import Path

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from core.errors import Preempted
from core.run import Run
from robotics import sgft
from robotics.sgft import finetune
from robotics.sgft.finetune import Schedule
from robotics.sgft.own_robot import InMemory
from robotics.sgft.source import sim_value
from robotics.sgft.tasks import closed_form, puck_push
from tests.robotics.sgft.conftest import jitted, model_free

BLOCK = 10
GAP = puck_push.GAPS["paper"]
STARTS = jax.vmap(closed_form.reset)(jax.random.split(jax.random.key(9), 8))
move = jax.jit(jax.vmap(lambda state, action: closed_form.step(state, action, GAP)))


class Outputs(flax.struct.PyTreeNode):
    """All that a robot tells. `count` is the robot's own."""

    observation: jax.Array
    final_observation: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    count: jax.Array


def opaque(lanes, *, length=25):
    """A robot that knows nothing but `reset` and `auto_reset_step`; each lane has its own start."""
    start = np.asarray(STARTS[np.array(lanes)])

    class Robot:
        def __getattribute__(self, name):
            functions = {"reset": reset, "auto_reset_step": auto_reset_step}
            assert name in functions, f"the loop asked the robot for {name!r}"
            return functions[name]

    def reset(key):
        del key
        no = np.zeros(len(start), bool)
        zero = np.zeros(len(start), np.float32)
        return Outputs(start, start, zero, no, no, np.zeros(len(start), np.int32))

    def auto_reset_step(state, action):
        count = state.count + 1
        final = np.asarray(move(state.observation, np.asarray(action)))
        ended = count == length
        return Outputs(
            np.where(ended[:, None], start, final),
            final,
            np.asarray(puck_push.reward(final)),
            np.zeros(len(start), bool),
            ended,
            np.where(ended, 0, count).astype(np.int32),
        )

    return Robot()


@pytest.fixture(scope="module")
def fit(source, networks):
    """Runs stage 2 on opaque robots of the given lanes: (agent, last state)."""
    values = jitted(jax.vmap(functools.partial(sim_value, networks=networks)))

    def run(agent, lanes, *, steps=40, run=None, **options):
        part = jax.tree.map(lambda leaf: leaf[np.array(lanes)], source)
        return finetune.run_lanes(
            "finetune",
            agent,
            part,
            options.pop("robot", None) or opaque(lanes),
            seeds=[100 + i for i in lanes],
            schedule=Schedule(steps, BLOCK, 20),
            value=values,
            control_seconds=0.1,
            run=run or InMemory(),
            **options,
        )

    return run


@pytest.fixture(scope="module")
def three_lanes(fit):
    return fit(model_free(warmup_steps=15), [0, 1, 2])


def test_a_robot_is_a_reset_and_a_step(three_lanes):
    real = three_lanes.agent.real
    assert (real.size == 32).all()  # the replay's capacity, of 40 steps
    chex.assert_tree_all_finite(three_lanes.agent.sac)


def test_the_real_stage_never_speaks_of_the_gap():
    folder = Path(sgft.__path__[0])
    stage = "agents dynamics finetune gymnasium_robot model_based own_robot planner sac_agent shaping source"
    for name in stage.split():
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text())):
            named = getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "name", None)
            assert not (isinstance(named, str) and "gap" in named.lower()), f"{name}.py: {named}"


def test_steps_episodes_and_seconds_are_counted(three_lanes):
    used = three_lanes.used
    np.testing.assert_array_equal(used.steps, [40] * 3)
    np.testing.assert_array_equal(used.episodes, [1] * 3)  # of 25 steps
    np.testing.assert_allclose(used.seconds, [4.0] * 3, rtol=1e-6)
    np.testing.assert_array_equal(three_lanes.episode, [1] * 3)
    np.testing.assert_array_equal(three_lanes.t, [15] * 3)


def test_stored_steps_are_the_robots_with_v_sim_of_both_ends(three_lanes, source, networks):
    rows = jax.tree.map(lambda leaf: np.asarray(leaf[1]), three_lanes.agent.real.data)
    order = np.lexsort((rows.transition.t, rows.transition.episode_id))  # the ring, in time order
    rows = jax.tree.map(lambda leaf: leaf[order], rows)
    steps = rows.transition
    np.testing.assert_array_equal(steps.t, [*range(8, 25), *range(15)])
    np.testing.assert_array_equal(steps.truncated, steps.t == 24)
    np.testing.assert_allclose(
        steps.next_observation, move(steps.observation, steps.action), rtol=1e-5, atol=1e-6
    )
    inside = steps.t[1:] != 0
    np.testing.assert_array_equal(steps.observation[1:][inside], steps.next_observation[:-1][inside])
    np.testing.assert_array_equal(steps.observation[17], STARTS[1])
    lane = jax.tree.map(lambda leaf: leaf[1], source)
    for stored, seen in ((rows.value, steps.observation), (rows.next_value, steps.next_observation)):
        np.testing.assert_allclose(stored, sim_value(lane, seen, networks=networks), rtol=1e-5)


def test_a_lane_does_not_depend_on_its_neighbours(fit, three_lanes):
    others = fit(model_free(warmup_steps=15), [4, 7, 2])
    for part in ("sac", "real"):
        lane = (jax.tree.map(lambda leaf: leaf[2], getattr(s.agent, part)) for s in (others, three_lanes))
        chex.assert_trees_all_equal(*lane)


def test_a_stop_ends_at_once(fit):
    asked = []

    def stop(steps, state):
        asked.append((steps, float(state.observation[0, 0])))
        return steps == 13

    state = fit(model_free(warmup_steps=15), [0, 1, 2], stop=stop)
    assert [steps for steps, _ in asked] == list(range(1, 14))
    np.testing.assert_array_equal(state.used.steps, [13] * 3)
    np.testing.assert_array_equal(state.agent.real.size, [10] * 3)  # what was learned from is one whole block


class Evaluation:
    """Two environments a lane, each an episode of two steps that pays the first action."""

    def __init__(self, lanes):
        self.n, self.task = 2 * lanes, type("Task", (), {"episode_length": 2})

    def reset(self, key):
        no, zero = np.zeros(self.n, bool), np.zeros(self.n, np.float32)
        place = np.full((self.n, 8), 0.5, np.float32)
        return closed_form_outputs(place, zero, no, no, np.zeros(self.n, np.int32))

    def auto_reset_step(self, state, action):
        count = state.count + 1
        return closed_form_outputs(state.observation, action[:, 0], count == 2, count == 2, count)


class Judged(Outputs):
    success: jax.Array


def closed_form_outputs(observation, reward, truncated, success, count):
    return Judged(observation, observation, reward, np.zeros(len(reward), bool), truncated, count, success)


def test_curves_start_before_training_and_go_on_every_so_often(fit):
    state = fit(model_free(warmup_steps=15), [0, 1, 2], evaluation=Evaluation(3))
    np.testing.assert_array_equal(state.curve.steps, [[0, 20, 40]] * 3)
    np.testing.assert_array_equal(state.curve.episodes, [[0, 0, 1]] * 3)
    np.testing.assert_allclose(state.curve.seconds, [[0, 2, 4]] * 3, rtol=1e-6)
    np.testing.assert_array_equal(state.curve.success, np.ones((3, 3)))
    assert np.ptp(np.asarray(state.curve.returns), axis=1).all()  # the policy moved, in every lane
    assert np.ptp(np.asarray(state.curve.returns), axis=0).all()  # and is its own in each


@pytest.mark.parametrize("kind", ["model_free", "model_based"])
def test_a_run_cut_short_ends_as_an_unbroken_one(fit, planning, tmp_path, kind):
    agent = model_free(warmup_steps=15) if kind == "model_free" else planning()
    config = ConfigDict({"name": "sgft", "mesh": {"data": -1}})
    made = functools.partial(Run, config, quiet=True)
    cut = made(tmp_path / "cut")

    def stop(steps, state):
        if steps == 15:
            cut.preempt()  # as SIGTERM in the second block does
        return False

    with pytest.raises(Preempted):
        fit(agent, [0, 1, 2], run=cut, stop=stop, checkpoint_every=10)
    cut.close()
    resumed, whole = (
        fit(agent, [0, 1, 2], run=made(tmp_path / name), checkpoint_every=10) for name in ("cut", "whole")
    )
    chex.assert_trees_all_equal(*(jax.device_get(plain_keys(state)) for state in (resumed, whole)))
    assert (whole.used.steps == 40).all()


def plain_keys(state):
    return state.replace(key=jax.random.key_data(state.key))


def test_nothing_of_the_run_is_left_out_of_what_it_returns(three_lanes):
    small = finetune.deployed(jax.tree.map(lambda leaf: leaf[0], three_lanes.agent))
    assert jax.tree.structure(small).num_leaves < jax.tree.structure(three_lanes.agent).num_leaves
    assert jnp.isfinite(small.sac.actor["params"]["log_std"]).all()
