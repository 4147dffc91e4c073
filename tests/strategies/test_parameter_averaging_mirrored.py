# SPDX-License-Identifier: Apache-2.0
"""MirroredStrategy with ParameterAveraging is as two models that are averaged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import training

import tfdist

pytestmark = pytest.mark.devices

OPTIMIZERS, LAYERS = keras.optimizers, keras.layers
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.random((48, 3), np.float32), RANDOM.random((48, 1), np.float32)
ONE_DEVICE = tf.distribute.get_strategy()
# Batches of 8, of which each of two replicas has 4: 6 steps an epoch.
BATCH, STEPS = 8, 6


def averaging(cpus: list[str], every_steps: int, **options: Any) -> tfdist.MirroredStrategy:
    return tfdist.MirroredStrategy(cpus[:2], policies=[tfdist.ParameterAveraging(every_steps, **options)])


@pytest.fixture(scope="session")
def every_four(cpus: list[str]) -> tfdist.MirroredStrategy:
    return averaging(cpus, 4)


def dense(between: Sequence[Any] = (), kind: Any = keras.Sequential) -> keras.Model:
    return kind([keras.Input((3,)), LAYERS.Dense(8, "tanh"), *between, LAYERS.Dense(1)])


def compiled(strategy: Any, optimizer: Any, make: Callable[[], keras.Model] = dense, **options: Any) -> keras.Model:
    return training.compiled(strategy, make, optimizer, **options)


def copies(variables: Sequence[Any]) -> list[list[np.ndarray]]:
    return [[copy.numpy() for copy in variable.value.values] for variable in variables]


def assert_alike(model: keras.Model, also: Sequence[Any] = ()) -> None:
    for first, *others in copies([*model.weights, *also]):
        for other in others:
            np.testing.assert_array_equal(first, other)
        assert np.isfinite(first).all()


def assert_close(expected: Any, found: Any, atol: float = 1e-6) -> None:
    tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(b, a, atol=atol, rtol=1e-6), expected, found)


# Periods of several steps, against models that train by themselves.


def by_hand(optimizer: Any, every_steps: int, epochs: int, state: str, outer: Any = None) -> list[np.ndarray]:
    """The weights of two models on one device, each trained on its half of each batch, that are averaged by hand."""
    models = [compiled(ONE_DEVICE, optimizer) for _ in range(2)]
    for model in models:
        model.optimizer.build(model.trainable_variables)
    slots = slice(2, None)
    initial = [variable.numpy() for variable in models[0].optimizer.variables][slots]
    start, velocity, alone = models[0].get_weights(), [np.zeros_like(w) for w in models[0].get_weights()], 0

    for step in range(epochs * STEPS):
        begin = step % STEPS * BATCH
        for index, model in enumerate(models):
            own = slice(begin + index * BATCH // 2, begin + (index + 1) * BATCH // 2)
            model.train_on_batch(X[own], Y[own])
        alone += 1
        if alone < every_steps and (step + 1) % STEPS:
            continue
        alone = 0
        means = [np.mean(pair, axis=0) for pair in zip(*(model.get_weights() for model in models), strict=True)]
        if outer:
            # Sutskever's form of Nesterov's momentum, as Keras has it.
            rate, momentum = outer
            gradients = [before - mean for before, mean in zip(start, means, strict=True)]
            velocity = [momentum * v - rate * g for v, g in zip(velocity, gradients, strict=True)]
            means = [w + momentum * v - rate * g for w, v, g in zip(start, velocity, gradients, strict=True)]
        start = means
        averages = [np.mean(pair, axis=0) for pair in zip(*(values(m)[slots] for m in models), strict=True)]
        for model in models:
            model.set_weights(means)
            for variable, mean, first in zip(model.optimizer.variables[slots], averages, initial, strict=True):
                if state != "local":
                    variable.assign(mean if state == "average" else first)
    return models[0].get_weights()


def values(model: keras.Model) -> list[np.ndarray]:
    return [variable.numpy() for variable in model.optimizer.variables]


def trained(strategy: Any, optimizer: Any, epochs: int = 2) -> keras.Model:
    model = compiled(strategy, optimizer)
    model.fit(X, Y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize(
    ("state", "optimizer"),
    [
        ("average", lambda: OPTIMIZERS.Adam(0.01)),
        pytest.param("local", lambda: OPTIMIZERS.SGD(0.1, momentum=0.9, clipnorm=0.05), marks=pytest.mark.slow),
        # Its slots don't begin at zero.
        pytest.param("reset", lambda: OPTIMIZERS.Adagrad(0.1, initial_accumulator_value=0.5), marks=pytest.mark.slow),
    ],
)
def test_it_is_as_if_models_were_averaged_by_hand(cpus, state: str, optimizer: Callable[[], Any]):
    strategy = averaging(cpus, 4, optimizer_state=state)
    model = trained(strategy, optimizer)
    assert_close(by_hand(optimizer, 4, 2, state), model.get_weights())
    assert_alike(model, model.optimizer.variables)
    assert int(model.optimizer.iterations.numpy()) == strategy.report().updates == 2 * STEPS
    assert strategy.report().accepted == {"worker:0": 12, "worker:1": 12}
    # Nothing crosses a network.
    assert not any(strategy.report().bytes_sent.values())


def test_an_outer_optimizer_is_given_the_averaged_difference(cpus):
    optimizer = lambda: OPTIMIZERS.SGD(0.1)  # noqa: E731
    plain = trained(averaging(cpus, 4), optimizer).get_weights()
    assert_close(plain, trained(averaging(cpus, 4, outer=OPTIMIZERS.SGD(1.0)), optimizer).get_weights())
    diloco = averaging(cpus, 4, outer=OPTIMIZERS.SGD(0.7, momentum=0.9, nesterov=True))
    model = trained(diloco, optimizer)
    assert_close(by_hand(optimizer, 4, 2, "average", outer=(0.7, 0.9)), model.get_weights())
    assert_alike(model)


# Who looks.


def test_a_fit_within_a_callback_leaves_the_averages_of_the_outer_one(every_four):
    model, other = (compiled(every_four, lambda: OPTIMIZERS.SGD(0.1)) for _ in range(2))
    fit = lambda epoch, logs: [each.fit(X, Y, verbose=0) for each in (other, model)[epoch:]]  # noqa: E731
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH).repeat()
    within = keras.callbacks.LambdaCallback(on_epoch_begin=fit)
    model.fit(data, steps_per_epoch=STEPS, epochs=2, callbacks=[within], verbose=0)
    assert_alike(model)


def interrupted(model: keras.Model) -> None:
    def interrupt(batch: int, logs: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.fit(X, Y, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)])


def test_a_fit_that_raises_after_its_last_average_changes_nothing(cpus):
    def end(logs: Any) -> None:
        raise ValueError("at the end")

    weights = []
    for callbacks in [], [keras.callbacks.LambdaCallback(on_train_end=end)]:
        model = compiled(averaging(cpus, 4, outer=OPTIMIZERS.SGD(0.5)), lambda: OPTIMIZERS.SGD(0.1))
        with contextlib.suppress(ValueError):
            model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
        model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    assert_close(*weights)


def test_weights_set_after_an_interrupted_fit_stay_and_replicas_train_alike(cpus):
    outer = averaging(cpus, 4, outer=OPTIMIZERS.SGD(0.5), optimizer_state="local")
    model = compiled(outer, lambda: OPTIMIZERS.SGD(0.1, momentum=0.9))
    interrupted(model)
    model.set_weights([np.full_like(weight, 7.0) for weight in model.get_weights()])
    model.evaluate(X, Y, verbose=0)
    assert all((weight == 7.0).all() for weight in model.get_weights())
    model.train_on_batch(X, Y)
    assert_alike(model)


def test_an_interrupted_fit_within_another_is_averaged(every_four):
    model, outer = (compiled(every_four, lambda: OPTIMIZERS.SGD(0.1)) for _ in range(2))
    within = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: interrupted(model))
    outer.fit(X, Y, verbose=0, callbacks=[within])
    model.evaluate(X, Y, verbose=0)
    assert_alike(model)


@pytest.mark.slow
@pytest.mark.parametrize("use", ["evaluate", "train_on_batch"])
def test_an_interrupted_fit_is_averaged_when_the_model_is_used_again(every_four, use: str):
    model = compiled(every_four, lambda: OPTIMIZERS.SGD(0.1))
    interrupted(model)
    with pytest.raises(AssertionError):
        assert_alike(model)
    getattr(model, use)(X, Y)
    assert_alike(model)


@pytest.mark.slow
def test_each_replica_may_have_data_of_its_own(every_four):
    model = compiled(every_four, lambda: OPTIMIZERS.SGD(0.1))
    own = every_four.distribute_datasets_from_function(
        lambda context: tf.data.Dataset.from_tensor_slices((X, Y)).batch(4).repeat()
    )
    model.fit(own, steps_per_epoch=STEPS, epochs=2, verbose=0)
    # The parts come in turn: these are the batches of all other tests.
    assert_close(by_hand(lambda: OPTIMIZERS.SGD(0.1), 4, 2, "average"), model.get_weights())
    with every_four.scope():
        model.compile("adam", "mse")
    model.fit(own, steps_per_epoch=STEPS, verbose=0)
    model.train_on_batch(X, Y)
    assert_alike(model, model.optimizer.variables)


# What can't be.


class Meets(keras.Sequential):
    """Asks for the other replicas."""

    def train_step(self, data: Any) -> Any:
        context: Any = tf.distribute.get_replica_context()
        return context.merge_call(lambda strategy, x: strategy.reduce("SUM", x, axis=None), args=(data[0],))


@pytest.mark.parametrize(
    ("message", "options"),
    [
        (r"can't gather the other replicas' parts with merge_call", {"make": lambda: dense(kind=Meets)}),
        (r"XLA can't compile", {"jit_compile": True}),
    ],
)
def test_what_a_replica_alone_cannot_do_is_an_error(every_four, message: str, options: dict[str, Any]):
    model = compiled(every_four, lambda: OPTIMIZERS.SGD(0.1), metrics=[], **options)
    with pytest.raises(ValueError, match=message):
        model.fit(X, Y, verbose=0)


def test_after_a_warmup_phase_the_replicas_train_alone(cpus):
    policies = [tfdist.Warmup(epochs=1), tfdist.ParameterAveraging(4)]
    strategy = tfdist.MirroredStrategy(cpus[:2], policies=policies)
    apart: list[bool] = []

    def look(batch: int, logs: Any) -> None:
        apart.append(any(not np.array_equal(first, second) for first, second in copies(model.trainable_weights)))

    model = compiled(strategy, lambda: OPTIMIZERS.SGD(0.1))
    log = keras.callbacks.LambdaCallback(on_train_batch_end=look)
    model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[log])
    assert_alike(model, model.optimizer.variables)
    # An average after the fourth step of the second epoch, and at its end.
    assert apart[-STEPS:] == [True, True, True, False, True, True]
    report = strategy.report()
    assert int(model.optimizer.iterations.numpy()) == report.updates == 2 * STEPS
    assert report.accepted == {"worker:0": 2 * STEPS, "worker:1": STEPS}
    assert report.staleness == {0: 3 * STEPS}
