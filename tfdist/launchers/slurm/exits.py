# SPDX-License-Identifier: Apache-2.0
"""Collects the exit codes of a Slurm step's tasks in a shared directory, and decides the exit code of the step.

srun itself would kill all tasks at once when one has failed, and report the largest of their codes. The directory has

    worker_0          exit code of the script of worker:0
    term_worker_0     worker:0 has got SIGTERM: "1" before any task had failed, "0" afterwards
    first             exit code and name of the task that failed first
    resumes           a `tfdist.callbacks.Resume` is in use: the job can resume from a checkpoint
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable

from tfdist import _log
from tfdist.cluster import Task
from tfdist.launchers.requests import TRY_AGAIN_EXIT_CODE
from tfdist.launchers.shape import Shape
from tfdist.launchers.supervise.verdict import CAUSE_SECS, FirstFailure

EXITS_VARIABLE = "TFDIST_SLURM_EXITS"
LOGS_VARIABLE = "TFDIST_SLURM_LOGS"
# "1" where Slurm signals the script itself as well as its wrapper (proctrack/linuxproc).
REACHES_ALL_VARIABLE = "TFDIST_SLURM_REACHES_ALL"
_SIGNAL_TIMEOUT_SECS = 20.0
_POLL_SECS = 0.2
_KILLED_EXIT_CODE = 137
TERMINATED_EXIT_CODE = 128 + signal.SIGTERM
_LATE_SECS = 2.0


@dataclasses.dataclass(frozen=True)
class SlurmVerdict:
    """Result of a step.

    Args:
      code: exit code of the step: that of the task that failed first, or 0.
      task: name of this task; None if no task has failed, or all were preempted together.
      is_preempted: True for a preemption, which is no failure.
      is_saved: True if a deciding task has saved its work, as its exit code shows.
      is_resumable: True if the script can resume from a checkpoint.
      lost: tasks whose wrapper was killed, so that they left neither an exit code nor a note of SIGTERM.
    """

    code: int
    task: str | None = None
    is_preempted: bool = False
    is_saved: bool = False
    is_resumable: bool = False
    lost: tuple[str, ...] = ()


class Exits:
    """The directory of one run of a job.

    Args:
      directory: the directory; None in a step without one, such as a step started by hand.
      job: the tasks of the job.
    """

    def __init__(self, directory: str | os.PathLike[str] | None, job: Shape) -> None:
        self._directory = pathlib.Path(directory) if directory else None
        self._job = job
        self._has_ended = False

    def job_has_succeeded(self) -> bool:
        """Returns True if all deciding tasks have succeeded, so that the others may end."""
        return all(self._code(task) == "0" for task in self._job.deciding)

    def note_term(self, task: Task) -> None:
        """Notes that a task has received SIGTERM while it ran."""
        if not self._has_ended and self._term(task) is None:
            self._write(f"term_{_file_name(task)}", "0" if self._read("first") else "1", "w")

    def leave(self, task: Task, code: int, grace_secs: float) -> None:
        """Notes the exit code of a task; after a failure, waits for the others to save their work."""
        if code == TERMINATED_EXIT_CODE:
            # Where Slurm signals the script, too, it can end before this process has received the same signal.
            self._wait(lambda: self._term(task) is not None, _LATE_SECS)
        self._has_ended = True
        self._write(_file_name(task), str(code), "w")
        if code == 0 or self._is_gone():
            return
        if self._follows_job_wide_term(task):
            _log.say(f"{task} ended with exit code {code} after SIGTERM to all tasks; waiting for the others")
        else:
            first, now_secs = FirstFailure(), time.monotonic()
            first.ended(str(task), code, now_secs)
            self._wait(lambda: self._read("first") is not None or self._all_ended(), first.deadline_secs - now_secs)
            if self._write("first", f"{code} {task}\n", "x"):
                _log.say(f"{task} ended with exit code {code}, as the first; ending the others")
                if len(self._job.tasks) > 1:
                    _terminate_step()
        # srun kills the other tasks as soon as this process has ended (--kill-on-bad-exit).
        self._wait(self._all_ended, grace_secs)

    def verdict(self, srun_code: int) -> SlurmVerdict:
        """Decides the result of the step, once srun has ended with this code."""
        _refresh(self._directory)
        codes = {task: self._code(task) for task in self._job.tasks}
        if srun_code == 0 or not self._directory:
            return SlurmVerdict(srun_code)
        if self.job_has_succeeded():
            return SlurmVerdict(0)  # A failure of a parameter server after the chief's success doesn't count.
        saved = any(codes[task] == str(TRY_AGAIN_EXIT_CODE) for task in self._job.deciding)
        resumable = self._read("resumes") is not None
        failed = [task for task in self._job.tasks if codes[task] != "0"]
        lost = tuple(str(task) for task in failed if codes[task] is None and self._term(task) is None)
        code, _, name = (self._read("first") or "").strip().partition(" ")
        if failed and all(self._term(task) == "1" for task in failed):
            return SlurmVerdict(TRY_AGAIN_EXIT_CODE, None, True, saved, resumable)
        if code.isdigit() and (int(code) != TRY_AGAIN_EXIT_CODE or not lost):
            return SlurmVerdict(int(code), name, int(code) == TRY_AGAIN_EXIT_CODE, True, resumable)
        if lost and len(lost) < len(self._job.tasks):
            killed = srun_code if srun_code not in (0, TRY_AGAIN_EXIT_CODE) else _KILLED_EXIT_CODE
            return SlurmVerdict(killed, lost[0], lost=lost)
        return SlurmVerdict(srun_code)

    def _follows_job_wide_term(self, task: Task) -> bool:
        """Returns True if this task ended after a SIGTERM that all running tasks received."""
        if self._term(task) != "1":
            return False
        heard = lambda: all(self._term(each) or self._code(each) for each in self._job.tasks)  # noqa: E731
        return self._wait(heard, CAUSE_SECS)  # SIGTERM reaches all tasks of a job in less time.

    def _wait(self, is_due: Callable[[], bool], secs: float) -> bool:
        """Waits until `is_due` returns True; returns False after the timeout."""
        deadline = time.monotonic() + secs
        while not is_due():
            if time.monotonic() >= deadline or self._is_gone():
                return False
            _refresh(self._directory)
            time.sleep(_POLL_SECS)
        return True

    def _is_gone(self) -> bool:
        """Returns True if the batch script has removed the directory, because Slurm ends the job."""
        return self._directory is not None and not self._directory.exists()

    def _all_ended(self) -> bool:
        return all(self._code(task) is not None for task in self._job.tasks)

    def _code(self, task: Task) -> str | None:
        return self._read(_file_name(task))

    def _term(self, task: Task) -> str | None:
        return self._read(f"term_{_file_name(task)}")

    def _read(self, name: str) -> str | None:
        try:
            # An empty file is about to be written.
            return (self._directory / name).read_text() or None if self._directory else None
        except OSError:
            return None

    def _write(self, name: str, text: str, mode: str) -> bool:
        """Writes a file; returns False if another task has written it before."""
        try:
            if self._directory:
                with (self._directory / name).open(mode, encoding="utf-8") as file:
                    file.write(text)
        except FileExistsError:
            return False
        except OSError as error:
            if not self._is_gone():
                _log.say(f"can't write to {self._directory}, which all hosts of the job should share: {error}")
        return True


def ended_well(tasks: Iterable[str]) -> set[str]:
    """Returns those of `tasks`, such as "worker:1", that have ended with code 0; of a Slurm job alone."""
    given = os.environ.get(EXITS_VARIABLE) if os.environ.get("TFDIST_LAUNCHER") == "slurm" else None
    ended: set[str] = set()
    if given:
        directory = pathlib.Path(given)
        _refresh(directory)
        with contextlib.suppress(OSError):
            # One look at the directory, which many tasks share, for all tasks that still run.
            there = {path.name: path for path in directory.iterdir()}
            for task in tasks:
                path = there.get(_file_name(task))
                if path and path.read_text() == "0":
                    ended.add(task)
    return ended


def note_resumable() -> None:
    """Notes, in a task of a Slurm job, that the script can resume from a checkpoint."""
    if directory := os.environ.get(EXITS_VARIABLE):
        with contextlib.suppress(OSError):
            pathlib.Path(directory, "resumes").write_text("1")


def _refresh(directory: pathlib.Path | None) -> None:
    """Changes the directory, so that a network file system drops its cached list of files."""
    with contextlib.suppress(OSError):
        if directory:
            probe = directory / f"probe_{os.uname().nodename}_{os.getpid()}"
            probe.touch()
            probe.unlink()


def _file_name(task: Task | str) -> str:
    return str(task).replace(":", "_")


def _terminate_step() -> None:
    job, step, tool = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_STEP_ID"), shutil.which("scancel")
    if tool and job and step:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            command = [tool, "--signal=TERM", f"{job}.{step}"]
            subprocess.run(command, timeout=_SIGNAL_TIMEOUT_SECS, stdin=subprocess.DEVNULL, check=False)
