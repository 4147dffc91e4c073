# SPDX-License-Identifier: Apache-2.0
"""Custom loops of every kind that guides write, as functions of a strategy that return numbers.

Each divides the losses of a replica by the global batch, so its numbers under a synchronous strategy
are those of one device. The last batch has another size than the others.
"""

from __future__ import annotations

import os
import pathlib
import types
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

COUNT, BATCH = 27, 8
X = np.random.default_rng(0).random((COUNT, 3), np.float32)
Y = np.random.default_rng(1).random((COUNT, 1), np.float32)
LOOPS: dict[str, Callable[[Any], Any]] = {}
# Those that write files into a directory.
SAVING: dict[str, Callable[[Any, pathlib.Path], Any]] = {}


def loop(function: Any) -> Any:
    """Adds a loop to those that are run."""
    (SAVING if "directory" in function.__code__.co_varnames[: function.__code__.co_argcount] else LOOPS)[
        function.__name__
    ] = function
    return function


def distributed(strategy: Any, count: int = COUNT) -> Any:
    return strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices((X[:count], Y[:count])).batch(BATCH)
    )


class Net:
    """A model, its optimizer and its losses under a strategy."""

    def __init__(
        self, strategy: Any, optimizer: Callable[[], Any] = lambda: keras.optimizers.SGD(0.1), is_deep: bool = False
    ) -> None:
        keras.utils.set_random_seed(3)
        self.strategy = strategy
        with strategy.scope():
            hidden = [keras.layers.Dense(4, "tanh")] if is_deep else []
            self.model = keras.Sequential([keras.Input((3,)), *hidden, keras.layers.Dense(1, "tanh")])
            self.optimizer = optimizer()
            self.squares = keras.losses.MeanSquaredError(reduction=None)

    def loss(self, x: Any, y: Any) -> Any:
        return tf.nn.compute_average_loss(self.squares(y, self.model(x, training=True)), global_batch_size=BATCH)

    def step(self, batch: Any) -> Any:
        return self.unpacked(*batch)

    def unpacked(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.loss(x, y)
        weights = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    def run(self, batch: Any) -> Any:
        return self.total(self.strategy.run(self.step, args=(batch,)))

    def total(self, value: Any) -> Any:
        return self.strategy.reduce(tf.distribute.ReduceOp.SUM, value, axis=None)

    def result(self, losses: Any) -> list[Any]:
        return [np.asarray(losses, np.float32), int(self.optimizer.iterations), *self.model.get_weights()]


# Over a data set.


@loop
def for_outside_of_a_graph(strategy):
    net = Net(strategy)
    return net.result([float(net.run(batch)) for batch in distributed(strategy)])


@loop
def for_outside_of_a_traced_step(strategy):
    net = Net(strategy)
    step, data = tf.function(net.run), distributed(strategy)
    return net.result([float(step(batch)) for _ in range(2) for batch in data])


@loop
def data_set_as_an_argument(strategy):
    net = Net(strategy)

    @tf.function
    def epoch(data):
        found, count = 0.0, 0
        for batch in data:
            found += net.run(batch)
            count += 1
        return found / tf.cast(count, tf.float32)

    data = distributed(strategy)
    return net.result([float(epoch(data)) for _ in range(2)])


@loop
def captured_data_set(strategy):
    net, data = Net(strategy), distributed(strategy)

    @tf.function
    def epoch():
        found = 0.0
        for batch in data:
            found += net.run(batch)
        return found

    return net.result(float(epoch()))


@loop
def enumerated_data_set(strategy):
    net = Net(strategy)
    return net.result([index * float(net.run(batch)) for index, batch in enumerate(distributed(strategy))])


@loop
def batches_unpacked_by_the_caller(strategy):
    net = Net(strategy)

    @tf.function
    def step(x, y):
        return net.total(strategy.run(net.unpacked, args=(x, y)))

    outside = [float(net.total(strategy.run(net.unpacked, args=(x, y)))) for x, y in distributed(strategy)]
    return net.result(outside + [float(step(x, y)) for x, y in distributed(strategy)])


@loop
def batches_given_by_name(strategy):
    net = Net(strategy)

    @tf.function
    def step(x, y):
        return net.total(strategy.run(net.unpacked, kwargs={"y": y, "x": x}))

    return net.result([float(step(x, y)) for x, y in distributed(strategy)])


@loop
def signature_of_the_data_set(strategy):
    net, data = Net(strategy), distributed(strategy)

    @tf.function(input_signature=[data.element_spec])
    def step(batch):
        return net.run(batch)

    return net.result([float(step(batch)) for batch in data])


# Over an iterator.


@loop
def iterator_as_an_argument(strategy):
    net = Net(strategy)

    @tf.function
    def some(iterator, steps):
        found = 0.0
        for _ in tf.range(steps):
            found += net.run(next(iterator))
        return found

    iterator = iter(distributed(strategy))
    return net.result([float(some(iterator, tf.constant(steps))) for steps in (1, 2, 1)])


@loop
def next_until_the_end(strategy):
    net, iterator, losses = Net(strategy), iter(distributed(strategy)), []
    try:
        while True:
            losses.append(float(net.run(next(iterator))))
    except (StopIteration, tf.errors.OutOfRangeError):
        return net.result(losses)


@loop
def optional_outside_of_a_graph(strategy):
    net, iterator, losses = Net(strategy), iter(distributed(strategy)), []
    while (some := iterator.get_next_as_optional()).has_value():
        losses.append(float(net.run(some.get_value())))
    return net.result(losses)


@loop
def optional_in_a_graph(strategy):
    net = Net(strategy)

    @tf.function
    def until_the_end(iterator):
        found = 0.0
        for _ in tf.range(100):
            some = iterator.get_next_as_optional()
            if not some.has_value():
                break
            found += net.run(some.get_value())
        return found

    return net.result(float(until_the_end(iter(distributed(strategy)))))


@loop
def iterator_made_in_a_graph(strategy):
    net, data = Net(strategy), distributed(strategy)

    @tf.function
    def epoch():
        found, iterator = 0.0, iter(data)
        for _ in tf.range(3):
            found += net.run(next(iterator))
        for batch in iterator:
            found += net.run(batch)
        return found

    return net.result(float(epoch()))


@loop
def one_batch_again_and_again(strategy):
    net, batch = Net(strategy), next(iter(distributed(strategy)))

    @tf.function
    def some(batch):
        found = 0.0
        for _ in tf.range(3):
            found += net.run(batch)
        return found

    return net.result(float(some(batch)))


@loop
def loop_within_a_replica(strategy):
    net = Net(strategy)

    def steps(batch):
        found = 0.0
        for _ in range(2):
            found += net.step(batch)
        return found

    @tf.function
    def once(batch):
        return net.total(strategy.run(steps, args=(batch,)))

    return net.result([float(once(batch)) for batch in distributed(strategy)])


# What replicas return.


@loop
def results_of_replicas(strategy):
    net = Net(strategy)

    @tf.function
    def predict(batch):
        return strategy.run(lambda batch: net.model(batch[0]), args=(batch,))

    found = []
    for batch in distributed(strategy, 16):
        predictions = predict(batch)
        found += [
            np.sort(strategy.gather(predictions, axis=0).numpy(), 0),
            float(strategy.reduce("MEAN", predictions, axis=0)[0]),
            float(tf.reduce_sum(strategy.reduce("SUM", predictions, axis=0))),
            sum(len(each.shape) for each in strategy.experimental_local_results(predictions))
            / len(strategy.experimental_local_results(predictions)),
        ]
    return found


@loop
def reduced_within_a_replica(strategy):
    net = Net(strategy)

    def step(batch):
        context = tf.distribute.get_replica_context()
        return context.all_reduce("SUM", net.step(batch))

    @tf.function
    def once(batch):
        return strategy.run(step, args=(batch,))

    losses = [strategy.experimental_local_results(once(batch))[0] for batch in distributed(strategy)]
    return net.result([float(loss) for loss in losses])


@loop
def structures_of_results(strategy):
    net = Net(strategy)

    @tf.function
    def once(batch):
        losses = strategy.run(lambda batch: {"loss": net.step(batch), "count": [len(batch)]}, args=(batch,))
        return strategy.reduce("SUM", losses["loss"], axis=None), strategy.reduce("MEAN", losses["count"], axis=None)

    found = [once(batch) for batch in distributed(strategy)]
    return net.result([[float(loss), float(count[0])] for loss, count in found])


@loop
def data_sets_from_a_function(strategy):
    net = Net(strategy)

    def make(context):
        size = context.get_per_replica_batch_size(BATCH)
        data = tf.data.Dataset.from_tensor_slices((X[:24], Y[:24])).batch(size)
        return data.shard(context.num_input_pipelines, context.input_pipeline_id)

    step, losses = tf.function(net.run), []
    for batch in strategy.distribute_datasets_from_function(make):
        losses.append(float(step(batch)))
    return [len(losses), *net.result(losses)]


@loop
def values_from_a_function(strategy):
    values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(1.0 / context.num_replicas_in_sync)
    )
    return float(strategy.reduce("SUM", strategy.run(lambda value: 2 * value, args=(values,)), axis=None))


