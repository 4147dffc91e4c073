# SPDX-License-Identifier: Apache-2.0
"""Logs as formulas of metrics' counts, found in the graph of a step."""

from __future__ import annotations

import sys

import tensorflow as tf

from tfdist.step.logs import Formula


def test_log_behind_more_operations_than_python_has_frames_is_found() -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        count, loss = (tf.compat.v1.placeholder(tf.float32, ()) for _ in range(2))
        deep, deep_loss = 2.0 * count, loss
        for _ in range(sys.getrecursionlimit()):
            deep, deep_loss = deep + 1.0, deep_loss + 1.0
        formula = Formula(deep + deep_loss, [count])
        assert [each is count for each in formula.counts] == [True]
        assert [each is deep_loss for each in formula.others] == [True]
        assert Formula(deep_loss, [count]).counts == []
        found = formula.value([tf.constant(3.0)], [tf.constant(4.0)])
        assert session.run(found) == 2 * 3 + sys.getrecursionlimit() + 4
