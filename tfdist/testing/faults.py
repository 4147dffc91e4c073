# SPDX-License-Identifier: Apache-2.0
"""Fault injection: kills, stops and continues tasks, at once or at a given step of `fit`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import _checks, _forks

# Process groups that were stopped and not continued yet.
_stopped: set[int] = set()


def kill(strategy: tf.distribute.Strategy, task: str) -> bool:
    """Ends a task with SIGKILL. The embedded cluster restarts a worker; a parameter server is lost.

    Under ParameterServerStrategy with its embedded cluster, call it in the chief; it can end every task. Under
    MultiWorkerMirroredStrategy, call it in all workers; it takes effect in the process of `task`.

    Args:
      strategy: the strategy.
      task: name of the task, such as "worker:1".

    Returns:
      True if the signal was sent to a running process.

    Raises:
      ValueError: there is no such task, or its process can't be reached from here.
    """
    return _send(_group(strategy, task, "kill"), signal.SIGKILL)


def stop_task(strategy: tf.distribute.Strategy, task: str) -> bool:
    """Stops a task of the embedded cluster with SIGSTOP, until `continue_task` or the end of this program.

    See `kill` for the arguments and the result.
    """
    group = _group(strategy, task, "stop")
    if group is None:
        return False
    # Noted before the signal is sent, so that the task is continued at exit in any case.
    _stopped.add(group)
    _forks.not_at_exit(_continue_all)
    _forks.at_exit(_continue_all)
    return _send(group, signal.SIGSTOP)


def continue_task(strategy: tf.distribute.Strategy, task: str) -> bool:
    """Continues a stopped task with SIGCONT. See `kill` for the arguments and the result."""
    group = _group(strategy, task, "continue")
    _stopped.discard(group or 0)
    return _send(group, signal.SIGCONT)


_ACTIONS: dict[str, Callable[[Any, str], bool]] = {"kill": kill, "stop": stop_task, "continue": continue_task}


class Faults(keras.callbacks.Callback):
    """Kills, stops and continues tasks while `fit` runs.

        model.fit(dataset, callbacks=[tfdist.testing.Faults([(20, "stop", "worker:1"), (40, "continue", "worker:1")])])

    Tasks that are still stopped at the end of training are continued.

    Args:
      schedule: entries (step, action, task). The action, "kill", "stop" or "continue", is taken after `step` batches of
        this `fit` (0: when training begins). Under ParameterServerStrategy without policies, earlier batches may still
        be computing at that time.

    Raises:
      ValueError: an entry is invalid. When training begins: a task in the schedule can't be reached.
    """

    def __init__(self, schedule: Sequence[tuple[int, str, str]]) -> None:
        super().__init__()
        for entry in schedule:
            _check(entry)
        self._schedule = sorted(schedule, key=lambda entry: entry[0])
        self._due: list[tuple[int, str, str]] = []
        self._epoch_start = self._batches = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks that all tasks can be reached."""
        for _, action, task in self._schedule:
            _group(self.model.distribute_strategy, task, action)
        self._due = list(self._schedule)
        self._epoch_start = self._batches = 0
        self._act()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Counts batches through all epochs."""
        self._epoch_start = self._batches

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Takes the actions that are due."""
        self._batches = self._epoch_start + batch + 1
        self._act()

    def on_train_end(self, logs: Any = None) -> None:
        """Continues all stopped tasks."""
        _continue_all()

    def _act(self) -> None:
        while self._due and self._due[0][0] <= self._batches:
            _, action, task = self._due.pop(0)
            _ACTIONS[action](self.model.distribute_strategy, task)


def _check(entry: Any) -> None:
    problem = None
    if not isinstance(entry, tuple | list) or len(entry) != 3:
        problem = 'each entry is (step, action, task), such as (100, "kill", "worker:1")'
    elif not _checks.is_count(entry[0], at_least=0):
        problem = "step must be an integer of at least 0"
    elif not isinstance(entry[1], str) or entry[1] not in _ACTIONS:
        problem = f"action must be one of {', '.join(map(repr, _ACTIONS))}"
    elif not isinstance(entry[2], str):
        problem = 'task must be a name such as "worker:1"'
    if problem:
        raise ValueError(f"Faults(schedule=...): {problem}. Received: {entry!r}")


def _send(group: int | None, signum: int) -> bool:
    if group is None:
        return False
    try:
        # A worker that kills itself must not kill its launcher, which may be in the same process group.
        (os.kill if group == os.getpid() else os.killpg)(group, signum)
    except ProcessLookupError:
        return False
    return True


def _group(strategy: Any, task: str, action: str) -> int | None:
    """Returns the process group of a task; this process' own id if it is the task; None if ended or out of reach."""
    distribution = getattr(strategy, "distribution", None)
    if distribution is not None and distribution.serving is not None:
        return _embedded_group(distribution.serving.embedded, task)
    agreement = distribution and distribution.agreement
    if agreement is None:
        raise ValueError(
            "faults need a ParameterServerStrategy with its embedded cluster, or a MultiWorkerMirroredStrategy of "
            f"several workers. Received: {type(strategy).__name__}"
        )
    if action != "kill":
        raise ValueError(
            f'under MultiWorkerMirroredStrategy only "kill" is possible: while a worker is stopped, no other comes to '
            f"the step at which it goes on; make it slow with tfdist.testing.Delays. Received: {action!r}"
        )
    _check_task(task, [str(each) for each in agreement.tasks])
    return os.getpid() if task == str(agreement.task) else None


def _embedded_group(embedded: Any, task: str) -> int | None:
    if embedded is None:
        raise ValueError(
            "faults reach the tasks of an embedded cluster only: run the program without TF_CONFIG. Received: "
            f"{task!r} of a cluster that this program has not started"
        )
    _check_task(task, [str(each) for each in embedded.cluster.tasks])
    return embedded.pid(task)


def _check_task(task: str, tasks: Sequence[str]) -> None:
    if task not in tasks:
        raise ValueError(f"there is no such task; the cluster has {', '.join(tasks)}. Received: {task!r}")


def _continue_all() -> None:
    while _stopped:
        _send(_stopped.pop(), signal.SIGCONT)
