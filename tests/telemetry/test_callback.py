# SPDX-License-Identifier: Apache-2.0
"""Telemetry: what is in its files after a `fit` on logical devices, on several workers and under a parameter server."""

from __future__ import annotations

import collections
import contextlib
import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import process_cluster
import programs
import pytest
import tensorflow as tf
from waiting import Clock

import tfdist
from tfdist.policies.base import Update
from tfdist.telemetry.report import Recorder

X = np.random.default_rng(0).random((64, 4), np.float32)
Y = X.sum(1, keepdims=True)
SPEED = "tfdist/speed/updates_per_sec"

Scalars = dict[str, dict[int, float]]


def scalars(log_dir: pathlib.Path) -> Scalars:
    """Every scalar below `log_dir`, as {tag: {step: value}}."""
    found: Scalars = collections.defaultdict(dict)
    for path in event_files(log_dir):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                assert event.step not in found[value.tag], "one writer, one point for each step"
                found[value.tag][event.step] = value.simple_value
    return dict(found)


def event_files(log_dir: pathlib.Path) -> list[pathlib.Path]:
    return sorted(log_dir.rglob("*tfevents*"))


class Engine(keras.callbacks.Callback):
    """Does, before Telemetry sees a batch, what an engine does: it records the update, and time passes."""

    def __init__(self, clock: Clock, recorder: Recorder | None = None, examples: int = 0) -> None:
        super().__init__()
        self.clock, self.recorder, self.examples = clock, recorder, examples

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.clock.now += 1.0
        if self.recorder is not None:
            # Worker 1 is late every other time.
            late = batch % 2
            self.recorder.record(
                Update(
                    step=0,
                    contributors=(0, 2) if late else (0, 1),
                    dropped=(1,) if late else (),
                    staleness=(0, 0),
                    wait_secs=0.5,
                    spread_secs=0.25,
                    changes=(),
                ),
                self.examples,
            )

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.clock.now += 1000.0


def compiled(strategy: Any, **optimizer: Any) -> keras.Model:
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01, **optimizer), "mse")
    return model


def mirrored(cpus: list[str], recorder: Recorder | None = None) -> tfdist.MirroredStrategy:
    strategy = tfdist.MirroredStrategy(cpus[:2])
    if recorder is not None:
        strategy.distribution.recorder = recorder
    return strategy


def telemetry(log_dir: pathlib.Path, clock: Callable[[], float], update_freq: int) -> tfdist.callbacks.Telemetry:
    callback = tfdist.callbacks.Telemetry(log_dir, update_freq)
    callback._clock = clock
    return callback


def fit(
    model: keras.Model, callbacks: list[Any], steps: int = 20, drop_remainder: bool = False, **options: Any
) -> None:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16, drop_remainder=drop_remainder).repeat()
    model.fit(data, steps_per_epoch=steps, callbacks=callbacks, verbose=0, **options)


@pytest.mark.devices
def test_a_fit_shows_its_speed_and_who_contributed(cpus: list[str], tmp_path: pathlib.Path) -> None:
    recorder, clock = Recorder([f"worker:{replica}" for replica in range(3)], is_complete=True), Clock()
    model = compiled(mirrored(cpus, recorder))
    fit(model, [Engine(clock, recorder, examples=32), telemetry(tmp_path, clock, 5)], steps=21)
    found = scalars(tmp_path)
    steps = [6, 11, 16, 21]
    assert {tag: list(points) for tag, points in found.items()} == dict.fromkeys(found, steps)
    # Five batches, of which the last four, or the last but the last, are alike in pairs.
    assert found[SPEED] == dict.fromkeys(steps, 1.0)
    assert found["tfdist/speed/examples_per_sec"] == dict.fromkeys(steps, 32.0)
    assert found["tfdist/accepted/worker:0"] == dict.fromkeys(steps, 1.0)
    shares = dict(zip(steps, [0.4, 0.6, 0.4, 0.6], strict=True))
    assert found["tfdist/accepted/worker:1"] == pytest.approx(shares)
    late = {step: 1 - share for step, share in shares.items()}
    assert found["tfdist/accepted/worker:2"] == found["tfdist/dropped/worker:1"] == pytest.approx(late)
    assert found["tfdist/dropped/worker:0"] == found["tfdist/dropped/worker:2"] == dict.fromkeys(steps, 0.0)
    assert found["tfdist/wait/per_update_secs"] == dict.fromkeys(steps, 0.5)
    assert found["tfdist/wait/first_to_last_secs"] == dict.fromkeys(steps, 0.25)
    assert event_files(tmp_path)[0].parent == tmp_path / "tfdist"
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 21


@pytest.mark.devices
def test_without_policies_it_shows_speed_alone(cpus: list[str], tmp_path: pathlib.Path) -> None:
    clock, strategy = Clock(), mirrored(cpus)
    model = compiled(strategy)
    fit(model, [Engine(clock), telemetry(tmp_path / "unknown", clock, 10)])
    assert scalars(tmp_path / "unknown") == {SPEED: {11: 1.0, 20: 1.0}}
    fit(model, [Engine(clock), telemetry(tmp_path / "known", clock, 10)], drop_remainder=True)
    assert scalars(tmp_path / "known")["tfdist/speed/examples_per_sec"] == {31: 16.0, 40: 16.0}


