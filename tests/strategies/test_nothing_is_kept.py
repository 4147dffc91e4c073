# SPDX-License-Identifier: Apache-2.0
"""A model, its strategy and the graphs of its steps go when nobody needs them: notebooks make one after the other."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import keras
import numpy as np
import pytest
from tensorflow.python.framework import func_graph

import tfdist

pytestmark = pytest.mark.devices

# The last batch has 5 examples, which two replicas can't share evenly.
# No other test has such data: TensorFlow traces what feeds the devices once for each kind.
X = np.random.default_rng(0).random((45, 11), np.float32)
Y = X.sum(1, keepdims=True)


def _graphs() -> dict[int, func_graph.FuncGraph]:
    return {id(found): found for found in gc.get_objects() if isinstance(found, func_graph.FuncGraph)}


def _used(cpus: list[str], policies: list[Any], optimizer: keras.Optimizer) -> dict[str, list[weakref.ref]]:
    """Trains, evaluates and predicts; refers to what there is when it is done."""
    before = _graphs()
    strategy = tfdist.MirroredStrategy(cpus[:2], policies=policies)
    with strategy.scope():
        model = keras.Sequential([keras.Input((11,)), keras.layers.Dense(1)])
        model.compile(optimizer, "mse")
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    model.evaluate(X, Y, batch_size=8, verbose=0)
    model.predict(X, batch_size=8, verbose=0)
    new = [weakref.ref(graph) for key, graph in _graphs().items() if key not in before]
    return {"strategy": [weakref.ref(strategy)], "model": [weakref.ref(model)], "graphs": new}


# `test_overlapping_calls.py` has a model without a policy.
def test_all_of_it_is_collected(cpus):
    used = _used(cpus, [tfdist.BackupWorkers(spares=1)], keras.optimizers.SGD(0.1))
    assert len(used["graphs"]) > 2
    keras.backend.clear_session()
    gc.collect()
    assert {name: [each() for each in kept if each()] for name, kept in used.items()} == {
        "strategy": [],
        "model": [],
        "graphs": [],
    }
