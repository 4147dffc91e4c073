# SPDX-License-Identifier: Apache-2.0
"""Model parallelism: replicas that span several devices. Public: `placement` and `split`.

Layers get a place on one of the devices of a replica; before training, all layers with weights must have one.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import _checks
from tfdist.compat.keras import models, optimizers, scope
from tfdist.compat.keras import placement as places
from tfdist.compat.tensorflow import replicas


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
    if not _checks.is_int(part) or not 0 <= part < parts.count:
        raise ValueError(
            f"placement(part): must be an integer from 0 to {parts.count - 1}, the index of a device of a replica; or "
            f"raise devices_per_replica. Received: part={part!r}, devices_per_replica={parts.count}"
        )
    return places.placed(part)


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
    if not _checks.is_int(wanted) or not 1 <= wanted <= devices:
        raise ValueError(
            f"split(parts): must be an integer from 1 to devices_per_replica. Received: parts={parts!r}, "
            f"devices_per_replica={devices}"
        )
    if not model.built:
        raise ValueError(
            "split(model): the model has no weights yet to be divided; give it a keras.Input, or call "
            f"model.build(shape), before. Received: model {model.name!r}, not built"
        )
    layers = layers_with_weights(model)
    if len(layers) < wanted:
        raise ValueError(
            f"split(parts): a part has one layer at least; use parts={max(1, len(layers))}, or fewer, or "
            f"tfdist.placement within the layers. Received: parts={wanted}, {len(layers)} layers with weights"
        )
    part_of_each = balanced(bytes_of_layers(layers), wanted) if layers else []
    move(strategy, model, layers, part_of_each)
    return model


def _parts(call: str, strategy: Any = None) -> replicas.ReplicaDevices:
    """Returns the devices of a strategy's replicas; raises ValueError if each has one device."""
    strategy = strategy or tf.distribute.get_strategy()
    parts = replicas.parts_of(strategy)
    if parts is None:
        raise ValueError(
            f"{call}: a replica has one device; put `with strategy.scope():` around it, of a strategy that was built "
            f"with devices_per_replica=2, or more, or leave it away. Received: {type(strategy).__name__}"
        )
    return parts


def check_placement(strategy: Any, model: keras.Model) -> None:
    """Raises ValueError if replicas span devices, and a layer with weights has no place or XLA compiles the step."""
    parts = replicas.parts_of(strategy)
    if parts is None:
        return
    count = f"devices_per_replica={parts.count}"
    if model.jit_compile:
        raise ValueError(
            "compile(jit_compile=True): XLA can't compile a step of replicas that span several devices; leave it at "
            f"'auto' or False. Received: jit_compile=True, {count}"
        )
    missing = [weight.path for weight in model.weights if places.part_of(weight) is None]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(
            f"{type(strategy).__name__}({count}): layers have no place; make them within "
            "`with tfdist.placement(...):`, or call tfdist.split(model) before training. "
            f"Received: no place for {', '.join(missing[:3])}{more}, of {len(model.weights)} weights"
        )


def layers_with_weights(model: keras.Model) -> list[keras.Layer]:
    """Returns the layers of a model that can be placed apart and have weights, in the order of the model.

    Layers of a Sequential or Functional model within a model count one by one; a layer that is made of layers counts
    as one. A layer that is used twice counts once.
    """
    unique = {id(layer): layer for layer in _units(model)}
    return [layer for layer in unique.values() if layer.weights]


def _units(model: keras.Model) -> Iterator[keras.Layer]:
    for layer in model.layers:
        is_graph = isinstance(layer, keras.Sequential) or (
            isinstance(layer, keras.Model) and hasattr(layer, "operations")
        )
        if is_graph:
            yield from _units(layer)
        else:
            yield layer


def bytes_of_layers(layers: Sequence[keras.Layer]) -> list[int]:
    """Returns the bytes of each layer's weights; those of a weight that several layers share count for the first."""
    seen: set[int] = set()
    sizes: list[int] = []
    for layer in layers:
        own = {id(weight): weight for weight in layer.weights if id(weight) not in seen}
        seen |= own.keys()
        counts = [(tf.TensorShape(weight.shape).num_elements() or 0, weight.dtype) for weight in own.values()]
        sizes.append(sum(count * tf.as_dtype(dtype).size for count, dtype in counts))
    return sizes


def balanced(sizes: Sequence[int], parts: int) -> list[int]:
    """Divides successive layers into parts that have at least one layer each, the largest being as small as it can be.

    Args:
      sizes: bytes of each layer.
      parts: number of parts, at most that of the layers.

    Returns:
      The part of each layer.
    """
    sums = [0, *itertools.accumulate(sizes)]
    # best[n]: the least largest part of the first n layers, and where its last part begins.
    best: list[tuple[int, list[int]]] = [(total, [0]) for total in sums]
    for part in range(1, parts):
        best = [
            min(
                (
                    (max(best[start][0], sums[end] - sums[start]), [*best[start][1], start])
                    for start in range(part, end)
                ),
                default=(sums[-1] + 1, []),
            )
            for end in range(len(sums))
        ]
    begins = best[-1][1]
    return [sum(index >= begin for begin in begins) - 1 for index in range(len(sizes))]


def move(strategy: Any, model: keras.Model, layers: Sequence[keras.Layer], part_of_each: Sequence[int]) -> None:
    """Gives each layer a part, and moves its weights and their slots to the part's devices.

    Args:
      strategy: on several workers, all of them call this alike.
      model: weights that none of the layers has stay on the first part.
      layers: see `layers_with_weights`.
      part_of_each: their parts.
    """
    part_of_weight: dict[int, int] = {}
    for layer, part in zip(layers, part_of_each, strict=True):
        for each in models.layers_of(layer):
            places.place(each, part)
        for weight in layer.weights:
            part_of_weight.setdefault(id(weight), part)
    for weight in model.weights:
        scope.move_to_part(strategy, weight, part_of_weight.get(id(weight), 0))
    for optimizer in optimizers.optimizers_of(model):
        for part in optimizers.parts_of(optimizer):
            if part.built:
                for weight, slot in optimizers.slots_of(part):
                    scope.move_to_part(strategy, slot, part_of_weight.get(id(weight), 0))
                optimizers.find_again(part)
    model.train_function = model.test_function = model.predict_function = None
