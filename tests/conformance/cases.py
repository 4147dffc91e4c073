# SPDX-License-Identifier: Apache-2.0
"""Trainings under a strategy and on one device, by name: functions of a strategy that return numbers.

Each is given a directory as well, for what it writes: one for all workers, which is empty before.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import first_call_models
import guide_loops
import keras
import numpy as np
import own_models
import pytest
import tensorflow as tf
import training
from cutting_off import CutOff, CutOffError
from training import OPTIMIZERS, RANDOM, X, Y, batch_size

import tfdist
from tfdist.step import gradients

LAYERS = keras.layers
CASES: dict[str, Callable[[Any, pathlib.Path], Any]] = {}
BOTH = ["evaluate", "predict"]
# For what goes on from one epoch to the next.
TWO_EPOCHS = {"epochs": 2}


def _add(name: str, optimizer: Callable[[], Any], **options: Any) -> None:
    """Adds a training of one epoch, unless `fit` has more."""
    options["fit"] = {"epochs": 1, **options.get("fit", {})}
    CASES[name] = lambda strategy, directory: training.trained(strategy, optimizer, **dict(options))


def _case(name: str, *arguments: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds a function of a strategy and these arguments. Nothing starts TensorFlow's runtime before it is called."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        takes_directory = "directory" in inspect.signature(function).parameters
        CASES[name] = lambda strategy, directory: function(
            strategy, *([directory] if takes_directory else []), *arguments
        )
        return function

    return add


# Optimizers.

_add("global_clipnorm", lambda: OPTIMIZERS.SGD(0.1, global_clipnorm=0.01))
_add("decay, ema", lambda: OPTIMIZERS.AdamW(0.01, weight_decay=0.1, use_ema=True, clipvalue=0.01), fit=TWO_EPOCHS)
_add(
    "accumulation, clipnorm, ema",
    lambda: OPTIMIZERS.SGD(0.1, clipnorm=0.05, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=3),
    fit=TWO_EPOCHS,
)
_add("loss scale", lambda: OPTIMIZERS.LossScaleOptimizer(OPTIMIZERS.Adam(0.01, clipnorm=0.1)))
_add(
    "loss scale, accumulation",
    lambda: OPTIMIZERS.LossScaleOptimizer(OPTIMIZERS.SGD(0.1, gradient_accumulation_steps=2)),
    fit=TWO_EPOCHS,
)


# Gradient transforms.

TRANSFORMS = ("transforms, clip after the sum", "transforms, clip rows after the sum", "transforms, identity, rows")


@contextlib.contextmanager
def _with_transforms(strategy: Any, *transforms: Any) -> Iterator[bool]:
    """Gives a strategy other transforms for a while; yields False on one device, which has none."""
    distribution = getattr(strategy, "distribution", None)
    if distribution is None:
        yield False
        return
    before = distribution.transforms
    distribution.transforms = gradients.Transforms(tfdist.transforms.in_order(transforms), before.memory)
    try:
        yield True
    finally:
        distribution.transforms = before


def _clipped(strategy: Any, **options: Any) -> Any:
    """Clips the sum of gradients by a transform; on one device by Keras."""
    with _with_transforms(strategy, tfdist.transforms.clip_by_global_norm(0.01)) as is_clipped:
        clip = None if is_clipped else 0.01
        return training.trained(strategy, lambda: OPTIMIZERS.SGD(0.1, global_clipnorm=clip), **options)


@_case(TRANSFORMS[0])
def _clip_after_the_sum(strategy: Any) -> Any:
    return _clipped(strategy)


@_case(TRANSFORMS[1])
def _clip_rows_after_the_sum(strategy: Any) -> Any:
    return _clipped(strategy, **_rows, steps_per_execution=4)


@_case(TRANSFORMS[2])
def _identity(strategy: Any) -> Any:
    """Returns 1.0 if the weights are those of training without transforms, to the bit."""
    found = []
    for places in ((), tfdist.transforms.PLACES):
        with _with_transforms(strategy, *(tfdist.transforms.identity(each) for each in places)):
            found.append(training.trained(strategy, lambda: OPTIMIZERS.SGD(0.1), **_rows))
    without, with_identity = found
    same = [np.array_equal(*pair) for pair in zip(without[0], with_identity[0], strict=True)]
    return float(all(same)), with_identity


class _TwoOptimizers(keras.optimizers.Optimizer):
    """Hands kernels to one optimizer, and everything else to another."""

    def __init__(self, kernels: Any, others: Any) -> None:
        super().__init__(learning_rate=0.1)
        self.parts = {True: kernels, False: others}

    def build(self, variables: Any) -> None:
        super().build(variables)
        for is_kernel, part in self.parts.items():
            part.build([each for each in variables if ("kernel" in each.path) == is_kernel])

    def apply(self, grads: Any, trainable_variables: Any) -> None:
        if not self.built:
            self.build(trainable_variables)
        pairs = list(zip(grads, trainable_variables, strict=True))
        for is_kernel, part in self.parts.items():
            part.apply_gradients([pair for pair in pairs if ("kernel" in pair[1].path) == is_kernel])
        self.iterations.assign_add(1)


class _WeighedError(keras.losses.Loss):
    """Loss with a variable."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = keras.Variable(2.0, trainable=False)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self.weight * keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


