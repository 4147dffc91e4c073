# SPDX-License-Identifier: Apache-2.0
"""Telemetry: what is in its files after a `fit` on logical devices, on several workers and under a parameter server."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import telemetry_files
import tensorflow as tf
from cutting_off import CutOff, CutOffError
from tensorflow.python.data.experimental.ops import testing
from waiting import Clock

import tfdist
from tfdist.policies import Contribution, Outcome, Update
from tfdist.telemetry.recorder import Recorder
from tfdist.telemetry.update_log import EventKind, read_logs
from tfdist.watching.tensorboard import plugin

pytestmark = pytest.mark.devices
X = np.random.default_rng(0).random((64, 4), np.float32)
Y = X.sum(1, keepdims=True)
SPEED = "tfdist/speed/updates_per_sec"


def scalars(log_dir: pathlib.Path) -> telemetry_files.Scalars:
    """The scalars of the job."""
    return telemetry_files.scalars(log_dir, ".")


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
            first, last = Contribution(0, 9.0, 9.25), Contribution(2 if late else 1, 9.0, 9.5)
            dropped = (Contribution(1, 9.0, 9.5, Outcome.DROPPED),) if late else ()
            update = Update(
                step=0,
                contributors=(0, last.replica),
                dropped=(1,) if late else (),
                staleness=(0, 0),
                wait_secs=0.5,
                spread_secs=0.25,
                changes=(),
                contributions=(*dropped, first, last),
                time=10.0,
            )
            self.recorder.record(update, self.examples)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.clock.now += 1000.0


def compiled(strategy: Any, **optimizer: Any) -> keras.Model:
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01, **optimizer), "mse")
    return model


def mirrored(cpus: list[str]) -> tfdist.MirroredStrategy:
    return tfdist.MirroredStrategy(cpus[:2])


def telemetry(log_dir: pathlib.Path, clock: Callable[[], float], update_freq: int) -> tfdist.callbacks.Telemetry:
    callback = tfdist.callbacks.Telemetry(log_dir, update_freq)
    callback._clock = clock
    return callback


def fit(
    model: keras.Model, callbacks: list[Any], steps: int = 20, drop_remainder: bool = False, **options: Any
) -> None:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16, drop_remainder=drop_remainder).repeat()
    model.fit(data, steps_per_epoch=steps, callbacks=callbacks, verbose=0, **options)


def test_a_fit_shows_its_speed_and_who_contributed(cpus: list[str], tmp_path: pathlib.Path) -> None:
    recorder, clock = Recorder([f"worker:{replica}" for replica in range(3)], is_complete=True), Clock()
    strategy = mirrored(cpus)
    strategy.distribution.recorder = recorder
    strategy.distribution.policies = [tfdist.BackupWorkers(spares=1)]
    model = compiled(strategy)
    fit(model, [Engine(clock, recorder, examples=32), telemetry(tmp_path, clock, 5)], steps=21)
    found, steps = scalars(tmp_path), [6, 11, 16, 21]
    # Five batches, of which the last four, or the last but the last, are alike in pairs.
    assert found[SPEED] == dict.fromkeys(steps, 1.0)
    assert found["tfdist/speed/examples_per_sec"] == dict.fromkeys(steps, 32.0)
    assert found["tfdist/gradients/accepted"] == dict.fromkeys(steps, 2.0)
    late = dict(zip(steps, [0.6, 0.4, 0.6, 0.4], strict=True))
    assert found["tfdist/gradients/dropped"] == pytest.approx(late)
    assert found["tfdist/wait/per_update_secs"] == dict.fromkeys(steps, 0.5)
    assert found["tfdist/wait/first_to_last_secs"] == dict.fromkeys(steps, 0.25)
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 21


def test_without_policies_it_shows_speed_and_times(cpus: list[str], tmp_path: pathlib.Path) -> None:
    clock, strategy = Clock(), mirrored(cpus)
    model = compiled(strategy)
    fit(model, [Engine(clock), telemetry(tmp_path / "unknown", clock, 10)])
    unknown = scalars(tmp_path / "unknown")
    assert unknown[SPEED] == {11: 1.0, 20: 1.0}
    assert "tfdist/speed/examples_per_sec" not in unknown
    # Of both replicas together.
    assert unknown["tfdist/time/step_secs"].keys() == {11, 20}
    assert unknown["tfdist/time/step_secs_slowest"][11] >= unknown["tfdist/time/step_secs"][11] * 0.97
    fit(model, [Engine(clock), telemetry(tmp_path / "known", clock, 10)], drop_remainder=True)
    assert scalars(tmp_path / "known")["tfdist/speed/examples_per_sec"] == {31: 16.0, 40: 16.0}


def test_a_fit_that_raises_keeps_its_points_and_the_next_one_goes_on(cpus: list[str], tmp_path: pathlib.Path) -> None:
    clock = Clock()
    model, callback = compiled(mirrored(cpus)), telemetry(tmp_path, clock, 5)
    with pytest.raises(CutOffError):
        fit(model, [Engine(clock), callback, CutOff(13)])
    assert list(scalars(tmp_path)[SPEED]) == [6, 11]
    assert model.distribute_strategy.distribution.recorder.sink is None
    assert read_logs(tmp_path).num_updates >= 11
    assert read_logs(tmp_path).ended == "ended by CutOffError"
    fit(model, [Engine(clock), callback])
    assert list(scalars(tmp_path)[SPEED]) == [6, 11, 19, 24, 29, 33]


def test_evaluate_alone_writes_nothing(cpus: list[str], tmp_path: pathlib.Path) -> None:
    compiled(mirrored(cpus)).evaluate(X, Y, verbose=0, callbacks=[tfdist.callbacks.Telemetry(tmp_path)])
    assert telemetry_files.event_files(tmp_path) == []


@pytest.mark.parametrize("scope", [contextlib.nullcontext, lambda: tf.distribute.OneDeviceStrategy("CPU:0").scope()])
def test_a_model_of_no_tfdist_strategy(tmp_path: pathlib.Path, scope: Callable[[], Any]) -> None:
    with scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"strategy\.scope\(\).*Received: a model of ") as raised:
        model.fit(X, Y, verbose=0, callbacks=[tfdist.callbacks.Telemetry(tmp_path)])
    assert "\n" not in str(raised.value)
    assert telemetry_files.event_files(tmp_path) == []


@pytest.mark.parametrize("update_freq", [0, -1, 1.5, True, "epoch", None])
def test_frequencies_that_make_no_sense(tmp_path: pathlib.Path, update_freq: Any) -> None:
    with pytest.raises(ValueError, match="update_freq") as raised:
        tfdist.callbacks.Telemetry(tmp_path, update_freq)
    assert f"Received: update_freq={update_freq!r}" in str(raised.value)


def test_beside_keras_tensorboard_it_writes_other_runs(cpus: list[str], tmp_path: pathlib.Path) -> None:
    model, keras_own = compiled(mirrored(cpus)), keras.callbacks.TensorBoard(tmp_path, write_graph=False)
    own = tfdist.callbacks.Telemetry(tmp_path, update_freq=5)
    fit(model, [own, keras_own], validation_data=(X, Y))
    runs = telemetry_files.tags(tmp_path).keys()
    assert {".", "tfdist_train", "tfdist_validation"} <= runs
    assert not runs & {"train", "validation"}
    # The next training goes on in the same runs.
    fit(model, [tfdist.callbacks.Telemetry(tmp_path, update_freq=5)])
    assert not telemetry_files.tags(tmp_path).keys() & {"train", "validation"}


def test_a_path_that_can_not_be_written_ends_no_training(
    cpus: list[str], tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    model = compiled(mirrored(cpus))
    fit(model, [tfdist.callbacks.Telemetry(tmp_path / "file" / "logs", update_freq=5)], steps=8)
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 8
    assert "can't be written" in capfd.readouterr().err


def test_replica_with_a_slow_input_is_named_in_all_views(cpus: list[str], tmp_path: pathlib.Path) -> None:
    strategy = tfdist.MirroredStrategy(cpus[:3], policies=[tfdist.BackupWorkers(spares=1)])

    def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16).repeat()
        return data.apply(testing.sleep(20_000)) if context.input_pipeline_id == 1 else data

    data = strategy.distribute_datasets_from_function(make)
    # So many that the slow one has sent enough: of few gradients all must be slow, and one batch may be there at once.
    compiled(strategy).fit(data, steps_per_epoch=1000, verbose=0, callbacks=[tfdist.callbacks.Telemetry(tmp_path)])
    report, timeline = strategy.report(), read_logs(tmp_path)
    assert "of its time is input" in report.in_words and report.in_words.startswith("worker:1 is ")
    assert plugin.RecordedJob(timeline).report.in_words == report.in_words
    assert timeline.total().dropped[0].tolist() == list(report.dropped.values())


@pytest.mark.slow
def test_validations_and_checkpoints_are_in_the_log_until_the_end(cpus: list[str], tmp_path: pathlib.Path) -> None:
    saving = keras.callbacks.ModelCheckpoint(tmp_path / "saved.keras")
    fit(compiled(mirrored(cpus)), [saving, tfdist.callbacks.Telemetry(tmp_path)], epochs=2, validation_data=(X, Y))
    timeline = read_logs(tmp_path)
    kinds = [EventKind(each).name for each in timeline.events.event_kind]
    assert kinds == ["VALIDATION", "CHECKPOINT", "VALIDATION", "CHECKPOINT", "FINISHED"]
    events = timeline.events
    assert (events.event_secs[:4] > 0).all() and events.event_secs[4] == 0
    ends = events.event_time + events.event_secs
    assert (ends[:4] <= events.event_time[1:] + 1e-3).all()
    assert events.event_text[1].startswith("checkpoint saved.keras, ")
    assert timeline.ended == "finished"


@pytest.mark.parametrize("spares", [None, 0])
def test_updates_of_a_warmup_phase_are_in_the_log(cpus: list[str], tmp_path: pathlib.Path, spares: int | None) -> None:
    policies = [tfdist.Warmup(steps=4), *([] if spares is None else [tfdist.BackupWorkers(spares)])]
    model = compiled(tfdist.MirroredStrategy(cpus[:2], policies=policies))
    fit(model, [tfdist.callbacks.Telemetry(tmp_path)], steps=10)
    timeline = read_logs(tmp_path)
    assert timeline.updates.step.tolist() == list(range(1, 11))
    assert timeline.updates.phase.tolist() == [1] * 4 + [0] * 6
    assert timeline.contributions.worker[:4].tolist() == [0] * 4
    # The first replica alone, then both.
    assert timeline.updates.count.tolist() == [1] * 4 + [2] * 6
    assert timeline.events.event_kind.tolist() == [EventKind.PHASE_CHANGED, EventKind.FINISHED]


@pytest.mark.slow
def test_points_go_on_where_a_resumed_training_does(cpus: list[str], tmp_path: pathlib.Path) -> None:
    for epochs in (1, 2):
        # A strategy of its own, as a program that was started again has.
        callbacks = [tfdist.callbacks.Resume(tmp_path / "saved"), tfdist.callbacks.Telemetry(tmp_path / "logs", 5)]
        fit(compiled(mirrored(cpus)), callbacks, epochs=epochs)
    steps = [6, 11, 16, 20, 26, 31, 36, 40]
    assert list(scalars(tmp_path / "logs")["tfdist/time/step_secs"]) == steps
    # Both logs are one.
    timeline = read_logs(tmp_path / "logs")
    assert timeline.updates.step.tolist() == list(range(1, 41))
    kinds = [EventKind(each).name for each in timeline.events.event_kind]
    assert kinds == ["CHECKPOINT", "FINISHED", "RESUMED", "CHECKPOINT", "FINISHED"]


@pytest.mark.slow
def test_a_fit_within_a_fit_gives_the_log_back(cpus: list[str], tmp_path: pathlib.Path) -> None:
    strategy = tfdist.MirroredStrategy(cpus[:2], policies=[tfdist.BackupWorkers(spares=0)])
    outer, inner = compiled(strategy), compiled(strategy)

    class Within(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                fit(inner, [tfdist.callbacks.Telemetry(tmp_path / "inner")], steps=4)

    fit(outer, [tfdist.callbacks.Telemetry(tmp_path / "outer"), Within()], steps=8)
    assert [read_logs(tmp_path / each).num_updates for each in ("inner", "outer")] == [4, 8]
    assert strategy.distribution.recorder.sink is None
