# SPDX-License-Identifier: Apache-2.0
"""Variables that a step makes when it is first called under MirroredStrategy; `tests/conformance` has its numbers."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from typing import Any

import first_call_models
import keras
import numpy as np
import pytest
import tensorflow as tf
from first_call_models import Noisy, fitted, plainly_looped

import tfdist

pytestmark = pytest.mark.devices


@pytest.fixture(scope="module")
def strategy(cpus: list[str]) -> tfdist.MirroredStrategy:
    """Without policies, which see a model once its variables are made."""
    return tfdist.MirroredStrategy(cpus[:2])


def test_a_batch_without_an_axis_of_examples_is_named(strategy: Any) -> None:
    with (
        pytest.warns(RuntimeWarning, match=r"Stacked\.train_step fails with a part of a batch.*put them there"),
        pytest.raises(ValueError, match="slice index 1 of dimension 0"),
    ):
        first_call_models.fitted_with_pairs(strategy)


class Raising(keras.Model):
    """A step that fails with a whole batch, too."""

    def train_step(self, data):
        raise ValueError("of its own")


def test_error_of_a_step_itself_is_not_put_down_to_parts(strategy: Any) -> None:
    with strategy.scope():
        model = Raising()
        model.compile("sgd", "mse")
    with warnings.catch_warnings(), pytest.raises(ValueError, match="of its own"):
        warnings.simplefilter("error", RuntimeWarning)
        model.fit(first_call_models.X, first_call_models.Y, verbose=0)


class OverData(keras.Model):
    """A step with a Python loop over a data set, which TensorFlow would unroll without an end."""

    def test_step(self, data):
        return {"total": sum(tf.reduce_sum(each) for each in tf.data.Dataset.range(12).batch(5))}


@pytest.mark.slow
def test_python_loop_over_a_data_set_in_a_step_raises_as_on_one_device(strategy: Any) -> None:
    for each in (tf.distribute.get_strategy(), strategy):
        with each.scope():
            model = OverData()
            model.compile()
        with pytest.raises(ValueError, match="unusually high number of"):
            model.evaluate(first_call_models.X, first_call_models.Y, verbose=0)


def test_weights_made_outside_of_the_scope_are_named(strategy: Any) -> None:
    dense = keras.layers.Dense(1, name="outside")
    dense.build((None, 3))
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), dense])
        model.compile("sgd", "mse")
    message = r"under .with strategy\.scope.*variable 'outside/kernel'.*its layer is made at test_first_calls\.py:\d+$"
    with pytest.raises(ValueError, match=message):
        model.fit(first_call_models.X, first_call_models.Y, verbose=0)
    # In a loop of the user's own.
    optimizer = keras.optimizers.Adam()
    with pytest.raises(ValueError, match=message):
        strategy.run(lambda: optimizer.apply([tf.ones((3, 1)), tf.ones(1)], dense.trainable_variables))


def test_optimizer_built_outside_of_scope_is_refused(strategy: Any) -> None:
    optimizer = keras.optimizers.Adam()
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    with tf.distribute.get_strategy().scope():
        optimizer.build(model.trainable_variables)
    model.compile(optimizer, "mse")
    for _ in range(2):
        with pytest.raises(
            ValueError,
            match=r"under .with strategy\.scope.*variable 'adam.*'.*optimizer is built at test_first_calls\.py:\d+$",
        ):
            model.fit(first_call_models.X, first_call_models.Y, verbose=0)
    with pytest.raises(ValueError, match=r"variable 'adam.*', made outside of it"):
        strategy.run(lambda: optimizer.apply([tf.ones((3, 1)), tf.ones(1)], model.trainable_variables))


def test_policies_beside_a_model_of_tf_keras_are_refused(strategy: Any, cpus: list[str]) -> None:
    def make_train_function() -> Any:
        def run_step() -> Any:
            return tf.constant(1.0)

        return run_step

    step = make_train_function()
    step.__module__ = "tf_keras.src.engine.training"
    assert float(strategy.reduce("SUM", strategy.run(step), axis=None)) == 2.0
    with pytest.raises(ValueError, match=r"models of Keras 3.*leave them away.*BackupWorkers"):
        tfdist.MirroredStrategy(cpus[:2], policies=[tfdist.BackupWorkers(spares=0)]).run(step)


class Failing(keras.optimizers.SGD):
    """Can't be built the first time."""

    is_broken = True

    def build(self, variables: Any) -> None:
        super().build(variables)
        if Failing.is_broken:
            raise ValueError("broken")


def test_failed_build_of_an_optimizer_leaves_nothing_behind(strategy: Any) -> None:
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(Failing(0.1, momentum=0.9), "mse")
    Failing.is_broken = True
    with pytest.raises(ValueError, match="broken"):
        model.fit(first_call_models.X, first_call_models.Y, verbose=0)
    assert not model.optimizer.built
    assert len(model.optimizer.variables) == 2
    Failing.is_broken = False
    model.fit(first_call_models.X, first_call_models.Y, batch_size=9, verbose=0)
    assert len(model.optimizer.variables) == 4