@_case("compiled outside of the scope")
def _compiled_outside(strategy: Any) -> Any:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = training.dense_model()
    others = OPTIMIZERS.SGD(OPTIMIZERS.schedules.ExponentialDecay(0.1, 2, 0.9), momentum=0.9, clipvalue=0.01)
    model.compile(
        OPTIMIZERS.LossScaleOptimizer(_TwoOptimizers(OPTIMIZERS.Adam(0.01, clipnorm=0.05), others)),
        _WeighedError(),
        metrics=["mae", keras.metrics.RootMeanSquaredError()],
    )
    history = model.fit(X[:40], Y[:40], batch_size=batch_size(8), epochs=2, shuffle=False, verbose=0).history
    return [history, int(others.iterations), model.evaluate(X, Y, verbose=0), model.get_weights()]


# Ways to fit.

_sgd = functools.partial(_add, optimizer=lambda: OPTIMIZERS.SGD(0.1))
_sgd("steps_per_execution", steps_per_execution=4, calls=BOTH)
_sgd("run_eagerly", run_eagerly=True, calls=BOTH)
_sgd("sample_weight", fit={"sample_weight": np.linspace(0, 2, 45, dtype=np.float32)})
_few = {"data": (X[:9], Y[:9]), "fit": {"batch_size": 1}, "calls": BOTH}
_sgd("fewer examples than replicas", **_few)
_sgd("fewer examples than replicas, eagerly", run_eagerly=True, **_few)
for _name, _options in (("sum loss", {"calls": BOTH}), ("sum loss, eagerly", {"run_eagerly": True})):
    _add(_name, lambda: OPTIMIZERS.SGD(0.01), loss=keras.losses.MeanSquaredError(reduction="sum"), **_options)


@_case("unknown length", 1)
# The last two of six batches are an execution, too.
@_case("unknown length, steps_per_execution", 4)
def _unknown_length(strategy: Any, steps_per_execution: int) -> Any:
    model = training.compiled(strategy, optimizer=lambda: OPTIMIZERS.SGD(0.1), steps_per_execution=steps_per_execution)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch_size(8)).filter(lambda x, y: True)
    history = model.fit(data, epochs=2, verbose=0).history
    return history, model.get_weights(), model.evaluate(data, verbose=0)


@_case("no batches")
def _no_batches(strategy: Any) -> list[Any]:
    """Validation and evaluation of no batch have numbers of no example, and training goes on."""
    model = training.compiled(strategy, optimizer=lambda: OPTIMIZERS.SGD(0.1))
    data = tf.data.Dataset.from_tensor_slices((X[:16], Y[:16])).batch(batch_size(8))
    found = []
    for nothing in (data.take(0), data.filter(lambda x, y: False)):
        found.append(model.fit(data, epochs=2, verbose=0, validation_data=nothing).history)
        found.append(model.evaluate(nothing, verbose=0, return_dict=True))
    return [*found, model.get_weights()]


# Models and data.


_add(
    "class weights, validation_split, steps_per_epoch",
    lambda: OPTIMIZERS.SGD(0.1),
    model=lambda: keras.Sequential([keras.Input((3,)), LAYERS.Dense(1, "sigmoid")]),
    data=(X, RANDOM.integers(0, 2, (45,))),
    loss="binary_crossentropy",
    metrics=["accuracy", "auc"],
    fit={"class_weight": {0: 1.0, 1: 3.0}, "validation_split": 0.2, "steps_per_epoch": 2},
)


