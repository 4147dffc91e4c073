# SPDX-License-Identifier: Apache-2.0
# pathlib and contextlib would double what it costs to start a task:
# ruff: noqa: PTH112, PTH123, PTH208, SIM105
"""Guard process of one task: ends all processes of the task when the task or the parent process has ended.

Run by path, `python -I -S guard.py PARENT_PID COMMAND...`, never imported; it imports as little as possible because it
starts once per task. Standard input is a socket to the parent (see `processes.Process`):

    parent -> guard   one byte per signal to send to the task's process group; end of file means the parent is gone
    guard -> parent   "pid N", then "exit CODE" (negative for a signal) as soon as the task itself ends, then "done"

Three mechanisms are needed together. The guard watches its parent with a pidfd as well as with the socket, because a
child that the parent forks keeps the socket open. The task gets PR_SET_PDEATHSIG, so that it ends when the guard is
killed. This signal depends on the *thread* that forked, so it is set here, where there is only one thread. The guard is
the "child subreaper" of its descendants, so that it becomes the parent of orphaned daemons and of processes in other
sessions.
"""

import os
import select
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Time for the task between SIGTERM and SIGKILL when its parent has died, and no process waits for it.
_ORPHAN_GRACE_SECS = 1.0
_SWEEP_SECS = 5.0
_POLL_PARENT_SECS = 0.5
# The variable of `slurm/exits.py`: the scheduler signals the task and the guard itself, and means the task.
_REACHES_ALL_VARIABLE = "TFDIST_SLURM_REACHES_ALL"
_RESET = ("SIGINT", "SIGTERM", "SIGHUP", "SIGCHLD", "SIGPIPE", "SIGXFSZ", "SIGQUIT", "SIGUSR1", "SIGUSR2")


def main(argv: list[str]) -> int:
    """Runs the command `argv[2:]` for the parent process `argv[1]`, until all of its descendants have ended."""
    parent, command = int(argv[1]), argv[2:]
    control = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    prctl = _prctl()
    subreaper = prctl(_PR_SET_CHILD_SUBREAPER, 1) == 0
    parent_fd = _pidfd(parent)
    if os.getppid() != parent:
        return 1  # The parent died before it could be watched.
    wake = _wake_on_signals()
    task = _start(command, prctl)
    _tell(control, f"pid {task}")
    code = _supervise(task, parent, control, parent_fd, wake)
    _tell(control, f"exit {code}")
    if not subreaper:
        _kill_group(task, signal.SIGKILL)
    _sweep(time.monotonic() + _SWEEP_SECS)
    _tell(control, "done")
    return 0


def _prctl():
    """Returns the system call prctl(option, value), or outside of Linux a function that fails."""
    if not sys.platform.startswith("linux"):
        return lambda option, value: -1
    import ctypes

    call = ctypes.CDLL(None).prctl
    call.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    return lambda option, value: call(option, value, 0, 0, 0)


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1  # Old kernel, sandbox or other system: getppid is polled instead.


def _wake_on_signals() -> int:
    """Returns a descriptor from which the numbers of SIGCHLD and SIGTERM can be read."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # The thread that started us may have had them blocked.
    wake, sender = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(sender, False)
    signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    for signum in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(signum, lambda *_: None)
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    return wake


def _start(command: list[str], prctl) -> int:
    """Starts the task in a session of its own; returns its process id once the session exists."""
    ready, sender = os.pipe()
    guard = os.getpid()
    task = os.fork()
    if task == 0:
        _become(command, prctl, guard)
    os.close(sender)
    # End of file: the command runs (close-on-exec), so its process group exists and can be signalled.
    os.read(ready, 1)
    os.close(ready)
    return task


def _become(command: list[str], prctl, guard: int) -> None:
    """Executes the command in the forked child. Never returns."""
    try:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)
        os.setsid()
        for name in _RESET:
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        os.execvp(command[0], command)
    except BaseException as error:
        os.write(2, f"can't run {command[0]}: {error}\n".encode(errors="backslashreplace"))
    finally:
        os._exit(127)


def _supervise(task: int, parent: int, control: int, parent_fd: int, wake: int) -> int:
    """Forwards signals until the task ends; returns its exit code, negative for a signal."""
    poller = select.poll()
    for descriptor in (control, wake, parent_fd):
        if descriptor >= 0:
            poller.register(descriptor, select.POLLIN)
    poll_ms = None if parent_fd >= 0 else int(_POLL_PARENT_SECS * 1000)
    orphaned, asked, kill_at = False, False, None
    is_signalled_too = os.environ.get(_REACHES_ALL_VARIABLE) == "1"
    while True:
        code = _reap(task)
        if code is not None:
            # The parent never signals the guard, so another program has ended the task; its own code doesn't count.
            return -signal.SIGTERM if asked else code
        if orphaned and kill_at is None:
            _kill_group(task, signal.SIGTERM)
            kill_at = time.monotonic() + _ORPHAN_GRACE_SECS
        if kill_at is not None and time.monotonic() >= kill_at:
            _kill_group(task, signal.SIGKILL)
        readable = {fd for fd, _ in poller.poll(50 if orphaned else poll_ms)}
        if wake in readable and signal.SIGTERM in os.read(wake, 4096) and not is_signalled_too:
            orphaned = asked = True  # Another program ends the guard itself.
        if parent_fd in readable or os.getppid() != parent:
            orphaned = True
        if control in readable and not _pass_on(control, task):
            orphaned = True
            poller.unregister(control)
        if parent_fd in readable:
            poller.unregister(parent_fd)


def _pass_on(control: int, task: int) -> bool:
    """Sends the signals that the parent has requested; returns False at end of file."""
    try:
        asked = os.read(control, 4096)
    except OSError:
        return False
    for signum in asked:
        _kill_group(task, signum)
    return bool(asked)


def _kill_group(task: int, signum: int) -> None:
    try:
        os.killpg(task, signum)
        os.killpg(task, signal.SIGCONT)  # A stopped process handles SIGTERM only once it is continued.
    except (ProcessLookupError, PermissionError):
        pass


def _reap(task: int) -> int | None:
    """Reaps all ended children; returns the task's exit code if it is among them."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == task:
            code = os.waitstatus_to_exitcode(status)


def _sweep(deadline: float) -> None:
    """Kills the task's remaining descendants; the children of each killed one become children of the guard."""
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for pid in _children():
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        time.sleep(0.005)


def _children() -> list[int]:
    """Returns the direct children. Scans /proc, because /proc/self/task/*/children is a build option of the kernel."""
    me, found = str(os.getpid()), []
    for entry in os.listdir("/proc") if os.path.isdir("/proc/self") else []:
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    # The name in parentheses may itself hold spaces and parentheses.
                    parent = file.read().rpartition(b")")[2].split()[1].decode()
            except OSError:
                continue
            if parent == me:
                found.append(int(entry))
    return found


def _tell(control: int, message: str) -> None:
    try:
        os.write(control, f"{message}\n".encode())
    except OSError:
        pass  # The parent has died.


if __name__ == "__main__":
    sys.exit(main(sys.argv))
