# SPDX-License-Identifier: Apache-2.0
"""Compares a random model's training under a strategy with that on one device."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import parts
import tensorflow as tf

# Parts of a batch are added up in another order; all is float64.
_TOLERANCE = 1e-6


def outcome(seed: int, strategy: tf.distribute.Strategy) -> str:
    """Returns "agree", "refused: why" or "FAIL: what differs", and for those two the model."""
    program = parts.Program(seed)
    expected = None
    try:
        expected = _train(program, tf.distribute.get_strategy())
        found = _train(program, strategy)
    except Exception as error:
        if expected is None:
            return f"FAIL: on one device, {error!r} [{program}]".replace("\n", " ")
        # What is refused says so in one line, as one of Python's own errors; all else is a failure.
        is_refused = (
            type(error) in (ValueError, RuntimeError, NotImplementedError) and len(str(error).splitlines()) == 1
        )
        message = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return f"{'refused' if is_refused else 'FAIL'}: {message} [{program}]"
    differences = _differences(expected, found)
    return f"FAIL: {'; '.join(differences)} [{program}]" if differences else "agree"


def _train(program: parts.Program, strategy: tf.distribute.Strategy) -> dict[str, Any]:
    keras.utils.set_random_seed(program.seed)
    with strategy.scope():
        model = program.model()
        _initialize(model, program.seed)
    data, options = program.data()
    history = model.fit(*data, **options, verbose=0, shuffle=False).history
    examples = program.examples()
    return {
        "weights": [np.asarray(tf.convert_to_tensor(weight)) for weight in model.weights],
        "updates": int(tf.convert_to_tensor(model.optimizer.iterations)),
        "history": dict(sorted(history.items())),
        "evaluate": model.evaluate(*examples, batch_size=7, verbose=0, return_dict=True),
        "predict": model.predict(examples[0], batch_size=7, verbose=0),
    }


def _initialize(model: keras.Model, seed: int) -> None:
    """Gives the weights values that do not depend on how a strategy draws them."""
    random = np.random.default_rng(seed)
    for weight in model.weights:
        if tf.as_dtype(weight.dtype).is_floating:
            shape = tuple(weight.shape)
            scale = 0.5 / np.sqrt(max(1, shape[0]) if shape else 1)
            weight.assign(random.normal(size=shape) * scale + ("gamma" in weight.path))


def _differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    differences = []
    for name, one in expected.items():
        many = found[name]
        if len(tf.nest.flatten(one)) != len(tf.nest.flatten(many)):
            differences.append(f"{name} has other parts: {one} and {many}")
            continue
        distance = max(map(_distance, tf.nest.flatten(one), tf.nest.flatten(many)))
        if distance > _TOLERANCE:
            shown = f": {one} and {many}" if name in ("updates", "history", "evaluate") else ""
            differences.append(f"{name} differ by {distance:.1e}{shown}")
    return differences


def _distance(one: Any, many: Any) -> float:
    one, many = np.asarray(one, np.float64), np.asarray(many, np.float64)
    if one.shape != many.shape or (np.isfinite(one) != np.isfinite(many)).any():
        return np.inf
    one, many = np.nan_to_num(one), np.nan_to_num(many)
    return float(np.max(np.abs(one - many), initial=0) / max(np.max(np.abs(one), initial=0), 1.0))
