# SPDX-License-Identifier: Apache-2.0
"""Times of synchronous steps, taken by operations of the step itself: input, computing, and the all-reduce.

A step on one worker, between the ends of two sums:

    rest       from the end of the last sum: the update, callbacks, validation
    input      in `next`, until the batch is there
    compute    until the last bucket of gradients is handed to the sum
    wait       in the sum, until the last worker hands in
    reduce     until the sums are there; and in sums before the gradients', where a step has some

The first three are durations on one worker. They ride in a sum that the step makes anyway: worker i fills the i-th part
of a vector of zeros. The end of a sum is an event of all workers. So the worker with the largest total was the last
one, and each other waited for the difference. No clock is compared with another, and no worker waits to measure.

Where replicas train alone and average every H steps, a step ends with its gradients. Rests, inputs and computing of
all steps up to the average are added up, and ride in the sum of the average. Each of these steps is recorded with an
equal part of them, of the wait and of the sum.

On GPUs the times are those at which the host has enqueued the work.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.compat.keras import optimizers
from tfdist.compat.tensorflow import inputs, replicas, variables
from tfdist.policies.records import Outcome
from tfdist.telemetry.update_log import Contributions, Updates

# Of all unread steps; the oldest are left out.
_RING_BYTES = 2**22
_LEAST_ROWS = 64
# A time of 0 stands for one that was not measured.
_LEAST_SECS = 1e-6
_PARTS = 3
# Columns of a row before the parts: the end of the sum, the time in it, and the number of steps, below 0 if a pass
# began with them.
_FIXED = 3


class StepClock:
    """Clock of a strategy's train steps. Its variables are made when the first step is traced.

    Args:
      num_rows: number of workers, or of replicas if they are all in this process.
      own_row: index of this worker; None if the replicas are all in this process.
      device: CPU of this process.

    Attributes:
      recorded: number of steps that `take` has returned.
    """

    def __init__(self, num_rows: int, own_row: int | None, device: str) -> None:
        self.num_rows = num_rows
        self.own_row = own_row
        self._device = tf.DeviceSpec.from_string(device).replace(device_type="CPU", device_index=0).to_string()
        self._width = _FIXED + _PARTS * num_rows
        self.capacity = max(_LEAST_ROWS, _RING_BYTES // (8 * self._width))
        self._variables: tuple[Any, Any, Any, Any, Any] | None = None
        self._read = self.recorded = 0
        self._last_end = 0.0

    def variables(self) -> tuple[Any, Any, Any, Any, Any]:
        """Returns the variables: number of rows, the rows, end of the last sum, limits of the last read, `Period`."""
        if self._variables is None:
            num_own = self.num_rows if self.own_row is None else 1
            with tf.init_scope(), tf.device(self._device):
                self._variables = (
                    variables.clock_variable(tf.zeros([], tf.int64), "steps"),
                    variables.clock_variable(tf.zeros([self.capacity, self._width], tf.float64), "step_times"),
                    variables.clock_variable(tf.zeros([], tf.float64), "end_of_sum"),
                    variables.clock_variable(tf.zeros([2], tf.float64), "read"),
                    variables.clock_variable(tf.zeros([2 + _PARTS * num_own], tf.float64), "period"),
                )
        return self._variables

    def on_cpu(self) -> contextlib.AbstractContextManager:
        """Returns the scope of the operations of this clock."""
        return tf.device(self._device)

    def note_read(self, read: Callable[[], Any]) -> Any:
        """Reads a batch with `read`, in a graph or eagerly, and keeps the times before and after it."""
        _, _, end, limits, _ = self.variables()
        with self.on_cpu(), tf.control_dependencies([end.read_value()]):
            called = tf.timestamp()
        with tf.control_dependencies([called]):
            found = read()
        with self.on_cpu(), tf.control_dependencies(tensors_of(found)):
            limits.assign(tf.stack([called, tf.timestamp()]))
        return found

    def open(self, dataset: Any, fit: Any) -> Any:
        """Opens a pass of `fit` over a data set of `Timed` elements, for an engine; see `Engine.open`.

        What is between two passes over the data belongs to no step, so the end of the last sum is forgotten.
        """
        if fit is None:
            return None
        if self._variables is not None:
            self._variables[2].assign(0.0)
        return iter(dataset.own)

    def begin(self, limits: Any = None) -> TimedStep:
        """Begins a step, in a graph or eagerly, in cross-replica context.

        Args:
          limits: float64 [2], the times at which `next` was called and returned; by default those of `note_read` since
            the last step, and now if there was none.
        """
        with self.on_cpu():
            if limits is None:
                noted = self.variables()[3]
                limits = noted.read_value()
                noted.assign(tf.zeros_like(limits))
                limits = tf.where(limits > 0, limits, tf.timestamp())
            return TimedStep(self, limits)

    def placed(self, parts: tf.Tensor) -> list[tf.Tensor]:
        """Returns the vector that the workers sum, of this worker's parts, float32 [replicas, 3]; none in a process."""
        own, flat = self.own_row, tf.reshape(parts, [-1])
        if own is None:
            return []
        return [tf.pad(flat, [[_PARTS * own, _PARTS * (self.num_rows - 1 - own)]])]

    def write(self, ended: tf.Tensor, in_sum: tf.Tensor, steps: Any, parts: tf.Tensor) -> None:
        """Writes a row; its parts are those of all workers, float32 [3 * workers]."""
        count, rows, last_end, *_ = self.variables()
        row = tf.concat([[ended, in_sum, steps], tf.cast(parts, tf.float64)], 0)
        number = count.read_value()
        # A step that finds no more data counts as none, though some of its operations run.
        with tf.control_dependencies([row]):
            rows.scatter_update(tf.IndexedSlices(row[None], [number % self.capacity]))
            last_end.assign(ended)
            count.assign_add(1)

    def take(self) -> tuple[int, Updates, Contributions]:
        """Returns the steps since the last call: how many rows have been overwritten, and the others' steps.

        Their times are on the monotonic clock.
        """
        count = int(self._variables[0].numpy()) if self._variables is not None else 0
        new = count - self._read
        if self._variables is None or not new:
            return 0, Updates.of_rows([]), Contributions.of_rows([])
        kept = min(new, self.capacity)
        # These rows alone: the others are megabytes.
        rows = tf.gather(self._variables[1], np.arange(count - kept, count) % self.capacity).numpy()
        self._read = count
        self.recorded += new - kept
        self._last_end = self._last_end if kept == new else 0.0
        steps = self._steps(rows)
        self.recorded += len(steps[0])
        return new - kept, *steps

    def _steps(self, rows: np.ndarray) -> tuple[Updates, Contributions]:
        offset = time.monotonic() - time.time()
        end, in_sum = rows[:, 0] + offset, rows[:, 1]
        parts = rows[:, _FIXED:].reshape(len(rows), self.num_rows, _PARTS)
        busy = parts.sum(2)
        waits = busy.max(1, keepdims=True) - busy
        own = waits[:, self.own_row] if self.own_row is not None else 0.0
        before = np.concatenate([[self._last_end + offset], end[:-1]])
        # The first step of a pass has no rest on any worker. All that no worker did itself is communication.
        follows = (rows[:, 2] > 0) & (parts[:, :, 0] > 0).any(1) & (before > offset)
        reduce = np.maximum(_LEAST_SECS, np.where(follows, end - before - busy.max(1), in_sum - own))
        length = np.where(follows, end - before, busy.max(1) + reduce)
        self._last_end = float(rows[-1, 0])
        # Of several steps with one sum, each has an equal part of all; the last one waits for the sum.
        counts = np.abs(rows[:, 2]).astype(np.int64)
        row = np.repeat(np.arange(len(rows)), counts)
        left = np.cumsum(counts)[row] - 1 - np.arange(len(row))
        counts, waits, parts = counts[row], waits[row], parts[row]
        reduce, length = reduce[row] / counts, length[row] / counts
        ended = end[row] - left * length
        late = np.where(left > 0, 0.0, waits.max(1))
        waits, parts = waits / counts[:, None], parts / counts[:, None, None]
        arrival = (ended - reduce)[:, None] - waits
        start = arrival - parts[:, :, 1] - parts[:, :, 2]
        updates = Updates.of(
            step=self.recorded + 1 + np.arange(len(row)),
            time=ended,
            opened=length,
            wait=late,
            examples=np.zeros(len(row)),
            phase=np.zeros(len(row)),
            count=np.full(len(row), self.num_rows),
            reduce=reduce,
        )
        order = np.argsort(arrival, axis=1, kind="stable")
        since = (each - ended[:, None] for each in (start, arrival))
        starts, arrivals, reads = (np.take_along_axis(each, order, 1).ravel() for each in (*since, parts[:, :, 1]))
        zeros = np.zeros(order.size)
        return updates, Contributions.of(
            worker=order.ravel(),
            start=starts,
            arrival=arrivals,
            outcome=np.full(order.size, Outcome.ACCEPTED),
            staleness=zeros,
            weight=zeros + 1,
            held=zeros,
            input=reads,
        )


