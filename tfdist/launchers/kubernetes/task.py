# SPDX-License-Identifier: Apache-2.0
"""Wrapper in a pod's container: determines the pod's task from JOB_COMPLETION_INDEX, and runs the script as this task.

It stays the container's first process and forwards signals, because the kernel delivers no signal without a handler to
the first process. Kubernetes starts failed tasks again: a task of an all-reduce job that has lost another one fails by
itself, so all of them do.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence

from absl import flags

from tfdist import _log
from tfdist.cluster import ClusterError, Task
from tfdist.launchers import command_line
from tfdist.launchers.requests import TRY_AGAIN_EXIT_CODE, LaunchError
from tfdist.launchers.shape import Shape
from tfdist.launchers.supervise import wrapping
from tfdist.launchers.supervise.processes import on_signals

INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
# Fails the Job of this pod regardless of its count of failures. It is no code of sysexits.h, and no signal.
GIVEN_UP_EXIT_CODE = 79
# Variables with the number of replacements of this pod that were no failures, and of restarts of all tasks, from
# annotations of Kubernetes' controllers.
IGNORED_VARIABLE = "TFDIST_POD_IGNORED_FAILURES"
RESTARTS_VARIABLE = "TFDIST_POD_RESTARTS"
_ENDING = (signal.SIGTERM, signal.SIGINT)


def task_environment(
    job: Shape, role: str, host_format: str, port: int, env: Mapping[str, str]
) -> tuple[Task, dict[str, str]]:
    """Returns the task of a pod, and the variables that are added to its environment.

    Args:
      job: the tasks of the job.
      role: the job name of this pod's tasks, such as "worker".
      host_format: the name of a task's host, with {type} and {index}.
      port: port at which each task listens.
      env: the container's environment.

    Raises:
      LaunchError: there is no index, or no such task.
      ClusterError: the hosts' names are invalid.
    """
    text = env.get(INDEX_VARIABLE, "")
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise LaunchError(f"{INDEX_VARIABLE} is no index; this runs in a pod of an Indexed Job. Received: {text!r}")
    task = Task(role, int(text))
    if task not in job.tasks:
        raise LaunchError(f"the job has no task {task}; use completions as planned. Received: {INDEX_VARIABLE}={text}")
    addresses = [
        host_format.replace("{type}", member.type).replace("{index}", str(member.index)) + f":{port}"
        for member in job.members
    ]
    return task, job.environment("kubernetes", addresses, task)


def define_flags(values: flags.FlagValues) -> None:
    """Defines the wrapper's flags."""
    command_line.define_settings(values, Shape)
    table = {
        "role": ("worker", "the job of this pod's tasks"),
        "form": ("job", "job or jobset: who restarts pods"),
        "host_format": ("", "host of a task, with {type} and {index}"),
        "port": (2222, "port of every task"),
        "max_restarts": (3, "failures after which the job starts again"),
        "max_preemptions": (100, "preemptions after which the job starts again"),
    }
    command_line.define(values, table)


def main(arguments: Sequence[str]) -> int:
    """Runs the script as this pod's task; returns its exit code."""
    # From the beginning to the end, so that no signal is lost while the script doesn't run: the first process of a
    # container receives none without a handler.
    received: list[int] = []
    with on_signals(_ENDING, received.append):
        return _run(arguments, received)


def _run(arguments: Sequence[str], received: Sequence[int]) -> int:
    try:
        values, script = command_line.parse(define_flags, arguments)
        job = command_line.from_settings(Shape, values)
        task, env = task_environment(job, values.role, values.host_format, values.port, os.environ)
    except (LaunchError, ClusterError, flags.Error) as error:
        _log.say(" ".join(str(error).split()))
        return 2
    if received:
        return TRY_AGAIN_EXIT_CODE
    if _is_preempted_too_often(values, job, task):
        _log.say(f"the job is not started again: --max_preemptions={values.max_preemptions} is used up")
        return GIVEN_UP_EXIT_CODE
    return wrapping.run_wrapped([sys.executable, *script], env, early=received)


def _is_preempted_too_often(values: flags.FlagValues, job: Shape, task: Task) -> bool:
    """Returns True if more restarts than allowed were none of Kubernetes' counted failures; it has no limit for these.

    Kubernetes before 1.29 doesn't say how many there were.
    """
    is_jobset = values.form == "jobset"
    text = os.environ.get(RESTARTS_VARIABLE if is_jobset else IGNORED_VARIABLE, "")
    restarts = int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else 0
    # A JobSet counts restarts after failures, too. Failures of a task that has lost the chief are ignored.
    has_others = is_jobset or (job.num_ps > 0 and task.type != "chief")
    return restarts > values.max_preemptions + (values.max_restarts if has_others else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
