# SPDX-License-Identifier: Apache-2.0
"""Compares the calls that the workers of a MultiWorkerMirroredStrategy make, and their models, before anything is done.

The models are compared after each epoch of `fit`, too.

All workers run the same script. A call that one worker makes otherwise (`if rank == 0:`) has one of two effects. Either
the workers wait for each other in different collectives, or their models diverge without an error. Examples are weights
that the chief alone has loaded, and a learning rate that the chief's callback alone sets. A few numbers of each
variable show the latter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
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
    call, own = calls.current(), None
    if call is not None and not call.is_compared and call.kind in ("fit", "evaluate", "predict"):
        own = [_traits(call), [] if is_apart else _values(_variables(call))]
    found = agreement.gather([own, value], what)
    of_call = {task: each for task, (each, _) in found.items()}
    if call is not None and all(of_call.values()):
        call.is_compared = True
        check_same(
            f"{call.name}: every worker must make the same call of the same model, as each takes part in every step; "
            "do it on every worker, and remove the `if` around it",
            {task: traits for task, (traits, _) in of_call.items()},
        )
        _check_values(call, _variables(call), {task: values for task, (_, values) in of_call.items()})
    return {task: value for task, (_, value) in found.items()}


def check_same(requirement: str, traits: Mapping[Any, Mapping[str, Any]]) -> None:
    """Raises ValueError with the requirement for the first trait that differs between workers; by task, by name."""
    for name in dict.fromkeys(name for each in traits.values() for name in each):
        shown = [f"{name} {each.get(name, 'none')}" for each in traits.values()]
        if len(set(shown)) > 1:
            received = ", ".join(f"{each} on {task}" for each, task in zip(shown, traits, strict=True))
            raise ValueError(f"{requirement}. Received: {received}")


def _traits(call: calls.Call) -> dict[str, str]:
    model, given = call.model, call.arguments
    found = {name: repr(given[name]) for name in _ARGUMENTS if given.get(name) is not None}
    if call.kind == "fit":
        found["validation_data"] = "given" if given.get("validation_data") is not None else "none"
    weights = [tuple(weight.shape) for weight in model.trainable_variables] if model.built else []
    found["trainable weights"] = f"{len(weights)} with {sum(map(math.prod, weights))} numbers"
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
    return [_value(one_replica.copies_of(variable)[0]) for variable in variables]


def _value(copy: tf.Variable) -> list[float]:
    """Returns a few numbers of a variable."""
    if not (isinstance(copy, tf.Variable) and (copy.dtype.is_floating or copy.dtype.is_integer)):
        return []
    # Rows are gathered, as a whole table might be copied when it is read.
    numbers = np.ravel(tf.gather(copy, _some(int(copy.shape[0]))) if copy.shape.rank else copy)
    # After a gather each read of a step would copy the variable.
    tf.raw_ops.DisableCopyOnRead(resource=copy.handle)
    return [float(f"{number:.6g}") for number in numbers[_some(len(numbers))].astype(np.float64)]


def _some(count: int) -> np.ndarray:
    return np.linspace(0, count - 1, min(count, _NUMBERS), dtype=np.int64)


def _check_values(call: calls.Call, variables: Sequence[Any], values: Mapping[Any, Any]) -> None:
    # Names of variables may differ: they have running numbers.
    for variable, *numbers in zip(variables, *values.values(), strict=False):
        if differing := _difference(numbers):
            received = ", ".join(f"{number:g} on {task}" for task, number in zip(values, differing, strict=True))
            raise ValueError(
                f"{call.name}: the workers' models differ, and would diverge; set and load weights, and set the "
                f"learning rate, on every worker. Received: a number of {variable.path} of {received}"
            )


def _difference(numbers: Sequence[Sequence[float]]) -> tuple[float, ...] | None:
    """Returns the first number of a variable that differs, of each worker; None if all are the same."""
    # A small number may be the rest of large ones, whose rounding it has.
    most = _TOLERANCE * max((abs(each) for one in numbers for each in one if math.isfinite(each)), default=0.0)
    for each in itertools.zip_longest(*numbers, fillvalue=math.nan):
        are_finite = [math.isfinite(number) for number in each]
        if any(are_finite) and not (all(are_finite) and max(each) - min(each) <= most):
            return each
    return None


def compare_models(call: calls.Call, agreement: Agreement) -> None:
    """Compares a few numbers of the workers' models after an epoch, when callbacks have made their changes.

    Raises:
      ValueError: they differ.
    """
    # A call that the workers have not compared may be this one's alone.
    if call.is_compared:
        variables = _variables(call, is_after_epoch=True)
        _check_values(call, variables, agreement.gather(_values(variables), "comparing the models"))
