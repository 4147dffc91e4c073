# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are whole or not there, and the newest one that can be read is taken."""

from __future__ import annotations

import pathlib
import resource
import signal
import subprocess
import sys
import tempfile
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tfdist.compat.keras import sharding
from tfdist.resume import checkpoint
from tfdist.resume.checkpoint import Checkpoint, CheckpointDirectory, check_same

pytestmark = pytest.mark.timeout(120)


def _directory(path: pathlib.Path, max_to_keep: int = 2) -> tuple[CheckpointDirectory, list[str]]:
    said: list[str] = []
    return CheckpointDirectory(path, max_to_keep, said.append), said


def _names(path: pathlib.Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def _newest(directory: CheckpointDirectory) -> Checkpoint:
    found = directory.newest()
    assert found is not None
    return found


def _of(step: int, value: float = 0.0) -> Checkpoint:
    return Checkpoint(step, {"epoch": step // 10}, (np.full((2, 3), value, np.float32), np.array(step)))


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 10**12),
    st.lists(
        st.sampled_from(["float16", "float32", "float64", "int8", "int64", "uint32", "bool"]).flatmap(
            lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
        ),
        max_size=5,
    ),
    st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text()),
)
def test_what_was_saved_is_read(step: int, values: list[np.ndarray], state: dict):
    with tempfile.TemporaryDirectory() as path:
        directory, said = _directory(pathlib.Path(path, "made", "when needed"))
        directory.save(Checkpoint(step, state, tuple(values)))
        found = _newest(directory)
    assert (found.step, found.state) == (step, state)
    assert [value.tobytes() for value in found.arrays] == [value.tobytes() for value in values]
    assert [(value.shape, value.dtype) for value in found.arrays] == [(value.shape, value.dtype) for value in values]
    assert not said


def test_types_that_numpy_does_not_know_keep_their_bytes(tmp_path: pathlib.Path):
    directory, _ = _directory(tmp_path)
    value = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    directory.save(Checkpoint(1, {}, (value,)))
    assert _newest(directory).arrays[0].view(ml_dtypes.bfloat16).tolist() == [1.5, -2.0]


def test_tables_are_written_and_read_by_rows(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sharding, "BLOCK_BYTES", 64)
    directory, said = _directory(tmp_path)
    for step, dtype in ((1, np.float32), (2, ml_dtypes.bfloat16)):
        value = np.arange(42).reshape(14, 3).astype(dtype)
        ranges = list(sharding.row_blocks(value.shape, value.itemsize))
        assert len(ranges) > 1
        read: list[tuple[int, int]] = []
        table = mock.Mock(shape=value.shape, dtype=tf.as_dtype(value.dtype))
        table.read_rows = lambda *rows, value=value, read=read: [read.append(rows), value[slice(*rows)]][1]
        directory.save(Checkpoint(step, {}, (np.ones(2), sharding.TableRows(table), np.zeros(3))))
        assert read == ranges
        found = _newest(directory)
        assert isinstance(found.arrays[1], np.memmap)
        assert found.arrays[1].tobytes() == value.tobytes()
        assert [each.shape for each in found.arrays] == [(2,), (14, 3), (3,)]
    damaged = tmp_path / "step-0000000002" / "variables.npz"
    content = bytearray(damaged.read_bytes())
    content[content.index(value[5].tobytes())] ^= 1
    damaged.write_bytes(content)
    assert _newest(directory).step == 1 and len(said) == 1


def test_the_newest_are_kept(tmp_path: pathlib.Path):
    directory, _ = _directory(tmp_path, max_to_keep=2)
    assert directory.newest() is None
    for step in (5, 10, 9, 123456789012):
        directory.save(_of(step))
    assert _names(tmp_path) == ["step-0000000010", "step-123456789012"]
    assert _newest(directory).step == 123456789012


def test_one_of_the_same_step_is_replaced(tmp_path: pathlib.Path):
    directory, _ = _directory(tmp_path)
    directory.save(_of(5, 1.0))
    directory.save(_of(5, 2.0))
    assert _newest(directory).arrays[0][0, 0] == 2.0


