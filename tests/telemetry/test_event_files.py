# SPDX-License-Identifier: Apache-2.0
"""Event files have values that TensorBoard's own classes read, and are begun again where they vanish."""

from __future__ import annotations

import pathlib
import shutil

import numpy as np
import pytest
import telemetry_files
import tensorflow as tf

from tfdist.telemetry import event_files


def test_text_is_read_by_tensorboards_own_classes() -> None:
    metadata = pytest.importorskip("tensorboard.plugins.text.metadata")
    value = event_files.text("policy/changes", "spares 0 -> 1\n<b>")
    assert value.metadata.plugin_data.plugin_name == metadata.PLUGIN_NAME
    metadata.parse_plugin_metadata(value.metadata.plugin_data.content)
    # Indented: Markdown shows it as it is.
    assert tf.make_ndarray(value.tensor).tolist() == [b"    spares 0 -> 1\n    <b>"]


def test_histograms_are_read_by_tensorboards_own_classes() -> None:
    data_compat = pytest.importorskip("tensorboard.data_compat")
    value = event_files.histogram("time/steps", 0.5, 2.0, [(0.51, 3), (2.03, 1)])
    # Left and right limit, and count, of each bucket.
    found = tf.make_ndarray(data_compat.migrate_value(value).tensor)
    np.testing.assert_allclose(found, [[0.5, 0.51, 3], [0.51, 2.0, 1]])


def test_files_that_vanish_are_begun_again_with_a_warning(tmp_path: pathlib.Path) -> None:
    warnings: list[str] = []
    writers = event_files.EventWriters(str(tmp_path / "run"), warnings.append)
    for step in (1, 2, 3):
        writers.add("", step, lambda: [event_files.scalar("value", 0.5)])
        writers.flush()
        if step == 1:
            shutil.rmtree(tmp_path / "run")
    writers.add("", 4, lambda: [1 / 0])
    writers.close()
    assert telemetry_files.scalars(tmp_path, "run") == {"tfdist/value": {2: 0.5, 3: 0.5}}
    assert "has vanished" in warnings[0] and "division by zero" in warnings[1]
