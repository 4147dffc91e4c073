# SPDX-License-Identifier: Apache-2.0
"""Compares the batch size that a stateful RNN was built with to the size that each replica computes with.

A stateful RNN keeps a state for each example of a batch, so its batches have one size. The rule is the same for all
strategies: the size is that of a replica's part.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist import _log
from tfdist.compat import patching
from tfdist.compat.keras import calls, models
from tfdist.compat.tensorflow import inputs

_TOLD = "_tfdist_told_of_states"


def check(strategy: tf.distribute.Strategy, dataset: Any, num_parts: int, keeps_states: bool) -> None:
    """Checks the data of the call of Keras that is running, before it does anything.

    Args:
      strategy: the strategy.
      dataset: the data set of whole batches.
      num_parts: number of parts that a batch is divided into.
      keeps_states: True if each replica keeps the states of its own examples; otherwise one line says that it does not.

    Raises:
      ValueError: a replica's part has another size than a stateful RNN of the model.
    """
    call = calls.current()
    if call is None or not isinstance(dataset, tf.data.Dataset):
        return
    fixed = {layer.name: size for layer in models.layers_of(call.model) if (size := _size(layer)) is not None}
    if not fixed:
        return
    batch_size = inputs.batch_size(dataset)
    for name, size in fixed.items():
        if batch_size is not None and batch_size != size * num_parts:
            part = f"{batch_size / num_parts:g}"
            raise ValueError(
                f"model.{call.kind}: layer {name!r} is stateful and was built for batches of {size}, but "
                f"{type(strategy).__name__} gives each replica {part} of the {batch_size} examples of a batch; use "
                f"batch_size={size * num_parts}, or build the model with keras.Input(batch_shape=({part}, ...)). "
                f"Received: batch_size={batch_size}, divided by {num_parts}"
            )
    # With parts, a policy decides about updates alone.
    if not keeps_states and (call.trains or num_parts == 1) and not patching.of(call.model, _TOLD):
        patching.put(call.model, _TOLD, True)
        _log.say(
            f"{type(strategy).__name__}: replicas share the states of stateful RNNs here, as means, so the "
            "numbers differ from one device; MirroredStrategy and MultiWorkerMirroredStrategy without a policy keep a "
            f"state for each example. Received: layer {next(iter(fixed))!r}, model {call.model.name!r}"
        )


def _size(layer: Any) -> int | None:
    """Returns the batch size of a stateful RNN that is built, else None."""
    states = getattr(layer, "states", None) if getattr(layer, "stateful", False) else None
    first = next((each for each in tf.nest.flatten(states) if each is not None), None)
    return None if first is None or not getattr(first, "shape", None) else first.shape[0]
