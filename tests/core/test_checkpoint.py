"""Checkpoints: bit-equal types, other device counts, damage, a full disk, errors of the background write."""

import errno
import itertools
import logging
import resource
import shutil
from contextlib import contextmanager
from pathlib import Path

import flax.struct
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from core.checkpoint import CheckpointError, Checkpoints, data_position, set_data_position
from core.errors import UserError


class Learner(flax.struct.PyTreeNode):
    step: jax.Array
    params: dict
    opt_state: optax.OptState
    rng: jax.Array
    name: str = flax.struct.field(pytree_node=False)
    extras: dict


def learner(seed=0, width=4):
    params = {
        "dense": {"kernel": jax.random.normal(jax.random.key(seed), (3, width)), "bias": jnp.zeros(width)},
        "half": jnp.linspace(0, 1, 5, dtype=jnp.bfloat16),
    }
    extras = {
        "int8": jnp.array([-3, 7], jnp.int8),
        "flags": jnp.array([True, False]),
        "weak": jnp.asarray(0.5),
        "keys": jax.random.split(jax.random.key(seed, impl="rbg"), 3),
        "no_keys": jax.random.split(jax.random.key(seed), 3)[:0],
        "nothing": jnp.zeros((0, 3), jnp.bfloat16),
        "nan": jnp.array([np.nan, -np.inf, -0.0, 1e-45], jnp.float32),
        "numpy": np.array([1.1, 2.2]),
        "numpy_scalar": np.int64(2**60 + seed),
        "numpy_half": np.array([1.5], jnp.bfloat16),
        "numpy_empty": np.zeros((2, 0), np.uint16),
        "python": (1.1, 2**80, True, "text", float("inf")),
        "empty": {"dict": {}, "tuple": (), "none": None},
        "slash/ed": {"name": jnp.ones(1)},
    }
    optimizer = optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.adam)(1e-3))
    rng = jax.random.key(seed + 1)
    return Learner(jnp.int32(seed), params, optimizer.init(params), rng, "learner", extras)


def assert_identical(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
        assert type(a) is type(b)
        if isinstance(b, jax.Array):
            assert (a.dtype, a.aval.weak_type) == (b.dtype, b.aval.weak_type)
            if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
        if isinstance(b, (jax.Array, np.ndarray, np.generic)):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        else:
            assert a == b


@pytest.fixture
def checkpoints(tmp_path):
    made = Checkpoints(tmp_path / "run" / "stage", keep=3)
    yield made
    made.close()


def save_all(checkpoints, *steps):
    for step in steps:
        checkpoints.save(step, learner(step), {"position": step})
    checkpoints.wait()


def test_every_leaf_type_comes_back_bit_equal(checkpoints):
    state = learner(7)
    host = {"offset": 12, "iterator": {"base64": "AAEC"}, "nested": [1, {"x": None}]}
    checkpoints.save(7, state, host)
    step, restored, host_restored = checkpoints.restore(learner(0))
    assert step == 7 and host_restored == host
    assert_identical(restored, state)


def test_like_may_be_abstract(checkpoints):
    state = {
        "w": jnp.arange(6.0).reshape(2, 3),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(1)),
    }
    checkpoints.save(1, state)
    assert_identical(checkpoints.restore(jax.eval_shape(lambda: state)).state, state)


def test_state_without_arrays(checkpoints):
    checkpoints.save(1, {"count": 3, "none": None})
    assert checkpoints.restore({"count": 0, "none": None}).state == {"count": 3, "none": None}


def test_nothing_saved_gives_none_and_writes_nothing(checkpoints):
    assert checkpoints.restore(learner()) is None
    assert checkpoints.steps() == [] and not checkpoints.directory.exists()


