# SPDX-License-Identifier: Apache-2.0
"""MirroredStrategy with BackupWorkers: with spares it waits for no straggler. See `tests/conformance`, too."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Iterator

import keras
import numpy as np
import own_models
import pytest
import tensorflow as tf
from training import OPTIMIZERS, Logs, X, Y, assert_close, assert_copies_are_equal, compiled, dense_model, trained

import tfdist
from tfdist.coordination import delay_hook

pytestmark = pytest.mark.devices

ONE_DEVICE = tf.distribute.get_strategy()


def without_policy(cpus: list[str]) -> tfdist.MirroredStrategy:
    # Two strategies on the same devices get in each other's way with the collectives that are the default.
    return tfdist.MirroredStrategy(cpus[:2], tf.distribute.ReductionToOneDevice())


@pytest.fixture(scope="session")
def strategy(cpus: list[str]) -> tfdist.MirroredStrategy:
    """Two devices, both of which are waited for."""
    return tfdist.MirroredStrategy(cpus[:2], policies=[tfdist.BackupWorkers(spares=0)])


@pytest.fixture(scope="session")
def spared(cpus: list[str]) -> tfdist.MirroredStrategy:
    """Three devices, one of which is not waited for."""
    return tfdist.MirroredStrategy(cpus[:3], policies=[tfdist.BackupWorkers(spares=1)])


@pytest.mark.parametrize(
    ("metrics", "loss", "words"),
    [
        (True, "mse", "on parameter servers with a policy as a maximum or minimum"),
        (False, keras.losses.Dice(name="overlap"), r"the loss 'overlap' .*axis=.* or train without a policy"),
    ],
)
def test_what_needs_all_examples_is_refused_before_it_trains(strategy, metrics: bool, loss: object, words: str):
    with strategy.scope():
        model = dense_model()
        largest = own_models.Combined(lambda value, y: tf.maximum(value, tf.reduce_max(y)))
        model.compile(OPTIMIZERS.SGD(0.1), loss, metrics=[largest] if metrics else [])
    with pytest.raises(ValueError, match=words):
        model.fit(X, Y, batch_size=8, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 0


class Gate:
    """Holds up replicas before they compute."""

    def __init__(self) -> None:
        self._passed = {replica: threading.Event() for replica in range(3)}
        self.open()

    def open(self) -> None:
        for event in self._passed.values():
            event.set()

    def only(self, blocked: int) -> None:
        """Holds up this one, and no other any longer."""
        self._passed[blocked].clear()
        for replica, event in self._passed.items():
            if replica != blocked:
                event.set()

    def __call__(self, replica: int, attempt: int) -> None:
        self._passed[replica].wait()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    delay_hook.set_hook(gate)
    yield gate
    delay_hook.uninstall(gate)
    gate.open()


# Without spares.


def normalized() -> keras.Model:
    layers = [keras.Input((3,)), keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    return keras.Sequential(layers)


def test_every_copy_is_updated_alike(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5), *normalized().layers])
        model.compile(OPTIMIZERS.LossScaleOptimizer(OPTIMIZERS.Adam(0.01, use_ema=True)), "mse")
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    assert_copies_are_equal(model)


def test_batch_that_no_train_step_takes_is_refused(strategy):
    batch = next(iter(strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(X).batch(8))))
    with pytest.raises(ValueError, match=r"logs = strategy\.run\(model\.train_step, args=\(batch,\)\); other data"):
        strategy.run(tf.reduce_sum, args=(batch,))
    with pytest.raises(ValueError, match=r"model\.evaluate and model\.predict\. Received: a batch that is unpacked"):
        tuple(batch)


def test_a_batch_is_that_of_its_handle(strategy):
    class Seeing(keras.Sequential):
        def train_step(self, data):
            return {**super().train_step(data), "seen": tf.reduce_max(data[0])}

    models = [compiled(strategy, lambda: Seeing([keras.Input((1,)), keras.layers.Dense(1)])) for _ in range(2)]
    data = tf.data.Dataset.from_tensor_slices((X[:, :1] * 0 + np.arange(len(X))[:, None] // 9, Y)).batch(9)
    for number, batch in enumerate(strategy.experimental_distribute_dataset(data)):
        for model in models if number else ():
            assert float(strategy.run(model.train_step, args=(batch,))["seen"]) == number


def test_loops_of_two_models_trace_each_once_and_follow_compile(strategy):
    traced = []

    class Noting(keras.Sequential):
        def train_step(self, data):
            traced.append(self)
            return super().train_step(data)

    models = [compiled(strategy, lambda: Noting([keras.Input((3,)), keras.layers.Dense(1)])) for _ in range(2)]
    data = tf.data.Dataset.from_tensor_slices((X, Y)).map(lambda x, y: (x, y, None)).batch(8, drop_remainder=True)
    counts = []
    for batch in strategy.experimental_distribute_dataset(data.take(3)):
        for model in models:
            strategy.run(model.train_step, args=(batch,))
        counts.append(len(traced))
    assert counts == counts[:1] * 3
    with strategy.scope():
        models[0].compile(OPTIMIZERS.SGD(0.0), "mse")
    before = models[0].get_weights()
    for batch in strategy.experimental_distribute_dataset(data):
        strategy.run(models[0].train_step, args=(batch,))
    assert_close(before, models[0].get_weights())
    assert int(models[0].optimizer.iterations) == len(data)


def test_a_decorated_step_follows_the_policy_and_a_function_is_refused(strategy):
    def decorated(method):
        @functools.wraps(method)
        def step(self, data):
            return method(self, data)

        return step

    class Decorated(keras.Sequential):
        train_step = decorated(keras.Sequential.train_step)

    with strategy.scope():
        model = Decorated([keras.Input((X.shape[1],)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    before = strategy.report().updates
    model.fit(X, Y, batch_size=9, verbose=0)
    assert strategy.report().updates == before + 5
    model.train_step = lambda data: {}
    model.compile("sgd", "mse")
    for _ in range(2):
        with pytest.raises(ValueError, match="train_step: a policy takes a model's step apart, so it must be a method"):
            model.fit(X, Y, batch_size=9, verbose=0)


def test_evaluate_reads_all_of_one_s_own_data_sets(strategy, recwarn):
    model = compiled(strategy)
    own = strategy.distribute_datasets_from_function(
        lambda _: tf.data.Dataset.from_tensor_slices((X[:16], Y[:16])).batch(4)
    )
    found = model.evaluate(own, verbose=0)
    assert not [each for each in recwarn if "ran out of data" in str(each.message)]
    assert found == pytest.approx(model.evaluate(X[:16], Y[:16], batch_size=8, verbose=0), rel=1e-5)


# With spares.


def kept(rows: slice) -> tuple[np.ndarray, ...]:
    """Returns these rows of each batch of 9."""
    return tuple(np.concatenate([part[start : start + 9][rows] for start in range(0, 45, 9)]) for part in (X, Y))


def test_a_straggler_is_not_waited_for_and_leaves_no_trace(spared, cpus, gate):
    gate.only(2)
    logs = Logs()
    optimizer = lambda: OPTIMIZERS.SGD(0.1, momentum=0.9)  # noqa: E731
    model = compiled(spared, normalized, optimizer)
    before = spared.report()
    history = model.fit(X, Y, batch_size=9, epochs=3, shuffle=False, verbose=0, callbacks=[logs]).history
    report = spared.report()
    assert report.updates - before.updates == 15
    assert report.accepted["worker:2"] == before.accepted["worker:2"]
    fit = {"batch_size": 6, "epochs": 3}
    expected = trained(without_policy(cpus), optimizer, normalized, data=kept(slice(6)), fit=fit)
    assert_close(expected, (model.get_weights(), history, logs.batches))

    # It takes part again as soon as it can, and what it was at is dropped.
    gate.only(1)
    model.fit(X, Y, batch_size=9, epochs=1, shuffle=False, verbose=0)
    after = spared.report()
    assert after.updates - report.updates == 5
    assert after.accepted["worker:2"] - report.accepted["worker:2"] == 5
    assert after.accepted["worker:1"] == report.accepted["worker:1"]
    assert after.dropped["worker:2"] == report.dropped["worker:2"] + 1
    assert set(after.staleness) == {0}


def test_sums_are_scaled_to_all_replicas(spared, cpus, gate):
    gate.only(2)
    options = {"loss": keras.losses.MeanSquaredError(reduction="sum"), "metrics": None}
    model = compiled(spared, optimizer=lambda: OPTIMIZERS.SGD(0.01), **options)
    history = model.fit(X, Y, batch_size=9, epochs=2, shuffle=False, verbose=0).history
    # The sum over 6 of 9 examples stands for that over 9.
    expected = trained(
        ONE_DEVICE, lambda: OPTIMIZERS.SGD(0.015), data=kept(slice(6)), fit={"batch_size": 6, "epochs": 2}, **options
    )
    assert_close(expected[0], model.get_weights())
    np.testing.assert_allclose(1.5 * np.array(expected[1]["loss"]), history["loss"], rtol=1e-5)


def test_a_slow_pipeline_of_its_own_makes_a_replica_late(spared):
    released = threading.Event()

    def own(context):
        parts = tf.data.Dataset.from_tensor_slices((X[:15], Y[:15])).batch(3)
        if context.input_pipeline_id == 0:
            parts = parts.map(lambda x, y: (tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32), x.shape), y))
        options = tf.data.Options()
        # What waits in it must not keep the replicas' computations from the few threads there are.
        options.threading.private_threadpool_size = 1
        return parts.with_options(options)

    def wait(x):
        released.wait()
        return x

    model = compiled(spared)
    before = spared.report()
    try:
        model.fit(spared.distribute_datasets_from_function(own), epochs=2, verbose=0)
    finally:
        released.set()
    after = spared.report()
    assert after.updates - before.updates == 10
    assert after.accepted["worker:0"] == before.accepted["worker:0"]


def test_the_number_of_spares_follows_what_the_devices_take(cpus, capfd):
    strategy = tfdist.MirroredStrategy(cpus[:3], policies=[tfdist.BackupWorkers(spares="auto")])
    model = compiled(strategy, optimizer=lambda: OPTIMIZERS.Adam(0.01))
    with tfdist.testing.Delays({"*": tfdist.testing.constant(0.01), "worker:2": tfdist.testing.constant(0.15)}):
        model.fit(np.tile(X, (4, 1)), np.tile(Y, (4, 1)), batch_size=4, epochs=2, verbose=0)
    updates, counted = int(model.optimizer.iterations.numpy()), strategy.report()
    # All three were waited for until each had been measured often enough, and then two.
    assert 2 * updates < sum(counted.accepted.values()) < 3 * updates
    assert 8 <= counted.accepted["worker:2"] < updates
    assert counted.dropped["worker:2"] > 0
    assert_copies_are_equal(model)
    said = capfd.readouterr().err
    assert said.count("spares 0 -> 1 of 3 replicas") == said.count("tfdist: spares") == 1


# What goes wrong.


def test_what_cannot_be_is_said_in_one_line(cpus):
    with pytest.raises(ValueError, match=r"use spares <= 1. Received: spares=2, total_num_replicas=2"):
        tfdist.MirroredStrategy(cpus[:2], policies=[tfdist.BackupWorkers(spares=2)])
    with pytest.raises(ValueError, match=r"MirroredStrategy has only one; .* Received: spares=1, total_num_replicas=1"):
        tfdist.MirroredStrategy(cpus[:1], policies=[tfdist.BackupWorkers(spares=1)])
    with pytest.raises(
        ValueError, match=r"stall_timeout_secs must be a positive number of seconds. Received: stall_timeout_secs=0"
    ):
        tfdist.MirroredStrategy(cpus[:2], policies=[tfdist.BackupWorkers(spares=0)], stall_timeout_secs=0)


def test_a_strategy_that_nobody_needs_ends_its_threads(cpus):
    def train() -> tuple[weakref.ref, set[threading.Thread]]:
        before = set(threading.enumerate())
        strategy = tfdist.MirroredStrategy(cpus[:2], policies=[tfdist.BackupWorkers(spares=0)])
        model = compiled(strategy)
        model.fit(X, Y, batch_size=8, verbose=0)
        return weakref.ref(strategy), set(threading.enumerate()) - before

    alive, threads = train()
    keras.backend.clear_session()
    gc.collect()
    assert alive() is None
    assert threads
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.slow
def test_close_ends_the_threads_and_refuses_further_training(cpus: list[str]) -> None:
    before = {thread.name for thread in threading.enumerate()}
    strategy = tfdist.MirroredStrategy(cpus[:2], policies=[tfdist.BackupWorkers(spares=0)])
    model = compiled(strategy)
    model.fit(X, Y, verbose=0)
    assert repr(strategy) == "<tfdist.MirroredStrategy devices=['CPU:0', 'CPU:1'] policies=[BackupWorkers(spares=0)]>"
    strategy.close()
    assert repr(strategy).endswith(" closed>")
    assert {thread.name for thread in threading.enumerate() if "tfdist" in thread.name} <= before
    with pytest.raises(RuntimeError, match="this strategy is closed"):
        model.fit(X, Y, verbose=0)
    assert len(model.get_weights()) == len(model.weights)


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (["GPU:0", "GPU:1"], "this process has no device GPU:0; it has CPU:0, CPU:1"),
        (["CPU:0", "/cpu:97"], "this process has no device /cpu:97;"),
        ("GPU:0", r"must be a list of names, such as \['GPU:0', 'GPU:1'\]".replace("'", '"')),
        (2, "must be a list of names"),
    ],
)
def test_devices_that_are_not_there_are_refused_at_once(devices, words):
    """With one of them, the first step of the stock strategy never ends."""
    with pytest.raises(ValueError, match=words):
        tfdist.MirroredStrategy(devices)


@pytest.mark.parametrize(
    ("strategy", "arguments", "words"),
    [
        (tfdist.MirroredStrategy, {"num_workers": 2}, r"to start tasks, use tfdist launch local --num_workers=2"),
        (tfdist.MultiWorkerMirroredStrategy, {"num_ps": 1}, r"takes no num_ps; to start tasks"),
        (tfdist.MultiWorkerMirroredStrategy, {"policy": []}, r"takes no policy; did you mean policies=\.\.\.\?"),
        (tfdist.ParameterServerStrategy, {"communication": "mpi"}, r"takes no communication; leave it away\."),
    ],
)
def test_arguments_that_a_strategy_does_not_take_bring_a_remedy(strategy, arguments, words):
    with pytest.raises(TypeError, match=words):
        strategy(**arguments)


def test_names_of_devices_may_be_written_in_any_way():
    for names in (["cpu:0", "/CPU:1"], ["/job:localhost/replica:0/task:0/device:CPU:0"], ("CPU:1",)):
        assert tfdist.MirroredStrategy(names).num_replicas_in_sync == len(names)
