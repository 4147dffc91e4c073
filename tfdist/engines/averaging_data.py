# SPDX-License-Identifier: Apache-2.0
"""The data set of a strategy whose replicas train alone: `fit` reads it without asking anybody.

In `fit` every worker iterates over whole batches, of which each replica takes its part in the step. `evaluate`,
`predict` and custom loops get the stock iterator. Either way the parameters are averaged first, if they are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf
from tensorflow.python.distribute import input_lib

from tfdist.engines import fitting, sharing

if TYPE_CHECKING:
    from tfdist.engines.averaging import AveragingEngine

# Under these names `fit` sees what is to be trained on alone.
_WHOLE, _OWN = "tfdist: a batch of all replicas", "tfdist: this worker's parts of a batch"


class Part(NamedTuple):
    """What one replica trains on in a step.

    Attributes:
      batch: the examples.
      total: int64 scalar, the examples of all replicas together; None if nobody knows.
    """

    batch: Any
    total: tf.Tensor | None


class AveragingDataset(input_lib.DistributedDataset):
    """A data set that `fit` trains on alone, and everybody else together.

    It says that it is the stock `DistributedDataset`, which shares nothing with it but its interface, because Keras
    goes by that class when it decides what `fit` takes.

    Args:
      engine: averages.
      own: what `fit` reads: `whole_batches` or `own_parts`.
      distribute: makes the same data set as the stock strategy distributes it; called once, when it is needed.
    """

    def __init__(self, engine: AveragingEngine, own: tf.data.Dataset, distribute: Callable[[], Any]) -> None:
        self._engine = engine
        self._own = own
        self._distribute = distribute
        self._distributed: Any = None

    @property
    def element_spec(self) -> Any:
        """The structure of `tf.TypeSpec`s of a batch."""
        return self._stock().element_spec

    @property
    def cardinality(self) -> int:
        """Batches in one pass, or one of tf.data's constants for an unknown or endless number."""
        return int(self._own.cardinality())

    def __iter__(self) -> Any:
        frame = fitting.fit_frame() if tf.executing_eagerly() else None
        if tf.executing_eagerly():
            # Also at the end of an interrupted `fit`.
            self._engine.settle()
        if frame is None:
            return iter(self._stock())
        self._engine.attend(frame.f_locals["self"], frame.f_locals["callbacks"])
        return iter(self._own)

    def _stock(self) -> Any:
        if self._distributed is None:
            self._distributed = self._distribute()
        return self._distributed


def whole_batches(dataset: tf.data.Dataset, num_replicas: int) -> tf.data.Dataset:
    """What an `AveragingDataset` reads, from a data set of global batches.

    Raises:
      ValueError: the elements are not batches.
    """
    sharing.check_batched(dataset.element_spec, num_replicas)
    return _named(dataset, _WHOLE)


def own_parts(dataset: tf.data.Dataset, num_local_replicas: int) -> tf.data.Dataset:
    """The same from a data set of this worker's own, whose elements go to its replicas in turn."""
    shards = [dataset.shard(num_local_replicas, index) for index in range(num_local_replicas)]
    return _named(tf.data.Dataset.zip(tuple(shards)), _OWN)


def is_plain(dataset: Any, options: Any) -> bool:
    """Whether this is a data set of global batches, to be divided as usual."""
    return options is None and isinstance(dataset, tf.data.Dataset) and tf.executing_eagerly()


def is_alone(args: Sequence[Any]) -> bool:
    """Whether these are the arguments of a step that each replica makes alone."""
    return len(args) == 1 and isinstance(args[0], dict) and bool(args[0].keys() & {_WHOLE, _OWN})


def parts(data: dict[str, Any], replicas: Sequence[int], num_replicas: int) -> list[Part]:
    """What the replicas of this worker train on.

    Args:
      data: an element of `whole_batches` or `own_parts`.
      replicas: which parts of a whole batch they take.
      num_replicas: replicas on all workers.
    """
    if _WHOLE in data:
        with tf.device("/device:CPU:0"):
            total = sharing.rows(data[_WHOLE])
            return [Part(sharing.cut(data[_WHOLE], replica, num_replicas), total) for replica in replicas]
    rows = [sharing.rows(batch) for batch in data[_OWN]]
    is_all = len(rows) == num_replicas and None not in rows
    return [Part(batch, tf.add_n(rows) if is_all else None) for batch in data[_OWN]]


def _named(dataset: tf.data.Dataset, name: str) -> tf.data.Dataset:
    is_tuple = isinstance(dataset.element_spec, tuple)
    named = dataset.map(tf.autograph.experimental.do_not_convert(lambda *e: {name: e if is_tuple else e[0]}))
    options = tf.data.Options()
    # Workers that see the same batches in different orders would take overlapping parts.
    options.deterministic = True
    return named.with_options(options).prefetch(2)
