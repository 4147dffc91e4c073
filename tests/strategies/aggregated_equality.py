# SPDX-License-Identifier: Apache-2.0
"""With spares=0, four workers and two parameter servers train as one device does, given the same global batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from aggregated_cluster import BATCH, COUNT, IDS, STEPS, X, Y, compiled, layers
from training import Logs

OPTIMIZERS = keras.optimizers
EPOCHS = 2


def trained(strategy: Any, optimizer: Any, make: Callable[[], keras.Model], data: Any, **options: Any) -> Any:
    fit = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, **options.pop("fit", {})}
    model = compiled(strategy, make, optimizer, **options)
    logs = Logs()
    data = data() if callable(data) else data
    if not isinstance(data, tuple):
        del fit["batch_size"], fit["shuffle"]
        data = (data,)
    history = model.fit(*data, verbose=0, callbacks=[logs], **fit).history
    return model, history, logs.batches


def assert_like_one_device(
    strategy: Any, optimizer: Any, make: Callable[[], keras.Model] = layers, data: Any = (X, Y), **options: Any
) -> Any:
    model, history, logs = trained(strategy, optimizer, make, data, **dict(options))
    alone, own_history, own_logs = trained(tf.distribute.get_strategy(), optimizer, make, data, **dict(options))
    for one, other in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    for key, values in own_history.items():
        np.testing.assert_allclose(history[key], values, rtol=1e-4, err_msg=key)
    assert len(logs) == len(own_logs)
    for one, other in zip(logs, own_logs, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    # On one device, Keras counts the step that finds no batch where their number is unknown.
    updates = len(logs) // (getattr(model.optimizer, "gradient_accumulation_steps", None) or 1)
    assert int(model.optimizer.iterations.numpy()) == updates
    return model


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: OPTIMIZERS.SGD(0.05),
        lambda: OPTIMIZERS.SGD(0.05, momentum=0.9, global_clipnorm=0.5),
        lambda: OPTIMIZERS.Adam(0.01, use_ema=True, ema_overwrite_frequency=5, weight_decay=0.01),
        lambda: OPTIMIZERS.Adam(0.01, gradient_accumulation_steps=4),
        lambda: OPTIMIZERS.LossScaleOptimizer(OPTIMIZERS.Adam(0.01), dynamic_growth_steps=7),
    ],
    ids=["sgd", "clipping", "ema", "accumulation", "loss-scale"],
)
def test_optimizers(strategy: Any, optimizer: Callable[[], Any]) -> None:
    assert_like_one_device(strategy, optimizer)


def embedding(num_rows: int = 50) -> keras.Model:
    numbers, ids = keras.Input((6,)), keras.Input((3,), dtype="int32")
    rows = keras.layers.Flatten()(keras.layers.Embedding(num_rows, 4)(ids))
    joined = keras.layers.Concatenate()([keras.layers.Dense(8, "relu")(numbers), rows])
    return keras.Model([numbers, ids], [keras.layers.Dense(1, name="a")(joined), keras.layers.Dense(1, name="b")(rows)])


@pytest.mark.parametrize(
    "optimizer", [lambda: OPTIMIZERS.SGD(0.05), lambda: OPTIMIZERS.Adam(0.01)], ids=["sgd", "adam"]
)
def test_an_embedding_and_two_outputs(strategy: Any, optimizer: Callable[[], Any]) -> None:
    """Batches of 12 examples: 3 for each worker, so that Keras' metrics of single outputs weigh all alike."""
    data = tf.data.Dataset.from_tensor_slices(((X[:192], IDS[:192]), (Y[:192], Y[:192]))).batch(12)
    assert_like_one_device(strategy, optimizer, embedding, data, metrics=[["mae"], ["mse"]])


def test_rows_of_an_embedding_are_gathered_where_the_table_is(strategy: Any) -> None:
    # A small table would travel whole, with the other small variables.
    model = compiled(strategy, lambda: embedding(num_rows=5000), metrics=[["mae"], ["mse"]])
    model.fit([X, IDS], [Y, Y], batch_size=BATCH, verbose=0)
    (step,) = vars(model.train_function)["_tfdist_traced"].values()
    operations = step._from_iterator.graph.get_operations()
    gathered = [
        op for op in operations if op.type == "GatherV2" and "embedding" in op.name and "gradient" not in op.name
    ]
    table = next(v for v in model.trainable_variables if "embedding" in v.path)
    assert gathered
    assert all(op.device == table.value.device for op in gathered)
    # What travels back is rows as well: indices and values, as many as were looked up.
    gradient = step._template.gradients[[v.path for v in step._step.variables()].index(table.path)]
    assert isinstance(gradient, tf.IndexedSlices)


