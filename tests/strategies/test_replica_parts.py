# SPDX-License-Identifier: Apache-2.0
"""Replicas that span devices: where weights, slots, gradients and sums are, files, and bad input.

`tests/conformance` compares their numbers with those of one device.
"""

from __future__ import annotations

import collections
import itertools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import process_cluster
import pytest
import tensorflow as tf
from training import OPTIMIZERS, X, Y

import tfdist
from tfdist import model_parallel

pytestmark = pytest.mark.devices
LAYERS = keras.layers


@pytest.fixture(scope="module")
def strategy(cpus: list[str]) -> tfdist.MirroredStrategy:
    """Two replicas of two devices each."""
    return tfdist.MirroredStrategy(cpus[:4], devices_per_replica=2)


def placed(strategy: Any) -> keras.Model:
    """Two layers on each part, with kernels of shapes that nothing else has."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        with tfdist.placement(0):
            first = [LAYERS.Dense(31, "relu", kernel_regularizer="l2"), LAYERS.Dense(37)]
        with tfdist.placement(1):
            second = [LAYERS.Dense(41, "relu", kernel_regularizer="l2"), LAYERS.Dense(1)]
        model = keras.Sequential([keras.Input((3,)), *first, LAYERS.Dropout(0.0), *second])
        model.compile(OPTIMIZERS.Adam(0.01, global_clipnorm=1.0), "mse", jit_compile=False)
    return model


def plain(strategy: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((3,)), *(LAYERS.Dense(size, "relu") for size in (31, 37, 41)), LAYERS.Dense(1)]
        )
        model.compile(OPTIMIZERS.Adam(0.01), "mse", metrics=["mae"], jit_compile=False)
    return model


def bytes_per_device(variables: Any) -> dict[str, int]:
    """Bytes of all copies, by the end of the name of the device that has the memory."""
    found: collections.Counter[str] = collections.Counter()
    for copy in itertools.chain.from_iterable(variable.value.values for variable in variables):
        found[copy.value().backing_device[-1]] += copy.shape.num_elements() * copy.dtype.size
    return dict(found)


def graphs_of(graph: Any) -> Iterator[Any]:
    """Nodes of a graph and of the functions that it calls."""
    definition = graph.as_graph_def(add_shapes=True)
    yield from definition.node
    yield from itertools.chain.from_iterable(function.node_def for function in definition.library.function)


def test_each_device_holds_only_its_part(strategy: tfdist.MirroredStrategy) -> None:
    model = placed(strategy)
    model.fit(X, Y, batch_size=8, verbose=0)
    first, second = (
        sum(np.prod(weight.shape) for layer in layers for weight in layer.weights) * 4
        for layers in (model.layers[:2], model.layers[3:])
    )
    assert bytes_per_device(model.weights) == {"0": first, "1": second, "2": first, "3": second}
    slots = [each for each in model.optimizer.variables if each.shape.rank]
    assert bytes_per_device(slots) == {"0": 2 * first, "1": 2 * second, "2": 2 * first, "3": 2 * second}


def test_weights_and_gradients_never_leave_their_part(strategy: tfdist.MirroredStrategy) -> None:
    model = placed(strategy)
    model.optimizer.build(model.trainable_variables)

    @tf.function
    def step(batch: Any) -> Any:
        return strategy.run(model.train_step, (batch,))

    batch = next(iter(strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors((X[:8], Y[:8])))))
    graph = step.get_concrete_function(batch).graph
    seen: dict[tuple[int, ...], set[str]] = {(3, 31): set(), (31, 37): set(), (37, 41): set()}
    summed: collections.Counter[str] = collections.Counter()
    for node in graphs_of(graph):
        for shape in node.attr["_output_shapes"].list.shape:
            sizes = tuple(axis.size for axis in shape.dim)
            # A variable is read where it is.
            if (sizes in seen and node.op not in ("ReadVariableOp", "Identity")) or (sizes in seen and node.device):
                seen[sizes].add(node.device[-1])
        if node.op.startswith("CollectiveReduce"):
            summed[node.device[-1]] += node.attr["_output_shapes"].list.shape[0].dim[0].size
    assert seen == {(3, 31): {"0", "2"}, (31, 37): {"0", "2"}, (37, 41): {"1", "3"}}
    sizes = [sum(np.prod(w.shape) for w in part) for part in (model.weights[:4], model.weights[4:])]
    assert (summed["1"], summed["3"]) == (sizes[1], sizes[1])
    # And counts and logs.
    assert sizes[0] <= summed["0"] == summed["2"] <= sizes[0] + 8


def test_split_moves_weights_and_slots(strategy: tfdist.MirroredStrategy) -> None:
    model = plain(strategy)
    model.optimizer.build(model.trainable_variables)
    assert tfdist.split(model) is model
    assert set(bytes_per_device(model.layers[1].weights)) == {"0", "2"}
    assert set(bytes_per_device(model.layers[2].weights)) == {"1", "3"}
    slots = model.optimizer.variables
    assert {len(bytes_per_device([slot])) for slot in slots} == {2}
    assert bytes_per_device(s for s in slots if s.shape.rank)["1"] == 2 * bytes_per_device(model.weights)["1"]
    tfdist.split(model, parts=1)
    assert set(bytes_per_device(model.weights)) == {"0", "2"}


@pytest.mark.parametrize(
    ("sizes", "parts", "expected"),
    [
        ([4, 4], 2, [0, 1]),
        ([1, 1, 1, 9], 2, [0, 0, 0, 1]),
        ([9, 1, 1, 1], 3, [0, 1, 2, 2]),
        ([5, 5, 1, 5, 5, 1], 3, [0, 0, 1, 1, 2, 2]),
        ([3, 2, 1], 1, [0, 0, 0]),
    ],
)
def test_split_makes_the_largest_part_small(sizes: list[int], parts: int, expected: list[int]) -> None:
    found = model_parallel.balanced(sizes, parts)
    largest = [
        max(sum(s for s, p in zip(sizes, each, strict=True) if p == part) for part in range(parts))
        for each in (found, expected)
    ]
    assert largest[0] == largest[1]
    assert found == sorted(found)
    assert set(found) == set(range(parts))


@pytest.mark.slow
def test_a_shared_layer_has_one_place(strategy: tfdist.MirroredStrategy) -> None:
    with strategy.scope():
        first, shared, last = (
            LAYERS.Dense(3, name="first"),
            LAYERS.Dense(3, name="shared"),
            LAYERS.Dense(1, name="last"),
        )
        x = keras.Input((3,))
        model = keras.Model(x, last(shared(keras.Sequential([shared, first])(shared(x)))))
        model.compile("sgd", "mse", jit_compile=False)
    tfdist.split(model)
    assert {len(bytes_per_device([weight])) for weight in model.weights} == {2}
    model.fit(X, Y, batch_size=8, verbose=0)


# Bad input.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"devices_per_replica": 3}, r"devices_per_replica=3\): does not divide .*use 1 or 2 or 4.* 4 devices"),
        ({"devices_per_replica": 0}, "devices_per_replica=0"),
        ({"devices_per_replica": 2.0}, "devices_per_replica=2.0"),
        ({"devices_per_replica": 2, "cross_device_ops": object()}, "leave cross_device_ops away"),
    ],
)
def test_devices_per_replica_is_checked(cpus: list[str], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tfdist.MirroredStrategy(cpus[:4], **options)


def _inside(strategy: Any, call: Callable[[], Any]) -> None:
    with strategy.scope():
        call()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: tfdist.placement(2), r"from 0 to 1.*part=2, devices_per_replica=2"),
        (lambda: tfdist.placement(-1), "part=-1"),
        (lambda: tfdist.placement("1"), "part='1'"),
        (lambda: tfdist.split(plain(tf.distribute.get_strategy()), parts=3), "parts=3, devices_per_replica=2"),
        (lambda: tfdist.split(keras.Sequential([keras.Input((3,)), LAYERS.Dense(1)])), "parts=2, 1 layers with"),
        (lambda: tfdist.split(keras.Sequential([LAYERS.Dense(1), LAYERS.Dense(1)])), "not built"),
        (lambda: tfdist.split(LAYERS.Dense(1)), "must be a keras.Model"),
    ],
)
def test_calls_are_checked(strategy: tfdist.MirroredStrategy, call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _inside(strategy, call)


def test_replicas_of_one_device_have_no_places(cpus: list[str]) -> None:
    with pytest.raises(ValueError, match=r"placement\(0\).*devices_per_replica=2.*Received: MirroredStrategy"):
        _inside(tfdist.MirroredStrategy(cpus[:2]), lambda: tfdist.placement(0))
    for call in (lambda: tfdist.placement(0), lambda: tfdist.split(plain(tf.distribute.get_strategy()))):
        with pytest.raises(ValueError, match=r"put `with strategy.scope\(\):` around it"):
            call()


@pytest.mark.slow
def test_split_before_compile_places_a_clone(strategy: tfdist.MirroredStrategy) -> None:
    with strategy.scope():
        layers = [keras.layers.Dense(2), keras.layers.Dense(1)]
        model = tfdist.split(keras.models.clone_model(keras.Sequential([keras.Input((4,)), *layers])))
        model.compile("sgd", "mse")
    assert model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0).history["loss"][0] > 0


@pytest.mark.parametrize(
    "call", ["fit", *(pytest.param(each, marks=pytest.mark.slow) for each in ("evaluate", "predict"))]
)
def test_layers_without_a_place_are_named(strategy: tfdist.MirroredStrategy, call: str) -> None:
    with strategy.scope():
        with tfdist.placement(0):
            first = LAYERS.Dense(4, name="with_a_place")
        model = keras.Sequential([keras.Input((3,)), first, LAYERS.Dense(1, name="without")])
        model.compile("sgd", "mse", jit_compile=False)
    before = model.get_weights()
    with pytest.raises(
        ValueError, match=r"tfdist.split\(model\).*no place for \S*without/kernel, \S*without/bias, of 4"
    ):
        getattr(model, call)(X, *([] if call == "predict" else [Y]), verbose=0)
    np.testing.assert_array_equal(before[0], model.get_weights()[0])


# Several workers.

_WORKER = """
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
for wrong in (3, 4):
    try:
        tfdist.MultiWorkerMirroredStrategy(devices_per_replica=wrong)
    except ValueError as error:
        report(f"refused {wrong}", str(error))