# Optimizers and gradients.


@loop
def two_optimizers_and_a_persistent_tape(strategy):
    net = Net(strategy, is_deep=True)
    with strategy.scope():
        other = keras.optimizers.Adam(0.01)

    def step(batch):
        x, y = batch
        first, second = net.model.layers[0].trainable_variables, net.model.layers[1].trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            loss = net.loss(x, y)
        net.optimizer.apply(tape.gradient(loss, first), first)
        other.apply_gradients(zip(tape.gradient(loss, second), second, strict=True))
        del tape
        return loss

    once = tf.function(lambda batch: net.total(strategy.run(step, args=(batch,))))
    return [*net.result([float(once(batch)) for batch in distributed(strategy)]), int(other.iterations)]


@loop
def gradient_penalty(strategy):
    net = Net(strategy, is_deep=True)

    def step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                score = net.model(x, training=True)
            slopes = tf.sqrt(tf.reduce_sum(inner.gradient(score, x) ** 2, axis=1) + 1e-6)
            loss = tf.nn.compute_average_loss((slopes - 1.0) ** 2, global_batch_size=BATCH) + net.loss(x, y)
        weights = net.model.trainable_variables
        net.optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    once = tf.function(lambda batch: net.total(strategy.run(step, args=(batch,))))
    return net.result([float(once(batch)) for batch in distributed(strategy)])