def _embedding() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), LAYERS.Embedding(5, 3), LAYERS.Flatten(), LAYERS.Dense(1)])


_rows = {"model": _embedding, "data": (RANDOM.integers(0, 5, (45, 4)), Y)}
# Within one execution of several steps, the last batch has fewer rows than those before.
_add("embedding, clipnorm", lambda: OPTIMIZERS.Adam(0.01, clipnorm=0.1), steps_per_execution=4, **_rows)


@_case("embedding, places")
def _places(strategy: Any) -> Any:
    """Adam squares each row of a gradient, before it adds up those of equal number."""
    ids = keras.Input((4,), dtype="int32")
    model = lambda: keras.Model(ids, LAYERS.Dense(1)(LAYERS.Flatten()(own_models.Places()(ids))))  # noqa: E731
    data = _rows["data"]
    return training.trained(strategy, lambda: OPTIMIZERS.Adam(0.01, clipvalue=0.01), model, data=data)


@_case("sparse inputs, clipvalue")
def _sparse_inputs(strategy: Any) -> Any:
    """Keras looks up each column that an example has once for all examples; clipping is after the sum of its rows."""
    layers = lambda: keras.Sequential([keras.Input((3,), sparse=True), LAYERS.Dense(4), LAYERS.Dense(1)])  # noqa: E731
    model = training.compiled(strategy, layers, lambda: OPTIMIZERS.Adam(0.01, clipvalue=0.01), metrics=None)
    rows = tf.sparse.from_dense(np.where(X > 0.5, X, 0))
    data = tf.data.Dataset.from_tensor_slices((rows, Y)).batch(batch_size(8))
    return model.fit(data, epochs=2, verbose=0).history, model.get_weights()


@_case("single batches")
def _single_batches(strategy: Any) -> Any:
    """A batch that every replica has counts once, in rows of tables, sums and counts."""
    ids, targets = _rows["data"][0][:8], Y[:8] > 0.5
    found = []
    for loss in ("mse", keras.losses.MeanSquaredError(reduction="sum")):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = _embedding()
            model.compile(OPTIMIZERS.Adam(0.01), loss, metrics=[own_models.Total()])
        found += [model.train_on_batch(ids, targets) for _ in range(2)]
        model.reset_metrics()
        found += [model.test_on_batch(ids[:5], targets[:5]), model.get_weights()]
    return found


