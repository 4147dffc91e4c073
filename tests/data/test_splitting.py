# SPDX-License-Identifier: Apache-2.0
"""Batches of which not all components have a batch dimension are divided by nobody in silence."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from tfdist.data import splitting

pytestmark = pytest.mark.devices

UNEVEN = {"table": tf.TensorSpec([3]), "x": tf.TensorSpec([None, 2])}


def batch() -> dict[str, tf.Tensor]:
    return {"table": tf.ones([3]), "x": tf.ones([6, 2])}


def test_a_lone_replica_gets_a_batch_as_it_is() -> None:
    given: Any = {**batch(), "scale": tf.constant(2.0)}
    assert splitting.cut(given, 0, 1) is given


def test_components_of_different_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"different batch sizes.*tf\.repeat.*Received: batch sizes \[3, 6\]"):
        splitting.check_batched({"table": tf.TensorSpec([3]), "x": tf.TensorSpec([6, 2])}, 2)


def test_components_of_unknown_different_sizes_are_refused_when_they_come() -> None:
    cut = tf.function(lambda given: splitting.cut(given, 1, 2), autograph=False, input_signature=[UNEVEN])
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="components of a batch have different numbers of examples"
    ):
        cut(batch())


def test_components_of_one_size_are_cut_alike() -> None:
    spec = {"table": tf.TensorSpec([None]), "x": tf.TensorSpec([None, 2])}
    cut = tf.function(lambda given: splitting.cut(given, 1, 2), autograph=False, input_signature=[spec])
    parts = cut({"table": tf.range(5.0), "x": tf.ones([5, 2])})
    assert parts["table"].numpy().tolist() == [2.0, 3.0, 4.0]
    assert parts["x"].shape == (3, 2)


def test_components_of_different_sizes_are_named_in_one_line() -> None:
    given = (batch(), tf.ragged.constant([[1]] * 6), tf.sparse.eye(6), None)
    message = (
        r"tf\.repeat.*Received examples: 3 in batch\[0\]\['table'\], 6 in batch\[0\]\['x'\], 6 in batch\[1\], 6 in"
    )
    with pytest.raises(ValueError, match=message) as raised:
        splitting.check_examples(given, 2)
    assert "\n" not in str(raised.value)
    splitting.check_examples((given[0]["x"], *given[1:], tf.constant(2.0)), 2)
