# SPDX-License-Identifier: Apache-2.0
"""Distinguishes Keras' own steps from other functions given to `strategy.run`.

Keras hands in `model.train_step` and `model.test_step` as bound methods, and for `predict` a function of its own around
`model.predict_step`. A recognised step may overlap with other steps. Any other function runs alone, so a step that is
not recognised costs time and changes no result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import patching
from tfdist.compat.keras import models
from tfdist.compat.tensorflow import graphs


def classify(fn: Callable[..., Any]) -> str:
    """Returns "train", "test", "predict" or "other"."""
    model, fn = model_of(fn), getattr(fn, "__wrapped__", fn)
    if model is not None:
        return {"train_step": "train", "test_step": "test"}.get(fn.__name__, "other")
    return "predict" if "make_predict_function" in getattr(fn, "__qualname__", "") else "other"


def model_of(fn: Callable[..., Any]) -> keras.Model | None:
    """Returns the model that `fn` is a method of, or None."""
    owner = getattr(getattr(fn, "__wrapped__", fn), "__self__", None)
    return owner if models.is_trainer(owner) else None


def make_predict_function(model: keras.Model) -> Callable[[Any], Any]:
    """Returns the function of a batch that `predict` runs on a replica; `classify` knows it by its name, as Keras'."""

    def predict(data: Any) -> Any:
        # Keras has empty Optionals for None.
        given = tf.nest.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data)
        return model.predict_step(given)

    return predict


def runs_eagerly(fn: Callable[..., Any]) -> bool:
    """Returns True if `fn` is a method of a model compiled with `run_eagerly=True`."""
    model = model_of(fn)
    return model is not None and model.run_eagerly


def traced_with(fn: Callable[..., Any]) -> dict[Any, Any] | None:
    """Returns the cache of a Keras step's traces, an attribute of the function that Keras has made of the step.

    So the cache ends with the model, and when the model is compiled again: then Keras makes a new function of a bound
    method that compares equal to the previous one.

    Returns:
      The same dictionary until then; None if `fn` is no step of Keras', or if Keras has made nothing of it, as in a
      custom loop.
    """
    kind = classify(fn)
    function = getattr(getattr(fn, "__self__", None), f"{kind}_function", None)
    return None if function is None else patching.setdefault(function, "_tfdist_traced", dict)


def check(fn: Callable[..., Any], asynchronous: bool) -> None:
    """Refuses models that can't train on several workers, and builds the optimizer.

    Variables can't be created while a step is traced, so the optimizer creates its own before.

    Args:
      fn: The function given to `strategy.run`.
      asynchronous: True if each worker updates the model on its own.

    Raises:
      ValueError: The model was compiled with something that has no meaning here.
    """
    model: Any = getattr(fn, "__self__", None)
    kind = classify(fn)
    if (kind in ("train", "test") and model.jit_compile) or graphs.is_compiled_by_xla(fn):
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


def steps_per_execution(fn: Callable[..., Any]) -> int:
    """Returns how many train steps of its model Keras asks for at a time; 1 for any other function."""
    return int(getattr(model_of(fn), "steps_per_execution", 1)) if classify(fn) == "train" else 1


def accumulates(fn: Callable[..., Any]) -> Any:
    """Returns the optimizer of a train step if it accumulates gradients, else None."""
    optimizer = getattr(model_of(fn), "optimizer", None) if classify(fn) == "train" else None
    return optimizer if getattr(optimizer, "gradient_accumulation_steps", None) else None
