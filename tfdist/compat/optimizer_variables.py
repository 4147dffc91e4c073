# SPDX-License-Identifier: Apache-2.0
"""The variables of a Keras optimizer by the part that they play in it.

There is no public way: `optimizer.variables` has them all in one list. The public names `learning_rate` and
`iterations` give values rather than variables in some cases, and the variables that are trained have none at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras

NEEDS = (
    "keras.src.optimizers.base_optimizer:BaseOptimizer._accumulated_gradients",
    "keras.src.optimizers.base_optimizer:BaseOptimizer._get_variable_index",
    "keras.src.optimizers.base_optimizer:BaseOptimizer._iterations",
    "keras.src.optimizers.base_optimizer:BaseOptimizer._learning_rate",
    "keras.src.optimizers.base_optimizer:BaseOptimizer._model_variables_moving_average",
    "keras.src.optimizers.base_optimizer:BaseOptimizer._trainable_variables",
    "keras.src.optimizers.base_optimizer:BaseOptimizer._trainable_variables_indices",
    "keras.src.optimizers.base_optimizer:BaseOptimizer._var_key",
)

_LISTS = ("_variables", "_trainable_variables")


def parts_of(optimizer: Any) -> list[Any]:
    """The optimizer, and those in its attributes, as of loss scaling and of optimizers that divide variables."""
    found, waiting = dict[int, Any](), [optimizer]
    while waiting:
        each = waiting.pop(0)
        if isinstance(each, keras.optimizers.Optimizer):
            if id(each) not in found:
                found[id(each)] = each
                waiting.extend(value for name, value in vars(each).items() if name not in _LISTS)
        elif isinstance(each, dict):
            waiting.extend(each.values())
        elif isinstance(each, list | tuple):
            waiting.extend(each)
    return list(found.values())


@contextlib.contextmanager
def undone_on_error(optimizers: Iterable[Any]) -> Iterator[None]:
    """Within this block, a build of these optimizers that raises leaves them as they were.

    Keras' optimizers say that they are built, and append to their lists, before they make their slots.
    """
    parts = [part for optimizer in optimizers for part in parts_of(optimizer)]
    before = [(part, {name: _copied(value) for name, value in vars(part).items()}) for part in parts]
    try:
        yield
    except BaseException:
        for part, attributes in before:
            for name in vars(part).keys() - attributes.keys():
                object.__delattr__(part, name)
            for name, (value, content) in attributes.items():
                object.__setattr__(part, name, value)
                if content is not None:
                    _refill(value, content)
        raise


def _copied(value: Any) -> tuple[Any, Any]:
    """The value, and what is in it if that may change."""
    is_dict = isinstance(value, dict)
    return value, dict(value) if is_dict else list(value) if isinstance(value, list) else None


def _refill(value: Any, content: Any) -> None:
    if len(value) != len(content):
        value.clear()
        (value.update if isinstance(value, dict) else value.extend)(content)


def trained_by(optimizer: Any) -> Sequence[Any]:
    """The variables that a built optimizer updates, in its order; those of the one inside for loss scaling."""
    return getattr(optimizer, "inner_optimizer", optimizer)._trainable_variables


def index_of(optimizer: Any, variable: Any) -> int:
    """The index of a variable in that order."""
    return optimizer._get_variable_index(variable)


def learning_rate_of(optimizer: Any) -> Any:
    """The variable, or the schedule, that an optimizer takes its learning rate from; None for loss scaling."""
    return getattr(optimizer, "_learning_rate", None)


def iterations_of(optimizer: Any) -> Any:
    """The variable that counts an optimizer's updates."""
    return optimizer._iterations


def averages_of(optimizer: Any) -> Sequence[Any]:
    """The moving averages of the variables that it updates, in their order; none without `use_ema`."""
    return getattr(optimizer, "_model_variables_moving_average", None) or ()


def sums_of(optimizer: Any) -> Sequence[Any]:
    """The gradients that it accumulates, in the same order; none without `gradient_accumulation_steps`."""
    return getattr(optimizer, "_accumulated_gradients", None) or ()


def slots_of(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """Yields each variable that a built optimizer updates with each of the slots that it keeps for the variable."""
    trained = optimizer._trainable_variables
    others = {id(variable) for variable in [*trained, optimizer._iterations, learning_rate_of(optimizer)]}
    for name, kept in vars(optimizer).items():
        # Optimizers keep a list of slots of each kind, in the order of the variables.
        is_list = isinstance(kept, Sequence) and not isinstance(kept, str) and len(kept) == len(trained)
        if is_list and name not in _LISTS:
            pairs = zip(trained, kept, strict=True)
            yield from ((v, slot) for v, slot in pairs if isinstance(slot, keras.Variable) and id(slot) not in others)


def find_again(optimizer: Any) -> None:
    """Rebuilds the index of the variables that an optimizer updates, after their TensorFlow variables were replaced."""
    trained = optimizer._trainable_variables
    optimizer._trainable_variables_indices = {optimizer._var_key(variable): i for i, variable in enumerate(trained)}
