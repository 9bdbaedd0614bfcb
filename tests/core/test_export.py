"""An export runs without the training code, for any batch size, and is whole or absent."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import export
from core.errors import UserError

PARAMS = {"layer": [{"w": jnp.arange(6.0).reshape(3, 2)}], "b": jnp.asarray([1, -1], jnp.bfloat16)}
EXAMPLE = (jax.ShapeDtypeStruct((1, 3), jnp.float32),)


def apply(params, x):
    return {"y": jnp.tanh(x @ params["layer"][0]["w"] / 10) + params["b"]}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports") / "policy"
    export.save(folder, apply, PARAMS, EXAMPLE)
    return folder


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_it_gives_the_values_of_apply_for_any_batch(directory, batch):
    x = np.linspace(-1, 1, 3 * batch, dtype=np.float32).reshape(batch, 3)
    np.testing.assert_array_equal(export.load(directory)(x)["y"], jax.jit(apply)(PARAMS, x)["y"])


def test_it_needs_nothing_of_this_repository(directory, tmp_path):
    script = (
        "import json, sys, numpy, jax\n"
        "exported = jax.export.deserialize(bytearray(open(sys.argv[1] + '/module.bin', 'rb').read()))\n"
        "meta = json.load(open(sys.argv[1] + '/meta.json'))\n"
        "arrays = numpy.load(sys.argv[1] + '/params.npz')\n"
        "leaves = [arrays[str(i)].view(p['dtype']) for i, p in enumerate(meta['parameters'])]\n"
        "print(float(exported.call(leaves, numpy.ones((5, 3), 'float32'))['y'].sum()))\n"
    )
    command = [sys.executable, "-c", "import ml_dtypes, jax.export\n" + script, str(directory)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) == pytest.approx(float(apply(PARAMS, jnp.ones((5, 3)))["y"].sum()), rel=1e-5)


def test_it_is_lowered_for_every_platform(directory):
    meta = json.loads((directory / "meta.json").read_text())
    assert meta["platforms"] == ["cpu", "cuda", "tpu"]
    assert [p["dtype"] for p in meta["parameters"]] == ["bfloat16", "float32"]


def test_inputs_may_be_several_with_scalars_and_keys(tmp_path):
    def sample(params, key, x, scale):
        return params * x["a"] + scale * jax.random.normal(key, x["a"].shape)

    example = (jax.random.key(0), {"a": np.zeros((1, 2), np.float32)}, np.float32(0))
    export.save(tmp_path / "e", sample, jnp.float32(2), example)
    inputs = (jax.random.key(3), {"a": np.ones((4, 2), np.float32)}, np.float32(0.5))
    np.testing.assert_allclose(export.load(tmp_path / "e")(*inputs), sample(2.0, *inputs), rtol=1e-6)


def test_an_export_is_replaced_but_nothing_else_is(tmp_path):
    export.save(tmp_path / "e", lambda p, x: p * x, jnp.float32(2), EXAMPLE)
    export.save(tmp_path / "e", lambda p, x: p * x, jnp.float32(3), EXAMPLE)
    assert export.load(tmp_path / "e")(np.ones((2, 3), np.float32))[0, 0] == 3
    assert [p.name for p in tmp_path.iterdir()] == ["e"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="holds something that is no export"):
        export.save(tmp_path / "mine", lambda p, x: p * x, jnp.float32(2), EXAMPLE)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "x"


def test_a_function_that_can_not_be_exported_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError):
        export.save(tmp_path / "e", lambda p, x: 1 / 0, jnp.float32(2), EXAMPLE)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_export_is_refused(tmp_path):
    export.save(tmp_path / "e", lambda p, x: p * x, jnp.float32(2), EXAMPLE)
    (tmp_path / "e" / "params.npz").write_bytes(b"half")
    with pytest.raises(UserError, match="no readable export"):
        export.load(tmp_path / "e")
    with pytest.raises(UserError, match="no readable export"):
        export.load(tmp_path / "nothing")


def test_a_platform_that_was_not_exported_is_named(tmp_path):
    export.save(tmp_path / "e", lambda p, x: p * x, jnp.float32(2), EXAMPLE, platforms=("tpu",))
    with pytest.raises(UserError, match="is for tpu, this process runs on cpu"):
        export.load(tmp_path / "e")
