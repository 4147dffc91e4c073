# SPDX-License-Identifier: Apache-2.0
"""Runs as the container of a pod: finds out from JOB_COMPLETION_INDEX which task this is, and runs the script as it.

It stays the container's first process: as such it passes signals on, which the kernel would keep from a script that
has no handler for them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from absl import flags

from tfdist.cluster import DATA_SERVICE_VARIABLE, ClusterError, Task
from tfdist.launchers import command_line, shape, wrapping
from tfdist.launchers.requests import LaunchError
from tfdist.launchers.shape import Shape

INDEX_VARIABLE = "JOB_COMPLETION_INDEX"


def task_environment(
    job: Shape, role: str, host_format: str, port: int, env: Mapping[str, str]
) -> tuple[Task, dict[str, str]]:
    """Which task a pod is, and what it finds in its environment.

    Args:
      job: which tasks there are.
      role: the job name of this pod's tasks, such as "worker".
      host_format: the name of a task's host, with {type} and {index}.
      port: on which each task listens. A tf.data service gets the next.
      env: the environment that Kubernetes gave to the container.

    Raises:
      LaunchError: there is no index, or no such task.
      ClusterError: the hosts' names make no addresses.
    """
    text = env.get(INDEX_VARIABLE, "")
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise LaunchError(f"{INDEX_VARIABLE} is no index; this runs in a pod of an Indexed Job. Received: {text!r}")
    task = Task(role, int(text))
    if task not in job.tasks:
        raise LaunchError(f"the job has no task {task}; use completions as planned. Received: {INDEX_VARIABLE}={text}")
    hosts = {
        member: host_format.replace("{type}", member.type).replace("{index}", str(member.index))
        for member in job.members
    }
    cluster = job.cluster([f"{hosts[member]}:{port}" for member in job.members], task)
    found = {"TF_CONFIG": cluster.to_tf_config(), "TFDIST_LAUNCHER": "kubernetes", "PYTHONUNBUFFERED": "1"}
    if job.num_ps:
        found[DATA_SERVICE_VARIABLE] = f"{hosts[Task('chief', 0)]}:{port + 1}"
    return task, found


def define_flags(values: flags.FlagValues) -> None:
    """Defines the wrapper's flags."""
    shape.define_flags(values)
    flags.DEFINE_string("role", "worker", "the job of this pod's tasks", flag_values=values)
    flags.DEFINE_string("host_format", "", "host of a task, with {type} and {index}", flag_values=values)
    flags.DEFINE_integer("port", 2222, "port of every task", flag_values=values)


def main(arguments: Sequence[str]) -> int:
    """Runs the script as the task that this pod is; returns its exit code."""
    try:
        values, script = command_line.parse(define_flags, arguments)
        job = Shape.from_flags(values)
        _, env = task_environment(job, values.role, values.host_format, values.port, os.environ)
    except (LaunchError, ClusterError, flags.Error) as error:
        wrapping.say(" ".join(str(error).split()))
        return 2
    return wrapping.run(wrapping.script_command(script), env)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