class Own(keras.Model):
    """Its logs are metrics and another value."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.tracker = keras.metrics.Mean(name="tracked")

    def build(self, shape: Any) -> None:
        self.dense.build(shape)

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.tracker.update_state((self(x) - y) ** 2)
        return {"tracked": self.tracker.result(), "raw": loss}


def test_an_own_train_step(strategy: Any) -> None:
    """The second forward pass reads weights that are updated only later, so only what is not about it is compared."""
    data = (X[:192], Y[:192])
    model, history, logs = trained(strategy, "sgd", Own, data, metrics=None)
    alone, _, own = trained(tf.distribute.get_strategy(), "sgd", Own, data, metrics=None)
    for one, other in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert [batch["raw"] for batch in logs] == pytest.approx([batch["raw"] for batch in own], rel=1e-4)
    # A metric's log is that of the epoch so far: here the mean of what the same batches' losses were before the update.
    assert history["tracked"][0] == pytest.approx(np.mean([batch["raw"] for batch in logs[:12]]), rel=1e-4)


def dataset() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)


@pytest.mark.parametrize(
    ("data", "fit"),
    [
        (lambda: dataset().filter(lambda x, y: True), {}),
        (lambda: dataset().repeat(), {"steps_per_epoch": 5}),
        (
            lambda: dataset().map(
                lambda x, y: (tf.ensure_shape(tf.py_function(lambda x: x, [x], x.dtype), x.shape), y)
            ),
            {},
        ),
        (lambda: dataset().map(lambda x, y: (x, y, tf.ones_like(y))), {}),
        (lambda: ({"x": X[:160]}, Y[:160]), {"validation_split": 0.25}),
        (lambda: (X, Y), {"class_weight": None, "sample_weight": np.ones(COUNT)}),
    ],
    ids=["unknown-size", "endless", "from-python", "weighted", "dict", "weights"],
)
def test_data(strategy: Any, data: Any, fit: dict[str, Any]) -> None:
    def make() -> keras.Model:
        if "validation_split" not in fit:
            return layers()
        x = keras.Input((6,), name="x")
        return keras.Model({"x": x}, keras.layers.Dense(1)(x))

    assert_like_one_device(strategy, lambda: OPTIMIZERS.SGD(0.05), make, data, fit=fit)


def ragged() -> tf.data.Dataset:
    lengths = np.arange(COUNT) % 6 + 1
    rows = tf.RaggedTensor.from_row_lengths(X.ravel()[: lengths.sum()], lengths)
    return tf.data.Dataset.from_tensor_slices((rows, Y)).batch(BATCH)


def sparse() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(X * (X > 0.5)), Y)).batch(BATCH)


class SumOfRow(keras.layers.Layer):
    """Takes ragged and sparse rows."""

    def call(self, rows: Any) -> Any:
        is_sparse = isinstance(rows, tf.SparseTensor)
        total = tf.sparse.reduce_sum(rows, axis=1) if is_sparse else tf.reduce_sum(rows, axis=1)
        return tf.reshape(total, [-1, 1])


def of_rows(**kind: bool) -> Callable[[], keras.Model]:
    return lambda: keras.Sequential(
        [keras.Input((None,) if "ragged" in kind else (6,), **kind), SumOfRow(), keras.layers.Dense(1)]
    )


class Masked(keras.layers.Layer):
    """Multiplies only some of the rows by a large kernel."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(6, 8192), name="kernel")

    def call(self, rows: Any) -> Any:
        mask = rows[:, 0] > 0.5
        product = tf.matmul(tf.boolean_mask(rows, mask), self.kernel)
        return tf.scatter_nd(tf.where(mask), product, [tf.shape(rows, tf.int64)[0], 8192])


def masked() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), Masked(), keras.layers.Dense(1)])


