# SPDX-License-Identifier: Apache-2.0
"""Wrapper in a pod's container: determines the pod's task from JOB_COMPLETION_INDEX, and runs the script as this task.

It stays the container's first process and forwards signals, because the kernel delivers no signal without a handler to
the first process. The tasks of an all-reduce job end together; see `pod_group`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence

from absl import flags

from tfdist import _log
from tfdist.cluster import DATA_SERVICE_VARIABLE, JOB_SECRET_VARIABLE, ClusterError, Task
from tfdist.launchers import command_line, shape
from tfdist.launchers.kubernetes.pod_group import GIVEN_UP_EXIT_CODE, Counts, Leader, Member, Rules
from tfdist.launchers.requests import TRY_AGAIN_EXIT_CODE, LaunchError
from tfdist.launchers.shape import Shape
from tfdist.launchers.supervise import wrapping
from tfdist.launchers.supervise.notices import ENDED, Notices

INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
# Variables with the number of replacements of this pod, from annotations of Kubernetes' controllers.
FAILURES_VARIABLE = "TFDIST_POD_FAILURES"
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
      port: port at which each task listens. A tf.data service has the next one.
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
    texts = {"role": ("worker", "the job of this pod's tasks"), "form": ("job", "job or jobset: who restarts pods")}
    texts["host_format"] = ("", "host of a task, with {type} and {index}")
    for name, (default, text) in texts.items():
        flags.DEFINE_string(name, default, text, flag_values=values)
    numbers = {
        "port": (2222, "port of every task; that of the wrappers is the next"),
        "max_restarts": (3, "failures after which the job starts again"),
        "max_preemptions": (100, "preemptions after which the job starts again"),
        "grace_period_secs": (120, "seconds for scripts that save their work"),
    }
    for name, (default, text) in numbers.items():
        flags.DEFINE_integer(name, default, text, flag_values=values)


def main(arguments: Sequence[str]) -> int:
    """Runs the script as this pod's task; returns its exit code."""
    # Installed from the beginning to the end, so that no signal is lost while the script doesn't run.
    with _signals() as received:
        return _run(arguments, received)


def _run(arguments: Sequence[str], received: Sequence[int]) -> int:
    try:
        values, script = command_line.parse(define_flags, arguments)
        job = Shape.from_flags(values)
        task, env = task_environment(job, values.role, values.host_format, values.port, os.environ)
    except (LaunchError, ClusterError, flags.Error) as error:
        _log.say(" ".join(str(error).split()))
        return 2
    command = wrapping.script_command(script)
    if received:
        return TRY_AGAIN_EXIT_CODE
    with contextlib.closing(Notices()) as notices:
        code = _run_task(values, job, task, command, env, notices, received)
        wrapping.about_cluster(code, task, job, notices)
    return code


def _run_task(
    values: flags.FlagValues,
    job: Shape,
    task: Task,
    command: Sequence[str],
    env: Mapping[str, str],
    notices: Notices,
    received: Sequence[int],
) -> int:
    if not job.num_ps and task in job.members and len(job.members) > 1:
        return _run_together(values, job, task, command, env, notices, received)
    if _is_preempted_too_often(values, task, pod_counts(values.form, os.environ)):
        _log.say(f"the job is not started again: --max_preemptions={values.max_preemptions} is used up")
        return GIVEN_UP_EXIT_CODE
    return wrapping.run_wrapped(command, {**env, **notices.joining}, early=received)


def pod_counts(form: str, env: Mapping[str, str]) -> Counts:
    """Returns the numbers of earlier failures of this task's pods; zeros if Kubernetes doesn't provide them."""
    if form == "jobset":
        return Counts(0, _number(env, RESTARTS_VARIABLE))
    return Counts(_number(env, FAILURES_VARIABLE), _number(env, IGNORED_VARIABLE))


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else 0


def group_rules(values: flags.FlagValues, job: Shape) -> Rules:
    """Returns the rules for the exit codes of an all-reduce job's tasks."""
    if values.form == "jobset":
        # A JobSet counts restarts of all tasks by itself, and doesn't tell its pods which restarts were preemptions.
        # A peer's ignored exit code could hide the failure.
        return Rules(values.max_restarts, values.max_preemptions + values.max_restarts, peer_exit_code=1)
    kinds = len({member.type for member in job.members})
    return Rules(values.max_restarts, values.max_preemptions, kinds=kinds)


def _is_preempted_too_often(values: flags.FlagValues, task: Task, counts: Counts) -> bool:
    # Failures of a task that has lost the chief are ignored, too.
    is_alone = values.form != "jobset" and task.type == "chief"
    return counts.ignored > values.max_preemptions + (0 if is_alone else values.max_restarts)


def _run_together(
    values: flags.FlagValues,
    job: Shape,
    task: Task,
    command: Sequence[str],
    env: Mapping[str, str],
    notices: Notices,
    received: Sequence[int],
) -> int:
    """Runs the script of a task that ends and restarts together with all others."""
    first, rules = job.members[0], group_rules(values, job)
    secret = os.environ.get(JOB_SECRET_VARIABLE, "")
    with contextlib.ExitStack() as stack:
        host = values.host_format.replace("{type}", first.type).replace("{index}", str(first.index))
        if task == first:
            names = [str(member) for member in job.members]
            try:
                leader = Leader(names, rules, values.port + 1, secret, values.grace_period_secs, _log.say)
            except OSError as error:
                _log.say(f"can't listen on port {values.port + 1}, the one after --port: {error}")
                return 2
            stack.callback(leader.close)
            host = "localhost"
        counts = pod_counts(values.form, os.environ)
        member = Member(
            str(task),
            (host, values.port + 1),
            secret,
            counts,
            rules.peer_exit_code,
            _log.say,
            on_success=lambda name: notices.add(ENDED + name),
        )
        stack.callback(member.close)
        member.join(lambda: bool(received))
        if received:
            return TRY_AGAIN_EXIT_CODE
        code = wrapping.run_wrapped(command, {**env, **notices.env}, is_over=member.is_over, early=received)
        return member.finish(code, lambda: bool(received))


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Notes signals that end a pod. The first process of a container receives no signal without a handler."""
    received: list[int] = []
    before = {number: signal.signal(number, lambda n, _: received.append(n)) for number in _ENDING}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
