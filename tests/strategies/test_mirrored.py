# SPDX-License-Identifier: Apache-2.0
"""MirroredStrategy on two logical devices gives what one device gives."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist

pytestmark = pytest.mark.devices

# 45 examples in batches of 8: the last batch has 5, which two replicas can't share evenly.
RANDOM = np.random.default_rng(0)
X = RANDOM.random((45, 3), np.float32)
Y = RANDOM.random((45, 1), np.float32)
OPTIMIZERS = keras.optimizers


@pytest.fixture(scope="session")
def strategy(cpus: list[str]) -> tfdist.MirroredStrategy:
    return tfdist.MirroredStrategy(cpus[:2])


class Logs(keras.callbacks.Callback):
    """Keeps the logs of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[dict[str, float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches.append({key: float(value) for key, value in logs.items()})


def dense_model() -> keras.Model:
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])


def trained(
    strategy: Any,
    optimizer: Callable[[], Any],
    model: Callable[[], Any] = dense_model,
    calls: Sequence[str] = ("evaluate", "predict"),
    **options: Any,
) -> Any:
    """(weights, history, logs of batches) after 12 steps, and the results of `calls`.

    To trace a test step and a predict step takes as long as to train, so that only those tests do it which are about
    more than the update.
    """
    fit = {"batch_size": 8, "epochs": 2, "shuffle": False, **options.pop("fit", {})}
    data = options.pop("data", (X, Y))
    keras.utils.set_random_seed(3)
    with strategy.scope():
        made = model()
        made.compile(optimizer(), **{"loss": "mse", "metrics": ["mae"], **options})
    logs = Logs()
    history = made.fit(*data, verbose=0, callbacks=[logs], **fit).history
    after = {
        "evaluate": lambda: made.evaluate(*data[:2], batch_size=8, verbose=0, return_dict=True),
        "predict": lambda: made.predict(data[0], batch_size=8, verbose=0),
    }
    return made.get_weights(), history, logs.batches, *(after[call]() for call in calls)


def assert_like_one_device(strategy: Any, optimizer: Callable[[], Any], **options: Any) -> None:
    one, many = (trained(s, optimizer, **dict(options)) for s in (tf.distribute.get_strategy(), strategy))
    for alone, together in zip(one, many, strict=True):
        tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), alone, together)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(lambda: OPTIMIZERS.SGD(0.1), id="sgd"),
        pytest.param(lambda: OPTIMIZERS.Adam(0.01), id="adam"),
        pytest.param(lambda: OPTIMIZERS.SGD(0.1, global_clipnorm=0.01), id="global_clipnorm"),
        pytest.param(lambda: OPTIMIZERS.AdamW(0.01, weight_decay=0.1, use_ema=True, clipvalue=0.01), id="decay-ema"),
        pytest.param(lambda: OPTIMIZERS.SGD(0.1, use_ema=True, ema_overwrite_frequency=5), id="ema-overwrite"),
        pytest.param(
            lambda: OPTIMIZERS.SGD(
                0.1, clipnorm=0.05, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=3
            ),
            id="accumulation-clip-ema",
        ),
        pytest.param(lambda: OPTIMIZERS.LossScaleOptimizer(OPTIMIZERS.Adam(0.01, clipnorm=0.1)), id="loss-scale"),
        pytest.param(
            lambda: OPTIMIZERS.LossScaleOptimizer(OPTIMIZERS.SGD(0.1, gradient_accumulation_steps=2)),
            id="loss-scale-accumulation",
        ),
    ],
)
def test_every_optimizer_updates_as_on_one_device(strategy, optimizer):
    assert_like_one_device(strategy, optimizer, calls=())


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"steps_per_execution": 4}, id="steps_per_execution"),
        pytest.param({"run_eagerly": True}, id="run_eagerly"),
        pytest.param({"fit": {"validation_split": 0.2}, "calls": ()}, id="validation_split"),
        pytest.param({"fit": {"steps_per_epoch": 3}, "calls": ()}, id="steps_per_epoch"),
        pytest.param(
            {"fit": {"sample_weight": np.linspace(0, 2, 45, dtype=np.float32)}, "calls": ()}, id="sample_weight"
        ),
        pytest.param({"loss": keras.losses.MeanSquaredError(reduction="sum")}, id="sum-loss"),
    ],
)
def test_every_way_to_fit_is_as_on_one_device(strategy, options):
    assert_like_one_device(strategy, lambda: OPTIMIZERS.Adam(0.01), **options)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(lambda: OPTIMIZERS.Adam(0.01), id="adam"),
        # The step that is none, after the six of the first epoch, would be the seventh, which makes an update.
        pytest.param(
            lambda: OPTIMIZERS.AdamW(0.01, weight_decay=0.1, gradient_accumulation_steps=7), id="decay-accumulation"
        ),
    ],
)
def test_the_unannounced_end_of_the_data_is_no_step(strategy, optimizer):
    def trained(**fit: Any) -> list[np.ndarray]:
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(8), keras.layers.Dropout(0.5)])
            model.compile(optimizer(), "mse")
        model.fit(epochs=2, shuffle=False, verbose=0, **fit)
        return [copy.numpy() for v in (*model.variables, *model.optimizer.variables) for copy in v.value.values]

    known = trained(x=X, y=Y, batch_size=8)
    unknown = trained(x=tf.data.Dataset.from_tensor_slices((X, Y)).filter(lambda x, y: True).batch(8))
    for one, other in zip(known, unknown, strict=True):
        np.testing.assert_array_equal(one, other)


