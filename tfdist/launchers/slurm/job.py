# SPDX-License-Identifier: Apache-2.0
"""Runs a Slurm job from its batch script: starts the step, and requeues the job after a preemption or a failure.

    python3 -m tfdist.launchers.slurm.job --num_workers=4 --max_restarts=3 -- srun ... slurm_task ... train.py

The number of failures is stored in the job's comment, so that no file of a finished job is left on the file system.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import pathlib
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from absl import flags

from tfdist import _log
from tfdist.cluster import JOB_SECRET_VARIABLE
from tfdist.launchers import command_line, requests
from tfdist.launchers.requests import TRY_AGAIN_EXIT_CODE, LaunchError, setting, shell_code
from tfdist.launchers.shape import Shape
from tfdist.launchers.slurm import exits


def secs_of_limit(text: str) -> int | None:
    """Returns a time limit in seconds; None for no limit, and for text that Slurm refuses, too.

    Args:
      text: "minutes", "minutes:seconds", "hours:minutes:seconds", "days-hours", "days-hours:minutes" or
        "days-hours:minutes:seconds". Slurm rounds up to whole minutes.
    """
    days, dash, clock = text.strip().rpartition("-")
    parts = clock.split(":")
    if len(parts) > 3 or not all(each.isdecimal() for each in (days if dash else "0", *parts)):
        return None
    if not dash:
        # The last number is of minutes if it is alone, else of seconds.
        parts = ["0", *parts, "0"] if len(parts) == 1 else ["0", "0", *parts][-3:]
    hours, minutes, seconds = map(int, [*parts, "0", "0"][:3])
    minutes += (int(days or 0) * 24 + hours) * 60 + (seconds > 0)
    return minutes * 60 or None


_FAILURES = re.compile(r"\btfdist_failures=(\d{1,9})\b")
# Slurm sends the signal before the time limit up to a minute too early.
_EARLY_SECS = 90.0


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a job's requeues, and `task_logs`, in which %j is the job's id."""

    max_restarts: int = setting(0, "restarts of a job that has failed")
    max_preemptions: int = setting(100, "restarts of a job that was preempted; not counted as failures")
    pre_kill_secs: int = setting(120, "seconds before the time limit when tasks get SIGTERM; 0 for none", most=65535)
    task_logs: str = setting("slurm-%j", "directory for files of each task's output; empty for none")


class BatchJob:
    """One run of a job.

    Args:
      number: id of the job.
      attempt: number of requeues before this run.
      tasks: the tasks of the job.
      limits: limits of requeues.
    """

    def __init__(self, number: str, attempt: int, tasks: Shape, limits: Limits) -> None:
        self._number = number
        self._attempt = attempt
        self._limits = limits
        # `None` while Slurm doesn't answer.
        self._failures = _failures_before(number) if attempt else 0
        self._directory = pathlib.Path.cwd() / f".tfdist-{number}-{attempt}"
        self._exits = exits.Exits(self._directory, tasks)
        self._is_ending = False

    @property
    def _preemptions(self) -> int:
        """Number of preemptions before this run; its lower bound if the number of failures is unknown."""
        # A requeue for another reason, such as by an administrator, counts as a preemption.
        failures = self._limits.max_restarts if self._failures is None else self._failures
        return max(0, self._attempt - failures)

    def run(self, srun: Sequence[str]) -> int:
        """Runs the step; returns the exit code of the job."""
        for leftover in pathlib.Path.cwd().glob(f".tfdist-{self._number}-[0-9]*"):
            # Left by an earlier run that Slurm killed.
            shutil.rmtree(leftover, ignore_errors=True)
        if self._preemptions > self._limits.max_preemptions:
            return self._give_up(TRY_AGAIN_EXIT_CODE, "--max_preemptions", self._limits.max_preemptions)
        signal.signal(signal.SIGTERM, self._end)
        try:
            self._directory.mkdir()
            code = subprocess.Popen(srun, env={**os.environ, **self._environment()}).wait()
            if self._is_ending:
                return exits.TERMINATED_EXIT_CODE
            return self._conclude(self._exits.verdict(shell_code(code)))
        except OSError as error:
            _log.say(f"can't run {srun[0]} in {pathlib.Path.cwd()}, which all hosts of the job should share: {error}")
            return 1
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _end(self, *_: object) -> None:
        """Handles SIGTERM: Slurm ends the whole job (scancel or requeue), and may kill this process soon."""
        self._is_ending = True
        shutil.rmtree(self._directory, ignore_errors=True)

    def _environment(self) -> dict[str, str]:
        return {
            # A new secret for each run.
            JOB_SECRET_VARIABLE: secrets.token_hex(32),
            "TFDIST_ATTEMPT": str(self._attempt),
            exits.EXITS_VARIABLE: str(self._directory),
            exits.LOGS_VARIABLE: self._limits.task_logs.replace("%j", self._number),
            exits.REACHES_ALL_VARIABLE: str(int(_signals_reach_all())),
        }

    def _conclude(self, verdict: exits.SlurmVerdict) -> int:
        if verdict.code == 0:
            return 0
        for task in verdict.lost:
            _log.say(f"{task} left no exit code: its wrapper was killed")
        if verdict.task and not verdict.lost:
            how = "was preempted, and the work is saved" if verdict.is_preempted else "failed first"
            _log.say(f"{verdict.task} {how} (exit code {verdict.code})")
        fields = _fields(self._number)
        if fields.get("JobState", "RUNNING") != "RUNNING":
            return verdict.code  # The job was cancelled; a requeue would start it again.
        if self._failures is None:
            self._failures = _failures_before(self._number)
        if verdict.is_preempted:
            return self._after_preemption(verdict, fields)
        if self._failures is None:
            _log.say("not queued again: squeue does not say how many failures there were before")
            return verdict.code
        if self._failures >= self._limits.max_restarts:
            return self._give_up(verdict.code, "--max_restarts", self._limits.max_restarts)
        if not _note_failures(self._number, self._failures + 1):
            return verdict.code
        return self._requeue(verdict.code, f"restart {self._failures + 1} of {self._limits.max_restarts}")

    def _after_preemption(self, verdict: exits.SlurmVerdict, fields: Mapping[str, str]) -> int:
        if not (verdict.is_saved or verdict.is_resumable) and self._is_near_limit(fields):
            _log.say(
                "not queued again: the time limit is near and nothing was saved, so that it would begin anew; "
                "train with tfdist.callbacks.Resume, or use a longer --time"
            )
            return exits.TERMINATED_EXIT_CODE
        if self._preemptions >= self._limits.max_preemptions:
            return self._give_up(verdict.code, "--max_preemptions", self._limits.max_preemptions)
        return self._requeue(verdict.code, f"preemption {self._preemptions + 1}")

    def _is_near_limit(self, fields: Mapping[str, str]) -> bool:
        # Not EndTime: a preemption moves it to the end of the grace period.
        limit_secs = secs_of_limit(fields.get("TimeLimit", ""))
        try:
            started = datetime.datetime.fromisoformat(fields["StartTime"])
        except (KeyError, ValueError):
            return False
        if fields.get("PreemptTime", "None") != "None" or limit_secs is None or not self._limits.pre_kill_secs:
            return False
        left = limit_secs - (datetime.datetime.now() - started).total_seconds()
        return left <= self._limits.pre_kill_secs + _EARLY_SECS

    def _requeue(self, code: int, why: str) -> int:
        _log.say(f"queuing the job again ({why})")
        # Removed before, because Slurm ends this process as soon as the job is requeued.
        shutil.rmtree(self._directory, ignore_errors=True)
        _ask("scontrol", "requeue", self._number)
        return code

    def _give_up(self, code: int, flag: str, most: int) -> int:
        if most or flag == "--max_preemptions":  # With --max_restarts=0 the user expects no restart.
            _log.say(f"not queued again: {flag}={most} is used up")
        return code