@pytest.mark.devices
def test_after_a_warmup_alone_each_batch_is_an_update(cpus: list[str], tmp_path: pathlib.Path) -> None:
    clock, strategy = Clock(), tfdist.MirroredStrategy(cpus[:2], policies=[tfdist.Warmup(steps=4)])
    model = compiled(strategy)
    fit(model, [Engine(clock), telemetry(tmp_path, clock, 5)], steps=21)
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 21
    assert scalars(tmp_path)[SPEED] == dict.fromkeys([6, 11, 16, 21], 1.0)


@pytest.mark.devices
@pytest.mark.parametrize(("steps_per_execution", "accumulated"), [(1, 2), (4, None)])
def test_points_stand_at_the_iterations_of_the_optimizer(
    cpus: list[str], tmp_path: pathlib.Path, steps_per_execution: int, accumulated: int | None
) -> None:
    """In several epochs, with validation between them, and in a second fit with the same callback."""
    clock = Clock()
    model = compiled(mirrored(cpus), gradient_accumulation_steps=accumulated)
    model.steps_per_execution = steps_per_execution
    callbacks = [Engine(clock), telemetry(tmp_path, clock, 8)]
    for _ in range(2):
        fit(model, callbacks, steps=16, epochs=2, validation_data=(X, Y), validation_batch_size=32)
    per_update = accumulated or 1
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 64 // per_update
    first = 8 + steps_per_execution, 16 + steps_per_execution, 24 + steps_per_execution, 32
    expected = [(batch + fit_before) // per_update for fit_before in (0, 32) for batch in first]
    found = scalars(tmp_path)[SPEED]
    assert list(found) == expected
    # One second for each execution; none for validation, of which each batch takes 1000.
    assert list(found.values()) == pytest.approx([steps_per_execution / per_update] * 8, rel=0.2)


@pytest.mark.devices
def test_a_fit_that_raises_keeps_its_points_and_the_next_one_goes_on(cpus: list[str], tmp_path: pathlib.Path) -> None:
    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 12:
                raise RuntimeError("on purpose")

    clock = Clock()
    model, callback = compiled(mirrored(cpus)), telemetry(tmp_path, clock, 5)
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(model, [Engine(clock), callback, Fail()])
    assert list(scalars(tmp_path)[SPEED]) == [6, 11]
    fit(model, [Engine(clock), callback])
    assert list(scalars(tmp_path)[SPEED]) == [6, 11, 19, 24, 29, 33]


@pytest.mark.devices
def test_evaluate_alone_writes_nothing(cpus: list[str], tmp_path: pathlib.Path) -> None:
    compiled(mirrored(cpus)).evaluate(X, Y, verbose=0, callbacks=[tfdist.callbacks.Telemetry(tmp_path)])
    assert event_files(tmp_path) == []


@pytest.mark.devices
@pytest.mark.parametrize("scope", [contextlib.nullcontext, lambda: tf.distribute.OneDeviceStrategy("CPU:0").scope()])
def test_a_model_of_no_tfdist_strategy(tmp_path: pathlib.Path, scope: Callable[[], Any]) -> None:
    with scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"strategy\.scope\(\).*Received: a model of ") as raised:
        model.fit(X, Y, verbose=0, callbacks=[tfdist.callbacks.Telemetry(tmp_path)])
    assert "\n" not in str(raised.value)
    assert event_files(tmp_path) == []


@pytest.mark.devices
@pytest.mark.parametrize("update_freq", [0, -1, 1.5, True, "epoch", None])
def test_frequencies_that_make_no_sense(tmp_path: pathlib.Path, update_freq: Any) -> None:
    with pytest.raises(ValueError, match="update_freq") as raised:
        tfdist.callbacks.Telemetry(tmp_path, update_freq)
    assert f"Received: update_freq={update_freq!r}" in str(raised.value)


TRAIN = """
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    X = np.random.default_rng(0).random((64, 4), np.float32)
    data = tf.data.Dataset.from_tensor_slices((X, X.sum(1, keepdims=True))).batch(16).repeat()
    callback = tfdist.callbacks.Telemetry("logs", update_freq=10)
    # In scope too, as some write it.
    model.fit(data, steps_per_epoch=40, epochs=2, verbose=0, callbacks=[callback])
"""


@pytest.mark.processes
def test_of_several_workers_the_chief_alone_writes(tmp_path: pathlib.Path) -> None:
    script = """
    import os
    os.chdir(shared)
    os.makedirs(task)
    os.chdir(task)
    strategy = tfdist.MultiWorkerMirroredStrategy()
    """
    process_cluster.run("import textwrap\nexec(textwrap.dedent('''" + script + "'''))" + TRAIN, tmp_path)
    (path,) = event_files(tmp_path)
    assert path.parent == tmp_path / "worker:0" / "logs" / "tfdist"
    assert max(scalars(tmp_path)[SPEED]) == 80


@pytest.mark.processes
def test_under_a_parameter_server(tmp_path: pathlib.Path) -> None:
    script = "strategy = tfdist.ParameterServerStrategy(num_workers=2)\n"
    with programs.running(script + TRAIN, tmp_path) as program:
        assert program.wait(110) == 0, program.output
    found = scalars(tmp_path)[SPEED]
    assert max(found) == 80
    assert all(speed > 0 for speed in found.values())
