# SPDX-License-Identifier: Apache-2.0
"""Files that a worker loads before the chief has saved them."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Iterator

import keras
import pytest
import tensorflow as tf

from tfdist.compat.keras import saving

REPLACED = [
    *((keras.saving, "load_model"), (keras.models, "load_model"), (tf.saved_model, "load")),
    (keras.Model, "load_weights"),
]


@pytest.fixture(autouse=True)
def _as_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for owner, name in REPLACED:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    saving.wait_for_files("worker:1")


def model() -> keras.Model:
    return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])


def test_a_load_waits_for_the_chiefs_file(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    saved, path = model(), tmp_path / "saved.keras"

    def save() -> None:
        saved.save(tmp_path / "staged.keras")
        (tmp_path / "staged.keras").replace(path)

    late = threading.Timer(0.2, save)
    late.start()
    assert keras.models.load_model(path).count_params() == 2
    late.join()
    assert f"worker:1 waits up to 10 s for {path}" in capsys.readouterr().err
    keras.saving.load_model(filepath=path)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("load", "error"),
    [
        (lambda path: keras.models.load_model(path / "no.keras"), ValueError),
        (lambda path: model().load_weights(path / "no.weights.h5"), FileNotFoundError),
        (lambda path: tf.saved_model.load(path / "no"), OSError),
    ],
)
def test_a_file_that_never_appears_is_the_usual_error(tmp_path, monkeypatch, capsys, load, error):
    monkeypatch.setattr(saving, "WAIT_SECS", 0.01)
    with pytest.raises(error, match="no"):
        load(tmp_path)
    assert "worker:1 waits up to 0.01 s for" in capsys.readouterr().err