def test_one_that_is_being_replaced_is_kept_until_the_other_is_there(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    directory, said = _directory(tmp_path, max_to_keep=1)
    directory.save(_of(7, 1.0))
    rename = pathlib.Path.rename

    def interrupted(path: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
        if path.name.startswith(".writing"):
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(pathlib.Path, "rename", interrupted)
        directory.save(_of(7, 2.0))
    assert _newest(directory).arrays[0][0, 0] == 1.0
    assert not said


@pytest.mark.parametrize("damage", ["no state", "no variables", "cut variables", "cut state", "other state"])
def test_one_that_cannot_be_read_is_put_aside_and_the_one_before_is_taken(tmp_path: pathlib.Path, damage: str):
    directory, said = _directory(tmp_path)
    directory.save(_of(5))
    directory.save(_of(10))
    newest = tmp_path / "step-0000000010"
    variables, state = newest / "variables.npz", newest / "state.json"
    if damage == "no state":
        state.unlink()
    elif damage == "no variables":
        variables.unlink()
    elif damage == "cut variables":
        variables.write_bytes(variables.read_bytes()[:-30])
    elif damage == "cut state":
        state.write_text(state.read_text()[:10])
    else:
        state.write_text("{}")
    assert _newest(directory).step == 5
    (line,) = said
    assert f"{newest} can't be read, and is put aside" in line
    assert _names(tmp_path) == ["step-0000000005", "unreadable-step-0000000010"]


@pytest.mark.processes
def test_a_process_that_is_killed_while_it_writes_leaves_the_checkpoints_that_were_complete(tmp_path: pathlib.Path):
    """The process writes checkpoints as fast as it can, and is killed while it does."""
    script = """
import sys, numpy as np
from tfdist.resume.checkpoint import Checkpoint, CheckpointDirectory
directory = CheckpointDirectory(sys.argv[1], 2, print)
for step in range(1, 10**6):
    directory.save(Checkpoint(step, {}, (np.full(200_000, step),)))
    print(step, flush=True)
"""
    root = pathlib.Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        for _ in range(4):
            done = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    directory, said = _directory(tmp_path)
    found = _newest(directory)
    assert found.step >= done
    assert (found.arrays[0] == found.step).all()
    assert not said
    directory.save(_of(10**7))
    assert not [name for name in _names(tmp_path) if not name.startswith("step-")]


TRAINING = """
import sys, time
from tfdist.resume.checkpoint import CheckpointDirectory
CheckpointDirectory(sys.argv[1], 2, print).take()
print("taken", flush=True)
time.sleep(600)
"""


@pytest.mark.processes
@pytest.mark.parametrize("machines", ["one", pytest.param("two", marks=pytest.mark.slow)])
def test_a_directory_belongs_to_one_training_that_lives(
    tmp_path: pathlib.Path, machines: str, monkeypatch: pytest.MonkeyPatch
):
    other, _ = _directory(tmp_path)
    if machines != "one":
        monkeypatch.setattr(checkpoint.socket, "gethostname", lambda: "elsewhere")
    command, root = [sys.executable, "-c", TRAINING, str(tmp_path)], pathlib.Path(__file__).resolve().parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "taken\n"
            with pytest.raises(RuntimeError, match=f"process {process.pid} on .*Received: directory='{tmp_path}'"):
                other.take()
        finally:
            process.kill()
    other.take()
    # It was stopped for a while.
    late, _ = _directory(tmp_path)
    with pytest.raises(RuntimeError, match="another one has the directory"):
        late.save(_of(1))
    other.save(_of(2))
    other.release()
    assert [name for name in _names(tmp_path) if not name.startswith(".")] == ["step-0000000002"]


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: pathlib.Path):
    directory, _ = _directory(tmp_path)
    directory.save(_of(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    large = Checkpoint(2, {}, (np.zeros(1 << 16),))
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
        with pytest.raises(OSError, match=f"step 2 can't be saved in {tmp_path}; step-0000000001 is whole"):
            directory.save(large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert _names(tmp_path) == ["step-0000000001"]


def test_another_model_is_refused_by_name():
    same = [["dense/kernel", [3, 4], "float32"], ["dense/bias", [4], "float32"]]
    check_same(same, [["dense_1/kernel", [3, 4], "float32"], ["dense_1/bias", [4], "float32"]], "here")
    with pytest.raises(ValueError, match=r"here has a checkpoint of another model or optimizer, with 2 variables"):
        check_same(same, same[:1], "here")
    with pytest.raises(
        ValueError, match=r"dense/bias is float32\[4\] there; .* Received: 2 variables, d/bias, float32\[5\]"
    ):
        check_same(same, [same[0], ["d/bias", [5], "float32"]], "here")
    with pytest.raises(ValueError, match=r"Received: 2 variables, dense/bias, float16\[4\]"):
        check_same(same, [same[0], ["dense/bias", [4], "float16"]], "here")
