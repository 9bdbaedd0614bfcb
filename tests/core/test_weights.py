"""Weights in .npz: names, shapes and dtypes are checked by name, and nothing is executed."""

import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.errors import UserError
from core.weights import load_npz, save_npz


@pytest.fixture
def tree():
    params = nn.Sequential([nn.Dense(4), nn.tanh, nn.Dense(2)]).init(jax.random.key(0), jnp.zeros((1, 3)))
    statistics = {
        "count": jnp.int32(7),
        "half": jnp.linspace(0, 1, 5, dtype=jnp.bfloat16),
        "on": jnp.array([True]),
    }
    return {**params, "statistics": statistics}


def test_round_trip_is_exact(tmp_path, tree):
    save_npz(tmp_path / "policy.npz", tree)
    restored = load_npz(tmp_path / "policy.npz", jax.eval_shape(lambda: tree))
    assert jax.tree.structure(restored) == jax.tree.structure(tree)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(tree)):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_the_file_is_plain_numpy(tmp_path, tree):
    save_npz(tmp_path / "policy.npz", tree)
    with np.load(tmp_path / "policy.npz") as file:
        np.testing.assert_array_equal(file["params/layers_0/kernel"], tree["params"]["layers_0"]["kernel"])
        assert file["statistics/half"].dtype == np.float32
    np.savez(tmp_path / "theirs.npz", w=np.ones(2))
    assert load_npz(tmp_path / "theirs.npz", {"w": jnp.zeros(2)})["w"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["statistics"].pop("on"), "missing: none; unexpected: statistics/on"),
        (lambda t: t.update(more=jnp.ones(1)), "missing: more; unexpected: none"),
        (
            lambda t: t["statistics"].update(half=jnp.ones(4)),
            r"statistics/half is float32\[5\] .* float32\[4\] in",
        ),
        (
            lambda t: t["statistics"].update(count=jnp.float32(1)),
            r"statistics/count is int32\[\] .* float32\[\] in",
        ),
        (lambda t: t.update({str(i): 0 for i in range(10)}), "missing: 0, 1, 2, 3, 4, 5, 6, 7 and 2 more;"),
    ],
)
def test_differences_are_named(tmp_path, tree, change, message):
    save_npz(tmp_path / "policy.npz", tree)
    change(tree)
    with pytest.raises(UserError, match=message):
        load_npz(tmp_path / "policy.npz", tree)


class Trap:
    def __reduce__(self):
        return pytest.fail, ("a pickle was executed",)


@pytest.mark.parametrize("kind", ["object array", "pickle", "npy", "text", "cut", "none"])
def test_what_is_no_npz_of_arrays_is_refused(tmp_path, kind):
    path = tmp_path / "file.npz"
    if kind == "object array":
        np.savez(path, w=np.array([Trap()], dtype=object))
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(Trap()))
    elif kind == "npy":
        with path.open("wb") as file:
            np.save(file, np.ones(3))
    elif kind == "text":
        path.write_text("w = 1")
    elif kind == "cut":
        np.savez(path, w=np.ones(300))
        path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"file\.npz: not a readable \.npz of plain arrays \(.+\)"):
        load_npz(path, {"w": jnp.ones(1)})


def test_a_path_is_one_leaf(tmp_path):
    with pytest.raises(UserError, match="two leaves are named a/b"):
        save_npz(tmp_path / "x.npz", {"a": {"b": jnp.ones(1)}, "a/b": jnp.ones(1)})
    assert not (tmp_path / "x.npz").exists()
