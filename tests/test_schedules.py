# SPDX-License-Identifier: Apache-2.0
"""Learning rates scaled to the replicas: the schedule, and the callback that follows the strategy."""

from __future__ import annotations

import re
import types

import keras
import numpy as np
import pytest

import tfdist
import tfdist.schedules


def rates(schedule: keras.optimizers.schedules.LearningRateSchedule, steps: list[int]) -> list[float]:
    return [float(schedule(step)) for step in steps]


def test_the_rate_rises_from_that_of_one_replica_to_that_of_all():
    schedule = tfdist.schedules.LinearScaling(0.1, replicas=8, warmup_steps=10)
    assert rates(schedule, [0, 5, 10, 1000]) == pytest.approx([0.1, 0.45, 0.8, 0.8])


def test_while_one_replica_trains_alone_the_rate_is_its_own():
    schedule = tfdist.schedules.LinearScaling(0.1, replicas=4, warmup_steps=2, alone_steps=3)
    assert rates(schedule, [0, 3, 4, 5, 6]) == pytest.approx([0.1, 0.1, 0.25, 0.4, 0.4])
    at_once = tfdist.schedules.LinearScaling(0.1, replicas=4, warmup_steps=0, alone_steps=3)
    assert rates(at_once, [0, 2, 3]) == pytest.approx([0.1, 0.1, 0.4])


def test_a_schedule_that_decays_is_scaled():
    decay = keras.optimizers.schedules.PiecewiseConstantDecay([10], [1.0, 0.5])
    schedule = tfdist.schedules.LinearScaling(decay, replicas=2, warmup_steps=5)
    assert rates(schedule, [0, 5, 11]) == pytest.approx([1.0, 2.0, 1.0])


@pytest.mark.parametrize("base", [0.1, keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)])
def test_an_optimizer_with_it_is_saved_and_made_again(base):
    schedule = tfdist.schedules.LinearScaling(base, replicas=3, warmup_steps=7, alone_steps=2)
    optimizer = keras.optimizers.SGD(schedule)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert rates(keras.optimizers.schedules.deserialize(again.get_config()["learning_rate"]), [0, 4, 40]) == rates(
        schedule, [0, 4, 40]
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"base_rate": 0.0}, "base_rate=0.0"),
        ({"base_rate": float("nan")}, "base_rate=nan"),
        ({"replicas": 0}, "replicas=0"),
        ({"replicas": 1.5}, "replicas=1.5"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"alone_steps": True}, "alone_steps=True"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(arguments, named):
    with pytest.raises(ValueError, match=named):
        tfdist.schedules.LinearScaling(**{"base_rate": 0.1, "replicas": 2, "warmup_steps": 1, **arguments})


def fitted(numbers: list[int], warmup_steps: int, *others: keras.callbacks.Callback) -> list[float]:
    """The rate of each update, while the strategy says these numbers one after the other."""
    strategy = types.SimpleNamespace(replicas_to_aggregate=numbers[0])
    callback = tfdist.callbacks.ScaleLearningRate(warmup_steps, strategy=strategy)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            seen.append(float(np.asarray(model.optimizer.learning_rate)))

        def on_train_batch_end(self, batch, logs=None):
            strategy.replicas_to_aggregate = numbers[min(len(seen), len(numbers) - 1)]

    x = np.ones((len(numbers), 1), np.float32)
    model.fit(x, x, batch_size=1, verbose=0, callbacks=[callback, *others, Watch()])
    seen.append(float(np.asarray(model.optimizer.learning_rate)))
    return seen


def test_the_callback_follows_the_strategy():
    found = fitted([1, 1, 4, 4, 4, 4, 2, 2], 2)
    # It rises within two updates, falls at once, and is the base at the end.
    assert found == pytest.approx([0.1, 0.1, 0.1, 0.25, 0.4, 0.4, 0.2, 0.2, 0.1])


def test_the_rate_of_more_replicas_is_said_once(capsys):
    fitted([2, 2, 1, 2, 3], 2)
    lines = [line for line in capsys.readouterr().err.splitlines() if "ScaleLearningRate" in line]
    assert [re.search(r"[\d.]+ x \d replicas = [\d.]+ after \d steps", line).group() for line in lines] == [
        "0.1 x 2 replicas = 0.2 after 2 steps",
        "0.1 x 3 replicas = 0.3 after 2 steps",
    ]


def test_what_another_callback_does_to_the_rate_stays():
    class Halve(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                self.model.optimizer.learning_rate = float(np.asarray(self.model.optimizer.learning_rate)) / 2

    found = fitted([2, 2, 2, 4, 4], 0, Halve())
    assert found == pytest.approx([0.2, 0.2, 0.1, 0.2, 0.2, 0.05])


def test_the_callback_says_what_it_can_not_work_with():
    x = np.ones((2, 1), np.float32)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(tfdist.schedules.LinearScaling(0.1, 2, 2)), "mse")
    with pytest.raises(ValueError, match="give a tfdist strategy"):
        model.fit(x, x, verbose=0, callbacks=[tfdist.callbacks.ScaleLearningRate(2)])
    strategy = types.SimpleNamespace(replicas_to_aggregate=1)
    with pytest.raises(ValueError, match="LinearScaling"):
        model.fit(x, x, verbose=0, callbacks=[tfdist.callbacks.ScaleLearningRate(2, strategy=strategy)])
    with pytest.raises(ValueError, match="warmup_steps=-1"):
        tfdist.callbacks.ScaleLearningRate(-1)
    with pytest.raises(ValueError, match="base_rate=0"):
        tfdist.callbacks.ScaleLearningRate(1, base_rate=0)
