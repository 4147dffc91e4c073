# SPDX-License-Identifier: Apache-2.0
"""Callbacks, files, loops of the user's own, and errors. Run by `test_parameter_server.py`."""

from __future__ import annotations

import contextlib
import functools
import math
import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from parameter_server_cluster import STEPS, Batches, Own, X, Y, dataset, dense, fit
from training import build_metrics

# Callbacks and files.


@functools.cache
def healthy(strategy: Any) -> keras.Model:
    """A model for checks to which it does not matter what it has learned, so that it is traced once."""
    return dense(strategy, metrics=lambda: [Batches()])


def test_batch_callbacks_get_real_logs(strategy: Any) -> None:
    losses, kinds = [], set()

    class Logs(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            losses.append(float(logs["loss"]))
            kinds.update(logs)

    fit(healthy(strategy), X, Y, epochs=2, callbacks=[Logs()])
    assert len(losses) == 2 * STEPS
    assert all(math.isfinite(loss) and loss > 0 for loss in losses)
    assert kinds == {"loss", "batches"}


@pytest.mark.parametrize("follows", [False, True])
def test_epochs_show_all_batches_whether_a_callback_follows_them(strategy: Any, follows: bool) -> None:
    class Follows(keras.callbacks.Callback):
        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            assert logs["loss"] > 0

        on_train_batch_end = on_test_batch_end

    class Stops(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = logs["val_batches"] != 3 or logs["batches"] != 9

    model, callbacks = dense(strategy, metrics=lambda: [Batches()]), [Stops(), *[Follows()] * follows]
    model.compile("adam", "mse", metrics=[Batches()], steps_per_execution=3)
    endless = dataset().repeat()
    given = {"steps_per_epoch": 7, "validation_data": endless, "validation_steps": 2, "callbacks": callbacks}
    history = fit(model, endless, epochs=4, **given)
    # Whole executions, as on one device.
    assert history["batches"] == [9] * 4
    assert history["val_batches"] == [3] * 4
    assert all(value > 0 for name in ("loss", "val_loss") for value in history[name])
    for _ in range(3):
        assert model.evaluate(dataset(), verbose=0, callbacks=callbacks[1:], return_dict=True)["batches"] == STEPS


def test_an_error_in_the_last_batch_of_a_step_without_logs_is_of_its_own_fit(strategy: Any) -> None:
    class Silent(Own):
        def train_step(self, data: Any) -> Any:
            tf.debugging.assert_less(tf.reduce_max(data[0]), 5.0)
            super().train_step(data)
            return {}

    with strategy.scope():
        model = Silent()
        model.compile("sgd", "mse")
    for fails in (False, True, False, True):
        x = X[:64].copy()
        x[-1] += 10.0 * fails
        with pytest.raises(tf.errors.InvalidArgumentError) if fails else contextlib.nullcontext():
            fit(model, x, Y[:64])


def test_the_report_tells_how_stale_each_gradient_was(strategy: Any) -> None:
    before = strategy.report()
    fit(healthy(strategy), X, Y, epochs=3)
    report = strategy.report()
    assert report.updates - before.updates == 3 * STEPS
    for counted in (report.staleness, report.accepted):
        assert sum(counted.values()) == report.updates
    assert min(report.staleness) == 0
    assert sum(report.dropped.values()) == 0


def test_the_learning_rate_is_the_one_set_before_the_step(strategy: Any) -> None:
    """Steps before the change still move the weights; none after it does."""
    weights = []

    class Freeze(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 5:
                self.model.optimizer.learning_rate = 0.0
                weights.append(self.model.get_weights())

    model = dense(strategy, lambda: keras.optimizers.SGD(0.1))
    fit(model, X, Y, callbacks=[Freeze()])
    for one, other in zip(weights[0], model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_interrupted_training_goes_on_where_it_was(strategy: Any, tmp_path: pathlib.Path) -> None:
    class Interrupt(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(dense(strategy), X, Y, epochs=4, callbacks=[keras.callbacks.BackupAndRestore(tmp_path), Interrupt()])
    model = dense(strategy)
    history = fit(model, X, Y, epochs=4, callbacks=[keras.callbacks.BackupAndRestore(tmp_path)])
    assert len(history["loss"]) < 4
    assert int(model.optimizer.iterations) == 4 * STEPS


# Loops of the user's own.


def own_step(model: keras.Model) -> Callable[[Any], Any]:
    def step(batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return step


def test_a_loop_over_distributed_data(strategy: Any) -> None:
    model = dense(strategy, lambda: keras.optimizers.SGD(0.05))
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    step, losses = own_step(model), []

    def once(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

    data = strategy.experimental_distribute_dataset(dataset())
    for _ in range(2):
        losses += [float(once(batch)) for batch in data]
    assert len(losses) == int(model.optimizer.iterations) == 2 * STEPS
    assert sum(losses[STEPS:]) < sum(losses[:STEPS])


def test_a_loop_with_the_coordinator(strategy: Any) -> None:
    model = dense(strategy)
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    build_metrics(model, X[:1], Y[:1])
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    iterator = iter(coordinator.create_per_worker_dataset(lambda: dataset().repeat()))
    step = tf.function(lambda iterator: strategy.run(model.train_step, args=(next(iterator),)))
    results = [coordinator.schedule(step, args=(iterator,)) for _ in range(50)]
    coordinator.join()
    assert int(model.optimizer.iterations) == 50
    assert math.isfinite(results[-1].fetch()["loss"])


# Errors of the user's code.


def works_again(strategy: Any) -> None:
    assert fit(healthy(strategy), X, Y)["batches"] == [STEPS]


@pytest.mark.parametrize("eager", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_error_of_an_operation_reaches_the_user(strategy: Any, eager: bool) -> None:
    class Broken(Own):
        def train_step(self, data: Any) -> Any:
            with tf.control_dependencies([tf.debugging.Assert(False, ["my own message"])]):
                return super().train_step(data)

    with strategy.scope():
        model = Broken()
        model.compile("sgd", run_eagerly=eager)
    with pytest.raises(tf.errors.InvalidArgumentError, match="my own message") as raised:
        fit(model, X, Y)
    if not eager:
        # Near the beginning, and where the operation was made: not behind the frames of Keras' loop.
        told = raised.value.message.splitlines()[:5]
        assert any("my own message" in line for line in told)
        assert any("parameter_server_loops_checks.py" in line for line in told)
    works_again(strategy)


def test_an_error_of_the_engine_keeps_its_type(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(*args: Any, **kwargs: Any) -> Any:
        raise TimeoutError("no step has completed")

    model = healthy(strategy)
    with monkeypatch.context() as patch:
        patch.setattr(strategy._engine, "step", step)
        for method in (lambda: fit(model, X, Y), lambda: model.evaluate(X, Y, verbose=0)):
            with pytest.raises(TimeoutError, match="no step has completed"):
                method()
    works_again(strategy)


def test_an_error_in_a_callback_leaves_the_cluster_usable(strategy: Any) -> None:
    class Broken(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            raise RuntimeError("my own message")

    with pytest.raises(RuntimeError, match="my own message"):
        fit(healthy(strategy), X, Y, callbacks=[Broken()])
    works_again(strategy)
