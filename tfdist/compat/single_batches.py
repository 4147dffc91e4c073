# SPDX-License-Identifier: Apache-2.0
"""Lets `train_on_batch`, `test_on_batch` and `predict_on_batch` count each example of their batch once.

Every replica computes the whole batch, and Keras concatenates predictions of all of them. Neither `Strategy.run` nor
what Keras calls for the concatenation says that the batch was not divided, so Keras' methods are wrapped. Workers may
have been given one batch, or different ones, which only its content shows.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import fresh_threads, own_attributes, replacing, replicas

_strategies: weakref.WeakSet[tf.distribute.Strategy] = weakref.WeakSet()
# Attribute of strategies of several workers: a variable that is True during a `train_on_batch` or `test_on_batch`.
_IS_SINGLE = "_tfdist_is_single_batch"
# Its square, summed over 2**15 workers, is an int64.
_CONTENT_BITS = 24


def count_once(strategy: tf.distribute.Strategy) -> None:
    """Makes the methods on single batches, of models of this strategy, count each example once."""
    _strategies.add(strategy)
    for name, wrap in (
        ("predict_on_batch", _predicting_once),
        ("train_on_batch", _announced),
        ("test_on_batch", _announced),
    ):
        owner: Any = next(base for base in keras.Model.__mro__ if name in vars(base))
        replacing.once(owner, name, wrap)


def content_or(strategy: tf.distribute.Strategy, batch: Any, otherwise: int) -> tf.Tensor:
    """Returns a number for the content of a batch given to `train_on_batch` or `test_on_batch`; else another number.

    Args:
      strategy: the strategy, of several workers.
      batch: the step's argument on a replica.
      otherwise: the number in any other step. Keras may run one traced step in both.
    """
    return tf.cond(_is_single(strategy), lambda: _content(batch), lambda: tf.constant(otherwise, tf.int64))


def _content(batch: Any) -> tf.Tensor:
    leaves = [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(batch, expand_composites=True) if leaf is not None]
    with tf.device("/device:CPU:0"):
        found = [tf.constant(0, tf.int64)]
        for leaf in leaves:
            if leaf.dtype in (tf.resource, tf.variant):
                continue
            # A last byte or string, since there is no fingerprint of nothing.
            data = tf.reshape(leaf, [1, -1]) if leaf.dtype == tf.string else tf.reshape(_as_bytes(leaf), [1, -1])
            data = tf.concat([data, tf.zeros([1, 1], data.dtype) if data.dtype != tf.string else [[""]]], 1)
            mark = tf.bitcast(tf.raw_ops.Fingerprint(data=data, method="farmhash64")[0], tf.int64)
            found.append(tf.bitwise.bitwise_and(mark + 31 * found[-1], 2**_CONTENT_BITS - 1))
    return found[-1]


def _as_bytes(leaf: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(tf.cast(leaf, tf.uint8) if leaf.dtype == tf.bool else leaf, tf.uint8)


def _is_single(strategy: tf.distribute.Strategy) -> Any:
    def make() -> tf.Variable:
        with tf.device("/device:CPU:0"):
            return tf.Variable(False, trainable=False)

    return own_attributes.setdefault(strategy, _IS_SINGLE, lambda: fresh_threads.call(make))


@contextlib.contextmanager
def _single(strategy: tf.distribute.Strategy) -> Iterator[None]:
    _is_single(strategy).assign(True)
    try:
        yield
    finally:
        _is_single(strategy).assign(False)


def _announced(plain: Callable[..., Any]) -> Callable[..., Any]:
    def on_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = self.distribute_strategy
        if strategy not in _strategies or not replicas.has_other_workers(strategy):
            return plain(self, *args, **kwargs)
        with _single(strategy):
            return plain(self, *args, **kwargs)

    return on_batch


def _predicting_once(plain: Callable[..., Any]) -> Callable[..., Any]:
    def predict_on_batch(self: Any, x: Any) -> Any:
        outputs = plain(self, x)
        strategy = self.distribute_strategy
        return _own(outputs, x, strategy) if strategy in _strategies else outputs

    return predict_on_batch


def _own(outputs: Any, x: Any, strategy: Any) -> Any:
    """Picks this process' rows of outputs; those with another number of rows than the input are not changed."""
    copies = strategy.num_replicas_in_sync
    shapes: list[Any] = [getattr(leaf, "shape", ()) for leaf in keras.tree.flatten(x)]
    rows = {shape[0] for shape in shapes if len(shape)}
    if copies == 1 or len(rows) != 1:
        return outputs
    count = int(rows.pop())
    # Workers may have been given different examples: Keras orders the parts by replica, which is one for each worker.
    begin = count * (replicas.worker_index(strategy) if replicas.has_other_workers(strategy) else 0)
    return keras.tree.map_structure(
        lambda output: output[begin : begin + count] if output.shape[0] == copies * count else output, outputs
    )
