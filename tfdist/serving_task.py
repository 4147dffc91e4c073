# SPDX-License-Identifier: Apache-2.0
"""Serves a `worker` or `ps` task until the chief is done.

Such a process has no program of its own: the chief's closures run in it. It ends when the chief is done (exit code 0),
or when the chief has vanished (exit code 75, which launchers restart). The chief says that it is done by having
TensorFlow write a file *on the serving machine*, through the connection it has anyway, so that no second port is
needed.

`python -m tfdist.serving_task` serves the task in TF_CONFIG; it is what the embedded cluster starts, and is up within
a second. So this module imports no TensorFlow.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import pathlib
import shutil
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from tfdist import data_worker
from tfdist.cluster import JOB_SECRET_VARIABLE, Cluster, Task
from tfdist.engines import heap, keepalive, rendezvous, task_server, watch

# EX_TEMPFAIL of sysexits.h: "try again later". Launchers restart a task that ends with it.
CHIEF_LOST_EXIT_CODE = 75

_POLL_SECS = 0.5
_CHIEF_LOST_SECS = 10.0
# The same two once this task was asked to end: whoever asked may be waiting to start it again.
_ENDING_POLL_SECS = 0.1
_CHIEF_ENDED_SECS = 0.5
# Not `tempfile.gettempdir()`: TMPDIR need not be the same on the chief, and both have to come to the same path.
_MARKS = pathlib.Path("/tmp")


def serve(cluster: Cluster, start_timeout_secs: float = 300.0) -> int:
    """Serves this process' task until the chief is done.

    Args:
      cluster: The cluster, with the task of this process.
      start_timeout_secs: How long to wait for the chief to come up.

    Returns:
      The exit code: 0 when the chief is done, 75 when it has vanished, 1 when it never came or the port is in use.
    """
    heap.keep_freed_memory(few_arenas=True)
    mark = done_mark(cluster, cluster.task)
    if "chief" in cluster.jobs:
        try:
            _prepare(mark.parent)
        except OSError as error:
            watch.say(f"tfdist: {cluster.task}: {error}")
            return 1
    server = None
    try:
        server = _start_server(cluster)
        if server is None:
            return 1
        with data_worker.beside(cluster):
            if "chief" not in cluster.jobs:
                # An embedded cluster: the guard of this process ends it.
                threading.Event().wait()
            keepalive.watch(cluster)
            with _ending_with_chief() as is_asked_to_end:
                return _await_chief(cluster, mark, start_timeout_secs, is_asked_to_end)
    finally:
        if _is_ours(mark.parent):
            shutil.rmtree(mark.parent, ignore_errors=True)
        del server


def _start_server(cluster: Cluster) -> Any:
    """The server of this process' task; None if its port is in use, which is said."""
    try:
        with rendezvous.naming_port(cluster):
            return task_server.start(cluster)
    except OSError as error:
        watch.say(f"tfdist: {error.strerror}")
        return None


@contextlib.contextmanager
def _ending_with_chief() -> Iterator[threading.Event]:
    """Within this block SIGTERM only sets what is yielded; a second one has its usual effect.

    It may have been sent to all tasks, and then the chief is about to save what is on this one.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def note(number: int, frame: Any) -> None:
        del frame
        asked.set()
        signal.signal(number, before)

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield asked
    finally:
        if signal.getsignal(signal.SIGTERM) == note:
            signal.signal(signal.SIGTERM, before)


def _await_chief(
    cluster: Cluster, mark: pathlib.Path, start_timeout_secs: float, is_asked_to_end: threading.Event
) -> int:
    chief = cluster.jobs["chief"][0]
    seen = False
    waiting_since = last_seen = time.monotonic()
    while not (_is_ours(mark.parent) and mark.exists()):
        now = time.monotonic()
        if rendezvous.answers(chief, _POLL_SECS):
            seen, last_seen = True, now
        elif is_asked_to_end.is_set() and (not seen or now - last_seen > _CHIEF_ENDED_SECS):
            return CHIEF_LOST_EXIT_CODE
        elif seen and now - last_seen > _CHIEF_LOST_SECS:
            watch.say(
                f"tfdist: {cluster.task}: the chief at {chief} has been gone for {_CHIEF_LOST_SECS:.0f} s; "
                f"ending with code {CHIEF_LOST_EXIT_CODE}"
            )
            return CHIEF_LOST_EXIT_CODE
        elif not seen and now - waiting_since > start_timeout_secs:
            watch.say(
                f"tfdist: {cluster.task}: the chief at {chief} did not come up within "
                f"start_timeout_secs={start_timeout_secs:g}"
            )
            return 1
        if is_asked_to_end.is_set():
            time.sleep(_ENDING_POLL_SECS)
        else:
            is_asked_to_end.wait(_POLL_SECS)
    return 0


def done_mark(cluster: Cluster, task: Task) -> pathlib.Path:
    """The file on the machine of `task` that says that the chief is done.

    Its folder has a name that nobody else can guess, where a launcher has handed a secret to all tasks.
    """
    identity = f"{sorted((job, sorted(tasks.items())) for job, tasks in cluster.jobs.items())} {task}"
    digest = hmac.new(_secret(), identity.encode(), hashlib.sha256).hexdigest()
    return _MARKS / f"tfdist-{digest[:24]}" / "done"


def _secret() -> bytes:
    return os.environ.get(JOB_SECRET_VARIABLE, "").encode(errors="surrogateescape")


def _prepare(folder: pathlib.Path) -> None:
    """Removes what an earlier attempt has left, and keeps a name that can be guessed from other users.

    A name that can't be guessed is left to the chief, so that a task that is killed leaves nothing behind.

    Raises:
      OSError: the folder can't be made, or is another user's. The message is one line.
    """
    if folder.is_symlink() or folder.exists():
        if not _is_ours(folder):
            raise OSError(
                f"{folder} is not a folder of this user, so that the chief can't say there that it is done; remove "
                f"it, or set {JOB_SECRET_VARIABLE} to one random text for all tasks. Received: {_described(folder)}"
            )
        shutil.rmtree(folder)
    if not _secret():
        folder.mkdir(mode=0o700)


def _is_ours(folder: pathlib.Path) -> bool:
    """Whether this is a folder, and no link, that belongs to this user."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _described(path: pathlib.Path) -> str:
    status = path.lstat()
    return f"{stat.filemode(status.st_mode)}, user {status.st_uid}"


def main() -> int:
    """Serves the task in TF_CONFIG, in a process that does nothing else."""
    task_server.go_without_front_door()
    return serve(Cluster.from_tf_config())


if __name__ == "__main__":
    sys.exit(main())