def _ask(*command: str) -> str | None:
    """Returns the output of a Slurm command; writes a line and returns None if it failed."""
    try:
        return requests.run_tool([requests.find_tool(command[0], "call this in a job"), *command[1:]])
    except LaunchError as error:
        _log.say(" ".join(str(error).split()))
        return None


def _fields(number: str) -> dict[str, str]:
    """Returns the fields of a job; {} if Slurm doesn't answer."""
    lines = (_ask("scontrol", "--oneliner", "show", "job", number) or "").splitlines()
    # The first component of a heterogeneous job comes first.
    return dict(word.split("=", 1) for word in (lines[0].split() if lines else []) if "=" in word)


def _comment(number: str) -> str | None:
    """Returns the comment of a job; None if Slurm doesn't answer."""
    text = _ask("squeue", "--noheader", f"--jobs={number}", "--format=%k")
    if text is None:
        return None
    found = text.strip().partition("\n")[0].strip()
    return "" if found in ("(null)", "N/A") else found


def _failures_before(number: str) -> int | None:
    """Returns the number of failures in a job's comment; None if Slurm doesn't answer."""
    comment = _comment(number)
    if comment is None:
        return None
    found = _FAILURES.search(comment)
    return int(found[1]) if found else 0


def _note_failures(number: str, failures: int) -> bool:
    """Writes the number of failures into the job's comment, and keeps its other text; returns False on an error."""
    before = _comment(number)
    if before is None:
        _log.say("not queued again: squeue does not say the job's comment, where failures are counted")
        return False
    comment = " ".join(_FAILURES.sub("", before).split())
    text = f"{comment} tfdist_failures={failures}".strip()
    return _ask("scontrol", "update", f"JobId={number}", f"Comment={text}") is not None


def _signals_reach_all() -> bool:
    """Returns True if Slurm signals all descendants of a task, so that the script gets signals without the wrapper."""
    config = _ask("scontrol", "show", "config") or ""
    return bool(re.search(r"(?m)^ProctrackType\s*=\s*proctrack/linuxproc\s*$", config))


def main(arguments: Sequence[str]) -> int:
    """Runs the step that is given after the flags; returns the exit code of the job."""
    try:
        values, srun = command_line.parse(lambda flags: command_line.define_settings(flags, Shape, Limits), arguments)
        tasks = command_line.from_settings(Shape, values)
        limits = command_line.from_settings(Limits, values)
        number = os.environ.get("SLURM_JOB_ID", "")
        if not (number.isascii() and number.isdigit()):
            raise LaunchError(f"SLURM_JOB_ID is not set; run this in a batch script. Received: {number!r}")
    except (LaunchError, flags.Error) as error:
        _log.say(" ".join(str(error).split()))
        return 2
    attempt = 0
    with contextlib.suppress(ValueError):
        attempt = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    return BatchJob(number, attempt, tasks, limits).run(srun)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
