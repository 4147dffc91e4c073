# SPDX-License-Identifier: Apache-2.0
"""The losses of a Keras model besides those given to `compile`: penalties of weights and activities, and `add_loss`.

Keras adds them up in `Trainer._aggregate_additional_loss`, once for each, and divides them by the number of replicas.
The public `Model.losses` gives them undivided, and what is changed there does not reach the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

NEEDS = ("keras.src.backend.tensorflow.trainer:TensorFlowTrainer._aggregate_additional_loss(loss)",)


def multiplied(model: Any, factor: Callable[[], Any]) -> tuple[Any, str, Any]:
    """An attribute that has each of these losses multiplied, as (object, name, value).

    Args:
      model: a Keras model.
      factor: called in replica context for each loss; where it is 0, a loss that is NaN becomes 0.
    """
    aggregate = model._aggregate_additional_loss

    def aggregate_multiplied(loss: Any) -> tf.Tensor:
        total = aggregate(loss)
        return tf.math.multiply_no_nan(total, tf.cast(factor(), total.dtype))

    return model, "_aggregate_additional_loss", aggregate_multiplied
