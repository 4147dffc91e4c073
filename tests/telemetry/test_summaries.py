# SPDX-License-Identifier: Apache-2.0
"""Values of summaries are what TensorBoard's own classes read."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import tensorflow as tf

from tfdist.telemetry import summaries
from tfdist.telemetry.histogram import Histogram


def test_text_is_read_by_tensorboards_own_classes() -> None:
    metadata = pytest.importorskip("tensorboard.plugins.text.metadata")
    value = summaries.text("policy/changes", "spares 0 -> 1\n<b>")
    assert value.metadata.plugin_data.plugin_name == metadata.PLUGIN_NAME
    metadata.parse_plugin_metadata(value.metadata.plugin_data.content)
    # Indented: Markdown shows it as it is.
    assert tf.make_ndarray(value.tensor).tolist() == [b"    spares 0 -> 1\n    <b>"]


def test_histograms_have_the_values() -> None:
    values = Histogram()
    values.add_all(np.array([0.5, 0.5, 0.5, 2.0]))
    histo = summaries.histogram("time/steps", values).histo
    assert (histo.num, histo.sum, histo.min, histo.max) == (4, 3.5, 0.5, 2.0)
    assert histo.sum_squares == pytest.approx(4.75, rel=0.04)
    assert list(histo.bucket) == [0, 3, 1]
    assert histo.bucket_limit[1] == pytest.approx(0.5, rel=0.05)
    histo = summaries.counts("staleness/gradients", collections.Counter({0: 5, 2: 1})).histo
    assert (histo.num, histo.sum, histo.min, histo.max) == (6, 2, 0, 2)
    assert list(zip(histo.bucket_limit, histo.bucket, strict=True)) == [(-0.5, 0), (0.5, 5), (2.5, 1)]
