# SPDX-License-Identifier: Apache-2.0
"""The losses of a Keras model besides those given to `compile`: penalties of weights and activities, and `add_loss`.

Keras adds them up in `Trainer._aggregate_additional_loss`, once for each, and divides them by the number of replicas.
The public `Model.losses` gives them undivided, and what is changed there does not reach the gradient.

A layer keeps them in a list of its own, which the threads of several replicas share: where replicas meet in
`merge_call`, such as in `optimizer.apply` or a synchronized BatchNormalization, a replica would read the losses of the
one that came last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.compat import autograph_rules, flat_layers, own_attributes

NEEDS = (
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer._aggregate_additional_loss(loss)",
    "keras.src.layers.layer:Layer._loss_ids",
    "keras.src.layers.layer:Layer._losses",
)


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


def kept_by_replica(model: Any, step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a step whose replica, after each `merge_call`, finds the losses that it had before.

    Args:
      model: a Keras model.
      step: a function of it, to be run by the thread of each replica.
    """
    if isinstance(step, tf.types.experimental.PolymorphicFunction):
        return step
    step = autograph_rules.converted(step)

    @tf.autograph.experimental.do_not_convert
    def on_replica(*args: Any, **kwargs: Any) -> Any:
        context = tf.distribute.get_replica_context()
        merge_call = context.merge_call

        def keeping(*given: Any, **named: Any) -> Any:
            kept = [(layer, list(layer._losses), set(layer._loss_ids)) for layer in flat_layers.layers_of(model)]
            result = merge_call(*given, **named)
            for layer, losses, ids in kept:
                layer._losses[:] = losses
                layer._loss_ids.clear()
                layer._loss_ids.update(ids)
            return result

        own_attributes.put(context, "merge_call", keeping)
        return step(*args, **kwargs)

    return on_replica
