"""A film strip of a rollout, with and without a GL driver."""

import dataclasses

import jax
import matplotlib.figure
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from core.sim import NativeSimulator, render
from robotics.sgft.tasks.puck_push import TASK


@pytest.fixture(scope="module")
def physics():
    simulator = NativeSimulator(TASK, 1, gaps=TASK.gap("paper"))
    states = [simulator.reset(jax.random.key(0))]
    for _ in range(10):
        states.append(simulator.step(states[-1], np.array([[-1.0, 0.0]])))
    return np.stack([state.physics[0] for state in states])


def picture(figure):
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].astype(float)


def test_a_bare_machine_draws_the_geoms(physics, monkeypatch, capfd):
    monkeypatch.setenv("MUJOCO_GL", "disable")
    figure = render.film_strip(TASK, physics, gap=TASK.gap("paper"), frames=4, size=120)
    assert isinstance(figure, matplotlib.figure.Figure) and len(figure.axes) == 4
    assert [axes.get_title() for axes in figure.axes] == ["0.0 s", "0.3 s", "0.7 s", "1.0 s"]
    assert all(len(axes.patches) == 3 for axes in figure.axes), "target, hand and puck"
    assert capfd.readouterr() == ("", "")


def test_shapes_lie_where_the_world_has_them(physics, monkeypatch):
    """The hand's joints live in a turned frame: only the right gap puts it where its sensor says."""
    monkeypatch.setattr(render, "offscreen", lambda *args: None)
    figure = render.film_strip(TASK, physics, gap=TASK.gap("paper"), frames=2)
    simulator = NativeSimulator(TASK, 1, gaps=TASK.gap("paper"))
    observation = simulator.reset(jax.random.key(0)).observation[0]
    target, hand, puck = (patch.get_xy() for patch in figure.axes[0].patches)
    expected = [(target, (0, 0), 0.1), (hand, observation[:2], 0.05), (puck, observation[4:6], 0.07)]
    for outline, centre, radius in expected:
        np.testing.assert_allclose((outline.min(axis=0) + outline.max(axis=0)) / 2, centre, atol=1e-3)
        np.testing.assert_allclose(np.linalg.norm(outline - centre, axis=1), radius, rtol=0.02)


def test_a_box_is_drawn_as_a_box(monkeypatch):
    sphere, box = 'type="sphere" size="0.07"', 'type="box" size="0.07 0.03 0.01" euler="0 0 90"'
    task = dataclasses.replace(TASK, xml=TASK.xml.replace(sphere, box))
    assert task.xml != TASK.xml
    monkeypatch.setattr(render, "offscreen", lambda *args: None)
    state = np.zeros((1, 9))
    figure = render.film_strip(task, state, frames=1)
    outline = figure.axes[0].patches[-1].get_xy()
    np.testing.assert_allclose(np.abs(outline).max(axis=0), [0.03, 0.07], atol=1e-9)


def test_rendered_pictures_show_what_is_drawn(physics, monkeypatch):
    gap = TASK.gap("paper")
    probe = render.offscreen(TASK.nominal, physics[:1, 1:5], np.zeros(2), 1.0, 8)
    if probe is None:
        pytest.skip("no EGL on this machine")
    rendered = picture(render.film_strip(TASK, physics, gap=gap, frames=2, size=200))
    monkeypatch.setattr(render, "offscreen", lambda *args: None)
    drawn = picture(render.film_strip(TASK, physics, gap=gap, frames=2, size=200))
    orange = [(image[..., 0] > 180) & (image[..., 2] < 90) for image in (rendered, drawn)]
    overlap = (orange[0] & orange[1]).sum() / (orange[0] | orange[1]).sum()
    assert orange[1].sum() > 100 and overlap > 0.7
