# SPDX-License-Identifier: Apache-2.0
"""Every wait of the package is bounded, or looks at what it waits for.

A blocking call with a timeout, outside of a loop, is bounded. All others stand in one of two tables: a loop of short
waits names what ends it besides success (`ENDED_BY`: a look at those waited for, a deadline, or an event that its owner
sets), which must be in the loop; a call without a timeout says why it ends (`UNBOUNDED`). A new wait fails here.
"""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

PACKAGE = pathlib.Path(__file__).resolve().parent.parent / "tfdist"

# Methods that block, and the number of their arguments from which on one is a timeout.
_TIMEOUT_AT = dict.fromkeys(
    ("wait", "join", "result", "communicate", "acquire", "get", "select", "sleep", "Testall"), 1
)
_TIMEOUT_AT |= dict.fromkeys(("wait_for", "get_key", "receive", "create_connection", "_ask"), 2)
# Their timeout is their socket's.
_TIMEOUT_AT |= dict.fromkeys(("recv", "accept"), 9)
_OF_SUBPROCESS = ("run", "call", "check_call", "check_output")
# Receivers whose methods of these names don't block.
_PATHS_AND_TEXTS = ("os.path", "posixpath", "shlex", "file_utils", "tf.strings", "clusters")

ENDED_BY = {
    "compat/keras/saving.py:_wait_for": "deadline",
    "compat/keras/saving.py:locked": "deadline",
    "doctor/measure.py:_connected": "deadline",
    "engines/agreement.py:Agreement._get": "self.check()",
    "engines/agreement.py:Agreement._run": "self._stopped",
    "engines/agreement.py:Agreement.failure_behind": "deadline",
    "engines/agreement.py:Agreement.from_chief_at.of_any_name": "/begun/",
    "engines/agreement.py:Agreement.receive": "deadline",
    "engines/quorum.py:QuorumEngine._next_round": "self._is_closing",
    "engines/step_queue.py:StepQueue._park": "has_failed(",
    "engines/step_queue.py:StepQueue.wait_until": "self._raise_stall()",
    "launchers/ray.py:Actors._say_missing": "self._over",
    "launchers/ray.py:RayTask._get": "self._check()",
    "launchers/ray.py:RayTask._with_addresses": "self._check()",
    "launchers/supervise/guard.py:_sweep": "deadline",
    "launchers/supervise/attempts.py:Attempt._end": "stopping.is_alive()",
    "launchers/kubernetes/launcher.py:look_for_pods": "timeout_secs",
    "launchers/supervise/output.py:_write_fully": "os.write",
    "launchers/supervise/processes.py:Process._follow": "deadline",
    "launchers/supervise/processes.py:RemoteTask._forward": "TimeoutError",
    "launchers/supervise/processes.py:Supervisor.wait_first_exit": "limit",
    "launchers/slurm/exits.py:Exits._wait": "deadline",
    "launchers/ssh/client.py:main": "ssh.poll()",
    "launchers/ssh/task.py:received_from": "_LOST_SECS",
    "resume/checkpoint.py:CheckpointDirectory._beat": "self._released",
    "resume/checkpoint.py:CheckpointDirectory.take": "until",
    "resume/preemption.py:Together._receive": "check()",
    "coordination/keepalive.py:Keepalive._run": "self._ended",
    "coordination/lines.py:Connection.read_line": "settimeout",
    "coordination/lines.py:LineServer._accept": "self._make_room(",
    "coordination/lines.py:LineServer._serve": "self.is_closing",
    "coordination/quorum.py:QuorumClient._connect": "until",
    "coordination/quorum.py:QuorumClient.wait": "check()",
    "coordination/rendezvous.py:_Search._ask_until_met": "self._stop.is_set()",
    "coordination/rendezvous.py:_Search.complete": "timeout_secs",
    "coordination/round_runner.py:RoundRunner.collect": "self._check_progress()",
    "coordination/round_runner.py:RoundRunner.start": "is_over()",
    "coordination/stalls.py:StallReporter._run": "self._stop",
    "coordination/round_runner.py:StreamRunner.collect": "self._check_progress()",
    "serving/embedded.py:EmbeddedCluster._watch": "self._is_closing",
    "serving/task.py:_await_chief": "LOST_SECS",
    "strategies/_multi_worker_cluster.py:_stay_for_others": "agreement.lost()",
    "telemetry/event_files.py:EventWriters._run": "self._ended",
    "transport/mpi.py:Mpi.wait_until": "limit_secs",
    "transport/mpi.py:_ending_if_alone.watch": "timeout_secs",
    "telemetry/update_log/writer.py:LogWriter._run": "self._closed",
    "watching/watch.py:_follow": "refresh_secs",
}
# Reasons why a call without a timeout ends.
_BY_TIMEOUT_OF_SOCKET = "the socket has a timeout"
_OF_DONE_FUTURE = "the future is done"
_BY_QUEUE = "StepQueue.wait_until is behind it"
UNBOUNDED = {
    "compat/tensorflow/coordinator.py:_update_alone": "gRPC gives up the connections of a lost worker",
    "compat/tensorflow/graphs.py:call_outside": "runs one function of TensorFlow's that waits for no other process",
    "coordination/usage.py:Sampler._run": "its thread ends with the process",
    "doctor/measure.py:_measured": _BY_TIMEOUT_OF_SOCKET,
    "doctor/measure.py:_pass": _BY_TIMEOUT_OF_SOCKET,
    "engines/asynchronous.py:AsynchronousEngine._predict": _BY_QUEUE,
    "engines/asynchronous.py:AsynchronousEngine.call": _BY_QUEUE,
    "engines/asynchronous.py:AsynchronousEngine.step": _OF_DONE_FUTURE,
    "engines/asynchronous.py:AsynchronousEngine.wait_for": _OF_DONE_FUTURE,
    "engines/server_calls.py:within": _OF_DONE_FUTURE,
    "launchers/supervise/processes.py:Process._finish": "the guard's pipes are closed; it was killed, or has ended",
    "launchers/supervise/processes.py:Process.pid": "the guard reports the start, or its end",
    "launchers/supervise/processes.py:RemoteTask.wait": "its thread ends with the task, or soon after SIGKILL",
    "launchers/ray.py:TaskActor.read": "the wrapper's output is closed, as it has ended",
    "launchers/slurm/job.py:BatchJob.run": "ends with the user's command, which signals end",
    "launchers/slurm/launcher.py:submit": "sbatch --wait runs as long as the job; Ctrl-C ends it",
    "launchers/ssh/client.py:main": "the process was killed",
    "launchers/ssh/task.py:_run": "the task has ended; its last output is drained in a bounded time",
    "resume/checkpoint.py:CheckpointDirectory.release": "the thread has been told to end",
    "serving/task.py:serve": "the process ends with its parent",
    "step/logs.py:MetricResults.after": "a metric's value, no future",
}


