# SPDX-License-Identifier: Apache-2.0
"""A Slurm of one machine: sbatch, srun and the like, which refuse unknown options and run what they get.

`install` puts them into a directory for PATH. State is kept in that directory, one file per fact.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable

import psutil

# Options with a value that sbatch and srun of Slurm 23.11 know, as far as they concern us; those without one.
SBATCH = {
    *("account", "chdir", "comment", "constraint", "cpus-per-task", "error", "export", "gpus-per-node", "gres"),
    *("job-name", "mail-type", "mem", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output", "partition", "qos"),
    *("reservation", "signal", "time"),
}
SBATCH_SWITCHES = {"parsable", "requeue", "exclusive", "no-requeue", "test-only", "wait"}
SRUN = {"ntasks", "het-group", "cpus-per-task", "distribution", "kill-on-bad-exit", "nodes", "output"}
SRUN_SWITCHES = {"unbuffered", "label"}
KILL_WAIT_SECS = 10.0


def install(directory: pathlib.Path) -> dict[str, str]:
    """Writes the commands; returns the environment in which they are found."""
    directory.mkdir()
    for name in ("sbatch", "srun", "scancel", "scontrol", "sinfo", "squeue"):
        path = directory / name
        path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(__file__)} {name} "$@"\n')
        path.chmod(0o755)
    return {**os.environ, "PATH": f"{directory}{os.pathsep}{os.environ['PATH']}", "FAKE_SLURM": str(directory)}


def parse(arguments: list[str], valued: set[str], switches: set[str]) -> tuple[dict[str, str], list[str]]:
    """Long options up to the first word that is none."""
    options: dict[str, str] = {}
    for position, word in enumerate(arguments):
        if not word.startswith("--"):
            return options, arguments[position:]
        name, equals, value = word[2:].partition("=")
        if name not in (valued if equals else switches):
            sys.exit(f"error: unrecognized option '{word}'")
        options[name] = value
    return options, []


def directives(script: str) -> list[str]:
    """The words of the #SBATCH lines, which end at the first command."""
    words: list[str] = []
    for line in script.splitlines()[1:]:
        if line.startswith("#SBATCH "):
            words += shlex.split(line.removeprefix("#SBATCH "))
        elif line and not line.startswith("#"):
            break
    return words


def sbatch(state: pathlib.Path, arguments: list[str]) -> int:
    parse(arguments, SBATCH, SBATCH_SWITCHES)
    script = sys.stdin.read()
    if not script.startswith("#!"):
        sys.exit("error: This does not look like a batch script.")
    options, rest = parse(directives(script), SBATCH, SBATCH_SWITCHES)
    if rest:
        sys.exit(f"error: unrecognized option {rest[0]}")
    if not re.fullmatch(r"[A-Z0-9]+@[0-9]+", options.get("signal", "TERM@1")):
        sys.exit("error: Invalid --signal specification")
    if "cpus-per-task" in options and options.get("mem") == "1T":
        sys.exit("sbatch: error: allocation failure: Requested node configuration is not available")
    if "--test-only" in arguments:
        return 0
    nodes, ntasks, each = (int(options[name]) for name in ("nodes", "ntasks", "ntasks-per-node"))
    counts = [min(each, ntasks - each * node) for node in range(nodes)]
    env = {
        **os.environ,
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": f"n[01-{nodes:02d}]" if nodes > 1 else "n01",
        "SLURM_TASKS_PER_NODE": ",".join(map(str, counts)),
        "SLURM_NTASKS": str(ntasks),
    }
    if "gpus-per-node" in options:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(int(options["gpus-per-node"]))))
    output = options["output"].replace("%j", "4711")
    (state / "comment").unlink(missing_ok=True)
    if (state / "warning").exists():
        print("sbatch: warning: this partition closes at noon", file=sys.stderr, flush=True)
    number = "4711;cluster\n" if "--parsable" in arguments else "Submitted batch job 4711\n"
    if "wait" in options:
        sys.stdout.write(number)
        sys.stdout.flush()
    for attempt in range(10):
        if attempt:
            env["SLURM_RESTART_COUNT"] = str(attempt)
        with pathlib.Path(options["chdir"], output).open("ab") as file:
            code = subprocess.run(
                ["bash", "-c", script],
                env=env,
                cwd=options["chdir"],
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
            ).returncode
        if not (state / "requeued").exists():
            break
        (state / "requeued").unlink()
    (state / "code").write_text(str(code))
    if "wait" in options:
        return code
    sys.stdout.write(number)
    return 0


