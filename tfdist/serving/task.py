# SPDX-License-Identifier: Apache-2.0
"""Server process of a `worker` or `ps` task, which runs until the chief is done.

Such a process runs the chief's closures and no program of its own. It ends when the chief is done (exit code 0), or
when the chief is lost (exit code 75, after which launchers restart it). When the chief is done, it has TensorFlow write
a file (the mark) *on the server's machine*. That uses the existing connection, so no second port is needed.

`python -m tfdist.serving.task` serves the task in TF_CONFIG, with TFDIST_LOGICAL_CPUS logical CPUs and the operations
of the libraries in TFDIST_OP_LIBRARIES. The embedded cluster starts its processes with it. It starts within a second,
because this module imports no TensorFlow.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from tfdist import _log, _machine, _sockets
from tfdist.cluster import JOB_SECRET_VARIABLE, Cluster, Task
from tfdist.compat.tensorflow import servers
from tfdist.coordination import keepalive, rendezvous
from tfdist.coordination.usage import USAGE_REQUEST, Sampler
from tfdist.launchers.requests import TRY_AGAIN_EXIT_CODE

# The environment variable with the number of logical CPUs of a worker's server, which its parent sets.
VARIABLE = "TFDIST_LOGICAL_CPUS"
# The environment variable with the paths of libraries of operations, separated as in PATH.
LIBRARIES_VARIABLE = "TFDIST_OP_LIBRARIES"
# TensorFlow's own variable for the number of threads of an operation.
_THREADS_VARIABLE = "TF_NUM_INTRAOP_THREADS"


def start(cluster: Cluster, num_cpus: int = 1) -> Any:
    """Starts the server of this process' task; it lives as long as it is held, and then some.

    Args:
      cluster: the cluster, with this process' task.
      num_cpus: number of logical CPUs of the server.
    """
    task, cpus = cluster.task, os.cpu_count() or 1
    # A process that is bound to some of the CPUs has its share already; 0 leaves the choice to TensorFlow.
    is_bound = _machine.usable_cpus() < cpus
    threads = 0 if is_bound or os.environ.get(_THREADS_VARIABLE) else threads_per_operation(cluster, cpus)
    # The server's thread ends with the process, which does nothing else.
    functions = _Functions(str(task), Sampler(from_now=False).start())
    return servers.start_server(cluster.jobs, task.type, task.index, threads, functions, num_cpus)


class _Functions:
    """Answers requests for counters, libraries and codecs; imports codecs when needed, because most clusters need none.

    Args:
      task: name of this process, such as "worker:0".
      sampler: counters of this process.
    """

    def __init__(self, task: str, sampler: Sampler) -> None:
        self._task = task
        self._sampler = sampler
        self._lock = threading.Lock()
        self._server: Any = None

    def __call__(self, *arguments: Any) -> Any:
        """See `on_servers.CodecServer`."""
        import numpy as np

        request = arguments[0] if arguments else None
        # A scalar string comes as bytes, or in an array.
        request = request.item() if getattr(request, "size", 0) == 1 else request
        if request == USAGE_REQUEST:
            return [np.frombuffer(self._sampler.sample().to_json().encode(), np.uint8).copy()]
        if request == servers.LOAD_REQUEST:
            try:
                servers.load_op_libraries([os.fsdecode(path) for path in arguments[1]])
            except OSError as error:
                raise ValueError(f"{self._task} can't load operations: {error}") from None
            return [np.zeros(0, np.uint8)]
        with self._lock:
            if self._server is None:
                from tfdist.compression import on_servers

                self._server = on_servers.CodecServer(self._task)
        return self._server(*arguments)


def threads_per_operation(cluster: Cluster, num_cpus: int) -> int:
    """Returns the number of threads per operation of this process' task: workers of one host share its CPUs.

    TensorFlow's default is one thread per CPU in each process, with which workers of one host wait for each other's
    threads. Shares are rounded up. Tasks of other jobs don't count, because they are idle most of the time.

    Args:
      cluster: the cluster, with this process' task.
      num_cpus: number of CPUs of this host.
    """
    host, _ = _sockets.address_key(cluster.address())
    workers = [each for each in cluster.jobs.get("worker", {}).values() if _sockets.address_key(each)[0] == host]
    return -(-num_cpus // max(1, len(workers)))


# After SIGTERM a chief is lost sooner, because a launcher may be waiting to start this task again.
_ENDING_POLL_SECS = 0.1
_CHIEF_ENDED_SECS = 0.5
# Not `tempfile.gettempdir()`, because TMPDIR may differ on the chief, and both must compute the same path.
_MARKS = pathlib.Path("/tmp")


@contextlib.contextmanager
def _without_traceback_of_interrupt() -> Iterator[None]:
    """Lets Ctrl-C end the process as ever, by SIGINT, but without a traceback: it shows no line that the user wrote."""
    try:
        yield
    except KeyboardInterrupt:
        before = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
            if not issubclass(kind, KeyboardInterrupt):
                before(kind, error, traceback)

        sys.excepthook = hook
        raise


@_without_traceback_of_interrupt()
def serve(cluster: Cluster, start_timeout_secs: float = 300.0, num_cpus: int = 1) -> int:
    """Serves this process' task until the chief is done.

    Args:
      cluster: the cluster, with the task of this process.
      start_timeout_secs: how long to wait for the chief to start.
      num_cpus: number of logical CPUs of the server.

    Returns:
      The exit code: 0 if the chief is done, 75 if it was lost, 1 if it never started or the port is in use.
    """
    _machine.keep_freed_memory(few_arenas=True)
    mark = done_mark(cluster, cluster.task)
    if "chief" in cluster.jobs:
        try:
            prepare(mark.parent)
        except OSError as error:
            _log.say(f"{cluster.task}: {error}")
            return 1
    server = None
    try:
        try:
            with rendezvous.naming_port(cluster):
                server = start(cluster, num_cpus)
        except OSError as error:
            _log.say(f"{error.strerror}")
            return 1
        if "chief" not in cluster.jobs:
            # In an embedded cluster the process ends with its parent.
            threading.Event().wait()
        keepalive.watch(cluster)
        with _ending_with_chief() as is_asked_to_end:
            return _await_chief(cluster, mark, start_timeout_secs, is_asked_to_end)
    finally:
        if is_ours(mark.parent):
            shutil.rmtree(mark.parent, ignore_errors=True)
        del server


@contextlib.contextmanager
def _ending_with_chief() -> Iterator[threading.Event]:
    """Yields an event that SIGTERM sets within this block, instead of ending the process; a second SIGTERM ends it.

    SIGTERM may have been sent to all tasks, and the chief must still save the variables on this one.
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
    while not (is_ours(mark.parent) and mark.exists()):
        now = time.monotonic()
        if _sockets.connection_error(chief, keepalive.POLL_SECS) is None:
            seen, last_seen = True, now
        elif is_asked_to_end.is_set() and (not seen or now - last_seen > _CHIEF_ENDED_SECS):
            return TRY_AGAIN_EXIT_CODE
        elif seen and now - last_seen > keepalive.LOST_SECS:
            _log.say(
                f"{cluster.task}: the chief at {chief} has been gone for {keepalive.LOST_SECS} s; "
                f"ending with code {TRY_AGAIN_EXIT_CODE}"
            )
            return TRY_AGAIN_EXIT_CODE
        elif not seen and now - waiting_since > start_timeout_secs:
            _log.say(
                f"{cluster.task}: the chief at {chief} did not come up within start_timeout_secs={start_timeout_secs:g}"
            )
            return 1
        if is_asked_to_end.is_set():
            time.sleep(_ENDING_POLL_SECS)
        else:
            is_asked_to_end.wait(keepalive.POLL_SECS)
    return 0


