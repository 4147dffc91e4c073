# SPDX-License-Identifier: Apache-2.0
"""placement and split: which device of its replica computes a layer, where replicas span several devices."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.keras.placement import placed
from tfdist.compat.tensorflow import replicas
from tfdist.step import replica_placement


def placement(part: int) -> contextlib.AbstractContextManager[None]:
    """Places the layers that are made within `with tfdist.placement(part):` on a device of each replica.

        strategy = tfdist.MirroredStrategy(devices_per_replica=2)
        with strategy.scope():
            with tfdist.placement(0):
                encoder = keras.Sequential([keras.layers.Embedding(50_000, 512), keras.layers.LSTM(512)])
            with tfdist.placement(1):
                head = keras.layers.Dense(50_000)
            model = keras.Sequential([encoder, head])

    Weights and slots of these layers are on that device, and so are their forward pass, backward pass and update.
    Within another block the inner one counts. Layers without weights need no place: they compute where their input is.

    Args:
      part: index of the device in each replica, from 0.

    Raises:
      ValueError: the current strategy has no such device.
    """
    parts = _parts(f"placement({part!r})")
    if not _is_int(part) or not 0 <= part < parts.count:
        raise ValueError(
            f"placement(part): must be an integer from 0 to {parts.count - 1}, the index of a device of a replica; or "
            f"raise devices_per_replica. Received: part={part!r}, devices_per_replica={parts.count}"
        )
    return placed(part)


def split(model: keras.Model, parts: int | None = None) -> keras.Model:
    """Places successive layers of a built model on the devices of each replica, in parts of about equal bytes.

    It moves the weights, and the slots of an optimizer that has some, and may be called again, also on a model that was
    loaded. Layers of a model within the model are placed one by one; a layer that is made of layers stays whole.

    Args:
      model: a model that was made in the scope of a strategy with `devices_per_replica`, and is built.
      parts: number of parts, at most `devices_per_replica`; that many by default.

    Returns:
      The same model.

    Raises:
      ValueError: the model was made elsewhere or is not built, or there are fewer layers or devices than parts.
    """
    if not isinstance(model, keras.Model):
        raise ValueError(f"split(model): must be a keras.Model. Received: model={model!r}")
    strategy = model.distribute_strategy
    devices = _parts("split", strategy).count
    wanted = devices if parts is None else parts
    if not _is_int(wanted) or not 1 <= wanted <= devices:
        raise ValueError(
            f"split(parts): must be an integer from 1 to devices_per_replica. Received: parts={parts!r}, "
            f"devices_per_replica={devices}"
        )
    if not model.built:
        raise ValueError(
            "split(model): the model has no weights yet to be divided; give it a keras.Input, or call "
            f"model.build(shape), before. Received: model {model.name!r}, not built"
        )
    layers = replica_placement.layers_with_weights(model)
    if len(layers) < wanted:
        raise ValueError(
            f"split(parts): a part has one layer at least; use parts={max(1, len(layers))}, or fewer, or "
            f"tfdist.placement within the layers. Received: parts={wanted}, {len(layers)} layers with weights"
        )
    part_of_each = replica_placement.balanced(replica_placement.bytes_of_layers(layers), wanted) if layers else []
    replica_placement.move(strategy, model, layers, part_of_each)
    return model


def _parts(call: str, strategy: Any = None) -> replicas.Parts:
    """Returns the devices of a strategy's replicas; raises ValueError if each has one device."""
    strategy = strategy or tf.distribute.get_strategy()
    parts = replicas.parts_of(strategy)
    if parts is None and not tf.distribute.has_strategy() and strategy is tf.distribute.get_strategy():
        raise ValueError(
            f"{call}: there is no strategy; put `with strategy.scope():` around it, with the scope of "
            "a strategy that was built with devices_per_replica=2, or more. Received: no scope"
        )
    if parts is None:
        raise ValueError(
            f"{call}: a replica has one device; use it in the scope of a strategy that was built with "
            f"devices_per_replica=2, or more, or leave it away. Received: {type(strategy).__name__}"
        )
    return parts


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
