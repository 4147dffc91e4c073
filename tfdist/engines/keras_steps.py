# SPDX-License-Identifier: Apache-2.0
"""Tells Keras' own steps from other functions given to `strategy.run`.

Keras hands in `model.train_step` and `model.test_step` as bound methods, and for `predict` a function of its own around
`model.predict_step`. What is recognised may overlap with other steps; anything else is run as any other function, one
at a time, so a mistake here costs speed and never a result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import creation_lines, trainers
from tfdist.engines.coordinated_variable import CoordinatedVariable


def classify(fn: Callable[..., Any]) -> str:
    """Returns "train", "test", "predict" or "other"."""
    model, fn = model_of(fn), getattr(fn, "__wrapped__", fn)
    if model is not None:
        return {"train_step": "train", "test_step": "test"}.get(fn.__name__, "other")
    return "predict" if "make_predict_function" in getattr(fn, "__qualname__", "") else "other"


def model_of(fn: Callable[..., Any]) -> keras.Model | None:
    """The model that `fn` is a method of."""
    owner = getattr(getattr(fn, "__wrapped__", fn), "__self__", None)
    return owner if trainers.is_trainer(owner) else None


def traced_with(fn: Callable[..., Any]) -> dict[Any, Any] | None:
    """Where to keep what is traced of a Keras step: with what Keras has made of it.

    Keras throws that away when the model is compiled again, while the bound method stays the same to all appearances,
    and it goes when the model goes.

    Returns:
      The same dictionary until then; None if `fn` is no step of Keras', or if Keras has made nothing of it, as in a
      custom loop.
    """
    kind = classify(fn)
    function = getattr(getattr(fn, "__self__", None), f"{kind}_function", None)
    return None if function is None else vars(function).setdefault("_tfdist_traced", {})


def check(fn: Callable[..., Any], asynchronous: bool) -> None:
    """Refuses what cannot hold on several workers, and builds the optimizer.

    Variables can't be made while a step is traced, so the optimizer makes its own before.

    Args:
      fn: What was given to `strategy.run`.
      asynchronous: Whether each worker updates the model by itself.

    Raises:
      ValueError: The model was compiled with something that has no meaning here.
    """
    model: Any = getattr(fn, "__self__", None)
    kind = classify(fn)
    if (kind in ("train", "test") and model.jit_compile) or _is_compiled(fn):
        raise ValueError(
            "jit_compile=True cannot hold under ParameterServerStrategy: the variables are on other machines, where "
            "XLA can't reach them. "
            "Use model.compile(..., jit_compile=False). Received: jit_compile=True"
        )
    if kind != "train":
        return
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", None)
    if asynchronous and getattr(inner, "gradient_accumulation_steps", None):
        raise ValueError(
            "gradient_accumulation_steps with loss scaling cannot hold under asynchronous ParameterServerStrategy: the "
            "workers share one loss scale. Use mixed_bfloat16, or policies=[tfdist.BackupWorkers(spares=0)], which "
            f"makes training synchronous. Received: gradient_accumulation_steps={inner.gradient_accumulation_steps}"
        )
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)


def accumulates(fn: Callable[..., Any]) -> Any:
    """The optimizer of a train step that accumulates gradients, or None."""
    optimizer = getattr(model_of(fn), "optimizer", None) if classify(fn) == "train" else None
    return optimizer if getattr(optimizer, "gradient_accumulation_steps", None) else None


def _is_compiled(fn: Any) -> bool:
    """Whether `fn`, or what it wraps, is compiled with XLA, as Keras does with a step of `predict`."""
    while fn is not None:
        if getattr(fn, "_jit_compile", None):
            return True
        fn = getattr(fn, "__wrapped__", None)
    return False


def check_scope(fn: Callable[..., Any]) -> None:
    """Refuses a model that has variables of the chief's own, in which workers would overwrite each other's counts.

    Raises:
      ValueError: The model, its optimizer or one of its metrics was made outside of the strategy's scope.
    """
    if classify(fn) not in ("train", "test"):
        return
    model: Any = getattr(fn, "__self__", None)
    for variable in (*model.variables, *model.metrics_variables, *getattr(model.optimizer, "variables", ())):
        if not isinstance(getattr(variable, "_value", variable), CoordinatedVariable):
            raise ValueError(_outside(variable.path, variable))


def check_colocation(extended: Any) -> None:
    """Has an optimizer of the strategy refuse, before it makes a slot, a variable that was made outside of the scope.

    Args:
      extended: the strategy's `extended`.
    """
    colocate = extended.colocate_vars_with

    def colocate_vars_with(variable: Any) -> Any:
        # A partitioned one has parts of the strategy's.
        is_whole = isinstance(variable, tf.Variable) and not hasattr(variable, "variables")
        if is_whole and getattr(variable, "_distribute_strategy", None) is None:
            raise ValueError(_outside(variable.name, variable))
        return colocate(variable)

    extended.colocate_vars_with = colocate_vars_with


def _outside(name: str, variable: Any) -> str:
    line = creation_lines.of(variable)
    return (
        "The model, its optimizer and its metrics must be made in the scope of ParameterServerStrategy. Put "
        "the lines that make them, and model.compile, under `with strategy.scope():`. "
        f"Received: variable {name!r}, made outside of it{f' at {line}' if line else ''}"
    )
