# SPDX-License-Identifier: Apache-2.0
"""Compares the calls that the workers of a MultiWorkerMirroredStrategy make, and their models, before anything is done.

The models are compared after each epoch of `fit`, too.

All workers run the same script. A call that one worker makes otherwise (`if rank == 0:`) has one of two effects. Either
the workers wait for each other in different collectives, or their models diverge without an error. Examples are weights
that the chief alone has loaded, and a learning rate that the chief's callback alone sets. A few numbers of each
variable show the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat.keras import calls, models
from tfdist.compat.keras.optimizers import optimizers_of
from tfdist.engines.agreement import Agreement
from tfdist.step import one_replica

# Arguments on which the number of steps, passes and collectives of a call depends, or what it trains.
_ARGUMENTS = (
    *("batch_size", "epochs", "initial_epoch", "steps", "steps_per_epoch", "validation_split", "validation_steps"),
    *("validation_batch_size", "validation_freq", "class_weight"),
)
# Callbacks that change the training of the process that has them.
_CALLBACKS = (
    *(keras.callbacks.EarlyStopping, keras.callbacks.LearningRateScheduler, keras.callbacks.ReduceLROnPlateau),
    *(keras.callbacks.TerminateOnNaN, keras.callbacks.SwapEMAWeights),
)
# Numbers of a variable that are compared, and their relative difference that rounding can't make.
_NUMBERS = 4
# About so many weights are compared where only weights are, as by `predict`.
_WEIGHTS = 8
_TOLERANCE = 1e-2
_REMEDY = "do it on every worker, and remove the `if` around it"


def gather_and_compare(agreement: Agreement, value: Any, what: str, is_apart: bool = False) -> dict[Any, Any]:
    """Gathers a value of each worker, and compares the call of Keras that is open, once for each call.

    Args:
      agreement: with the other workers.
      value: JSON data.
      what: name of the exchange.
      is_apart: the workers' weights and optimizers may differ.

    Raises:
      ValueError: the workers make the call with different arguments, callbacks, models or weights.
    """
    call = calls.current()
    own = None
    if call is not None and not call.is_compared and call.kind in ("fit", "evaluate", "predict"):
        own = [_traits(call), [] if is_apart else _values(_variables(call))]
    found = agreement.gather([own, value], what)
    if call is not None and all(traits is not None for traits, _ in found.values()):
        call.is_compared = True
        _check(call, {str(task): traits for task, (traits, _) in found.items()})
    return {task: value for task, (_, value) in found.items()}


def _traits(call: calls.Call) -> dict[str, str]:
    model, given = call.model, call.arguments
    found = {name: repr(given[name]) for name in _ARGUMENTS if given.get(name) is not None}
    if call.kind == "fit":
        found["validation_data"] = "given" if given.get("validation_data") is not None else "none"
    weights = [tuple(weight.shape) for weight in model.trainable_variables] if model.built else []
    found["trainable weights"] = f"{len(weights)} with {sum(int(np.prod(shape)) for shape in weights)} numbers"
    found["optimizer"] = " and ".join(type(each).__name__ for each in optimizers_of(model)) or "none"
    found["metrics"] = ", ".join(models.names_of_given_metrics(model)) or "none"
    found["steps_per_execution"] = str(model.steps_per_execution)
    names = sorted(type(callback).__name__ for callback in call.each_callback if isinstance(callback, _CALLBACKS))
    found["callbacks that change training"] = " and ".join(names) or "none"
    return found


def _variables(call: calls.Call, is_after_epoch: bool = False) -> list[Any]:
    """Returns variables that are equal on all workers: all for `fit`, and some weights for others, often called."""
    weights = list(call.model.trainable_variables) if call.model.built else []
    some = weights[:: max(1, len(weights) // _WEIGHTS)]
    if call.kind != "fit":
        return some
    of_optimizers = [each for optimizer in optimizers_of(call.model) for each in optimizer.variables]
    # First the learning rates, because of which weights may differ.
    rates = [each for each in of_optimizers if each.name == "learning_rate"]
    others = [each for each in of_optimizers if each.name != "learning_rate"]
    return [*rates, *some] if is_after_epoch else [*rates, *weights, *others]


def _values(variables: Sequence[Any]) -> list[list[float]]:
    """Returns, for each of these variables, the sum of a few of its numbers and that of their absolute values."""
    return [_value(one_replica.copies_of(variable)[0]) for variable in variables]


def _value(copy: tf.Variable) -> list[float]:
    if not (isinstance(copy, tf.Variable) and (copy.dtype.is_floating or copy.dtype.is_integer)):
        return [0.0, 0.0]
    # Rows are gathered, as a whole table might be copied when it is read.
    if copy.shape.rank and (count := int(copy.shape[0])):
        numbers = tf.gather(copy, np.linspace(0, count - 1, min(count, _NUMBERS), dtype=np.int64)).numpy().ravel()
    else:
        numbers = np.ravel(copy.numpy())
    some = np.asarray(
        numbers[np.linspace(0, len(numbers) - 1, min(len(numbers), _NUMBERS), dtype=np.int64)] if len(numbers) else [],
        np.float64,
    )
    return [float(f"{float(np.sum(each)):.6g}") for each in (some, np.abs(some))]


def _check(call: calls.Call, found: Mapping[str, Any]) -> None:
    traits = {task: each[0] for task, each in found.items()}
    for name in dict.fromkeys(name for each in traits.values() for name in each):
        shown = {task: each.get(name, "none") for task, each in traits.items()}
        if len(set(shown.values())) > 1:
            received = ", ".join(f"{name} {text} on {task}" for task, text in shown.items())
            raise ValueError(
                f"{call.name}: every worker must make the same call of the same model, as each takes part in every "
                f"step; {_REMEDY}. Received: {received}"
            )
    _check_values(call, _variables(call), {task: each[1] for task, each in found.items()})


def _check_values(call: calls.Call, variables: Sequence[Any], values: Mapping[str, Any]) -> None:
    # Names of variables may differ: they have running numbers.
    for variable, *pairs in zip(variables, *values.values(), strict=False):
        if difference := _difference(pairs):
            what, numbers = difference
            received = ", ".join(f"{number:g} on {task}" for task, number in zip(values, numbers, strict=True))
            raise ValueError(
                f"{call.name}: the workers' models differ, and would diverge; set and load weights, and set "
                f"the learning rate, on every worker. Received: {what} over {variable.path} of {received}"
            )


def _difference(pairs: Sequence[Sequence[float]]) -> tuple[str, list[float]] | None:
    """Returns what differs, and this number of each worker; None if a variable is the same on all of them."""
    sums, sizes = np.asarray(pairs, np.float64).T
    are_finite = np.isfinite(sizes)
    if not are_finite.all():
        return ("a sum", sums.tolist()) if are_finite.any() else None
    # Positive and negative numbers may cancel to about 0, and rounding is large beside such a sum, but not beside this.
    most = _TOLERANCE * np.max(sizes)
    for what, numbers in (("a sum", sums), ("a sum of absolute values", sizes)):
        if np.ptp(numbers) > most:
            return what, numbers.tolist()
    return None


class Comparing(keras.callbacks.Callback):
    """Compares a few numbers of the workers' models after each epoch, when other callbacks have made their changes.

    Args:
      call: the `fit`.
      agreement: with the other workers.
      is_apart: returns True while the workers' weights and optimizers may differ.

    Raises:
      ValueError: they differ.
    """

    def __init__(self, call: calls.Call, agreement: Agreement, is_apart: Callable[[], bool]) -> None:
        super().__init__()
        self._call, self._agreement, self._is_apart = call, agreement, is_apart

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        # A call that the workers have not compared may be this one's alone.
        if not self._call.is_compared or self._is_apart():
            return
        variables = _variables(self._call, is_after_epoch=True)
        found = self._agreement.gather(_values(variables), "comparing the models")
        _check_values(self._call, variables, {str(task): values for task, values in found.items()})