def test_fit_of_a_model_outside_of_the_scope_warns_once(strategy: Any, recwarn: pytest.WarningsRecorder) -> None:
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    with tf.distribute.get_strategy().scope():
        on_purpose = keras.models.clone_model(model)
    outside = [keras.models.clone_model(model), keras.Sequential([keras.layers.Dense(1)])]
    for each in (model, on_purpose, *outside):
        each.compile("sgd", "mse")
        for _ in range(2):
            each.fit(first_call_models.X, first_call_models.Y, verbose=0)
    warned = [str(each.message) for each in recwarn if "outside of strategy.scope()" in str(each.message)]
    assert len(warned) == len(outside)
    assert "trains on one device, and MirroredStrategy has 2" in warned[0]
    assert f"Received: model {outside[0].name!r}" in warned[0]


class _Private(keras.Model):
    """TensorFlow refuses its name scope, "__private", in a graph, and Keras leaves it open."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.dense(data[0]) - data[1]) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.dense.trainable_variables), self.dense.trainable_variables)
        return {"loss": loss}


def test_model_of_a_private_class_leaves_no_name_scope_open(strategy: Any) -> None:
    with strategy.scope():
        model = _Private()
        model.compile("sgd")
    model.fit(first_call_models.X, first_call_models.Y, batch_size=9, verbose=0)
    later = keras.layers.Dense(1, name="later")
    later.build((None, 3))
    assert later.kernel.path == "later/kernel"


@pytest.mark.slow
def test_second_model_of_a_class_has_its_variables_made(strategy: Any) -> None:
    for _ in range(2):
        assert np.isfinite(fitted(strategy, Noisy, "mse")[0]["loss"]).all()


class Counting(keras.Model):
    """Notes each time that its `call` is traced, and whether that was outside of replicas, to build it."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.traced = keras.layers.Dense(1), []

    def call(self, x):
        self.traced.append(tf.distribute.in_cross_replica_context())
        return self.dense(x)


def test_a_built_model_is_traced_once_for_each_replica(cpus: list[str]) -> None:
    strategy = tfdist.MirroredStrategy(cpus[:2])
    with strategy.scope():
        model = Counting()
        model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
    model.fit(first_call_models.X, first_call_models.Y, batch_size=9, verbose=0)
    assert model.traced.count(False) == 2


def test_autograph_converts_a_step_and_not_the_library(cpus: list[str]) -> None:
    keras.utils.clear_session()
    # Makes seeds of Keras' own, which the step is then given.
    keras.random.normal((1,))
    strategy, found = tfdist.MirroredStrategy(cpus[:2]), set()
    with strategy.scope():
        layer = keras.layers.Dense(1)

    def step(x):
        found.update(frame.name for frame in traceback.extract_stack())
        if tf.reduce_sum(layer(x)) > 1e9:  # of no use but to be converted
            x = 0 * x
        return tf.reduce_sum(x)

    @tf.function
    def total(batch):
        return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

    batches = tf.data.Dataset.from_tensor_slices(first_call_models.X).batch(9)
    totals = [float(total(batch)) for batch in strategy.experimental_distribute_dataset(batches)]
    assert sum(totals) == pytest.approx(first_call_models.X.sum(), rel=1e-5)
    assert "tf__step" in found
    assert "tf__run" not in found


def test_a_decorated_step_runs_beside_keras_own_seed_generator(cpus: list[str]) -> None:
    keras.utils.clear_session()
    keras.random.normal((1,))
    many = tfdist.MirroredStrategy(cpus[:2])
    with many.scope():
        weight, optimizer = keras.Variable(1.0), keras.optimizers.SGD(0.5)
        optimizer.build([weight])
    step = tf.function(lambda: optimizer.apply([tf.ones([])], [weight]))
    many.run(step)
    assert float(weight.value.values[1]) == float(weight.value.values[0]) == 0.0


def test_loss_scale_without_variables_is_refused_in_a_graph(strategy: Any) -> None:
    with strategy.scope():
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5))
    with pytest.raises(
        RuntimeError, match=r"call optimizer\.build\(model\.trainable_variables\) in the strategy's scope"
    ):
        tf.function(lambda: optimizer.scale_loss(tf.ones([])))()


def test_a_loop_without_run_trains_on_one_worker() -> None:
    first_call_models.assert_like_one_device(tfdist.MultiWorkerMirroredStrategy(), plainly_looped, False, True)


@pytest.mark.parametrize("in_scope", [True, False])
def test_an_optimizer_made_outside_serves_a_loop_without_run(strategy: Any, in_scope: bool) -> None:
    with strategy.scope():
        weight = keras.Variable([1.0, 2.0])
    optimizer = keras.optimizers.Adam(0.5)
    with strategy.scope() if in_scope else contextlib.nullcontext():
        for _ in range(2):
            optimizer.apply([tf.constant([1.0, -1.0])], [weight])
    assert int(optimizer.iterations) == 2
    for copy in weight.value.values:
        np.testing.assert_allclose(copy, [0.0, 3.0], atol=1e-4)


def test_gradients_of_replicas_are_refused_outside_of_run(strategy: Any) -> None:
    with strategy.scope():
        weight, optimizer = keras.Variable(1.0), keras.optimizers.SGD(0.5)
    gradient = strategy.run(lambda: tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32))
    with pytest.raises(RuntimeError, match=r"would let the copies of the model drift apart\. Call it in the step"):
        optimizer.apply([gradient], [weight])
    optimizer.apply([strategy.reduce("SUM", gradient, axis=None)], [weight])
    assert [float(copy) for copy in weight.value.values] == [0.5, 0.5]
