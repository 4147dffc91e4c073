# SPDX-License-Identifier: Apache-2.0
"""A transport between simulated workers: one thread each, which meet at each collective."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compression import Codec

_TIMEOUT_SECS = 60.0


class Meeting:
    """Values that all workers have brought to a collective."""

    def __init__(self, num_workers: int) -> None:
        self._barrier = threading.Barrier(num_workers, timeout=_TIMEOUT_SECS)
        self._brought: list[Any] = [None] * num_workers
        self.bytes_sent = 0

    def gather(self, worker: int, value: Any) -> list[Any]:
        self._brought[worker] = value
        self._barrier.wait()
        found = list(self._brought)
        self._barrier.wait()
        if worker == 0:
            self.bytes_sent += getattr(value, "nbytes", 0)
        return found

    def abort(self) -> None:
        self._barrier.abort()


class SimulatedTransport:
    def __init__(self, meeting: Meeting, worker: int, num_workers: int) -> None:
        self._meeting, self._worker, self.num_workers = meeting, worker, num_workers
        self.senders = tuple(f"worker:{index}" for index in range(num_workers))

    def sum(self, flat: tf.Tensor) -> tf.Tensor:
        return tf.add_n([tf.constant(each) for each in self._meeting.gather(self._worker, flat.numpy())])

    def gather(self, message: tf.Tensor) -> tf.Tensor:
        return tf.constant(stacked(self._meeting.gather(self._worker, message.numpy())))


def stacked(messages: Sequence[np.ndarray]) -> np.ndarray:
    """Rows of one length, with rubbish behind the shorter messages."""
    capacity = max(len(message) for message in messages)
    rows = np.full((len(messages), capacity), 0xA5, np.uint8)
    for row, message in zip(rows, messages, strict=True):
        row[: len(message)] = message
    return rows


def exchange(
    codec: Codec, tensors: Sequence[Sequence[tf.Tensor]], states: Sequence[dict[str, tf.Tensor]]
) -> tuple[list[list[tf.Tensor]], list[dict[str, tf.Tensor]], int]:
    """Sums the tensors of each worker, eagerly.

    Returns:
      The sums of each worker, its new state, and the bytes that worker 0 sent.
    """
    num_workers = len(tensors)
    meeting = Meeting(num_workers)

    def work(worker: int) -> Any:
        transport = SimulatedTransport(meeting, worker, num_workers)
        return codec.exchange(tensors[worker], states[worker], transport)

    results = on_workers(meeting, num_workers, work)
    return [result[0] for result in results], [result[1] for result in results], meeting.bytes_sent


def on_workers(meeting: Meeting, num_workers: int, call: Callable[[int], Any]) -> list[Any]:
    """Calls a function for each worker in a thread of its own; returns the results, or raises the first error."""
    results: list[Any] = [None] * num_workers

    def work(worker: int) -> None:
        try:
            results[worker] = call(worker)
        except BaseException as error:
            results[worker] = error
            meeting.abort()

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in range(num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_TIMEOUT_SECS)
    errors = [result for result in results if isinstance(result, BaseException)]
    errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
    if errors:
        raise errors[0]
    return results
