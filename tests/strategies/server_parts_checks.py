# SPDX-License-Identifier: Apache-2.0
"""Workers of parameter servers that span devices: what each device computes, policies, tables, files and bad input.

Run by `test_server_parts.py`. `tests/conformance/server_parts_conformance_checks.py` compares numbers with one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from training import OPTIMIZERS

import tfdist
from tfdist.compat.keras import placement
from tfdist.engines.worker_function import Program
from tfdist.step import one_replica

LAYERS = keras.layers
ROWS = np.random.default_rng(0)
IDS = ROWS.integers(0, 50, (48, 3)).astype(np.int32)
Y = ROWS.random((48, 1), np.float32)
# Kernels of more elements than are sent with others, of shapes that nothing else has.
FIRST, SECOND = (190, 210), (210, 220)


def made(strategy: Any, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        layers = [
            *(LAYERS.Embedding(50, 8, name="table"), LAYERS.Flatten(), LAYERS.Dense(FIRST[0], "relu")),
            *(LAYERS.Dense(FIRST[1], kernel_regularizer="l2"), LAYERS.LayerNormalization()),
            *(LAYERS.Dense(SECOND[1], "relu"), LAYERS.Dense(1)),
        ]
        model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
        model.compile(OPTIMIZERS.Adam(0.01, global_clipnorm=1.0), "mse", metrics=["mae"], **options)
    # As `tfdist.placement` does while a layer is made.
    for part, layers in enumerate((model.layers[:4], model.layers[4:])):
        for layer in layers:
            placement.place(layer, part)
            for weight in layer.weights:
                placement.give(weight, part)
    return model


def devices_by_shape(graph: Any) -> dict[tuple[int, ...], set[str]]:
    """Devices of the operations with a result of a large kernel's shape; a variable is read where it is."""
    found: dict[tuple[int, ...], set[str]] = {FIRST: set(), SECOND: set()}
    definition = graph.as_graph_def(add_shapes=True)
    for node in [*definition.node, *(node for each in definition.library.function for node in each.node_def)]:
        for shape in node.attr["_output_shapes"].list.shape:
            sizes = tuple(axis.size for axis in shape.dim)
            # An output's own operation has no device.
            is_computed = node.op not in ("ReadVariableOp", "Identity") or node.device
            if sizes in found and is_computed and "/job:ps" not in node.device:
                found[sizes].add(node.device)
    return found


# What each device computes.


def test_each_part_computes_on_its_device(
    strategy: tfdist.ParameterServerStrategy, with_policies: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    traced: list[Any] = []
    trace = one_replica.trace

    def keep(strategy: Any, function: Callable[..., Any], specs: Any) -> Any:
        traced.append((function.__name__, trace(strategy, function, specs)))
        return traced[-1][1]

    monkeypatch.setattr(one_replica, "trace", keep)
    made(strategy).fit(IDS, Y, batch_size=16, epochs=2, verbose=0)
    expected = {FIRST: "CPU:0", SECOND: "CPU:1"}
    # One function for both workers.
    asynchronous = with_policies()
    made(asynchronous).fit(IDS, Y, batch_size=48, verbose=0)
    steps = {name: step for name, step in traced if name in ("_contribute_next", Program._on_worker.__name__)}
    assert len(steps) == 2
    for step in steps.values():
        assert devices_by_shape(step.graph) == {s: {f"/device:{device}"} for s, device in expected.items()}


# Numbers.


@pytest.mark.slow
def test_steps_on_the_chief_need_no_devices(strategy: Any) -> None:
    model = made(strategy, run_eagerly=True)
    before = model.get_weights()
    model.fit(IDS[:16], Y[:16], batch_size=16, verbose=0)
    assert any(np.abs(old - new).max() > 0 for old, new in zip(before, model.get_weights(), strict=True))
    assert model(IDS[:2]).shape == (2, 1)


# Bad input.


def test_unbuilt_layers_without_a_place_are_named(strategy: Any) -> None:
    with strategy.scope():
        model = keras.Sequential([LAYERS.Dense(1, name="without")])
        model.compile("sgd", "mse")
    with pytest.raises(
        ValueError, match=r"ParameterServerStrategy\(devices_per_replica=2\).*no place for \S*without/kernel"
    ):
        model.fit(IDS, Y, verbose=0)
