# SPDX-License-Identifier: Apache-2.0
"""MirroredStrategy without a policy: what is not in `tests/conformance`, which compares its numbers."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import own_models
import pytest
import tensorflow as tf
from training import OPTIMIZERS, X, Y, assert_close, assert_like_one_device, compiled, dense_model, weighed_within_parts

import tfdist

pytestmark = pytest.mark.devices


@pytest.fixture(scope="session")
def strategy(cpus: list[str]) -> tfdist.MirroredStrategy:
    return tfdist.MirroredStrategy(cpus[:2])


def test_the_unannounced_end_of_the_data_is_no_step(strategy):
    def trained(**fit: Any) -> list[np.ndarray]:
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(8), keras.layers.Dropout(0.5)])
            # The step that is none, after the six of the first epoch, would be the seventh, which makes an update.
            model.compile(OPTIMIZERS.AdamW(0.01, weight_decay=0.1, gradient_accumulation_steps=7), "mse")
        model.fit(epochs=2, shuffle=False, verbose=0, **fit)
        return [copy.numpy() for v in (*model.variables, *model.optimizer.variables) for copy in v.value.values]

    known = trained(x=X, y=Y, batch_size=8)
    unknown = trained(x=tf.data.Dataset.from_tensor_slices((X, Y)).filter(lambda x, y: True).batch(8))
    for one, other in zip(known, unknown, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", ["data set", "generator", "resumed"])
def test_weights_that_are_none(strategy, tmp_path: pathlib.Path, kind: str):
    batches = [(X[start : start + 8], Y[start : start + 8], None) for start in range(0, len(X), 8)]
    in_data_set = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).map(lambda x, y: (x, y, None))

    def data() -> Any:
        return (batch for batch in batches) if kind == "generator" else in_data_set

    def trained(strategy: tf.distribute.Strategy, directory: str) -> list[np.ndarray]:
        callbacks = [tfdist.callbacks.Resume(tmp_path / directory)] if kind == "resumed" else []
        for epochs in range(1, 2 + len(callbacks)):
            model = compiled(strategy, dense_model, lambda: OPTIMIZERS.SGD(0.1), metrics=["mae"])
            model.fit(data(), validation_data=data(), epochs=epochs, verbose=0, callbacks=callbacks)
        return [*model.get_weights(), *model.history.history.values(), model.evaluate(data(), verbose=0)]

    assert_close(trained(strategy, "replicas"), trained(tf.distribute.get_strategy(), "alone"))


@pytest.mark.slow
def test_loss_divided_by_weights_is_divided_within_replicas(strategy):
    found, expected = weighed_within_parts(strategy, strategy.num_replicas_in_sync)
    assert found == pytest.approx(expected)
    assert found != pytest.approx(weighed_within_parts(tf.distribute.get_strategy(), 1)[0])


def test_rows_that_replicas_share_are_added_up_before_the_update_of_a_loop(strategy):
    ids, rows = tf.constant([[1, 2], [2, 3], [1, 1], [2, 4]]), tf.constant(Y[:4])

    def looped(strategy: tf.distribute.Strategy) -> list[np.ndarray]:
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Embedding(5, 3), keras.layers.Flatten()])
            optimizer = OPTIMIZERS.Adam(0.1)
            optimizer.build(model.trainable_variables)

        def step(data: Any) -> None:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((model(x) - y) ** 2) / 4
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((ids, rows)).batch(4))
        for batch in [*data] * 2:
            tf.function(strategy.run)(step, args=(batch,))
        return model.get_weights()

    for one, many in zip(looped(tf.distribute.get_strategy()), looped(strategy), strict=True):
        np.testing.assert_allclose(many, one, atol=1e-6)


def test_an_epoch_after_one_that_is_left_at_its_last_batch_has_all_data(strategy):
    updates = []

    class Limit(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = batch == len(X) // 8 - 1

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = False
            updates.append(int(self.model.optimizer.iterations.numpy()))

    model = compiled(strategy)
    steps = len(X) // 8
    x, y = X[: 8 * steps], Y[: 8 * steps]
    model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0, callbacks=[Limit()])
    assert updates == [steps, 2 * steps, 3 * steps]


@pytest.mark.slow
def test_stateful_layer_keeps_a_state_for_each_example(strategy):
    def trained(strategy: Any, size: int) -> list[np.ndarray]:
        keras.utils.set_random_seed(3)
        with strategy.scope():
            inputs, rnn = keras.Input(batch_shape=(size, 3, 1)), keras.layers.SimpleRNN(2, stateful=True)
            model = keras.Sequential([inputs, rnn, keras.layers.Dense(1)])
            model.compile(OPTIMIZERS.SGD(0.1), "mse")
        model.fit(X[:40, :, None], Y[:40], batch_size=8, shuffle=False, verbose=0)
        return model.get_weights()

    for one, many in zip(trained(tf.distribute.get_strategy(), 8), trained(strategy, 4), strict=True):
        np.testing.assert_allclose(many, one, atol=1e-6)


def test_what_run_returns_may_be_reduced_as_a_structure(strategy):
    @tf.function
    def numbers():
        replica = strategy.run(lambda: {"id": tf.cast(tf.distribute.get_replica_context()._replica_id, tf.float32)})
        return strategy.reduce("SUM", replica, axis=None), strategy.reduce("MEAN", replica, axis=None)

    assert tf.nest.map_structure(float, numbers()) == ({"id": 1.0}, {"id": 0.5})


@pytest.mark.slow
def test_times_of_steps_on_single_batches_are_no_times_of_day(cpus):
    own = tfdist.MirroredStrategy(cpus[:2])
    model = compiled(own)
    for _ in range(3):
        model.train_on_batch(X, Y)
    assert own.report().compute_secs["worker:0"].most < 3600


def test_float16_skips_updates_that_are_not_finite_on_any_replica(strategy):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = compiled(strategy, optimizer=lambda: OPTIMIZERS.SGD(0.1), metrics=None)
        x = X[:8].copy()
        x[7] = np.inf  # on the last replica only
        before = model.get_weights()
        model.fit(x, Y[:8], batch_size=8, verbose=0)
    finally:
        keras.config.set_dtype_policy("float32")
    assert isinstance(model.optimizer, OPTIMIZERS.LossScaleOptimizer)
    assert float(model.optimizer.dynamic_scale.value.values[1]) == 2.0**14
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


class Steps(keras.Sequential):
    """Takes the numbers of its loss together as it is told."""

    def __init__(self, together: Callable[[Any], Any]) -> None:
        super().__init__([keras.Input((3,)), keras.layers.Dense(1)])
        self.together = together

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.together(self.loss(y, self(x)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def trained_by_own_step(strategy: Any, together: Callable[[Any], Any]) -> Any:
    loss = keras.losses.MeanSquaredError(reduction="none")
    model = compiled(strategy, lambda: Steps(together), lambda: OPTIMIZERS.SGD(0.01), loss=loss, metrics=None)
    return model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history, model.get_weights()


TOGETHER = {"mean": tf.reduce_mean, "by batch": lambda each: tf.reduce_sum(each) / 8}


@pytest.mark.parametrize("together", TOGETHER)
def test_own_step_adds_up_as_on_one_device(strategy, together: str, capfd):
    one, many = (trained_by_own_step(s, TOGETHER[together]) for s in (tf.distribute.get_strategy(), strategy))
    assert_close(one, many)
    assert capfd.readouterr().err.count("a sum over the examples") == (together == "by batch")


def test_a_table_that_a_step_fills_has_the_examples_alone(strategy):
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)

    def filled(losses: tf.Tensor) -> tf.Tensor:
        places = tf.range(tf.size(losses, tf.int64))
        table.insert(places, places)
        return tf.reduce_mean(losses)

    trained_by_own_step(strategy, filled)
    assert int(table.size()) == 4  # Those of a replica.


def test_loss_scale_of_an_own_step_is_that_of_one_device(strategy):
    def trained(strategy: Any) -> Any:
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = Steps(lambda losses: model.optimizer.scale_loss(1000 * tf.reduce_mean(losses)))
            scaled = OPTIMIZERS.LossScaleOptimizer(OPTIMIZERS.SGD(1e-6))
            model.compile(scaled, keras.losses.MeanSquaredError(reduction="none"))
            for layer in model.layers:
                layer.dtype_policy = "mixed_float16"
        model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        return np.asarray(scaled.dynamic_scale), model.get_weights()

    one, many = (trained(s) for s in (tf.distribute.get_strategy(), strategy))
    assert one[0] == many[0] < 2**15
    np.testing.assert_allclose(many[1][0], one[1][0], rtol=0.02)


def dice(y, predicted):
    return 1 - (2 * tf.reduce_sum(y * predicted) + 1) / (tf.reduce_sum(y + predicted) + 1)


def kept(y, predicted):
    return tf.boolean_mask((y - predicted) ** 2, y > np.quantile(Y, 0.2))


LOSSES = {
    "sum": lambda y, predicted: tf.reduce_sum((y - predicted) ** 2) / 100,
    "mean of fewer": lambda y, predicted: tf.reduce_mean(kept(y, predicted)),
    "of Keras": keras.losses.Tversky(axis=(1,)),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_of_any_kind_trains_as_on_one_device(strategy, loss: str, capfd):
    assert_like_one_device(strategy, lambda: OPTIMIZERS.SGD(0.01), loss=LOSSES[loss], metrics=[dice])
    assert "leaves examples out" not in capfd.readouterr().err


class Bank(keras.Sequential):
    """Keeps its newest outputs, or their mean."""

    def __init__(self, keeps: str) -> None:
        super().__init__([keras.Input((3,)), keras.layers.Dense(1)])
        self.keeps = keeps
        self.bank = tf.Variable(tf.ones([16, 1]))
        if keeps == "in a weight":
            self.bank = self.add_weight(shape=(16, 1), initializer="ones", trainable=False)
        self.next = tf.Variable(0)

    def train_step(self, data):
        result, newest, kept = super().train_step(data), self(data[0]), tf.convert_to_tensor(self.bank)
        count = tf.shape(newest)[0]
        if self.keeps == "a mean":
            self.bank.assign(0.9 * kept + tf.reduce_mean(newest))
        elif self.keeps == "at a place":
            self.bank[self.next : self.next + count].assign(newest)
            self.next.assign((self.next + count) % 16)
        else:
            self.bank.assign(tf.concat([newest, kept[:-count]], 0))
        return result


@pytest.mark.parametrize("keeps", ["in a weight", "in a variable", "at a place", "a mean"])
def test_single_examples_kept_by_a_step_are_refused(strategy, keeps: str, capfd):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = Bank(keeps)
        model.compile("sgd", "mse")
    if is_mean := keeps == "a mean":
        model.fit(X[:40], Y[:40], batch_size=8, verbose=0)
    else:
        with pytest.raises(ValueError, match="depends on the order of the examples"):
            model.fit(X[:40], Y[:40], batch_size=8, verbose=0)
        assert int(model.optimizer.iterations) == model.next.numpy() == 0 and np.all(np.asarray(model.bank) == 1)
    assert capfd.readouterr().err.count("it assigns to the tf.Variable") == int(is_mean)


class Alternating(own_models.Own):
    """Updates the second layer, and then the first one, by a loss with what the first update has written."""

    def train_step(self, data):
        x, y = data
        for layer in (self.second, self.first):
            weights = layer.trainable_variables
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def test_second_update_of_a_step_reads_what_the_first_wrote(strategy):
    def trained(strategy: Any) -> Any:
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = Alternating()
            model.build()
            model.compile(OPTIMIZERS.Adam(0.1, clipnorm=0.1))
            model.optimizer.build(model.trainable_variables)
        return model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history, model.get_weights()

    assert_close(trained(tf.distribute.get_strategy()), trained(strategy))


def test_a_metric_that_is_no_sum_is_refused_before_it_trains(strategy):
    with strategy.scope():
        model = dense_model()
        largest = own_models.Combined(lambda value, y: tf.maximum(value, tf.reduce_max(y)))
        model.compile(OPTIMIZERS.SGD(0.1), "mse", metrics=[largest])
    with pytest.raises(ValueError, match="which is no sum"):
        model.fit(X, Y, batch_size=8, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 0


def test_data_without_batches_is_refused(strategy):
    with pytest.raises(ValueError, match=r"call \.batch\(global_batch_size\)"):
        strategy.experimental_distribute_dataset(tf.data.Dataset.range(4))


def test_traceback_of_a_wrong_shape_has_the_users_frames(strategy):
    model = compiled(strategy)
    with pytest.raises(ValueError, match="incompatible with the layer") as raised:
        model.fit(X[:, :2], Y, verbose=0)
    # As on one device: of Keras only the function that has shortened it, and the one that has raised.
    frames = [pathlib.Path(entry.path) for entry in raised.traceback]
    assert [path.name for path in frames] == [pathlib.Path(__file__).name, "traceback_utils.py", "input_spec.py"]


def test_two_strategies_on_the_same_devices_do_not_meet(cpus):
    def sum_of_ones(size: int) -> list[float]:
        strategy = tfdist.MirroredStrategy(cpus[:2])

        @tf.function
        def total() -> Any:
            return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([size])))

        return strategy.experimental_local_results(total())[0].numpy().tolist()

    # TensorFlow's own MirroredStrategy raises at the second one.
    assert [sum_of_ones(size) for size in (3, 2)] == [[2.0] * 3, [2.0] * 2]


class Conditional(keras.Sequential):
    """Makes its update if the loss is positive, in the graph."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        gradients, weights = tape.gradient(loss, self.trainable_variables), self.trainable_variables
        tf.cond(loss > 0, lambda: [self.optimizer.apply(gradients, weights), 0][1], lambda: 0)
        return {"loss": loss}


def test_update_in_a_conditional_is_refused_in_one_line(strategy):
    with strategy.scope():
        model = Conditional([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd")
    with pytest.raises(RuntimeError, match="inside of a conditional") as raised:
        model.fit(X, Y, batch_size=8, verbose=0)
    assert "\n" not in str(raised.value)


def test_synchronized_batch_normalization_leaves_out_stand_in_examples(strategy):
    def normalized() -> keras.Model:
        layers = [keras.layers.BatchNormalization(synchronized=True), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((3,)), *layers])

    def trained(strategy):
        model = compiled(strategy, normalized, lambda: OPTIMIZERS.SGD(0.1))
        model.fit(X[:5], Y[:5], batch_size=4, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    assert_close(trained(tf.distribute.get_strategy()), trained(strategy))