def srun(state: pathlib.Path, arguments: list[str]) -> int:
    options, command = parse(arguments, SRUN, SRUN_SWITCHES)
    ntasks = int(options["ntasks"])
    step = {"SLURM_STEP_TASKS_PER_NODE": os.environ["SLURM_TASKS_PER_NODE"], "SLURM_STEP_ID": "0"}
    step["SLURM_STEP_NODELIST"] = os.environ["SLURM_JOB_NODELIST"]
    tasks = [
        subprocess.Popen(command, env={**os.environ, **step, "SLURM_PROCID": str(number)}, start_new_session=True)
        for number in range(ntasks)
    ]
    (state / "pids").write_text(" ".join(str(task.pid) for task in tasks))
    by_pid, codes = {task.pid: task for task in tasks}, []
    while by_pid:
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        by_pid.pop(pid)
        codes.append(code if code >= 0 else 128 - code)
        if codes[-1] and options.get("kill-on-bad-exit") == "1":
            _kill(by_pid)
    return max(codes)


def _kill(groups: Iterable[int]) -> None:
    """SIGTERM, and after KillWait SIGKILL, as Slurm does."""
    for group in groups:
        os.killpg(group, signal.SIGTERM)
    if not any(thread.name == "kill" for thread in threading.enumerate()):
        timer = threading.Timer(KILL_WAIT_SECS, lambda: [_kill_now(group) for group in list(groups)])
        timer.name, timer.daemon = "kill", True
        timer.start()


def _kill_now(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def scancel(state: pathlib.Path, arguments: list[str]) -> int:
    options, (step,) = parse(arguments, {"signal"}, set())
    if step != "4711.0":
        sys.exit(f"scancel: error: Invalid job id {step}")
    # A wrapper ends all that its task has started, so that of a caller in a task is the last one.
    ancestors = {each.pid for each in psutil.Process().parents()}
    for pid in sorted((state / "pids").read_text().split(), key=lambda pid: int(pid) in ancestors):
        try:
            os.kill(int(pid), signal.Signals[f"SIG{options['signal']}"])
        except ProcessLookupError:
            continue
    return 0


def scontrol(state: pathlib.Path, arguments: list[str]) -> int:
    if arguments == ["requeue", "4711"]:
        (state / "requeued").touch()
    elif arguments == ["--oneliner", "show", "job", "4711"]:
        job_state = state / "job_state"
        print("JobId=4711", f"JobState={job_state.read_text() if job_state.exists() else 'RUNNING'}", *_limit(state))
    elif arguments == ["show", "config"]:
        print("ProctrackType           = proctrack/cgroup")
    elif arguments[:2] == ["update", "JobId=4711"] and arguments[2].startswith("Comment="):
        (state / "comment").write_text(arguments[2].partition("=")[2])
    else:
        sys.exit(f"invalid keyword: {arguments}")
    return 0


def _limit(state: pathlib.Path) -> list[str]:
    now, limit = datetime.datetime.now().isoformat(timespec="seconds"), state / "time_limit"
    # A preemption sets PreemptTime, and an EndTime that is near.
    text = limit.read_text() if limit.exists() else "UNLIMITED PreemptTime=None"
    return [f"StartTime={now}", f"EndTime={now}", f"TimeLimit={text}"]


def sinfo(state: pathlib.Path, arguments: list[str]) -> int:
    if arguments != ["--noheader", "--Node", "--format=%P %c %Z %G"]:
        sys.exit(f"sinfo: unrecognized option {arguments}")
    print("low* 8 2 (null)")
    return 0


def squeue(state: pathlib.Path, arguments: list[str]) -> int:
    if arguments != ["--noheader", "--jobs=4711", "--format=%k"]:
        sys.exit(f"squeue: unrecognized option {arguments}")
    if (state / "squeue_fails").exists():
        sys.exit("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    comment = state / "comment"
    print(comment.read_text() if comment.exists() else "(null)")
    return 0


if __name__ == "__main__":
    sys.exit(globals()[sys.argv[1]](pathlib.Path(os.environ["FAKE_SLURM"]), sys.argv[2:]))
