# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that several workers put in the same place: whose stays there, and that its two files fit."""

from __future__ import annotations

import fcntl
import os
import pathlib

import pytest
import tensorflow as tf

from tfdist.compat.keras import saving


def written(path: pathlib.Path, value: object) -> str:
    variable = tf.Variable(value)
    return tf.train.Checkpoint(variable=variable, text=tf.Variable(["a", "b"])).write(str(path))


def value_of(path: pathlib.Path) -> object:
    reader = tf.train.load_checkpoint(str(path))
    return reader.get_tensor("variable/.ATTRIBUTES/VARIABLE_VALUE").tolist()


def test_other_values_take_their_place(tmp_path: pathlib.Path):
    there, late = written(tmp_path / "ckpt", 1.0), written(tmp_path / "late", 2.0)
    saving.publish_checkpoint(late, there)
    assert value_of(tmp_path / "ckpt") == 2.0
    assert not list(tmp_path.glob("late*"))


def is_locked(folder: pathlib.Path) -> bool:
    directory = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(directory)
    return False


def test_lock_that_is_never_released_is_not_waited_for(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(saving, "LOCK_SECS", 0.05)
    prefix = str(tmp_path / "ckpt")
    with saving.locked(prefix, fcntl.LOCK_SH), saving.locked(prefix, fcntl.LOCK_SH):
        with saving.locked(prefix, fcntl.LOCK_EX):
            assert is_locked(tmp_path)
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)


def test_path_outside_of_this_machine_is_not_locked(monkeypatch: pytest.MonkeyPatch):
    taken: list[object] = []
    monkeypatch.setattr(fcntl, "flock", lambda *given: taken.append(given))
    with saving.locked("gs://bucket/ckpt", fcntl.LOCK_EX):
        taken.append("inside")
    assert taken == ["inside"]
