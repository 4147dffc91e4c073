# SPDX-License-Identifier: Apache-2.0
"""Times of synchronous steps, taken by operations of the step itself: input, computing, and the all-reduce.

A step on one worker, between the ends of two sums:

    rest       from the end of the last sum: the update, callbacks, validation
    input      in `next`, until the batch is there
    compute    until the last bucket of gradients is handed to the sum
    wait       in the sum, until the last worker hands in
    reduce     until the sums are there; and in sums before the gradients', where a step has some

The first three are durations on one worker. They ride in a sum that the step makes anyway: worker i fills the i-th part
of a vector of zeros. The end of a sum is an event of all workers, so the worker with the largest total was the last
one, and each other waited for the difference. No clock is compared with another, and nobody waits to measure.

On GPUs the times are those at which the host has enqueued the work.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat.keras import optimizers
from tfdist.compat.tensorflow import replicas, variables
from tfdist.policies.records import Contribution, Outcome, Update

# Of all steps that nobody has read yet; the oldest are left out.
_RING_BYTES = 2**22
_LEAST_ROWS = 64
# A time of 0 stands for one that was not measured.
_LEAST_SECS = 1e-6
_PARTS = 3


class StepTimes:
    """Clock of a strategy's train steps. Its variables are made when the first step is traced.

    Args:
      num_rows: number of workers, or of replicas if they are all in this process.
      own_row: index of this worker; None if the replicas are all in this process.
      device: CPU of this process.
    """

    def __init__(self, num_rows: int, own_row: int | None, device: str) -> None:
        self.num_rows = num_rows
        self.own_row = own_row
        self._device = tf.DeviceSpec.from_string(device).replace(device_type="CPU", device_index=0).to_string()
        self._width = 2 + _PARTS * num_rows
        self.capacity = max(_LEAST_ROWS, _RING_BYTES // (8 * self._width))
        self._variables: tuple[Any, Any, Any, Any] | None = None
        self._read = 0
        self._last_end = 0.0

    def variables(self) -> tuple[Any, Any, Any, Any]:
        """Returns the variables: number of steps, their rows, end of the last sum, limits of the last read."""
        if self._variables is None:
            with tf.init_scope(), tf.device(self._device):
                self._variables = (
                    variables.clock_variable(tf.zeros([], tf.int64), "steps"),
                    variables.clock_variable(tf.zeros([self.capacity, self._width], tf.float64), "step_times"),
                    variables.clock_variable(tf.zeros([], tf.float64), "end_of_sum"),
                    variables.clock_variable(tf.zeros([2], tf.float64), "read"),
                )
        return self._variables

    def on_cpu(self) -> contextlib.AbstractContextManager:
        """Returns the scope of the operations of this clock."""
        return tf.device(self._device)

    def note_read(self, read: Callable[[], Any]) -> Any:
        """Reads a batch with `read`, in a graph or eagerly, and keeps the times before and after it."""
        _, _, end, limits = self.variables()
        with self.on_cpu(), tf.control_dependencies([end.read_value()]):
            called = tf.timestamp()
        with tf.control_dependencies([called]):
            found = read()
        with self.on_cpu(), tf.control_dependencies(tensors_of(found)):
            limits.assign(tf.stack([called, tf.timestamp()]))
        return found

    def begin_pass(self) -> None:
        """Forgets the end of the last sum: what is between two passes over the data belongs to no step."""
        if self._variables is not None:
            self._variables[2].assign(0.0)

    def begin(self, limits: Any = None) -> Step:
        """Begins a step, in a graph or eagerly, in cross-replica context.

        Args:
          limits: float64 [2], the times at which `next` was called and returned; those of `note_read` by default.
        """
        with self.on_cpu():
            return Step(self, self.variables()[3].read_value() if limits is None else limits)

    def steps(self) -> int:
        """Returns the number of steps so far."""
        return int(self._variables[0].numpy()) if self._variables is not None else 0

    def take(self) -> tuple[int, list[Update]]:
        """Returns the steps since the last call: how many of them have no times any more, and the others."""
        if self._variables is None:
            return 0, []
        count = self.steps()
        new = count - self._read
        if not new:
            return 0, []
        kept = min(new, self.capacity)
        # These rows alone: the others are megabytes.
        rows = tf.gather(self._variables[1], np.arange(count - kept, count) % self.capacity).numpy()
        first, self._read = count - kept, count
        return new - kept, self._updates(first, rows)

    def _updates(self, first: int, rows: np.ndarray) -> list[Update]:
        offset = time.monotonic() - time.time()
        end, in_sum = rows[:, 0] + offset, rows[:, 1]
        parts = rows[:, 2:].reshape(len(rows), self.num_rows, _PARTS)
        busy = parts.sum(2)
        waits = busy.max(1, keepdims=True) - busy
        own = waits[:, self.own_row] if self.own_row is not None else 0.0
        before = np.concatenate([[self._last_end + offset], end[:-1]])
        # The first step of a pass has no rest on any worker. All that no worker did itself is communication.
        follows = (parts[:, :, 0] > 0).any(1) & (before > offset)
        reduce = np.maximum(_LEAST_SECS, np.where(follows, end - before - busy.max(1), in_sum - own))
        arrival = (end - reduce)[:, None] - waits
        start = arrival - parts[:, :, 1] - parts[:, :, 2]
        opened = np.where(follows, end - before, end - start.min(1))
        self._last_end = float(rows[-1, 0])
        order = np.argsort(arrival, axis=1, kind="stable")
        spread = waits.max(1)
        steps = zip(*(each.tolist() for each in (end, reduce, start, arrival, parts[:, :, 1], order)), strict=True)
        more = zip(opened.tolist(), spread.tolist(), strict=True)
        zeros, ones = (0,) * self.num_rows, (1.0,) * self.num_rows
        return [
            Update(
                step=first + index + 1,
                contributors=tuple(workers),
                dropped=(),
                staleness=zeros,
                wait_secs=late,
                spread_secs=late,
                changes=(),
                weights=ones,
                held_secs=(),
                contributions=tuple(
                    Contribution(i, starts[i], arrivals[i], Outcome.ACCEPTED, 0, 1.0, 0.0, inputs[i]) for i in workers
                ),
                time=ended,
                opened_secs=since,
                reduce_secs=reducing,
            )
            for index, ((ended, reducing, starts, arrivals, inputs, workers), (since, late)) in enumerate(
                zip(steps, more, strict=True)
            )
        ]


class Step:
    """One step while it is traced, or while it runs eagerly.

    Args:
      times: the clock.
      limits: see `StepTimes.begin`.
    """

    def __init__(self, times: StepTimes, limits: tf.Tensor) -> None:
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
        own = self._times.own_row
        with self._times.on_cpu():
            last_end, (called, got) = self._times.variables()[2].read_value(), tf.unstack(self._limits)
            # The first step of a pass follows no other.
            rest = tf.where(last_end > 0.0, called - last_end, 0.0)
            arrivals = [self._handed_in[replica] for replica in sorted(self._handed_in)]
            count = self._times.num_rows if own is None else 1
            # A replica that has handed in nothing was not late.
            arrivals = (
                [tf.reduce_max(arrivals)] if own is not None else arrivals + arrivals[:1] * (count - len(arrivals))
            )
            begun = got if self._begun is None else self._begun
            parts = tf.stack([[rest, got - called, arrival - begun] for arrival in arrivals])
            flat = tf.reshape(tf.maximum(tf.cast(parts, tf.float32), 0.0), [-1])
            if own is None:
                self._parts = flat
                return []
            before, after = _PARTS * own, _PARTS * (self._times.num_rows - 1 - own)
            return [tf.concat([tf.zeros([before]), flat, tf.zeros([after])], 0)]

    def end(self, vector: Sequence[tf.Tensor], sums: Sequence[Any]) -> None:
        """Writes the times of the step, in cross-replica context.

        Args:
          vector: the sum of what `vector` has returned.
          sums: the other sums of the step.
        """
        parts = vector[0] if vector else self._parts
        if parts is None:
            return
        count, rows, last_end, _ = self._times.variables()
        with self._times.on_cpu():
            with tf.control_dependencies([*tensors_of(sums), *self._sums, parts]):
                now = tf.timestamp()
            in_sum = now - tf.reduce_max(list(self._handed_in.values()))
            row = tf.concat([[now, in_sum], tf.cast(parts, tf.float64)], 0)
            number = count.read_value()
            # A step that finds no more data counts as none, though some of its operations run.
            with tf.control_dependencies([row]):
                rows.scatter_update(tf.IndexedSlices(row[None], [number % self._times.capacity]))
                last_end.assign(now)
                count.assign_add(1)

    def _is_here(self) -> bool:
        """Returns False inside of a conditional or a loop within the step, whose tensors are not to be had outside."""
        return tf.executing_eagerly() or tf.compat.v1.get_default_graph() is self._graph


def tensors_of(structure: Any) -> list[tf.Tensor]:
    """Returns the tensors of a structure, of sparse ones their parts."""
    return [leaf for leaf in tf.nest.flatten(structure, expand_composites=True) if isinstance(leaf, tf.Tensor)]