strategy = tfdist.MultiWorkerMirroredStrategy(devices_per_replica=2, policies=POLICIES, start_timeout_secs=60)
"""

_TRAINING = """
def train(strategy, place, steps_per_execution):
    keras.utils.set_random_seed(3)
    rows = np.random.RandomState(0).normal(size=(45, 4)).astype(np.float32)
    with strategy.scope():
        layers = [keras.layers.Embedding(50, 7), keras.layers.Flatten(), keras.layers.Dense(31, "relu"),
                  keras.layers.LayerNormalization(), keras.layers.Dense(1, kernel_regularizer="l2")]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile(keras.optimizers.Adam(0.01, global_clipnorm=1.0), "mse", metrics=["mae"], jit_compile=False,
                      steps_per_execution=steps_per_execution)
    place(model)
    ids, y = np.abs(rows * 15).astype(np.int32) % 50, rows.sum(1, keepdims=True)
    fit = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0, "validation_data": (ids, y)}
    history = model.fit(ids, y, **fit).history
    found = [*model.get_weights(), *(np.array(values) for values in history.values())]
    return model, [each.tolist() for each in found] + [model.predict(ids, batch_size=8, verbose=0).tolist()]
"""

_REPORT = """
for steps in (1, 4):
    model, found = train(strategy, tfdist.split, steps)
    report(f"found {steps}", found)