def test_class_weights_count(strategy):
    data = X, RANDOM.integers(0, 2, (45,))
    options = {"loss": "binary_crossentropy", "metrics": ["accuracy", "auc"], "fit": {"class_weight": {0: 1.0, 1: 3.0}}}

    def classifier():
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, "sigmoid")])

    assert_like_one_device(strategy, lambda: OPTIMIZERS.SGD(0.1), model=classifier, data=data, **options)


def test_embedding_gradients_are_weighed(strategy):
    data = RANDOM.integers(0, 5, (45, 4)), Y

    def embedding():
        layers = [keras.Input((4,)), keras.layers.Embedding(5, 3), keras.layers.Flatten(), keras.layers.Dense(1)]
        return keras.Sequential(layers)

    # Within one execution of several steps, the last batch has fewer rows than those before.
    for optimizer, steps in (
        (lambda: OPTIMIZERS.SGD(0.1), 1),
        (lambda: OPTIMIZERS.SGD(0.1), 4),
        (lambda: OPTIMIZERS.Adam(0.01, clipnorm=0.1), 4),
    ):
        options = {"model": embedding, "data": data, "steps_per_execution": steps, "calls": ()}
        assert_like_one_device(strategy, optimizer, **options)


def two_ends() -> keras.Model:
    first, second = keras.Input((3,), name="first"), keras.Input((2,), name="second")
    joined = keras.layers.Concatenate()([first, second])
    outputs = {"sum": keras.layers.Dense(1, name="sum")(joined), "kind": keras.layers.Dense(4, name="kind")(joined)}
    return keras.Model({"first": first, "second": second}, outputs)


