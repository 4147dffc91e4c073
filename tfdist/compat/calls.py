# SPDX-License-Identifier: Apache-2.0
"""Calls of a Keras model: `fit`, `evaluate`, `predict` and the methods of one batch, announced before they begin.

Keras announces a call to the strategy of its model alone, and not before it asks for data. A model that was made
outside of `strategy.scope()` has no strategy to announce it to. So the six public methods are wrapped, once in a
process and for good; all models inherit them from one class, for which Keras exports no name.

A program says that a model is to have no strategy by `with tf.distribute.get_strategy().scope():`. TensorFlow lets that
scope leave no trace, so it is wrapped as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
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
_made_in_default: weakref.WeakSet[Any] = weakref.WeakSet()


class _Depth(threading.local):
    """Number of scopes of the default strategy that this thread is in."""

    depth = 0


_in_default = _Depth()


class _Running(threading.local):
    """Calls that run in this thread, the innermost last."""

    def __init__(self) -> None:
        self.calls: list[Call] = []


_running = _Running()


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a model's method.

    Attributes:
      model: the model.
      kind: name of the method, such as "fit".
      ends: called when the call has raised, with the exception.
    """

    model: Any
    kind: str
    ends: list[Callable[[BaseException], None]] = dataclasses.field(default_factory=list, compare=False)

    @property
    def trains(self) -> bool:
        """True for `fit` and `train_on_batch`."""
        return self.kind in ("fit", "train_on_batch")

    @property
    def strategy(self) -> Any:
        """The strategy that the model runs under: of the scope it was made in, else the current one.

        None if nothing was chosen; the default strategy only if the model was made, or is called, in its scope.
        """
        strategy, default = self.model.distribute_strategy, replicas.default_strategy()
        is_chosen = strategy is not default or self.model in _made_in_default or _in_default.depth > 0
        return strategy if is_chosen else None


def current() -> Call | None:
    """Returns the innermost call that runs in this thread, or None."""
    return _running.calls[-1] if _running.calls else None


def before_each(begin: Callable[[Call], None]) -> None:
    """Calls `begin(call)` before each call of a model of this process, as long as its owner lives.

    Args:
      begin: a bound method of a strategy. An exception that it raises ends the call before it has any effect.
    """
    for kind in _KINDS:
        replacing.once(TensorFlowTrainer, kind, _announcing)
    replacing.once(type(replicas.default_strategy()), "scope", _entering)
    replacing.once(keras.Layer, "__new__", _making)
    _listeners.append(weakref.WeakMethod(begin))


def _entering(original: Any) -> Any:
    def scope(self: Any) -> Any:
        return _inside(original(self))

    return scope


@contextlib.contextmanager
def _inside(stock: contextlib.AbstractContextManager) -> Iterator[Any]:
    with stock as strategy:
        _in_default.depth += 1
        try:
            yield strategy
        finally:
            _in_default.depth -= 1


def _making(original: Any) -> Any:
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        layer = original(cls, *args, **kwargs)
        if _in_default.depth:
            _made_in_default.add(layer)
        return layer

    return new


def _announcing(original: Any) -> Any:
    kind = original.__name__

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = Call(self, kind)
        for listener in [*_listeners]:
            begin = listener()
            if begin is None:
                _listeners.remove(listener)
            else:
                begin(call)
        _running.calls.append(call)
        try:
            return original(self, *args, **kwargs)
        except BaseException as error:
            for end in call.ends:
                end(error)
            raise
        finally:
            _running.calls.pop()

    return method