def test_changes_right_after_save_do_not_reach_the_checkpoint(checkpoints):
    double = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2, tree), donate_argnums=0)
    state = {"w": jax.random.normal(jax.random.key(0), (1 << 21,)), "host": np.ones(1 << 20)}
    expected = np.asarray(state["w"]).copy()
    host = {"seen": [1]}
    checkpoints.save(0, state, host)
    host["seen"].append(2)
    state["host"][:] = 5.0
    state = {"w": state["w"]}
    for _ in range(3):
        state = double(state)
    like = {"w": jnp.zeros(1 << 21), "host": np.zeros(1 << 20)}
    _, restored, host_restored = checkpoints.restore(like)
    assert host_restored == {"seen": [1]}
    np.testing.assert_array_equal(restored["w"], expected)
    np.testing.assert_array_equal(restored["host"], 1.0)


def sharded(devices, seed=0):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",), axis_types=(AxisType.Auto,))
    state = {
        "w": jax.random.normal(jax.random.key(seed), (16, 3)),
        "half": jnp.arange(8, dtype=jnp.bfloat16),
        "keys": jax.random.split(jax.random.key(seed), 8),
    }
    return jax.device_put(state, NamedSharding(mesh, P("data")))


@pytest.mark.parametrize("devices", [1, 4, 8])
def test_saved_on_eight_devices_restores_on_any_number(checkpoints, devices):
    state = sharded(8)
    checkpoints.save(1, state)
    like = sharded(devices, seed=1)
    restored = checkpoints.restore(like).state
    assert_identical(restored, state)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(like)):
        assert a.sharding == b.sharding


def test_saved_on_one_device_restores_sharded_over_eight(checkpoints):
    state = jax.device_put(sharded(1), SingleDeviceSharding(jax.devices()[3]))
    checkpoints.save(1, state)
    like = sharded(8, seed=1)
    restored = checkpoints.restore(like).state
    assert_identical(restored, state)
    assert restored["w"].sharding == like["w"].sharding


def test_keeps_the_newest(checkpoints):
    save_all(checkpoints, 1, 2, 3, 4, 10)
    assert checkpoints.steps() == [3, 4, 10]
    assert checkpoints.restore(learner()).step == 10
    assert checkpoints.restore(learner(), step=3).host == {"position": 3}
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 5; it has \[3, 4, 10\]"):
        checkpoints.restore(learner(), step=5)


def test_a_saved_step_is_not_written_again(checkpoints):
    checkpoints.save(1, learner(1))
    checkpoints.save(1, learner(2))
    assert int(checkpoints.restore(learner()).state.step) == 1
    again = Checkpoints(checkpoints.directory)
    again.save(1, learner(3))
    assert int(again.restore(learner()).state.step) == 1


def files(directory):
    return sorted(p for p in directory.rglob("*") if p.is_file())


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def test_any_single_damage_is_found_or_harmless(tmp_path):
    """Whatever happens to one file, the state is that of step 2 or of step 1, bit for bit."""
    original = Checkpoints(tmp_path / "original")
    state = {"w": jax.random.normal(jax.random.key(0), (300,)), "n": 3}
    for step in (1, 2):
        original.save(step, {**state, "w": state["w"] + step})
    original.close()
    skipped = 0
    names = [p.relative_to(original.directory) for p in files(original.directory / "2")]
    for name, damage in itertools.product(names, (truncate, flip, type(names[0]).unlink)):
        shutil.copytree(original.directory, tmp_path / "copy")
        damage(tmp_path / "copy" / name)
        step, restored, _ = Checkpoints(tmp_path / "copy").restore(state)
        np.testing.assert_array_equal(restored["w"], state["w"] + step)
        skipped += step == 1
        shutil.rmtree(tmp_path / "copy")
    assert len(names) >= 8 and skipped >= 3 * (len(names) - 3)


