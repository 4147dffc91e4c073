# SPDX-License-Identifier: Apache-2.0
"""Values of summaries are what TensorBoard's own classes read; without it, those that need it are left out."""

from __future__ import annotations

import collections
import sys

import numpy as np
import pytest
import tensorflow as tf

from tfdist.telemetry import summaries
from tfdist.telemetry.histogram import Histogram


def test_hparams_are_read_by_tensorboards_own_classes() -> None:
    metadata = pytest.importorskip("tensorboard.plugins.hparams.metadata")
    given = {"strategy": "MirroredStrategy", "learning_rate": 0.01, "num_workers": 300, "on": True}
    (value,) = summaries.session_start(given)
    assert value.tag == metadata.SESSION_START_INFO_TAG
    assert value.metadata.plugin_data.plugin_name == metadata.PLUGIN_NAME
    start = metadata.parse_session_start_info_plugin_data(value.metadata.plugin_data.content)
    found = {name: getattr(each, each.WhichOneof("kind")) for name, each in start.hparams.items()}
    assert found == given
    assert start.start_time_secs > 0
    (value,) = summaries.session_end()
    assert value.tag == metadata.SESSION_END_INFO_TAG
    end = metadata.parse_session_end_info_plugin_data(value.metadata.plugin_data.content)
    assert end.status == 1


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


def test_hparams_are_left_out_without_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert summaries.session_start({"a": 1}) == summaries.session_end() == []