def done_mark(cluster: Cluster, task: Task) -> pathlib.Path:
    """Returns the path of the file on the machine of `task` that exists once the chief is done.

    The name of its folder can't be guessed if a launcher has passed a secret to all tasks.
    """
    identity = f"{sorted((job, sorted(tasks.items())) for job, tasks in cluster.jobs.items())} {task}"
    digest = _sockets.proof(_secret(), "done", identity)
    return _MARKS / f"tfdist-{digest[:24]}" / "done"


def _secret() -> bytes:
    return os.environ.get(JOB_SECRET_VARIABLE, "").encode(errors="surrogateescape")


def prepare(folder: pathlib.Path) -> None:
    """Removes the folder of an earlier attempt, and creates a new one if its name can be guessed by other users.

    A folder with a secret name is created by the chief, so that a killed task leaves no folder behind.

    Raises:
      OSError: the folder can't be created, or belongs to another user. The message is one line.
    """
    if folder.is_symlink() or folder.exists():
        if not is_ours(folder):
            status = folder.lstat()
            seen = f"{stat.filemode(status.st_mode)}, user {status.st_uid}"
            raise OSError(
                f"{folder} is not a folder of this user, so that the chief can't say there that it is done; remove "
                f"it, or set {JOB_SECRET_VARIABLE} to one random text for all tasks. Received: {seen}"
            )
        shutil.rmtree(folder)
    if not _secret():
        folder.mkdir(mode=0o700)


def is_ours(folder: pathlib.Path) -> bool:
    """Returns True if this is a folder, and no link, that belongs to this user."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def main() -> int:
    """Serves the task in TF_CONFIG, in a process that does nothing else."""
    servers.skip_package_init()
    cluster = Cluster.from_tf_config()
    try:
        servers.load_op_libraries([path for path in os.environ.get(LIBRARIES_VARIABLE, "").split(os.pathsep) if path])
    except OSError as error:
        _log.say(f"{cluster.task} can't load operations that the program has loaded: {error}")
    return serve(cluster, num_cpus=int(os.environ.get(VARIABLE, "1")))


if __name__ == "__main__":
    sys.exit(main())
