# SPDX-License-Identifier: Apache-2.0
"""Runs a script as the child of a task's wrapper, which forwards signals to it and returns its exit code."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence

from tfdist import _log
from tfdist.cluster import Cluster, ClusterError
from tfdist.launchers.requests import TRY_AGAIN_EXIT_CODE, shell_code
from tfdist.launchers.supervise.notices import Notices, not_joined
from tfdist.launchers.supervise.output import Console, TaskLogs
from tfdist.launchers.supervise.processes import Process, Supervisor, on_signals

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
_POLL_SECS = 1.0
# Time for a task that is no longer needed: to end by itself, and again to end after SIGTERM.
_OVER_SECS = 10.0
# Time for the rest of the output, which background processes of the command may keep open.
_DRAIN_SECS = 10.0


def about_cluster(code: int, config: str, notices: Notices) -> None:
    """Says so if the first task of several has ended with code 0, and has not joined the cluster of its TF_CONFIG."""
    with contextlib.suppress(ClusterError):
        cluster = Cluster.from_tf_config(config)
        members = [task for task in cluster.tasks if task.type != "evaluator"]
        if code == 0 and len(members) > 1 and cluster.task == members[0] and not notices.has_joined:
            _log.say(not_joined(len(members), "ps" in cluster.jobs))


def run_wrapped(
    command: Sequence[str],
    env: Mapping[str, str],
    on_exit: Callable[[int], None] | None = None,
    is_over: Callable[[], bool] | None = None,
    name: str = "",
    on_signal: Callable[[int], bool] | None = None,
    early: Sequence[int] = (),
    is_muted: bool = False,
    logs: TaskLogs | None = None,
) -> int:
    """Runs a command to its end, in the main thread.

    Some schedulers signal only the wrapper, others its process group or all processes. The command has a process group
    of its own, so that the wrapper forwards each signal once. All that the command has started ends with it, and with
    the wrapper.

    Args:
      command: program and arguments.
      env: variables added to the environment, TF_CONFIG among them.
      on_exit: called with the exit code while the wrapper still handles signals.
      is_over: called every second. Once it returns True, the command has some time to end by itself, is ended then, and
        counts as successful.
      name: prefix of each line of output, such as "worker:1", for several tasks that share a file; "" for none.
      on_signal: called with each signal; returns True to forward it, False if the scheduler has sent it to the command.
      early: earlier signals, which are forwarded once the command has started.
      is_muted: with `name`, prints only the last lines of a command that failed by itself, without a signal or the loss
        of another task.
      logs: log files of the attempt, with `name`.

    Returns:
      The exit code; 128+N if signal N ended the command.
    """
    console = Console() if name else None
    on_lines = logs.write if logs else None if name else write_lines
    with (
        contextlib.closing(Notices()) as notices,
        Supervisor(console, on_lines, () if is_muted else None) as supervisor,
    ):
        received, forwarded = [*early], [*early]

        def note(signum: int) -> None:
            received.append(signum)
            if on_signal is None or on_signal(signum):
                forwarded.append(signum)
                supervisor.wake()

        with on_signals(_FORWARDED, note):
            task = supervisor.start(name or "task", command, {**os.environ, **env, **notices.joining})
            code = _wait(supervisor, task, forwarded, is_over)
            task.wait(_DRAIN_SECS)
            if is_muted and code not in (0, TRY_AGAIN_EXIT_CODE) and not received:
                _log.say(f"the last lines of {name}:", *(f"  {line}" for line in task.tail))
            if on_exit:
                on_exit(code)
        about_cluster(code, env.get("TF_CONFIG", ""), notices)
        return code


def _wait(supervisor: Supervisor, task: Process, forwarded: Sequence[int], is_over: Callable[[], bool] | None) -> int:
    """Forwards signals until the task has ended; returns its exit code."""
    sent = 0
    while True:
        for signum in forwarded[sent:]:
            task.send_signal(signum)
            sent += 1
        ended = supervisor.wait_first_exit(_POLL_SECS if is_over else None)
        if ended is not None:
            return shell_code(ended.returncode)
        if is_over is not None and is_over():
            supervisor.wait_first_exit(_OVER_SECS)
            supervisor.stop(grace_secs=_OVER_SECS)
            return 0


def write_lines(process: Process, lines: list[str], error: bool) -> None:
    """Writes lines of a task's output as they are."""
    del process
    data = "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace")
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(2 if error else 1, data) :]
