# SPDX-License-Identifier: Apache-2.0
"""Scaling of the losses of a user's own step, so that several replicas train as one device.

The loss of a batch is a mean over its examples, so several replicas' gradients are averaged. Keras divides the losses
that it computes itself by `num_replicas_in_sync`, and sums gradients. A loss that a step computes with `tf.reduce_mean`
is not divided: under the stock strategies its gradients are too large by a factor of the number of replicas.

Within `counted_as_one`, `strategy.num_replicas_in_sync` is 1 in replica context. So neither Keras nor
`tf.nn.compute_average_loss` divides, and every loss of the step is the mean over the replica's own examples. The
gradients are divided instead.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfdist.compat import patching
from tfdist.compat.keras import models
from tfdist.step import model_losses, used_objects

# Attribute of strategies: True while `num_replicas_in_sync` is 1 on a replica.
FLAG = "counts_as_one_replica"
_STEPS = ("train_step", "test_step")


def has_own_loss(step: Callable[..., Any]) -> bool:
    """Returns True if a Keras step may have a loss that Keras does not divide by the number of replicas.

    A loss with `reduction="sum"` is not divided on purpose: the step of such a model is left as it is.

    Args:
      step: a bound `train_step` or `test_step`, or Keras' wrapper around it.
    """
    model: Any = getattr(step, "__self__", None)
    if not models.is_trainer(model) or any(model_losses.is_sum(loss) for loss in models.compiled_losses(model)):
        return False
    if not models.compiled_losses(model) or any(_adds_losses(type(layer)) for layer in models.layers_of(model)):
        # Keras divides losses of `add_loss` once, and a Keras loss that a layer computes for `add_loss` a second time.
        return True
    names = (*_STEPS, "compute_loss")
    if any(getattr(type(model), name) is not getattr(keras.Model, name) for name in names):
        return True
    # An instance may have a step of its own.
    losses = models.compiled_losses(model)
    return any(name in vars(model) for name in names) or any(_is_of_users_code(loss) for loss in losses)


@contextlib.contextmanager
def counted_as_one(strategy: Any, step: Callable[..., Any]) -> Iterator[bool]:
    """Within this block, the losses of `step` are means over a replica's own examples, if it has its own loss.

    Yields:
      True if it has its own loss; then the gradients must be divided by the number of replicas.
    """
    before, applies = getattr(strategy, FLAG, False), has_own_loss(step)
    patching.put(strategy, FLAG, applies)
    try:
        yield applies
    finally:
        patching.put(strategy, FLAG, before)


@functools.cache
def _adds_losses(kind: type) -> bool:
    """Returns True if a user's layer class calls `add_loss`."""
    if used_objects.is_of_keras(kind):
        return False
    functions = [value for base in kind.__mro__ for value in vars(base).values() if _is_of_a_user(base, value)]
    return any("add_loss" in used_objects.names_used_by(function) for function in functions)


def _is_of_a_user(base: type, value: Any) -> bool:
    return base.__module__.split(".")[0] not in ("keras", "tensorflow", "builtins") and callable(value)


def _is_of_users_code(loss: Any) -> bool:
    """Returns True if the user's code computes a loss. It may be one number per batch, which Keras doesn't divide."""
    if not isinstance(loss, keras.losses.Loss):
        return False
    return not used_objects.is_all_of_keras(loss, getattr(loss, "fn", None))
