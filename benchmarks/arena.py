# SPDX-License-Identifier: Apache-2.0
"""Lets contenders train by turns: A B A B, within one run, so that whatever the machine does meets both alike.

A contender is one process or several (`contender.py`), which stay alive from the first segment to the last.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import pathlib
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Listener
from types import TracebackType
from typing import Any

from tfdist.launchers import local
from tfdist.launchers.shape import Shape
from tfdist.launchers.supervise.processes import PortReservation, Supervisor

_SCRIPT = pathlib.Path(__file__).with_name("contender.py")
_START_SECS = 180.0
_SEGMENT_LIMIT_SECS = 300.0
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "ERROR"}


class ContenderError(RuntimeError):
    """A contender died, or did not answer in time."""


class Team:
    """The processes of one contender.

    Args:
      contender: a key of `contender.CONTENDERS`.
      size: a key of `models.SIZES`.
      num_workers: worker processes; 0 for a contender that is one process.
      num_ps: parameter servers; with any, only the chief is told to train.
      own_cores: whether each process keeps to a core, as if on a machine of its own; the first one to the first.
      checkout: directory of another version of this repository, whose contender and package are run; None for this one.
    """

    def __init__(
        self,
        contender: str,
        size: str,
        num_workers: int = 0,
        num_ps: int = 0,
        own_cores: bool = False,
        checkout: pathlib.Path | None = None,
    ):
        self.name = contender if checkout is None else f"{contender} ({checkout.name})"
        self.steps = 0
        self._folder = tempfile.TemporaryDirectory()
        self._listener = Listener(f"{self._folder.name}/arena")
        self._callers: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        threading.Thread(target=self._accept, daemon=True).start()
        self._supervisor = Supervisor()
        self._connections: list[Connection] = []
        self._ports = PortReservation(len(Shape(num_workers, num_ps).members) if num_workers else 0)
        self._expected = max(1, num_workers if not num_ps else 1)
        script = _SCRIPT if checkout is None else checkout.resolve() / "benchmarks" / _SCRIPT.name
        # A rival may be in a folder of its own.
        folders = [str(script.parent.parent), os.environ.get("PYTHONPATH")]
        path = {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
        arguments = (str(script), f"--contender={contender}", f"--size={size}", f"--address={self._listener.address}")
        cores = itertools.cycle(sorted(os.sched_getaffinity(0)) if own_cores else [None])
        tasks = _tasks(arguments, num_workers, num_ps, self._ports.ports)
        for (task, command, env), core in zip(tasks, cores, strict=False):
            environment = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
            keeping = [] if core is None else [f"--core={core}"]
            self._supervisor.start(task, [*command, f"--task={task}", *keeping], environment | _QUIET | path | env)

    def wait_ready(self) -> None:
        """Waits until every process that trains has called."""
        deadline = time.monotonic() + _START_SECS
        while len(self._connections) < self._expected:
            try:
                self._connections.append(self._callers.get(timeout=0.5))
            except queue.Empty:
                self._check(deadline)

    def prepare(self, steps: int) -> None:
        """Sets the length of the segments."""
        self.steps = steps
        self._send(("prepare", steps))

    def segment(self, delays: str = "") -> float:
        """Trains for one segment; returns its seconds, those of the slowest process.

        Args:
          delays: who is made slow in it, as `tfdist.testing.Delays.to_json` writes it; nobody by default.
        """
        self._send(("go", delays))
        return max(self._answers())

    def processes(self) -> dict[str, list[int]]:
        """Returns the ids of the processes of each task."""
        groups = {process.pid: process.name for process in self._supervisor.processes}
        found: dict[str, list[int]] = {name: [] for name in groups.values()}
        for process in [int(path.name) for path in pathlib.Path("/proc").glob("[0-9]*")]:
            with contextlib.suppress(ProcessLookupError):
                if (group := os.getpgid(process)) in groups:
                    found[groups[group]].append(process)
        return found

    def ask(self) -> list[Any]:
        """Returns what each process reports, between two segments."""
        self._send(("ask", None))
        return self._answers()

    def calibrate(self, segment_secs: float, multiple_of: int = 1) -> None:
        """Warms up, and finds how many steps make a segment of about so many seconds."""
        steps = multiple_of
        while True:
            self.prepare(steps)
            self.segment()  # Traces the graph, or fills the pipelines of a new fit.
            taken = self.segment()
            if taken >= segment_secs / 2:
                break
            steps = multiple_of * math.ceil(steps * min(10.0, segment_secs / taken) / multiple_of)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._supervisor.stop(grace_secs=1.0)
        self._ports.release()
        self._listener.close()
        self._folder.cleanup()

    def _accept(self) -> None:
        try:
            while True:
                connection = self._listener.accept()
                connection.recv()
                self._callers.put(connection)
        except (OSError, EOFError):
            return  # Closed.

    def _answers(self) -> list[Any]:
        deadline = time.monotonic() + _SEGMENT_LIMIT_SECS
        for connection in self._connections:
            while not connection.poll(0.5):
                self._check(deadline)
        try:
            return [connection.recv() for connection in self._connections]
        except (EOFError, OSError) as error:
            raise self._failure("ended") from error

    def _send(self, message: object) -> None:
        try:
            for connection in self._connections:
                connection.send(message)
        except OSError as error:
            raise self._failure("ended") from error

    def _check(self, deadline: float) -> None:
        if self._supervisor.wait_first_exit(0) is not None:
            raise self._failure("ended")
        if time.monotonic() > deadline:
            raise self._failure("did not answer in time")

    def _failure(self, what: str) -> ContenderError:
        tails = [f"{process.name}: {line}" for process in self._supervisor.processes for line in process.tail[-8:]]
        return ContenderError("\n".join([f"{self.name} {what}; the end of what it printed:", *tails]))

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _tasks(
    arguments: tuple[str, ...], num_workers: int, num_ps: int, ports: Sequence[int]
) -> list[tuple[str, tuple[str, ...], dict[str, str]]]:
    if not num_workers:
        return [("local", (sys.executable, *arguments), {})]
    request = local.plan(local.LocalJob(arguments, Shape(num_workers, num_ps)), ports)
    return [(task.name, tuple(task.command), dict(task.env)) for task in request.tasks]


def duel(
    teams: Sequence[Team], rounds: int, delays: Callable[[int], str], progress: Callable[[str], None]
) -> dict[str, list[float]]:
    """Lets teams that are warm train by turns.

    Args:
      teams: the contenders.
      rounds: segments of each; who goes first moves on by one from round to round.
      delays: gives those of a round, which meet all teams alike.
      progress: is told what happens.

    Returns:
      By contender, its steps per second in each round.
    """
    rates: dict[str, list[float]] = {team.name: [] for team in teams}
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        first = number % len(teams)
        for team in [*teams[first:], *teams[:first]]:
            rates[team.name].append(team.steps / team.segment(delays(number)))
    return rates
