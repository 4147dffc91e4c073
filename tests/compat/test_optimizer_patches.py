# SPDX-License-Identifier: Apache-2.0
"""Optimizers of a model are found."""

from __future__ import annotations

import keras

from tfdist.compat.keras import optimizers


def test_an_optimizer_that_is_wrapped_for_loss_scaling_counts_once():
    """mixed_float16 wraps what compile is given, and a subclass may keep it in an attribute as well."""

    class Keeping(keras.Model):
        def compile(self, optimizer, **kwargs):
            self.kept = optimizer
            super().compile(optimizer=keras.optimizers.LossScaleOptimizer(optimizer), **kwargs)

    model = Keeping()
    model.compile(keras.optimizers.SGD(0.1))
    assert [type(each).__name__ for each in optimizers.optimizers_of(model)] == ["LossScaleOptimizer"]