@loop
def loss_scaling(strategy):
    net = Net(strategy, lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 2.0**127, 3))

    def step(batch):
        with tf.GradientTape() as tape:
            loss = net.loss(*batch)
            scaled = net.optimizer.scale_loss(loss) * 8
        weights = net.model.trainable_variables
        gradients = [gradient / 8 for gradient in tape.gradient(scaled, weights)]
        net.optimizer.apply(gradients, weights)
        return loss

    once = tf.function(lambda batch: net.total(strategy.run(step, args=(batch,))))
    losses = [float(once(batch)) for _ in range(3) for batch in distributed(strategy)]
    return [*net.result(losses), np.log2(float(net.optimizer.dynamic_scale))]


@loop
def seed_generators_made_outside_of_the_scope(strategy):
    seeds, noise = keras.random.SeedGenerator(5), keras.layers.GaussianNoise(0.0, seed=7)
    held = types.SimpleNamespace(seeds=keras.random.SeedGenerator(6))
    net = Net(strategy)

    def step(batch):
        x, y = batch
        drawn = [keras.random.uniform((3,), seed=seeds), keras.random.uniform((3,), seed=held.seeds)]
        return net.unpacked(noise(x, training=True) * drawn[0] + drawn[1], y)

    once = tf.function(lambda batch: net.total(strategy.run(step, args=(batch,))))
    losses = [float(once(batch)) for batch in distributed(strategy)]
    losses += [float(net.total(strategy.run(step, args=(batch,)))) for batch in distributed(strategy, 8)]
    # They serve outside, too.
    drawn = keras.random.uniform((3,), seed=seeds)
    return [*net.result(losses), drawn.numpy(), seeds.state.numpy(), held.seeds.state.numpy()]