_TWO_ENDS = (
    {"first": X, "second": RANDOM.random((45, 2), np.float32)},
    {"sum": Y, "kind": RANDOM.integers(0, 4, (45,))},
)
_sgd(
    "dicts",
    model=training.two_ends,
    data=_TWO_ENDS,
    loss={"sum": "mse", "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
    metrics={"sum": ["mae"], "kind": ["accuracy"]},
    calls=BOTH,
)


def _recurrent() -> keras.Model:
    return keras.Sequential([keras.Input((3,)), LAYERS.Reshape((3, 1)), LAYERS.LSTM(2), LAYERS.Dense(1)])


_add(
    "recurrent, built from one example",
    lambda: OPTIMIZERS.SGD(0.1),
    model=_recurrent,
    data=(X[:5], Y[:5]),
    fit={"batch_size": 1},
)


def _masked() -> keras.Model:
    return keras.Sequential([keras.Input((3,)), own_models.Masked(), LAYERS.Dense(1)])


_add("mask", lambda: OPTIMIZERS.SGD(0.005), model=_masked, metrics=None)

# The last batch of 4 has one example, for two replicas.
SEQUENCES = RANDOM.random((9, 5, 2), np.float32)


@_case("NaN of zeros, sum loss")
def _sequences(strategy: Any) -> list[Any]:
    keras.utils.set_random_seed(3)
    layers = [own_models.Direction(), LAYERS.Conv1D(3, 2), LAYERS.Flatten(), LAYERS.Dense(1)]
    with strategy.scope():
        model = keras.Sequential([keras.Input((5, 2)), *layers])
        model.compile("adam", keras.losses.MeanSquaredError("sum"), metrics=["mae"])
    x, y = SEQUENCES, Y[:9]
    fit = model.fit(x, y, batch_size=batch_size(4), epochs=2, shuffle=False, verbose=0, validation_data=(x[:5], y[:5]))
    return [fit.history, model.evaluate(x[:1], y[:1], verbose=0), model.predict(x[:1], verbose=0), model.get_weights()]


LENGTHS = [3, 1, 5, 2, 4, 1, 2, 5, 3]
RAGGED = [RANDOM.random(length).tolist() for length in LENGTHS]


@_case("ragged", "ragged")
@_case("sparse", "sparse")
def _not_dense(strategy: Any, kind: str) -> Any:
    ragged = tf.ragged.constant(RAGGED, tf.float32)
    rows = ragged if kind == "ragged" else ragged.to_sparse()
    with strategy.scope():
        model = own_models.Rows()
        model.compile(OPTIMIZERS.SGD(0.1), "mse", metrics=["mae"])
    data = tf.data.Dataset.from_tensor_slices((rows, Y[:9]))
    # Parts of ragged batches of a known size have known sizes, that differ.
    batches = data.batch(batch_size(4)), data.batch(9, drop_remainder=True)
    return [model.fit(each, epochs=2, verbose=0).history for each in batches], model.get_weights()


_ragged = lambda p: tf.RaggedTensor.from_row_lengths(p[:, 0], tf.ones_like(p[:, 0], tf.int32))  # noqa: E731


@_case("predictions of other dtypes")
def _predictions(strategy: Any) -> list[Any]:
    """Dtypes that TensorFlow's collectives do not take, strings of several lengths, and ragged tensors."""
    kinds: dict[str, Callable[[Any], Any]] = {
        **{kind: functools.partial(tf.cast, dtype=kind) for kind in ("bool", "bfloat16", "complex128")},
        "uint64": lambda p: tf.cast(p * 1e6, "uint64") * (1 << 40),
        "strings": lambda p: tf.strings.as_string(tf.cast(p**4, tf.int32)),
        "ragged strings": lambda p: tf.strings.as_string(_ragged(p)),
    }

    class Converting(keras.Model):
        def call(self, x):
            return 30 * x

        def predict_step(self, data):
            return {kind: convert(self(data)) for kind, convert in kinds.items()}

    with strategy.scope():
        model = Converting()
        model.compile()
    found = model.predict(X[:9], batch_size=batch_size(4), verbose=0)
    found = {kind: each.to_tensor() if kind.startswith("ragged") else each for kind, each in found.items()}
    assert [str(found[kind].dtype) for kind in kinds][:4] == [*kinds][:4]
    numbers = {kind: np.asarray(each) for kind, each in found.items()}
    return [np.abs(each.astype("complex128" if kind == "complex128" else "float64")) for kind, each in numbers.items()]


@_case("interrupted and resumed")
def _resumed(strategy: Any, directory: pathlib.Path) -> Any:
    """Numbers of the epochs after the interruption, which is between two checkpoints within an epoch."""
    for cut_off in ([CutOff(2 if training.SETTINGS.in_one_batch else 9)], []):
        model = training.compiled(strategy, optimizer=lambda: OPTIMIZERS.SGD(0.1, momentum=0.9))
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch_size(8))
        resume = tfdist.callbacks.Resume(directory, 1 if training.SETTINGS.in_one_batch else 4)
        with pytest.raises(CutOffError) if cut_off else contextlib.nullcontext():
            history = model.fit(data, epochs=3, verbose=0, callbacks=[resume, *cut_off]).history
    return history, resume.step, int(model.optimizer.iterations.numpy()), model.get_weights()


@_case("restored with its optimizer before it is built")
def _restored_with_optimizer(strategy: Any, directory: pathlib.Path) -> list[Any]:
    def made() -> keras.Model:
        with strategy.scope():
            model = own_models.Called()
            model.compile(OPTIMIZERS.Adam(0.01), "mse")
        return model

    def fitted(model: keras.Model) -> list[Any]:
        history = model.fit(X, Y, batch_size=batch_size(8), shuffle=False, verbose=0).history
        return [history, model.get_weights(), *(each.numpy() for each in model.optimizer.variables)]

    keras.utils.set_random_seed(3)
    first, second = made(), made()
    found = fitted(first)
    path = tf.train.Checkpoint(model=first, optimizer=first.optimizer).save(directory / "checkpoint")
    if strategy is tf.distribute.get_strategy():
        # Keras restores into one kernel here, and trains another one, if the train step makes the weights.
        second(X[:1])
    restored = tf.train.Checkpoint(model=second, optimizer=second.optimizer).restore(path)
    found += fitted(second)
    restored.assert_consumed()
    return found