def test_damaged_newest_falls_back_says_so_and_is_replaced(checkpoints, caplog):
    save_all(checkpoints, 1, 2, 3)
    truncate(max(files(checkpoints.directory / "3"), key=lambda p: p.stat().st_size))
    (checkpoints.directory / "2" / "digests.json").unlink()
    resumed = Checkpoints(checkpoints.directory, keep=3)
    with caplog.at_level(logging.WARNING):
        step, restored, host = resumed.restore(learner())
    assert step == 1 and host == {"position": 1}
    assert_identical(restored, learner(1))
    (line,) = [r.getMessage() for r in caplog.records if r.name == "core.checkpoint"]
    assert str(checkpoints.directory / "3") in line and "continuing from" in line
    assert line.index(str(checkpoints.directory / "2")) < line.index(str(checkpoints.directory / "1"))
    assert resumed.steps() == [1, 2, 3]
    save_all(resumed, 3)
    assert resumed.steps() == [1, 3]
    assert_identical(Checkpoints(checkpoints.directory).restore(learner()).state, learner(3))


def test_half_written_directory_is_never_chosen_and_is_removed_at_the_next_save(checkpoints):
    save_all(checkpoints, 1)
    left = checkpoints.directory / "2.orbax-checkpoint-tmp"
    shutil.copytree(checkpoints.directory / "1", left)
    assert checkpoints.steps() == [1]
    assert checkpoints.restore(learner()).step == 1 and left.exists()
    save_all(checkpoints, 2)
    assert checkpoints.steps() == [1, 2] and not left.exists()
    assert int(checkpoints.restore(learner()).state.step) == 2


def test_nothing_readable_names_the_directory_and_what_to_do(checkpoints):
    save_all(checkpoints, 1, 2)
    shutil.rmtree(checkpoints.directory / "1" / "meta")
    (checkpoints.directory / "2" / "digests.json").write_text("[]")
    with pytest.raises(CheckpointError, match="no readable checkpoint") as caught:
        Checkpoints(checkpoints.directory).restore(learner())
    assert isinstance(caught.value, UserError)
    for part in (
        str(checkpoints.directory),
        "step 2",
        "step 1: meta/commit_success.txt is missing",
        "--restart",
    ):
        assert part in str(caught.value)


KERNEL = {"kernel": jnp.ones((3, 4))}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"params": {"kernel": jnp.ones((3, 8))}},
            r"params/kernel is float32\[3, 4\] in .* float32\[3, 8\] here",
        ),
        (
            {"params": {"kernel": jnp.ones((3, 4), jnp.bfloat16)}},
            r"float32\[3, 4\] in .* bfloat16\[3, 4\] here",
        ),
        ({"params": {**KERNEL, "bias": jnp.ones(4)}}, r"params/bias is absent in the checkpoint"),
        ({"params": {}}, r"params/kernel is float32\[3, 4\] in the checkpoint and absent here"),
        ({"rng": jax.random.key(0, impl="rbg")}, r"rng is key<fry>\[\] in the .* and key<rbg>\[\] here"),
        ({"count": jnp.int32(1)}, r"count is int in the checkpoint and int32\[\] here"),
    ],
)
def test_another_structure_is_an_error_and_never_a_fallback(checkpoints, change, message):
    state = {"count": 1, "params": KERNEL, "rng": jax.random.key(0)}
    checkpoints.save(1, {**state, **change})
    checkpoints.save(2, state)
    with pytest.raises(CheckpointError, match=message):
        checkpoints.restore({**state, **change})


def test_leaves_that_can_not_be_kept_are_named(checkpoints):
    with pytest.raises(CheckpointError, match="a/0: a checkpoint can not hold a function"):
        checkpoints.save(1, {"a": [len, 1]} | {"a": [lambda: 0]})
    with pytest.raises(CheckpointError, match=r"text: .* array of <U2"):
        checkpoints.save(1, {"text": np.array(["ab"])})
    with pytest.raises(TypeError, match="not JSON serializable"):
        checkpoints.save(1, {}, host={"bytes": b"1"})


