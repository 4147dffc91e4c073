# SPDX-License-Identifier: Apache-2.0
"""Returns each prediction of `predict_on_batch` once.

Every replica computes the whole batch, and Keras concatenates the results of all of them. Neither `Strategy.run` nor
what Keras calls for the concatenation says that the batch was not divided, so Keras' method is wrapped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import replacing, replicas

_strategies: weakref.WeakSet[tf.distribute.Strategy] = weakref.WeakSet()


def predict_once(strategy: tf.distribute.Strategy) -> None:
    """Makes `predict_on_batch` of models of this strategy return one prediction for each example."""
    _strategies.add(strategy)
    owner: Any = next(base for base in keras.Model.__mro__ if "predict_on_batch" in vars(base))
    replacing.once(owner, "predict_on_batch", _predicting_once)


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