# Steps of their own.

_own = functools.partial(_sgd, metrics=None)
SIZES = {"one over": 8, "fewer examples than replicas": 1}
for _words, _size in SIZES.items():
    _fit = {"batch_size": _size}
    _own(f"step mean_by_hand, {_words}", model=own_models.stepping(own_models.mean_by_hand), fit=_fit)
for _step in (own_models.of_keras, own_models.of_both, own_models.average_by_tensorflow, own_models.tracked):
    # TensorFlow divides by the size of the batch that a replica has, times their number.
    _count = 40 if _step is own_models.average_by_tensorflow else 45
    _own(f"step {_step.__name__}", model=own_models.stepping(_step), data=(X[:_count], Y[:_count]))
_own("step sum_by_batch", model=own_models.stepping(own_models.sum_by_batch))
_own("step tracked by other names", model=own_models.Named)
_own("step with optimizers in a list", model=own_models.Listed)
_own("step decorated", model=own_models.Decorated, calls=["evaluate"])
_own("step with slices", model=own_models.Slices)
_own("step that assigns", model=own_models.stepping(own_models.by_hand))
_own("functions around those of Keras", model=own_models.FunctionsAroundKeras, calls=BOTH)
_own("own functions", model=own_models.OwnFunctions, calls=BOTH)
_own("own functions, step decorated", model=own_models.DecoratedInOwnFunctions, calls=["evaluate"])
_add("own compute_loss", lambda: OPTIMIZERS.Adam(0.01), model=own_models.OwnLoss, calls=["evaluate"])


@_case("metric that shows its variable")
def _shown(strategy: Any) -> list[Any]:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = training.dense_model()
        model.compile(OPTIMIZERS.SGD(0.1), "mse", metrics=[own_models.Total()])
    fit = {"batch_size": batch_size(8), "epochs": 2, "shuffle": False, "verbose": 0}
    return [model.fit(X, Y, **fit).history, model.evaluate(X, Y, batch_size=8, verbose=0)]


class _Reversed(keras.utils.PyDataset):
    """Data set whose batches are in reversed order in every other epoch."""

    def __init__(self) -> None:
        super().__init__(workers=2)
        self.starts = list(range(0, 40, 8))

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Any:
        start = self.starts[index]
        return X[start : start + 8], Y[start : start + 8]

    def on_epoch_end(self) -> None:
        self.starts.reverse()


for _words, _fit in (("one over", {}), ("fewer examples than replicas", {"batch_size": 1, "epochs": 1})):

    @_case(f"metrics of one number, {_words}", _fit)
    def _metrics_of_one_number(strategy: Any, fit: dict[str, int]) -> Any:
        """A number counts by the replica's share of the batch, wherever a mean gets it."""
        metrics = [own_models.one_number, own_models.MeanOfBatch(name="of_batch"), own_models.AroundMean()]
        return training.trained(
            strategy, lambda: OPTIMIZERS.SGD(0.1), metrics=metrics, calls=["evaluate"], data=(X[:17], Y[:17]), fit=fit
        )


@_case("order of the data")
def _order(strategy: Any) -> list[Any]:
    """Nothing is read before the first step: each iterator of a shuffle has another order."""
    keras.utils.set_random_seed(3)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(45, seed=3).batch(batch_size(8))
    found = []
    for given in (data.map(lambda x, y: (tf.ensure_shape(x, [None, None]), y)), _Reversed()):
        model = training.compiled(strategy, optimizer=lambda: OPTIMIZERS.SGD(0.5))
        found += [model.fit(given, epochs=2, verbose=0).history, model.get_weights()]
    return found


@_case("order of the data and of a part for validation")
def _orders(strategy: Any) -> list[Any]:
    """Each iterator of a shuffle draws an order; Keras makes one between epochs that it never reads.

    A second `fit` goes on with the orders.
    """
    keras.utils.set_random_seed(3)
    data, validation = (
        tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(45, seed=seed).batch(batch_size(8)) for seed in (3, 4)
    )
    model = training.compiled(strategy, optimizer=lambda: OPTIMIZERS.SGD(0.5))
    part = validation.take(2)
    fits = [model.fit(data, epochs=count, verbose=0, validation_data=part).history for count in (3, 2)]
    return [fits, model.get_weights()]


