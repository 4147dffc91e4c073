# SPDX-License-Identifier: Apache-2.0
"""Values of summaries are what TensorBoard's own classes read."""

from __future__ import annotations

import numpy as np
import pytest
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
