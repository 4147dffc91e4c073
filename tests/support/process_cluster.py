# SPDX-License-Identifier: Apache-2.0
"""Runs a Python script as every worker of a cluster, and collects what each found out.

The script is given with what it needs already imported (`tf`, `keras`, `np`, `tfdist`) and these names: `task` (such as
"worker:1"), `index`, `shared` (a directory for all workers, a `pathlib.Path`) and `report(key, value)`, whose values
(JSON data) come back. A script that is built of several checks costs one start of TensorFlow for all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import textwrap
import time
from collections.abc import Iterator, Mapping
from typing import Any

import prefork
import pytest
from waiting import await_output

from tfdist import Cluster, Task
from tfdist.launchers.supervise.processes import PortReservation

ROOT = pathlib.Path(__file__).resolve().parents[2]
needs_mpi = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")

_HEADER = """
import ctypes, json, os, pathlib, sys
# Threads and sockets to come are in the network namespace, too.
if space := os.environ.get("TFDIST_TEST_SPACE"):
    with open(f"/run/netns/{space}") as file:
        assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
import numpy as np, tensorflow as tf, keras
import tfdist
cluster = tfdist.Cluster.from_environment()
task, index, shared = str(cluster.task), cluster.task.index, pathlib.Path(os.environ["TFDIST_TEST_SHARED"])
_found = {}
def report(key, value):
    _found[key] = value
    (shared / f"{index}.json").write_text(json.dumps(_found))
"""


@dataclasses.dataclass
class Worker:
    """One running worker."""

    process: prefork.Process
    shared: pathlib.Path
    index: int

    def wait(self, timeout_secs: float = 100) -> int:
        """Returns the exit code; kills a process that does not end in time."""
        try:
            return self.process.wait(timeout_secs)
        except subprocess.TimeoutExpired:
            self.process.end()
            raise

    @property
    def output(self) -> str:
        """Text that it has written to standard output and error so far."""
        return (self.shared / f"{self.index}.log").read_text()

    @property
    def found(self) -> dict[str, Any]:
        """Reports that it has written so far."""
        path = self.shared / f"{self.index}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def wait_for_output(self, text: str, timeout_secs: float = 60) -> None:
        """Returns when it has written `text`."""
        await_output(self, text, timeout_secs)

    def interrupt(self) -> None:
        """Sends it the signal of Ctrl-C."""
        self.process.send_signal(signal.SIGINT)


@contextlib.contextmanager
def workers(
    script: str,
    shared: pathlib.Path,
    num_workers: int = 2,
    started: int | None = None,
    env: Mapping[str, str] = {},
    machines: Mapping[str, str] = {},
) -> Iterator[list[Worker]]:
    """Starts the workers and kills those that are still there at the end of the block.

    Args:
      script: Python code; see above.
      shared: an empty directory.
      num_workers: tasks of the cluster.
      started: how many of these are started; all by default.
      env: additional environment variables.
      machines: addresses by network namespace, one for each worker; by default all are on this machine.
    """
    path = shared / "script.py"
    path.write_text(_HEADER + textwrap.dedent(script))
    with PortReservation(num_workers) as reserved, contextlib.ExitStack() as stack:
        hosts = [*machines.values()] or ["127.0.0.1"] * num_workers
        addresses = [f"{host}:{port}" for host, port in zip(hosts, reserved.ports, strict=True)]
        running = []
        for index in range(num_workers if started is None else started):
            cluster = Cluster({"worker": dict(enumerate(addresses))}, Task("worker", index))
            log = stack.enter_context((shared / f"{index}.log").open("wb"))
            environment = {
                # By default a test that asks for nothing is of TensorFlow's collectives.
                "TFDIST_COMMUNICATION": "tensorflow",
                **os.environ,
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "TF_CONFIG": cluster.to_tf_config(),
                "TFDIST_TEST_SHARED": str(shared),
                **env,
                **({"TFDIST_TEST_SPACE": [*machines][index]} if machines else {}),
            }
            process = prefork.start(path, environment, log, shared, index)
            stack.callback(process.end)
            running.append(Worker(process, shared, index))
        yield running


def run(
    script: str, shared: pathlib.Path, num_workers: int = 2, timeout_secs: float = 100, machines: Mapping[str, str] = {}
) -> list[dict[str, Any]]:
    """Runs the workers to their end and returns what each reported; fails if one of them fails."""
    with workers(script, shared, num_workers, machines=machines) as running:
        deadline = time.monotonic() + timeout_secs
        try:
            codes = [worker.wait(max(1.0, deadline - time.monotonic())) for worker in running]
        except subprocess.TimeoutExpired:
            codes = ["too slow"]
        if any(codes):
            raise AssertionError(f"exit codes {codes}\n" + "\n----\n".join(worker.output for worker in running))
        return [worker.found for worker in running]