class _Halves(keras.Model):
    """Model for batches with twice as many examples without a target as with a target."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = LAYERS.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        unlabelled, (x, y) = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.dense(x) - y) ** 2) + tf.reduce_mean(self.dense(unlabelled) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.dense.trainable_variables), self.dense.trainable_variables)
        return {"loss": loss}


@_case("parts of two sizes")
def _two_sizes(strategy: Any) -> list[Any]:
    labelled = tf.data.Dataset.from_tensor_slices((X[:20], Y[:20])).batch(4)
    unlabelled = tf.data.Dataset.from_tensor_slices(X[:40]).batch(8)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = _Halves()
        model.build((None, 3))
        model.compile(OPTIMIZERS.SGD(0.1))
    history = model.fit(tf.data.Dataset.zip((unlabelled, labelled)), epochs=2, verbose=0).history
    return [history["loss"], model.get_weights()]


# Losses of users' code, and penalties.

_LOSSES = {
    "one number, one over": (own_models.one_number, 8),
    "one number, fewer examples than replicas": (own_models.one_number, 1),
    "one per example": (own_models.one_per_example, 8),
    "one number of a class": (own_models.OneNumber(), 8),
    "sum by its own call": (own_models.SumByCall(), 8),
}
for _name, (_loss, _size) in _LOSSES.items():
    _sgd(f"loss {_name}", loss=_loss, fit={"batch_size": _size}, calls=["evaluate"])


@_case("loss beside one of Keras")
def _two_losses(strategy: Any) -> list[Any]:
    data = tf.data.Dataset.from_tensor_slices((X, (Y, 2 * Y))).batch(batch_size(8))
    keras.utils.set_random_seed(0)
    with strategy.scope():
        inputs = keras.Input((3,))
        model = keras.Model(inputs, [LAYERS.Dense(1, name="one")(inputs), LAYERS.Dense(1, name="other")(inputs)])
        model.compile(OPTIMIZERS.SGD(0.1), [own_models.one_number, "mae"], loss_weights=[1.0, 0.5])
    history = model.fit(data, epochs=2, verbose=0).history
    return [history, model.get_weights(), model.evaluate(data, verbose=0)]


def _penalized() -> keras.Model:
    first = LAYERS.Dense(8, activity_regularizer="l2", kernel_regularizer="l1", kernel_constraint="non_neg")
    return keras.Sequential([keras.Input((3,)), first, own_models.Penalty(), LAYERS.Dense(1)])


# 45 examples leave an uneven batch, 41 one example.
for _reduction, _count in (("sum", 45), ("sum_over_batch_size", 41)):
    _add(
        f"penalties, {_reduction}",
        lambda: OPTIMIZERS.SGD(0.01),
        model=_penalized,
        loss=keras.losses.MeanSquaredError(reduction=_reduction),
        data=(X[:_count], Y[:_count]),
        calls=["evaluate"],
    )


@_case("losses of layers alone")
def _added_losses(strategy: Any) -> list[Any]:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        x, targets = keras.Input((3,), name="x"), keras.Input((1,), name="targets")
        model = keras.Model([x, targets], own_models.Endpoint()(LAYERS.Dense(1)(x), targets))
        model.compile(OPTIMIZERS.Adam(0.01))
    data = {"x": X[:40], "targets": Y[:40]}
    history = model.fit(data, batch_size=batch_size(8), epochs=2, shuffle=False, verbose=0).history
    return [history, model.evaluate(data, batch_size=8, verbose=0), model.get_weights()]


# Variables that a step makes when it is called for the first time.

_first = {
    "step without call": (first_call_models.fitted, first_call_models.Pair),
    "optimizer of its own": (first_call_models.fitted, first_call_models.Compiled),
    "seed generator": (first_call_models.fitted, first_call_models.Noisy, "mse"),
    "layer with Trainer": (first_call_models.fitted, first_call_models.Mixed, "mse", 9),
    "seeds from outside": (first_call_models.fitted_with_seeds_from_outside,),
    "without a seed": (first_call_models.fitted_without_seeds, False),
    "without a seed, drawn before": (first_call_models.fitted_without_seeds, True),
    "loop": (first_call_models.looped,),
}
for _words, (_function, *_arguments) in _first.items():
    _case(f"first call, {_words}", *_arguments)(_function)
_case("first call, no run", True)(lambda *given: first_call_models.looped_without_run(*given)[0])
_case("no run, optimizer alone")(first_call_models.updated)
# (in scope, in a graph, scaled)
for _words, _plain in {"in scope, graph, loss scale": (True, True, True), "out of it, eager": (False, False)}.items():
    _case(f"no run, {_words}", *_plain)(first_call_models.plainly_looped)

# Loops as guides write them.

LOOPS = frozenset(f"loop, {name}" for name in guide_loops.NAMES)
for _name in guide_loops.NAMES:
    CASES[f"loop, {_name}"] = functools.partial(guide_loops.run, _name)

# Loops, and variables that a first call makes.
IN_LOOPS = LOOPS | {name for name in CASES if name.startswith(("first call", "no run"))}
# Loops that update outside of `strategy.run`, which several workers refuse.
OUTSIDE_OF_RUN = {name for name in CASES if "no run" in name} | {"loop, gradients_clipped_after_their_sum"}
# What happens to data, gradients and results on their way, for suites that repeat another's steps: cases, and tests.
TRANSPORT = {
    *("accumulation, clipnorm, ema", "embedding, places", "transforms, clip rows after the sum"),
    *("run_eagerly", "steps_per_execution", "unknown length, steps_per_execution", "no batches", "single batches"),
    *("fewer examples than replicas", "metrics of one number, fewer examples than replicas", "parts of two sizes"),
    *("class weights, validation_split, steps_per_epoch", "order of the data", "dicts", "ragged", "sparse"),
    *("predictions of other dtypes", "interrupted and resumed", "step average_by_tensorflow", "sum loss, eagerly"),
    "test_callbacks_stop_schedule_save_and_restore",
    "test_error_of_an_operation_is_raised_and_the_next_fit_is_clean",
    "test_error_of_the_data_is_raised",
    "test_evaluate_and_predict_see_every_example_once",
    "test_every_batch_of_a_generator_is_used_once",
    "test_replicas_without_examples_leave_no_trace",
}
# In no suite of `make test`: each is as another that is, but for a detail. `test_cases.py` holds the list.
SLOW = {
    # `TestBackupWorkers` and `TestSpanningDevices` clip a sum and scale losses in a case of more.
    *("global_clipnorm", "loss scale", "loss scale, accumulation"),
    # "accumulation, clipnorm, ema" averages weights, and files of other rooms have sums, executions, and going on.
    *("decay, ema", "sum loss", "steps_per_execution", "interrupted and resumed"),
    *("compiled outside of the scope", "restored with its optimizer before it is built"),
    # "class weights" weighs examples, and data of unknown length come in executions of several steps.
    *("sample_weight", "unknown length"),
    # Others have parts without examples, and layers in loops.
    *("NaN of zeros, sum loss", "recurrent, built from one example", "fewer examples than replicas, eagerly"),
    # Steps and losses of users' code, of which one of each kind is enough.
    *("step of_keras", "step of_both", "step tracked", "step decorated", "step that assigns"),
    "functions around those of Keras",
    *("own functions", "own functions, step decorated", "metrics of one number, one over", "step sum_by_batch"),
    *("step mean_by_hand, one over", "step mean_by_hand, fewer examples than replicas", "step tracked by other names"),
    *("own compute_loss", "loss one number of a class", "loss beside one of Keras", "losses of layers alone"),
    *("loss one per example", "penalties, sum", "penalties, sum_over_batch_size", "loss one number, one over", "mask"),
    # First calls and loops, by the same ways to a batch and to an optimizer as others.
    *("first call, optimizer of its own", "first call, layer with Trainer", "first call, without a seed, drawn before"),
    *("first call, no run", "no run, out of it, eager", "first call, seed generator", "first call, without a seed"),
    "first call, seeds from outside",
    *(
        f"loop, {name}"
        for name in (
            *("batches_given_by_name", "seed_generators_made_outside_of_the_scope", "weights_set_within_the_loop"),
            *("train_step_of_keras_given_to_run", "saved_models"),
            *("data_set_as_an_argument", "two_optimizers_and_a_persistent_tape", "checkpoints"),
            *("train_function_of_keras", "gradients_clipped_after_their_sum", "models_saved_and_exported"),
            "reduced_within_a_replica",
        )
    ),
}