@loop
def optimizers_made_outside_of_the_scope(strategy):
    net, losses = Net(strategy), []
    for in_graph in (True, False):
        # The rate depends on how often replicas count.
        rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
        inner = keras.optimizers.Adam(rate)
        net.optimizer = keras.optimizers.LossScaleOptimizer(inner, 8.0) if in_graph else inner
        step = tf.function(net.run) if in_graph else net.run
        losses += [float(step(batch)) for batch in distributed(strategy, 16 if in_graph else 8)]
        losses += [int(inner.iterations), *(float(tf.reduce_sum(v)) for v in inner.variables)]
    return net.result(losses)


@loop
def weights_set_within_the_loop(strategy):
    net = Net(strategy)
    step = tf.function(net.run)
    losses = []
    for batch in distributed(strategy):
        before = net.model.get_weights()
        losses += [float(step(batch)) for _ in range(2)]
        moved = net.model.get_weights()
        net.model.set_weights([old + 0.5 * (new - old) for old, new in zip(before, moved, strict=True)])
    return net.result(losses)


@loop
def gradients_clipped_after_their_sum(strategy):
    """Replicas return gradients, and the update is made outside of `run`."""
    net = Net(strategy)
    weights = net.model.trainable_variables

    def gradients(batch):
        with tf.GradientTape() as tape:
            loss = net.loss(*batch)
        return tape.gradient(loss, weights)

    @tf.function
    def once(batch):
        summed = [net.total(each) for each in strategy.run(gradients, args=(batch,))]
        clipped, norm = tf.clip_by_global_norm(summed, 0.3)
        net.optimizer.apply(clipped, weights)
        return norm

    norms = [float(once(batch)) for batch in distributed(strategy)]
    for batch in distributed(strategy):
        summed = [net.total(each) for each in strategy.run(gradients, args=(batch,))]
        net.optimizer.apply_gradients(zip(summed, weights, strict=True))
    return net.result(norms)


# Metrics and Keras' own steps.


@loop
def metrics_and_evaluation_within_the_loop(strategy):
    net = Net(strategy)
    with strategy.scope():
        trained, tested = keras.metrics.Mean(), keras.metrics.MeanAbsoluteError()
        net.model.compile("sgd", "mse", metrics=["mae"])

    def train(batch):
        loss = net.step(batch)
        trained.update_state(net.squares(batch[1], net.model(batch[0])))
        return loss

    def test(batch):
        tested.update_state(batch[1], net.model(batch[0], training=False))

    train_step = tf.function(lambda batch: net.total(strategy.run(train, args=(batch,))))
    test_step = tf.function(lambda batch: strategy.run(test, args=(batch,)))
    losses = [float(train_step(batch)) for batch in distributed(strategy)]
    for batch in distributed(strategy):
        test_step(batch)
    own = net.model.evaluate(X, Y, batch_size=BATCH, verbose=0)
    predicted = net.model.predict(X, batch_size=BATCH, verbose=0)
    losses += [float(train_step(batch)) for batch in distributed(strategy)]
    found = [*losses, float(trained.result()), float(tested.result()), *own, predicted.sum()]
    trained.reset_state()
    found.append(float(trained.result()))
    return net.result(found)


@loop
def train_function_of_keras(strategy):
    net = Net(strategy)
    with strategy.scope():
        net.model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    net.model.make_train_function()
    iterator, losses = iter(distributed(strategy, 24)), []
    for _ in range(3):
        losses.append({name: float(value) for name, value in net.model.train_function(iterator).items()})
    steps = [net.model.train_on_batch(X[:8], Y[:8], return_dict=True) for _ in range(2)]
    return [losses, steps, net.model.get_weights()]