class Wait(NamedTuple):
    """A blocking call: its place, its line, the innermost `while` loop around it, and whether it has a timeout."""

    place: str
    line: int
    loop: str | None
    is_bounded: bool


def waits(source: str, path: str) -> Iterator[Wait]:
    """Yields the blocking calls of a module."""

    def within(node: ast.AST, names: tuple[str, ...], loop: ast.While | None) -> Iterator[Wait]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from within(child, (*names, child.name), None)
                continue
            if isinstance(child, ast.Call) and (is_bounded := _is_bounded(child, loop is not None)) is not None:
                place = f"{path}:{'.'.join(names)}"
                yield Wait(place, child.lineno, loop and ast.unparse(loop), is_bounded)
            yield from within(child, names, child if isinstance(child, ast.While) else loop)

    yield from within(ast.parse(source), (), None)


def _is_bounded(call: ast.Call, is_in_loop: bool) -> bool | None:
    """Returns whether a blocking call has a timeout; None for a call that does not block."""
    if not isinstance(call.func, ast.Attribute):
        return None
    name, of = call.func.attr, ast.unparse(call.func.value)
    has_timeout = any("timeout" in (keyword.arg or "") for keyword in call.keywords)
    if of == "subprocess" and name in _OF_SUBPROCESS:
        return has_timeout
    is_text = isinstance(call.func.value, ast.Constant | ast.JoinedStr)
    if name not in _TIMEOUT_AT or is_text or of in _PATHS_AND_TEXTS:
        return None
    # Of mappings and context variables; a sleep alone is no wait for anything.
    if (name == "get" and (call.args or not of.endswith("_exits"))) or (name == "sleep" and not is_in_loop):
        return None
    if name == "select" and of == "select":
        return len(call.args) == 4
    return has_timeout or len(call.args) >= _TIMEOUT_AT[name]


def _all() -> list[Wait]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return [wait for path in paths for wait in waits(path.read_text(), str(path.relative_to(PACKAGE)))]


def test_each_wait_has_a_timeout_or_a_reason_to_end():
    wrong = []
    for wait in _all():
        is_listed = wait.place in UNBOUNDED
        look = ENDED_BY.get(wait.place)
        if wait.loop is not None and (look is None or look not in wait.loop) and not is_listed:
            wrong.append(f"{wait.place}, line {wait.line}: a loop of waits; name in ENDED_BY what ends it")
        if wait.loop is None and not wait.is_bounded and not is_listed:
            wrong.append(f"{wait.place}, line {wait.line}: no timeout; say in UNBOUNDED why it ends")
    assert not wrong, "\n".join(wrong)


def test_the_tables_of_waits_have_no_stale_lines():
    places = {wait.place for wait in _all()}
    assert {*ENDED_BY, *UNBOUNDED} <= places


def test_the_finder_finds_waits_that_never_end():
    source = "def f():\n    event.wait()\n    while True:\n        changed.wait(1.0)\n        ', '.join(names)"
    assert next(waits(source, "a.py")) == Wait("a.py:f", 2, None, False)
    assert [(wait.line, wait.loop is not None) for wait in waits(source, "a.py")] == [(2, False), (4, True)]
