# SPDX-License-Identifier: Apache-2.0
"""Keras callback that writes the speed of updates, and each worker's accepted and dropped gradients, to TensorBoard."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import epoch_iterators
from tfdist.data import progress, splitting
from tfdist.telemetry.report import Recorder, Sums


class Telemetry(keras.callbacks.Callback):
    """Writes TensorBoard scalars about the updates, against `optimizer.iterations`.

    `tfdist/speed/updates_per_sec`. Under the mirrored strategies `tfdist/speed/examples_per_sec`, with `BackupWorkers`
    or if all batches have one static size. Under a strategy with policies also, as means per update since the last
    point: `tfdist/accepted/<worker>` and `tfdist/dropped/<worker>` (gradients), `tfdist/wait/per_update_secs` and
    `tfdist/wait/first_to_last_secs`. With `Compression` or `ParameterAveraging` also `tfdist/bytes_sent/<worker>`, the
    bytes that a worker has sent per update, or per step of its own. The time of validation is left out.

    The files are in the run directory `<log_dir>/tfdist`. On several workers only the chief writes.

    Args:
      log_dir: the log directory of TensorBoard, or a directory in it.
      update_freq: number of batches between two points; no value is read in between.

    Raises:
      ValueError: an argument is invalid. When training begins: the model belongs to no tfdist strategy.
    """

    def __init__(self, log_dir: str | os.PathLike[str], update_freq: int = 50) -> None:
        super().__init__()
        if not isinstance(update_freq, int) or isinstance(update_freq, bool) or update_freq < 1:
            raise ValueError(
                f"Telemetry(update_freq=...) must be an integer of at least 1. Received: update_freq={update_freq!r}"
            )
        self._run_dir = os.path.join(os.fspath(log_dir), "tfdist")  # noqa: PTH118 - may be a gs:// path
        self._update_freq = update_freq
        self._clock = time.monotonic
        self._writer: tf.summary.SummaryWriter | None = None
        self._recorder = Recorder([])
        self._bytes_sent: Callable[[], Sequence[int]] = lambda: ()
        self._batch_examples = 0
        self._epoch = _Start(0, 0, 0)
        self._last: _Moment | None = None
        self._batches = 0
        self._evaluated_secs = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        """Opens the event file, on the chief."""
        strategy = self.model.distribute_strategy
        self._recorder, agreement = _recorder(strategy), strategy.distribution.agreement
        self._bytes_sent = strategy.distribution.bytes_sent
        self._batch_examples = 0 if self._recorder.is_complete else _batch_examples(self.model)
        # The file of an earlier training that has raised.
        self._close()
        self._last, self._batches, self._evaluated_secs = None, 0, 0.0
        if agreement is None or agreement.is_chief:
            self._writer = tf.summary.create_file_writer(self._run_dir)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Reads `optimizer.iterations`; within the epoch updates are counted without reading it."""
        # On every worker, because reading the variable may be a collective operation.
        self._epoch = _Start(_iterations(self.model), self._batches, self._recorder.sums().updates)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Writes a point, if enough batches have passed."""
        if self._writer is None:
            return
        self._batches = self._epoch.batches + batch + 1
        if self._last is None:
            # The first batch includes the building of the graph.
            self._last = self._now()
        elif self._batches - self._last.batches >= self._update_freq:
            self._write(self._last)

    def on_test_begin(self, logs: Any = None) -> None:
        """Stops the measured time."""
        self._evaluation_began = self._clock()

    def on_test_end(self, logs: Any = None) -> None:
        """Continues the measured time."""
        self._evaluated_secs += self._clock() - self._evaluation_began

    def on_train_end(self, logs: Any = None) -> None:
        """Writes the last point and closes the file."""
        if self._last is not None and self._batches > self._last.batches:
            self._write(self._last)
        self._close()

    def _now(self) -> _Moment:
        return _Moment(self._clock() - self._evaluated_secs, self._batches, self._recorder.sums(), self._bytes_sent())

    def _write(self, last: _Moment) -> None:
        now = self._last = self._now()
        summary = tf.compat.v1.Summary()
        for name, value in _values(self._recorder, last, now, _accumulated(self.model), self._batch_examples):
            summary.value.add(tag=f"tfdist/{name}", simple_value=value)
        # One operation for all values; tf.summary.scalar makes several for each value, and needs tensorboard.
        with self._writer.as_default(self._iteration(now)):
            tf.summary.experimental.write_raw_pb(summary.SerializeToString())
        # Flushed at each point, because Keras calls no callback when training raises.
        self._writer.flush()

    def _iteration(self, moment: _Moment) -> int:
        """Computes `optimizer.iterations` from the counts; reading it would wait for steps under a parameter server."""
        recorded, batches = moment.sums.updates - self._epoch.updates, moment.batches - self._epoch.batches
        updates = recorded if self._recorder.is_complete else batches
        return self._epoch.iterations + updates // _accumulated(self.model)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


@dataclasses.dataclass(frozen=True)
class _Start:
    """Counts at the beginning of an epoch."""

    iterations: int
    batches: int
    updates: int


@dataclasses.dataclass(frozen=True)
class _Moment:
    """Counts between two batches of a training; `secs` is the time without that of evaluations."""

    secs: float
    batches: int
    sums: Sums
    sent: Sequence[int]


def _values(
    recorder: Recorder, last: _Moment, now: _Moment, accumulated: int, batch_examples: int
) -> Iterator[tuple[str, float]]:
    """Yields names and values of a point, for the interval from `last` to `now`."""
    sums, secs, batches = now.sums.since(last.sums), now.secs - last.secs, now.batches - last.batches
    updates, examples = sums.updates, sums.examples
    if not recorder.is_complete:
        updates, examples = batches // accumulated, batches * batch_examples
    if secs > 0:
        yield "speed/updates_per_sec", updates / secs
        if examples:
            yield "speed/examples_per_sec", examples / secs
    for name, count, before in zip(recorder.names, now.sent, last.sent, strict=False):
        if updates:
            yield f"bytes_sent/{name}", (count - before) / updates
    if not sums.updates:
        return
    for name, accepted, dropped in zip(recorder.names, sums.accepted, sums.dropped, strict=True):
        yield f"accepted/{name}", accepted / sums.updates
        yield f"dropped/{name}", dropped / sums.updates
    yield "wait/per_update_secs", sums.wait_secs / sums.updates
    yield "wait/first_to_last_secs", sums.spread_secs / sums.updates


def _recorder(strategy: Any) -> Recorder:
    recorder = getattr(getattr(strategy, "distribution", None), "recorder", None)
    if not isinstance(recorder, Recorder):
        raise ValueError(
            "Telemetry is for models of a tfdist strategy: build and compile the model in `with strategy.scope():` of, "
            f"say, tfdist.MirroredStrategy(). Received: a model of {type(strategy).__name__}"
        )
    return recorder


def _batch_examples(model: keras.Model) -> int:
    """Returns the number of examples in each global batch of the running `fit`; 0 if their sizes may differ."""
    fit = epoch_iterators.EpochIterator.of(model)
    restart = progress.restart_of(fit.dataset) if fit is not None else None
    source = getattr(restart, "source", None)
    return 0 if source is None else splitting.static_size(source.element_spec) or 0


def _iterations(model: Any) -> int:
    return int(keras.ops.convert_to_numpy(getattr(model.optimizer, "iterations", 0)))


def _accumulated(model: Any) -> int:
    """Returns the number of batches in one update."""
    return getattr(model.optimizer, "gradient_accumulation_steps", None) or 1