@contextmanager
def full_disk(limit):
    """No file may grow over `limit` bytes: what a full disk does to a large write, with EFBIG for ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def large(seed):
    return {"w": jax.random.normal(jax.random.key(seed), (1 << 18,))}


SURFACES = {
    "wait": lambda checkpoints: checkpoints.wait(),
    "close": lambda checkpoints: checkpoints.close(),
    "save": lambda checkpoints: checkpoints.save(3, large(3)),
    "restore": lambda checkpoints: checkpoints.restore(large(0)),
}


@pytest.mark.parametrize("call", SURFACES.values(), ids=SURFACES)
def test_full_disk_loses_nothing_and_surfaces_at_the_next_call(checkpoints, call, capfd):
    checkpoints.save(1, large(1))
    checkpoints.wait()
    with full_disk(1 << 18), pytest.raises(CheckpointError) as caught:
        checkpoints.save(2, large(2))
        call(checkpoints)
    message = str(caught.value)
    assert f"could not write checkpoint {checkpoints.directory / '2'}: " in message
    assert "File too large" in message and "Free disk space" in message
    assert f"last good checkpoint is {checkpoints.directory / '1'}. " in message
    assert "\n" not in message and "Traceback" not in capfd.readouterr().err
    assert [p.name for p in checkpoints.directory.iterdir()] == ["1"]
    again = Checkpoints(checkpoints.directory)
    assert_identical(again.restore(large(0)).state, large(1))
    again.save(2, large(2))
    assert again.restore(large(0)).step == 2


def test_out_of_space_before_the_background_write(checkpoints, monkeypatch):
    checkpoints.save(1, learner(1))
    checkpoints.wait()

    def no_space(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", no_space)
        with pytest.raises(CheckpointError, match=r"2: OSError: .* No space left.* checkpoint is .*1\."):
            checkpoints.save(2, learner(2))
    assert checkpoints.restore(learner()).step == 1
    save_all(checkpoints, 2)
    assert checkpoints.restore(learner()).step == 2


def test_out_of_space_for_the_digests(checkpoints, monkeypatch):
    def no_space(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("core.checkpoint._digest", no_space)
        checkpoints.save(1, learner(1))
        with pytest.raises(CheckpointError, match="No space left on device; none was saved before"):
            checkpoints.wait()
    assert checkpoints.steps() == [] and checkpoints.restore(learner()) is None


def test_directory_that_can_not_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"could not write checkpoint .*file/stage/1"):
        Checkpoints(tmp_path / "file" / "stage").save(1, learner())


def test_restored_unplaced_leaves_meet_sharded_ones(checkpoints):
    state = {"step": jnp.int32(3), "rng": jax.random.key(0), "w": sharded(8)["w"]}
    checkpoints.save(1, state)
    restored = checkpoints.restore(state).state
    step = jax.jit(lambda s: s["w"] * s["step"] + jax.random.normal(s["rng"], (16, 3)))
    np.testing.assert_array_equal(step(restored), step(state))


def record_iterator():
    sampler = grain.samplers.IndexSampler(10, grain.sharding.NoSharding(), num_epochs=2, seed=0)
    source = grain.sources.RangeDataSource(0, 10, 1)
    return iter(grain.DataLoader(data_source=source, sampler=sampler, worker_count=0))


def dataset_iterator():
    return iter(grain.MapDataset.range(10).shuffle(seed=1).to_iter_dataset())


@pytest.mark.parametrize(("make", "kind"), [(record_iterator, bytes), (dataset_iterator, dict)])
def test_data_position_round_trip(checkpoints, make, kind):
    iterator = make()
    assert isinstance(iterator.get_state(), kind)
    for _ in range(4):
        next(iterator)
    checkpoints.save(1, {}, {"data": data_position(iterator)})
    rest = [int(next(iterator)) for _ in range(3)]
    resumed = make()
    set_data_position(resumed, checkpoints.restore({}).host["data"])
    assert [int(next(resumed)) for _ in range(3)] == rest
    assert [int(next(i)) for i in [make()] for _ in range(3)] != rest