def test_dicts_several_inputs_and_several_outputs(strategy):
    x = {"first": X, "second": RANDOM.random((45, 2), np.float32)}
    y = {"sum": Y, "kind": RANDOM.integers(0, 4, (45,))}
    loss = {"sum": "mse", "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
    metrics = {"sum": ["mae"], "kind": ["accuracy"]}
    options = {"model": two_ends, "data": (x, y), "loss": loss, "metrics": metrics}
    assert_like_one_device(strategy, lambda: OPTIMIZERS.Adam(0.01), **options)


class OwnStep(keras.Model):
    """A subclassed model with its own train_step and logs, which does not call scale_loss."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.mean = keras.metrics.Mean(name="own")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.mean.update_state(tf.abs(y - self(x)))
        return {"own": self.mean.result(), "constant": 2.5}


def test_own_train_step_is_weighed_too(strategy):
    one, many = (
        trained(s, lambda: OPTIMIZERS.SGD(0.1), model=OwnStep, metrics=None, calls=())
        for s in (tf.distribute.get_strategy(), strategy)
    )
    for alone, together in zip(one[0], many[0], strict=True):
        np.testing.assert_allclose(alone, together, atol=1e-5)
    assert many[2][-1].keys() == {"own", "constant"}
    assert many[2][-1]["constant"] == pytest.approx(2.5)
    assert many[2][-1]["own"] == pytest.approx(one[2][-1]["own"], rel=0.05)


@pytest.mark.parametrize("batch_size", [8, 1], ids=["one over", "always fewer examples than replicas"])
def test_replicas_without_examples_leave_no_trace(strategy, batch_size):
    x, y = X[:9], Y[:9]  # in batches of 8 one example is left over: a replica has none

    def normalized():
        return keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        )

    with strategy.scope():
        model = normalized()
        model.compile("adam", "mse", metrics=["mae"])
    history = model.fit(x, y, batch_size=batch_size, epochs=2, verbose=0).history
    assert np.isfinite([*history["loss"], *history["mae"]]).all()
    for variable in model.variables:
        copies = [copy.numpy() for copy in variable.value.values]
        assert np.isfinite(copies).all(), variable.path
    assert model.predict(x, batch_size=batch_size, verbose=0).shape == (9, 1)


def test_batch_normalization_keeps_the_same_statistics_on_all_replicas(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    for variable in model.layers[0].non_trainable_variables:
        first, second = (copy.numpy() for copy in variable.value.values)
        np.testing.assert_array_equal(first, second)
        assert np.abs(first - 1).max() > 1e-3 or "mean" in variable.path


def test_evaluate_and_predict_see_every_example_once(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Rescaling(2.0)])
        model.compile(loss="mse", metrics=["mae"])
    x = np.arange(21, dtype=np.float32)[:, None]
    np.testing.assert_array_equal(model.predict(x, batch_size=8, verbose=0), 2 * x)
    assert model.evaluate(x, 0 * x, batch_size=8, verbose=0)[1] == pytest.approx(2 * x.mean())


def test_steps_on_single_batches(strategy):
    with strategy.scope():
        model = dense_model()
        model.compile(OPTIMIZERS.Adam(0.01), "mse", metrics=["mae"])
    before = model.test_on_batch(X, Y, return_dict=True)
    assert before == pytest.approx(model.evaluate(X, Y, verbose=0, return_dict=True), abs=1e-6)
    losses = [model.train_on_batch(X[:7], Y[:7])[0] for _ in range(20)]
    assert losses[-1] < losses[0]
    assert int(model.optimizer.iterations.numpy()) == 20
    np.testing.assert_allclose(model.predict_on_batch(X), model.predict(X, verbose=0), atol=1e-6)


def test_custom_loop_with_run(strategy):
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)

    def sums_and_means(strategy: Any) -> Any:
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = dense_model()
            optimizer = OPTIMIZERS.Adam(0.01)
            optimizer.build(model.trainable_variables)

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((model(x) - y) ** 2) / 8
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        @tf.function
        def global_step(batch):
            losses = strategy.run(step, args=batch)
            return strategy.reduce("SUM", losses, axis=None), strategy.reduce("MEAN", losses, axis=None)

        batches = strategy.experimental_distribute_dataset(dataset)
        return np.array([[float(loss) for loss in global_step(batch)] for _ in range(5) for batch in batches]).T

    alone, _ = sums_and_means(tf.distribute.get_strategy())
    together, means = sums_and_means(strategy)
    np.testing.assert_allclose(together, alone, atol=1e-5)
    np.testing.assert_allclose(together, 2 * means, rtol=1e-6)


def test_what_run_returns_may_be_reduced_as_a_structure(strategy):
    @tf.function
    def numbers():
        replica = strategy.run(lambda: {"id": tf.cast(tf.distribute.get_replica_context()._replica_id, tf.float32)})
        return strategy.reduce("SUM", replica, axis=None), strategy.reduce("MEAN", replica, axis=None)

    assert tf.nest.map_structure(float, numbers()) == ({"id": 1.0}, {"id": 0.5})


def test_float16_skips_updates_that_are_not_finite_on_any_replica(strategy):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with strategy.scope():
            model = dense_model()
            model.compile(OPTIMIZERS.SGD(0.1), "mse")
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


def test_callbacks_stop_schedule_save_and_restore(strategy, tmp_path: pathlib.Path):
    callbacks = keras.callbacks
    with strategy.scope():
        model = dense_model()
        model.compile(OPTIMIZERS.Adam(0.01), "mse")
    rates: list[float] = []
    history = model.fit(
        X,
        Y,
        batch_size=8,
        epochs=5,
        verbose=0,
        validation_data=(X, Y),
        callbacks=[
            callbacks.EarlyStopping("val_loss", patience=0, min_delta=100),
            callbacks.LearningRateScheduler(lambda epoch: rates.append(0.5**epoch) or 0.5**epoch),
            callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras"),
            callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False),
        ],
    ).history
    assert len(history["loss"]) == len(rates) == 2
    assert float(model.optimizer.learning_rate.numpy()) == 0.5
    with strategy.scope():
        loaded = keras.saving.load_model(tmp_path / "2.keras")
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))
    assert int(loaded.optimizer.iterations.numpy()) == 12
    rest = loaded.fit(
        X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[callbacks.BackupAndRestore(tmp_path / "backup")]
    )
    assert len(rest.history["loss"]) == 1


def test_logs_are_those_of_the_whole_batch(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Rescaling(1.0), keras.layers.Dense(1)])
        model.compile(OPTIMIZERS.SGD(0.0), "mae", metrics=["mae"])
    logs = Logs()
    x = np.arange(11, dtype=np.float32)[:, None]
    model.fit(x, 0 * x, batch_size=4, shuffle=False, verbose=0, callbacks=[logs])
    kernel = abs(float(model.layers[1].kernel.numpy()[0, 0]))
    assert [log["mae"] for log in logs.batches] == pytest.approx([kernel * x[:n].mean() for n in (4, 8, 11)], rel=1e-5)


def test_an_exception_in_the_model_keeps_its_message(strategy):
    class Failing(OwnStep):
        def call(self, x):
            raise LookupError("my own words")

    with strategy.scope():
        model = Failing()
        model.compile("sgd", "mse")
    with pytest.raises(Exception, match="my own words"):
        model.fit(X, Y, verbose=0)


def test_mixed_loss_reductions_are_refused_only_where_they_matter(strategy):
    with strategy.scope():
        model = two_ends()
        model.compile("sgd", {"sum": keras.losses.MeanSquaredError(reduction="sum"), "kind": "mse"})
    x = {"first": X, "second": X[:, :2]}
    y = {"sum": Y, "kind": np.zeros((45, 4), np.float32)}
    even = [{key: value[:40] for key, value in part.items()} for part in (x, y)]
    model.fit(*even, batch_size=8, verbose=0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="use one kind of reduction"):
        model.fit(x, y, batch_size=8, verbose=0)


def test_optimizers_are_left_as_they_were(strategy):
    with strategy.scope():
        model = dense_model()
        model.compile(OPTIMIZERS.Adam(0.01, clipnorm=1.0, gradient_accumulation_steps=2), "mse")
    model.fit(X, Y, batch_size=8, verbose=0)
    assert not {"apply", "_backend_apply_gradients", "_all_reduce_sum_gradients"} & vars(model.optimizer).keys()


def test_what_cannot_be_is_said_in_one_line(strategy):
    with pytest.raises(ValueError, match=r"policies must be a list of policies"):
        tfdist.MirroredStrategy(policies=["warmup"])
    with pytest.raises(ValueError, match=r"call \.batch\(global_batch_size\)"):
        strategy.experimental_distribute_dataset(tf.data.Dataset.range(4))


def test_xla_is_refused_where_it_cannot_be(strategy):
    with strategy.scope():
        model = dense_model()
        model.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(ValueError, match=r"jit_compile=True\): XLA can't compile"):
        model.fit(X, Y, verbose=0)


def test_two_strategies_on_the_same_devices_do_not_meet(cpus):
    def sum_of_ones(size: int) -> list[float]:
        strategy = tfdist.MirroredStrategy(cpus[:2])

        @tf.function
        def total() -> Any:
            return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([size])))

        return strategy.experimental_local_results(total())[0].numpy().tolist()

    # TensorFlow's own MirroredStrategy raises at the second one.
    assert [sum_of_ones(size) for size in (3, 2)] == [[2.0] * 3, [2.0] * 2]