class TimedStep:
    """One step while it is traced, or while it runs eagerly.

    Args:
      times: the clock.
      limits: see `StepClock.begin`.
    """

    def __init__(self, times: StepClock, limits: tf.Tensor) -> None:
        self._times = times
        self._limits = limits
        self._begun: tf.Tensor | None = None
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        # By replica of this process.
        self._handed_in: dict[int, tf.Tensor] = {}
        self._sums: list[tf.Tensor] = []
        self._parts: tf.Tensor | None = None

    def start_computing(self, summed: tf.Tensor) -> None:
        """Takes the time at which the workers have summed a tensor that the step needs; without it, `next` has ended.

        What is between the end of `next` and this time is communication.
        """
        with self._times.on_cpu(), tf.control_dependencies([summed]):
            self._begun = tf.timestamp()

    def summing(self, sum_gradients: optimizers.SumGradients | None) -> optimizers.SumGradients:
        """Returns what sums gradients by `sum_gradients`, in replica context, and takes the times around it."""

        def summed(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
            self.hand_in(gradients, replicas.current())
            sum_up = sum_gradients or optimizers.sum_given
            totals = sum_up(optimizer, gradients, variables)
            if self._is_here():
                self._sums += tensors_of(totals)[-1:]
            return totals

        return summed

    def handing_in(self, transform: optimizers.Transform | None) -> optimizers.Transform:
        """Returns what transforms gradients, in replica context, and takes the time at which all of them are there."""

        def transformed(
            gradients: optimizers.Gradients, optimizer: Any, variables: Sequence[Any]
        ) -> optimizers.Gradients:
            given = list(transform(gradients, optimizer, variables) if transform else gradients)
            self.hand_in(given, replicas.current())
            return given

        return transformed

    def hand_in(self, tensors: Sequence[Any], replica: int = 0) -> None:
        """Takes the time at which a replica has all of these tensors, which are to be summed; the first time counts."""
        given = tensors_of(tensors)
        if replica not in self._handed_in and given and self._is_here():
            with self._times.on_cpu(), tf.control_dependencies(given):
                self._handed_in[replica] = tf.timestamp()

    def vector(self, tensors: Sequence[Any]) -> list[tf.Tensor]:
        """Returns what the workers have to sum beside these tensors: a vector, or nothing if there are no others.

        Args:
          tensors: handed in here, if nothing was before.
        """
        if not self._handed_in:
            self.hand_in(tensors)
        if not self._handed_in:
            return []
        with self._times.on_cpu():
            parts = self._own_parts()
            self._parts = tf.reshape(parts, [-1])
            return self._times.placed(parts)

    def _own_parts(self) -> tf.Tensor:
        """Returns the parts of this worker, or of each replica if all are in this process: float32 [replicas, 3]."""
        own = self._times.own_row
        last_end, (called, got) = self._times.variables()[2].read_value(), tf.unstack(self._limits)
        # The first step of a pass follows no other.
        rest = tf.where(last_end > 0.0, called - last_end, 0.0)
        arrivals = [self._handed_in[replica] for replica in sorted(self._handed_in)]
        count = self._times.num_rows if own is None else 1
        # A replica that has handed in nothing was not late.
        arrivals = [tf.reduce_max(arrivals)] if own is not None else arrivals + arrivals[:1] * (count - len(arrivals))
        begun = got if self._begun is None else self._begun
        parts = tf.stack([[rest, got - called, arrival - begun] for arrival in arrivals])
        return tf.maximum(tf.cast(parts, tf.float32), 0.0)

    def end(self, vector: Sequence[tf.Tensor], sums: Sequence[Any]) -> None:
        """Writes the times of the step, in cross-replica context.

        Args:
          vector: the sum of what `vector` has returned.
          sums: the other sums of the step.
        """
        parts = vector[0] if vector else self._parts
        if parts is None:
            return
        with self._times.on_cpu():
            with tf.control_dependencies([*tensors_of(sums), *self._sums, parts]):
                now = tf.timestamp()
            in_sum = now - tf.reduce_max(list(self._handed_in.values()))
            self._times.write(now, in_sum, tf.constant(1.0, tf.float64), parts)

    def keep(self, results: Sequence[Any]) -> None:
        """Adds the step to its `Period`, in cross-replica context; `results` are handed in if nothing was before."""
        if not self._handed_in:
            self.hand_in(results)
        if not self._handed_in:
            return
        _, _, last_end, _, period = self._times.variables()
        with self._times.on_cpu():
            parts = tf.reshape(tf.cast(self._own_parts(), tf.float64), [-1])
            begins = tf.where(last_end.read_value() > 0.0, tf.zeros([], tf.float64), 1.0)
            with tf.control_dependencies([parts, begins]):
                period.assign_add(tf.concat([[1.0, begins], parts], 0))
                last_end.assign(tf.reduce_max(list(self._handed_in.values())))

    def _is_here(self) -> bool:
        """Returns False inside of a conditional or a loop within the step, whose tensors are not to be had outside."""
        return tf.executing_eagerly() or tf.compat.v1.get_default_graph() is self._graph


class Period:
    """The steps from one average to the next, while the average is traced, or runs eagerly.

    Args:
      times: the clock.
      tensors: what this worker has to sum.
    """

    def __init__(self, times: StepClock, tensors: Sequence[Any]) -> None:
        self._times = times
        _, _, last_end, _, period = times.variables()
        with times.on_cpu():
            with tf.control_dependencies(tensors_of(tensors)):
                self._handed_in = tf.timestamp()
                kept, end = period.read_value(), last_end.read_value()
            with tf.control_dependencies([kept]):
                period.assign(tf.zeros_like(kept))
            self._steps = tf.where(kept[1] > 0.0, -kept[0], kept[0])
            rest = tf.where(end > 0.0, self._handed_in - end, 0.0)
            parts = tf.reshape(kept[2:], [-1, _PARTS]) + tf.stack([rest, 0.0, 0.0])
            parts = tf.cast(parts, tf.float32)
            self._parts = tf.reshape(parts, [-1])
            self.vector = times.placed(parts)

    def end(self, vector: Sequence[tf.Tensor], sums: Sequence[Any]) -> None:
        """Writes the times; see `TimedStep.end`."""
        parts = vector[0] if vector else self._parts
        with self._times.on_cpu():
            with tf.control_dependencies([*tensors_of(sums), parts]):
                now = tf.timestamp()
            self._times.write(now, now - self._handed_in, self._steps, parts)


class Timed(NamedTuple):
    """An element of a data set that an engine, or a strategy, reads for `fit`, with the times of its read.

    Keras hands it to `strategy.run` as it is, in the graph that calls `next`.

    Attributes:
      called: time at which `next` was called, float64 [].
      given: element of the data set.
      got: time at which `next` returned, float64 [].
    """

    called: tf.Tensor
    given: Any
    got: tf.Tensor


def timed(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a data set of `Timed` elements, in one order."""
    # The data sets of a zip are read in their order.
    called = inputs.mapped_inline(tf.data.Dataset.from_tensors(0).repeat(), lambda _: tf.timestamp())
    found = inputs.mapped_inline(
        tf.data.Dataset.zip(called, dataset.prefetch(2)), lambda called, given: Timed(called, given, tf.timestamp())
    )
    options = tf.data.Options()
    options.deterministic = True
    # The times would be wrong if tf.data read ahead.
    options.experimental_optimization.inject_prefetch = False
    return found.with_options(options)


def timed_read(read: Callable[[], Any]) -> tuple[Any, tf.Tensor]:
    """Reads a batch with `read`, in a graph; returns it, and for how many seconds that took, float64 []."""
    called = tf.timestamp()
    with tf.control_dependencies([called]):
        found = read()
    with tf.control_dependencies(tensors_of(found)):
        return found, tf.timestamp() - called


def tensors_of(structure: Any) -> list[tf.Tensor]:
    """Returns the tensors of a structure, of sparse ones their parts."""
    return [leaf for leaf in tf.nest.flatten(structure, expand_composites=True) if isinstance(leaf, tf.Tensor)]
