# SPDX-License-Identifier: Apache-2.0
"""Custom loops with optimizers, metrics, Keras' own steps and files, as guides write them; see `guide_loops`."""

from __future__ import annotations

import os
import types

import guide_nets
import keras
import tensorflow as tf
from guide_nets import BATCH, Net, compiled, distributed, loop, own_name

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

    once = compiled(strategy, lambda batch: net.total(strategy.run(step, args=(batch,))))
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

    once = compiled(strategy, lambda batch: net.total(strategy.run(step, args=(batch,))))
    return net.result([float(once(batch)) for batch in distributed(strategy)])


@loop
def seed_generators_made_outside_of_the_scope(strategy):
    seeds, noise = keras.random.SeedGenerator(5), keras.layers.GaussianNoise(0.0, seed=7)
    held = types.SimpleNamespace(seeds=keras.random.SeedGenerator(6))
    net = Net(strategy)

    def step(batch):
        x, y = batch
        drawn = [keras.random.uniform((3,), seed=seeds), keras.random.uniform((3,), seed=held.seeds)]
        return net.unpacked(noise(x, training=True) * drawn[0] + drawn[1], y)

    once = compiled(strategy, lambda batch: net.total(strategy.run(step, args=(batch,))))
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
        step = compiled(strategy, net.run) if in_graph else net.run
        losses += [float(step(batch)) for batch in distributed(strategy, 16 if in_graph else 8)]
        losses += [int(inner.iterations), *(float(tf.reduce_sum(v)) for v in inner.variables)]
    return net.result(losses)


@loop
def weights_set_within_the_loop(strategy):
    net = Net(strategy)
    step = compiled(strategy, net.run)
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

    def clip(batch):
        summed = [net.total(each) for each in strategy.run(gradients, args=(batch,))]
        clipped, norm = tf.clip_by_global_norm(summed, 0.3)
        net.optimizer.apply(clipped, weights)
        return norm

    once = compiled(strategy, clip)
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

    train_step = compiled(strategy, lambda batch: net.total(strategy.run(train, args=(batch,))))
    test_step = compiled(strategy, lambda batch: strategy.run(test, args=(batch,)))
    losses = [float(train_step(batch)) for batch in distributed(strategy)]
    for batch in distributed(strategy):
        test_step(batch)
    own = net.model.evaluate(guide_nets.X, guide_nets.Y, batch_size=BATCH, verbose=0)
    predicted = net.model.predict(guide_nets.X, batch_size=BATCH, verbose=0)
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
    steps = [net.model.train_on_batch(guide_nets.X[:8], guide_nets.Y[:8], return_dict=True) for _ in range(2)]
    return [losses, steps, net.model.get_weights()]


@loop
def train_step_of_keras_given_to_run(strategy):
    net = Net(strategy)
    with strategy.scope():
        net.model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    once = compiled(strategy, lambda batch: strategy.run(net.model.train_step, args=(batch,)))
    for batch in distributed(strategy):
        logs = once(batch)
    return [float(strategy.experimental_local_results(logs["loss"])[0]), *net.model.get_weights()]


# Files within the loop.


@loop
def models_saved_and_exported(strategy, directory):
    net = Net(strategy)
    step, found = compiled(strategy, net.run), []
    for index, batch in enumerate(distributed(strategy)):
        step(batch)
        if index % 2:
            net.model.save(directory / f"{index}.keras")
            net.model.save_weights(directory / f"{index}.weights.h5")
            found.append(keras.models.load_model(directory / f"{index}.keras").get_weights())
            net.model.load_weights(directory / f"{index}.weights.h5")
            net.model.export(os.fspath(directory / f"exported-{index}"), verbose=False)
            exported = tf.saved_model.load(os.fspath(directory / f"exported-{index}"))
            found.append(exported.serve(guide_nets.X[:4]).numpy())
    return [found, net.model.get_weights()]


@loop
def saved_models(strategy, directory):
    net = Net(strategy)
    step, found = compiled(strategy, net.run), []
    serve = tf.function(lambda x: net.model(x, training=False), input_signature=[tf.TensorSpec([None, 3])])
    for index, batch in enumerate(distributed(strategy)):
        step(batch)
        if index % 2:
            # Each worker writes files of its own.
            path = os.fspath(directory / f"saved-{index}" / own_name(strategy))
            tf.saved_model.save(net.model, path, signatures={"serving_default": serve})
            loaded = tf.saved_model.load(path)
            signature = loaded.signatures["serving_default"]
            found.append(next(iter(signature(tf.constant(guide_nets.X[:4])).values())).numpy())
    return [found, net.model.get_weights()]


@loop
def checkpoints(strategy, directory):
    net = Net(strategy, lambda: keras.optimizers.Adam(0.01))
    with strategy.scope():
        net.optimizer.build(net.model.trainable_variables)
    checkpoint = tf.train.Checkpoint(model=net.model, optimizer=net.optimizer)
    manager = tf.train.CheckpointManager(checkpoint, os.fspath(directory / "checkpoints"), max_to_keep=2)
    step, saved, losses = compiled(strategy, net.run), [], []
    for batch in distributed(strategy):
        losses.append(float(step(batch)))
        saved.append(manager.save())
    after = net.result(losses)
    checkpoint.restore(manager.latest_checkpoint)
    again = net.result(losses)
    checkpoint.restore(saved[-2])
    return [after, again, int(net.optimizer.iterations), net.model.get_weights()]
