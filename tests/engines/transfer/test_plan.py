# SPDX-License-Identifier: Apache-2.0
"""The transfer of a strategy follows from its argument."""

from __future__ import annotations

import tensorflow as tf

from tfdist.engines.transfer.plan import TransferPlan


def test_a_plan_bundles_small_tensors_unless_it_is_plain() -> None:
    specs = [tf.TensorSpec([2]), tf.TensorSpec([3])]
    assert [len(TransferPlan(mode).bundles(specs, ["a", "a"]).devices) for mode in ("auto", "plain")] == [1, 2]


def test_a_plan_in_words_is_its_forms() -> None:
    assert str(TransferPlan("plain")) == "each variable and gradient sent whole"
    assert str(TransferPlan("auto")) == (
        "embedding rows gathered at the table, small variables sent together, gradients of large kernels sent as "
        "factors of up to 64 rows"
    )
