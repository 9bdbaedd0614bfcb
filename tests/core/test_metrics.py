"""metrics.jsonl: strict JSON, exact cuts on resume, TensorBoard that says the same; compile time."""

import json
import math
import struct
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from core.metrics import Timer, Writer, compile_seconds


@pytest.fixture
def writer(tmp_path):
    made = Writer(tmp_path / "run")
    yield made
    made.close()


def lines(tmp_path):
    refuse = lambda text: pytest.fail(f"{text} is not JSON")  # noqa: E731
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def board(tmp_path):
    """Every (step, tag, value) in the event files; a record is length, crc, data, crc."""
    found = []
    for path in sorted((tmp_path / "run" / "tensorboard").glob("events*")):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + size])
            found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
            data = data[16 + size :]
    return found


def test_records_are_strict_json(writer, tmp_path):
    before = time.time()
    writer.write(3, {"loss": np.float32(0.5), "count": np.int64(7), "bad": math.nan, "worse": -jnp.inf})
    writer.write(jnp.int32(4), {"return": jnp.float32(2)}, prefix="eval")
    first, second = lines(tmp_path)
    assert list(first) == ["step", "loss", "count", "bad", "worse", "time"]
    assert (first["step"], first["loss"], first["count"]) == (3, 0.5, 7)
    assert first["bad"] is None and first["worse"] is None
    assert second["step"] == 4 and second["eval/return"] == 2.0
    assert before - 1 <= first["time"] <= time.time() + 1


def test_reserved_names_are_refused(writer):
    with pytest.raises(ValueError, match="'time' is taken"):
        writer.write(0, {"time": 1.0})
    writer.write(0, {"time": 1.0}, prefix="stage")


def test_a_line_is_on_disk_when_write_returns(writer, tmp_path):
    writer.write(1, {"a": 1.0})
    assert len(lines(tmp_path)) == 1
    assert writer.offset() == (tmp_path / "run" / "metrics.jsonl").stat().st_size > 0


def test_truncate_makes_file_and_events_as_if_later_lines_never_were(writer, tmp_path):
    writer.write(1, {"a": 1.0})
    offset = writer.offset()
    writer.write(2, {"a": 2.0})
    writer.write(3, {"a": 3.0})
    writer.close()
    resumed = Writer(tmp_path / "run")
    assert resumed.offset() > offset
    resumed.truncate(offset)
    assert resumed.offset() == offset
    resumed.write(2, {"a": 20.0})
    resumed.close()
    assert [(r["step"], r["a"]) for r in lines(tmp_path)] == [(1, 1.0), (2, 20.0)]
    assert board(tmp_path) == [(1, "a", 1.0), (2, "a", 20.0)]


def test_reopening_without_a_cut_keeps_the_events(writer, tmp_path):
    writer.write(1, {"a": 1.0})
    offset = writer.offset()
    writer.close()
    resumed = Writer(tmp_path / "run")
    resumed.truncate(offset)
    resumed.write(2, {"a": 2.0, "gone": math.nan})
    resumed.flush()
    resumed.close()
    assert board(tmp_path) == [(1, "a", 1.0), (2, "a", 2.0)]


def test_lost_lines_are_reported(writer, tmp_path, caplog):
    writer.write(1, {"a": 1.0})
    size = writer.offset()
    writer.truncate(size + 10)
    assert f"has lost lines: {size} bytes of {size + 10} are left" in caplog.text
    assert writer.offset() == size


def test_only_process_zero_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    writer = Writer(tmp_path / "run")
    writer.write(1, {"a": 1.0})
    writer.truncate(0)
    writer.flush()
    writer.close()
    assert writer.offset() == 0 and not (tmp_path / "run").exists()


def test_timer():
    with Timer() as timer:
        time.sleep(0.02)
        inside = timer.seconds
    time.sleep(0.02)
    assert 0.02 <= inside <= timer.seconds < timer.seconds + 0.02
    assert timer.seconds == timer.seconds


def test_compile_seconds_grow_with_a_compilation_only():
    function = jax.jit(lambda x: jnp.sin(x) @ jnp.cos(x))
    x = jnp.ones((5, 5))
    before = compile_seconds()
    function(x).block_until_ready()
    after = compile_seconds()
    function(x).block_until_ready()
    assert before < after == compile_seconds()
