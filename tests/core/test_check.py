"""`--mode=check`: steps lower on a fake mesh, memory and FLOPs are what they are by hand."""

import json

import jax
import jax.numpy as jnp
import pytest

from core import check
from core import config as configs
from tests.toy import experiment as toy


class Method:
    """An experiment module with the given functions and data."""

    def __init__(self, functions, paths=()):
        self.functions = lambda config, mesh: functions(mesh)
        self.data = lambda config: list(paths)


def config(**mesh):
    result = configs.load("tests/toy/config.py:smoke")[0]
    result.mesh.update(mesh)
    return result


def product(mesh, *, rows="data", flops=None):
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(rows))
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=place)
    w = jax.ShapeDtypeStruct((32, 16), jnp.bfloat16)
    return [check.Function("product", lambda x, w: x @ w, (x, w), 512, flops)]


def run(method, tmp_path, **mesh):
    code = check.run(config(**mesh), tmp_path, method, variant="smoke")
    return code, json.loads((tmp_path / "check.json").read_text())


def test_the_record_has_its_schema_to_the_letter(tmp_path):
    (tmp_path / "there").write_text("")
    paths = [tmp_path / "there", tmp_path / "not"]
    code, record = run(Method(product, paths), tmp_path)
    assert code == 0
    function = record["functions"][0]
    assert isinstance(function.pop("peak_bytes_per_device"), int)
    assert record == {
        "schema": 1,
        "name": "toy",
        "variant": "smoke",
        "devices": 8,
        "mesh": {"data": 8, "fsdp": 1, "tensor": 1},
        "functions": [
            {
                "name": "product",
                "lowered": True,
                "parameters": 512,
                "argument_bytes_per_device": 64 // 8 * 32 * 4 + 32 * 16 * 2,
                "flops": 2.0 * 64 * 32 * 16,
            }
        ],
        "data": [{"path": str(paths[0]), "found": True}, {"path": str(paths[1]), "found": False}],
        "expected": {"parameters": 4},
    }


def test_memory_follows_the_mesh(tmp_path):
    _, record = run(Method(product), tmp_path, data=4, fsdp=2)
    assert record["mesh"] == {"data": 4, "fsdp": 2, "tensor": 1}
    assert record["functions"][0]["argument_bytes_per_device"] == 64 // 4 * 32 * 4 + 32 * 16 * 2


def test_analytic_flops_are_taken_as_given(tmp_path):
    assert run(Method(lambda mesh: product(mesh, flops=7.0)), tmp_path)[1]["functions"][0]["flops"] == 7.0


def test_what_does_not_lower_is_said_and_fails(tmp_path, capsys):
    def functions(mesh):
        bad = check.Function("bad", lambda x: x @ jnp.ones((3, 3)), (jax.ShapeDtypeStruct((2, 2), float),), 9)
        return [bad, *product(mesh)]

    code, record = run(Method(functions), tmp_path)
    assert code == 2
    assert [f["lowered"] for f in record["functions"]] == [False, True]
    assert record["functions"][0]["flops"] is None
    assert "error: bad does not lower: TypeError" in capsys.readouterr().err


def test_without_compiling_there_is_no_peak(tmp_path):
    settings = config()
    settings.check.compile = False
    check.run(settings, tmp_path, Method(product), variant="smoke")
    record = json.loads((tmp_path / "check.json").read_text())
    assert record["functions"][0]["peak_bytes_per_device"] is None and record["functions"][0]["lowered"]


def test_no_parameter_is_allocated(tmp_path):
    def functions(mesh):
        huge = jax.ShapeDtypeStruct((1 << 20, 1 << 20), jnp.float32)
        w = jax.ShapeDtypeStruct((1 << 20, 8), jnp.float32)
        return [check.Function("huge", jax.jit(lambda x, w: x @ w), (huge, w), 1 << 40)]

    code, record = run(Method(functions), tmp_path)
    assert code == 0 and record["functions"][0]["argument_bytes_per_device"] == (1 << 42) + (1 << 25)


@pytest.mark.parametrize("name", ["train", "evaluate"])
def test_the_toy_lowers(tmp_path, name):
    code, record = run(toy, tmp_path)
    by_name = {function["name"]: function for function in record["functions"]}
    assert code == 0
    forward = 2 * 3 * 32
    assert by_name[name]["flops"] == {"evaluate": forward, "train": 10 * 2 * forward}[name]
