# SPDX-License-Identifier: Apache-2.0
"""Calls of a Keras model: `fit`, `evaluate`, `predict` and the methods of one batch, announced before they begin.

Keras announces a call to the strategy of its model alone, and not before it asks for data. A model that was made
outside of `strategy.scope()` has no strategy to announce it to. So the six public methods are wrapped, once in a
process and for good; all models inherit them from one class, for which Keras exports no name.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

from tfdist.compat import replacing, replicas

NEEDS = (
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer.distribute_strategy",
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer.evaluate",
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer.fit",
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer.predict",
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer.predict_on_batch",
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer.test_on_batch",
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer.train_on_batch",
)

_KINDS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
# Weak references to bound methods of strategies.
_listeners: list[weakref.WeakMethod[Callable[[Call], None]]] = []


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a model's method.

    Attributes:
      model: the model.
      kind: name of the method, such as "fit".
    """

    model: Any
    kind: str

    @property
    def trains(self) -> bool:
        """True for `fit` and `train_on_batch`."""
        return self.kind in ("fit", "train_on_batch")

    @property
    def strategy(self) -> Any:
        """The strategy that the model runs under: of the scope it was made in, else the current one; None for none."""
        strategy = self.model.distribute_strategy
        return None if strategy is replicas.default_strategy() else strategy


def before_each(begin: Callable[[Call], None]) -> None:
    """Has `begin(call)` called before each call of a model of this process, as long as its owner lives.

    Args:
      begin: a bound method of a strategy. An exception that it raises ends the call before it has any effect.
    """
    for kind in _KINDS:
        replacing.once(TensorFlowTrainer, kind, _announcing)
    _listeners.append(weakref.WeakMethod(begin))


def _announcing(original: Any) -> Any:
    kind = original.__name__

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        for listener in [*_listeners]:
            begin = listener()
            if begin is None:
                _listeners.remove(listener)
            else:
                begin(Call(self, kind))
        return original(self, *args, **kwargs)

    return method