report("devices", {v.path: [copy.device for copy in v.value.values]
                   for v in [*model.weights, *model.optimizer.variables] if v.shape.rank})
model.save(shared / f"{index}.keras")
"""


@pytest.mark.slow  # `test_replica_parts_conformance.py` has the numbers, `test_server_parts.py` several workers.
@pytest.mark.processes
@pytest.mark.parametrize("policies", ["[]", "[tfdist.BackupWorkers(spares=0)]"])
def test_two_workers_of_two_devices_are_as_one_device(tmp_path: pathlib.Path, policies: str) -> None:
    names: dict[str, Any] = {"np": np, "keras": keras}
    exec(_TRAINING, names)
    _, one = names["train"](tf.distribute.get_strategy(), lambda model: None, 1)
    workers = process_cluster.run(_WORKER.replace("POLICIES", policies) + _TRAINING + _REPORT, tmp_path)
    for index, found in enumerate(workers):
        for steps in (1, 4):
            for expected, value in zip(one, found[f"found {steps}"], strict=True):
                np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)
        for path, devices in found["devices"].items():
            part = 0 if "embedding" in path else 1
            assert devices == [f"/job:worker/replica:0/task:{index}/device:CPU:{part}"], path
        for wrong in (3, 4):
            assert f"devices_per_replica={wrong}): does not divide the number of devices" in found[f"refused {wrong}"]
    assert keras.models.load_model(tmp_path / "0.keras").predict(np.zeros((1, 4)), verbose=0).shape == (1, 1)
