# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that several workers put in the same place: whose stays there, and that its two files fit."""

from __future__ import annotations

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


@pytest.mark.parametrize("value", [1.0, [float("nan"), 2.0], 3])
def test_the_same_values_stay_where_they_are(tmp_path: pathlib.Path, value: object):
    there, late = written(tmp_path / "ckpt", value), written(tmp_path / "late", value)
    before = [path.stat().st_ino for path in sorted(tmp_path.glob("ckpt.*"))]
    saving.publish_checkpoint(late, there)
    assert [path.stat().st_ino for path in sorted(tmp_path.glob("*"))] == before


def test_other_values_take_their_place(tmp_path: pathlib.Path):
    there, late = written(tmp_path / "ckpt", 1.0), written(tmp_path / "late", 2.0)
    saving.publish_checkpoint(late, there)
    assert value_of(tmp_path / "ckpt") == 2.0
    assert not list(tmp_path.glob("late*"))


@pytest.mark.parametrize("missing", ["ckpt.index", "ckpt.data-00000-of-00001"])
def test_half_a_checkpoint_is_replaced(tmp_path: pathlib.Path, missing: str):
    there, late = written(tmp_path / "ckpt", 1.0), written(tmp_path / "late", 1.0)
    (tmp_path / missing).unlink()
    saving.publish_checkpoint(late, there)
    assert value_of(tmp_path / "ckpt") == 1.0


def test_a_lock_that_is_never_given_back_holds_nobody_for_ever(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(saving, "LOCK_SECS", 0.05)
    with (
        saving.locked(str(tmp_path / "ckpt"), saving.fcntl.LOCK_SH),
        saving.locked(str(tmp_path / "ckpt"), saving.fcntl.LOCK_SH),
        saving.locked(str(tmp_path / "ckpt"), saving.fcntl.LOCK_EX),
    ):
        pass


def test_a_path_that_is_no_directory_of_this_machine_has_no_lock():
    with saving.locked("gs://bucket/ckpt", saving.fcntl.LOCK_EX):
        pass