def normalized() -> keras.Model:
    dense = keras.layers.SpectralNormalization(keras.layers.Dense(8))
    return keras.Sequential([keras.Input((6,)), dense, keras.layers.Dense(1)])


class Slices(Own):
    """Writes a part of a variable, and adds a derivative along the examples to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = self.add_weight(shape=(6, 2), initializer="ones", trainable=False, name="table")

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        self.table.value[1:3].assign(self.table.value[3:5] + 1.0)
        self.table.value[3:5].assign(self.table.value[1:3] * 0.5)
        with tf.GradientTape() as tape:
            with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as forward:
                outputs = self(x)
            loss = tf.reduce_mean((outputs - y) ** 2) + tf.reduce_mean(forward.jvp(outputs) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"raw": loss}


@pytest.mark.parametrize(
    ("make", "data"),
    [
        (of_rows(ragged=True), ragged),
        (of_rows(sparse=True), sparse),
        (masked, (X, Y)),
        (normalized, (X, Y)),
        (Slices, (X, Y)),
    ],
    ids=["ragged", "sparse", "mask", "spectral", "slices"],
)
def test_what_takes_more_than_a_dense_layer(strategy: Any, make: Callable[[], keras.Model], data: Any) -> None:
    assert_like_one_device(strategy, lambda: OPTIMIZERS.SGD(0.005), make, data, metrics=None)


def test_a_model_compiled_again_trains_with_its_new_optimizer(strategy: Any) -> None:
    model = compiled(strategy)
    model.fit(X, Y, batch_size=BATCH, verbose=0)
    weights = model.get_weights()
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(X, Y, batch_size=BATCH, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == STEPS
    for one, other in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_several_steps_per_execution(strategy: Any) -> None:
    model = compiled(strategy, steps_per_execution=4)
    alone = compiled(tf.distribute.get_strategy())
    for each in (model, alone):
        each.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 2 * STEPS
    for one, other in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_statistics_of_layers_are_those_of_all_workers(strategy: Any) -> None:
    def make() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.BatchNormalization(momentum=0.5),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(1),
            ]
        )

    model = compiled(strategy, make)
    model.fit(X[:16], Y[:16], batch_size=16, shuffle=False, verbose=0)
    parts = X[:16].reshape(4, 4, 6)
    np.testing.assert_allclose(model.layers[0].moving_mean.numpy(), 0.5 * parts.mean((0, 1)), atol=1e-5)
    variance = 0.5 + 0.5 * parts.var(1).mean(0)
    np.testing.assert_allclose(model.layers[0].moving_variance.numpy(), variance, atol=1e-5)


def test_evaluate_predict_and_single_batches(strategy: Any) -> None:
    model = compiled(strategy)
    model.fit(X, Y, batch_size=BATCH, epochs=2, validation_data=(X, Y), verbose=0)
    before = model.get_weights()
    predicted = model.predict(X, verbose=0)
    assert model.evaluate(X, Y, verbose=0)[0] == pytest.approx(np.mean((predicted - Y) ** 2), rel=1e-4)
    model.train_on_batch(X[:8], Y[:8])
    assert int(model.optimizer.iterations.numpy()) == 2 * STEPS + 1
    assert any((one != other).any() for one, other in zip(before, model.get_weights(), strict=True))


def weighted(batches: tf.data.Dataset) -> tf.data.Dataset:
    return batches.map(lambda x, y: (x, y, tf.ones([3])))


def generated() -> tf.data.Dataset:
    specs = tf.TensorSpec((6,)), tf.TensorSpec((1,))
    return tf.data.Dataset.from_generator(lambda: zip(X, Y, strict=True), output_signature=specs).batch(BATCH)


@pytest.mark.parametrize(
    "make",
    [lambda: weighted(dataset().shuffle(9)), lambda: weighted(generated())],
    ids=["read by workers", "from Python"],
)
def test_batch_of_unknown_different_sizes_is_refused_in_one_line(strategy: Any, make: Callable[[], Any]) -> None:
    model = compiled(strategy, layers, "sgd")
    before = model.get_weights()
    with pytest.raises(ValueError, match=r"16 in batch\[1\], 3 in batch\[2\]$") as raised:
        model.fit(make(), verbose=0)
    assert "\n" not in str(raised.value)
    tf.nest.map_structure(np.testing.assert_array_equal, model.get_weights(), before)
