# SPDX-License-Identifier: Apache-2.0
"""The segments of steps in which a contender trains, and between which it waits for the arena: see `contender.py`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any


class NewSteps(Exception):  # noqa: N818, it is no error
    """The arena wants segments of another length, so this `fit` ends."""


class Gate:
    """Gate at both ends of a segment."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._start, self._steps_end = 0.0, None
        self.delays: Any = None
        self.answer: Callable[[], Any] = lambda: None
        self.steps: int = connection.recv()[1]

    def enter(self) -> None:
        """Waits until the arena wants a segment."""
        kind, value = self._connection.recv()
        while kind == "ask":
            self._connection.send(self.answer())
            kind, value = self._connection.recv()
        if kind == "prepare":
            self.steps = value
            raise NewSteps
        if value:
            import scenarios

            self.delays = scenarios.SegmentDelays.from_json(value).start()
        self._start, self._steps_end = time.perf_counter(), None

    def steps_done(self) -> None:
        """Says that what comes until `leave` does not count."""
        self._steps_end = time.perf_counter()

    def leave(self) -> None:
        self._connection.send((self._steps_end or time.perf_counter()) - self._start)
        if self.delays is not None:
            # Whoever is still late wakes up, and meets the next segment as idle as the others.
            self.delays.stop()
            self.delays = None


Loop = Callable[[Gate], None]


def fit_loop(
    keras: ModuleType, model: Any, data: Any, late: Sequence[int] = (), counts_end_of_epoch: bool = True
) -> Loop:
    """Trains with `fit`.

    Args:
      keras: the Keras that the model is of.
      model: a compiled model.
      data: what `fit` takes.
      late: under a strategy without policies, which delays are not injected into: the replicas of this process. Each
        step waits, before it is run, for the latest of them. Empty otherwise.
      counts_end_of_epoch: whether what `fit` does after the last step of an epoch is a part of the segment.
    """

    class Segments(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.gate.enter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.gate.leave()

    class StepsOnly(Segments):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch + 1 == self.gate.steps:
                self.gate.steps_done()

    class LateSegments(Segments):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if self.gate.delays is not None:
                time.sleep(max(self.gate.delays.secs(replica, batch) for replica in late))

    def loop(gate: Gate) -> None:
        callback = LateSegments() if late else Segments() if counts_end_of_epoch else StepsOnly()
        callback.gate = gate
        model.fit(data, steps_per_epoch=gate.steps, epochs=10**6, verbose=0, callbacks=[callback])

    return loop