@loop
def train_step_of_keras_given_to_run(strategy):
    net = Net(strategy)
    with strategy.scope():
        net.model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    once = tf.function(lambda batch: strategy.run(net.model.train_step, args=(batch,)))
    for batch in distributed(strategy):
        logs = once(batch)
    return [float(strategy.experimental_local_results(logs["loss"])[0]), *net.model.get_weights()]


# Files within the loop.


@loop
def models_saved(strategy, directory):
    net = Net(strategy)
    step, found = tf.function(net.run), []
    for index, batch in enumerate(distributed(strategy)):
        step(batch)
        if index % 2:
            net.model.save(directory / f"{index}.keras")
            net.model.save_weights(directory / f"{index}.weights.h5")
            found.append(keras.models.load_model(directory / f"{index}.keras").get_weights())
            net.model.load_weights(directory / f"{index}.weights.h5")
    return [found, net.model.get_weights()]


@loop
def models_exported(strategy, directory):
    net = Net(strategy)
    step, found = tf.function(net.run), []
    for index, batch in enumerate(distributed(strategy)):
        step(batch)
        if index % 2:
            net.model.export(os.fspath(directory / f"exported-{index}"), verbose=False)
            exported = tf.saved_model.load(os.fspath(directory / f"exported-{index}"))
            found.append(exported.serve(X[:4]).numpy())
    return [found, net.model.get_weights()]


@loop
def saved_models(strategy, directory):
    net = Net(strategy)
    step, found = tf.function(net.run), []
    serve = tf.function(lambda x: net.model(x, training=False), input_signature=[tf.TensorSpec([None, 3])])
    for index, batch in enumerate(distributed(strategy)):
        step(batch)
        if index % 2:
            # Each worker writes files of its own.
            path = os.fspath(directory / f"saved-{index}" / own_name(strategy))
            tf.saved_model.save(net.model, path, signatures={"serving_default": serve})
            loaded = tf.saved_model.load(path)
            found.append(next(iter(loaded.signatures["serving_default"](tf.constant(X[:4])).values())).numpy())
    return [found, net.model.get_weights()]


@loop
def checkpoints(strategy, directory):
    net = Net(strategy, lambda: keras.optimizers.Adam(0.01))
    with strategy.scope():
        net.optimizer.build(net.model.trainable_variables)
    checkpoint = tf.train.Checkpoint(model=net.model, optimizer=net.optimizer)
    manager = tf.train.CheckpointManager(checkpoint, os.fspath(directory / "checkpoints"), max_to_keep=2)
    step, saved, losses = tf.function(net.run), [], []
    for batch in distributed(strategy):
        losses.append(float(step(batch)))
        saved.append(manager.save())
    after = net.result(losses)
    checkpoint.restore(manager.latest_checkpoint)
    again = net.result(losses)
    checkpoint.restore(saved[-2])
    return [after, again, int(net.optimizer.iterations), net.model.get_weights()]


def own_name(strategy: Any) -> str:
    """Tells the workers apart."""
    return (
        f"{strategy.cluster_resolver.task_type}-{strategy.cluster_resolver.task_id}" if _has_workers(strategy) else "0"
    )


def _has_workers(strategy: Any) -> bool:
    return getattr(getattr(strategy, "cluster_resolver", None), "task_id", None) is not None


def same_batches(monkeypatch: Any) -> None:
    """Makes all batches alike, so that their order does not matter."""
    for name in ("X", "Y"):
        monkeypatch.setitem(globals(), name, np.tile(globals()[name][:BATCH], (3, 1)))


NAMES = [*LOOPS, *SAVING]


def run(name: str, strategy: Any, directory: pathlib.Path) -> list[float]:
    """Runs a loop, and returns all its numbers; those that save write to a directory of their own."""
    if name in LOOPS:
        found = LOOPS[name](strategy)
    else:
        place = directory / f"{name}-{type(strategy).__name__}"
        place.mkdir(parents=True, exist_ok=True)
        found = SAVING[name](strategy, place)
    return [float(number) for leaf in tf.nest.flatten(found) for number in np.ravel(np.asarray(leaf))]
