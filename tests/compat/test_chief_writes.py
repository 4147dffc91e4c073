# SPDX-License-Identifier: Apache-2.0
"""Parts of Keras on which the chief's writing rests; multi_worker_checks.py tests the writing itself."""

from __future__ import annotations

import keras
import pytest

from tfdist.compat import chief_writes

pytestmark = pytest.mark.devices


def test_keras_still_writes_through_what_is_wrapped():
    assert chief_writes.check() == []


def test_a_keras_that_writes_otherwise_is_refused_by_name(monkeypatch):
    monkeypatch.delattr(keras.callbacks.BackupAndRestore, "_save_model")
    monkeypatch.setattr(keras.callbacks.TensorBoard, "set_model", lambda self, net: None)
    problems = chief_writes.check()
    assert problems == ["BackupAndRestore._save_model is gone", "TensorBoard.set_model takes ('self', 'net')"]
    with pytest.raises(RuntimeError, match=r"BackupAndRestore\._save_model is gone"):
        chief_writes.install()
