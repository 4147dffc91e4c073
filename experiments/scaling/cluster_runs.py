# SPDX-License-Identifier: Apache-2.0
"""Runs the tasks of a cluster as processes, and keeps what was found in a file."""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "tests" / "support"))
import namespaces

from tfdist import Cluster, Task
from tfdist.launchers.supervise import processes


def run_all(commands: Mapping[Task, Sequence[str]], cluster: dict[str, list[str]], limit_secs: float) -> None:
    """Runs a command for each task, until all have ended.

    Args:
      commands: by task, in the order in which they are started.
      cluster: addresses of the tasks, by job.
      limit_secs: longest wait for each process.

    Raises:
      RuntimeError: a process has failed; with the end of its output.
    """
    with processes.Supervisor() as supervisor:
        started = []
        for task, command in commands.items():
            variables = {**environment(), "TF_CONFIG": Cluster(cluster, task).to_tf_config()}
            started.append(supervisor.start(str(task), [*command], variables))
        for process in started:
            if process.wait(limit_secs) != 0:
                raise RuntimeError(f"{process.name} failed:\n" + "\n".join(process.tail))


def environment() -> dict[str, str]:
    """Returns the environment of a quiet process that is no task of a cluster."""
    variables = {**os.environ, "PATH": namespaces.PATH, "TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "ERROR"}
    variables.pop("TF_CONFIG", None)
    return variables


def write(output: pathlib.Path, found: Any) -> None:
    """Writes JSON, in one piece."""
    part = output.with_name(f"{output.name}.{os.getpid()}.part")
    part.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    part.replace(output)
