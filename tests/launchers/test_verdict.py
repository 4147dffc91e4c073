# SPDX-License-Identifier: Apache-2.0
"""First failure, of the ends of tasks as each supervisor sees them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tfdist.launchers.requests import TRY_AGAIN_EXIT_CODE
from tfdist.launchers.supervise.verdict import CAUSE_SECS, LEAST_SECS, FirstFailure

RAISED, UNDECIDING = {"raised_secs": {"worker:0": 2.0}}, {"decides": False}
LACKS = {"raised_secs": {"worker:0": 2.0}, "is_consequence": True}
# Each case: ends as (task, code, time, options), the first failure, and the time of the decision.
CASES = {
    "local: the first end decides": ([("worker:1", 1, 3.0, {}), ("worker:0", 1, 3.1, {})], "worker:1", 3.0),
    "local: a task that raised first is slow to exit": (
        [
            ("worker:1", 1, 3.0, {"raised_secs": {"worker:0": 2.0, "worker:1": 2.9}}),
            ("worker:0", 1, 3.5, RAISED),
        ],
        "worker:0",
        3.5,
    ),
    "local: a task that raised first does not exit": ([("worker:1", 1, 3.0, RAISED)], "worker:1", 3.0 + CAUSE_SECS),
    "local: a task that calls sys.exit, and ends after the one that misses it": (
        [("worker:0", 1, 3.0, LACKS), ("worker:1", 3, 3.5, {})],
        "worker:1",
        3.5,
    ),
    "local: a task that misses others that go on": ([("worker:0", 1, 3.0, LACKS)], "worker:0", 3.0 + CAUSE_SECS),
    "local: all miss another one": (
        [
            ("worker:1", 1, 3.0, {**LACKS, "raised_secs": {"worker:0": 2.0, "worker:1": 2.1}}),
            ("worker:0", 1, 3.1, LACKS),
        ],
        "worker:0",
        3.1 + CAUSE_SECS,
    ),
    "local: an exception that was caught long ago": ([("worker:1", 1, 100.0, RAISED)], "worker:1", 100.0),
    "local: a task that logged an exception and is killed": (
        [("worker:1", 1, 9.0, RAISED), ("worker:0", -9, 9.5, RAISED)],
        "worker:1",
        9.5,
    ),
    "local: a worker that has lost the chief ends before it": (
        [("worker:0", 1, 3.0, UNDECIDING), ("chief:0", 1, 3.2, {})],
        "worker:0",
        3.2,
    ),
    "local: a worker fails and the chief goes on": ([("worker:0", 1, 3.0, UNDECIDING)], "worker:0", 3 + LEAST_SECS),
    "ssh: a broken connection": ([("worker:1", 255, 3.0, {}), ("worker:0", 1, 3.1, {})], "worker:1", 3.0),
    "ssh: a preempted task, and one that fails otherwise": (
        [("worker:0", TRY_AGAIN_EXIT_CODE, 3.0, {}), ("worker:1", 2, 4.0, {})],
        "worker:1",
        4.0,
    ),
    "slurm: all are preempted, one after the other": (
        [("worker:0", TRY_AGAIN_EXIT_CODE, 3.0, {}), ("worker:1", TRY_AGAIN_EXIT_CODE, 5.0, {})],
        "worker:0",
        3.0 + CAUSE_SECS,
    ),
    "slurm: a preemption after a failure": (
        [("worker:0", 1, 3.0, {}), ("worker:1", TRY_AGAIN_EXIT_CODE, 3.1, {})],
        "worker:0",
        3.0,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_first_failure_is_the_one_that_began_first(case: str):
    ends, task, secs = CASES[case]
    first = FirstFailure()
    for name, code, now_secs, options in ends:
        first.ended(name, code, now_secs, **options)
    assert first.failure is not None
    assert (first.failure.task, first.deadline_secs) == (task, pytest.approx(secs))
    assert first.is_decided(secs) and not first.is_decided(secs - 0.01)


# The first worker raises, and its process ends after that of the other one, which fails because of it.
_SLOW_TO_EXIT = """
import atexit, json, os, pathlib, time
def wait_until(is_due):
    while not is_due():
        time.sleep(0.01)
def is_gone():
    try:
        os.kill(int(other.read_text()), 0)
    except ProcessLookupError:
        return True
raised, other = pathlib.Path("raised"), pathlib.Path("other")
if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0:
    atexit.register(lambda: (raised.touch(), wait_until(lambda: other.exists() and other.read_text() and is_gone())))
    raise FileNotFoundError("data.csv")
wait_until(raised.exists)
other.write_text(str(os.getpid()))
raise RuntimeError("worker:0 is gone")
"""


@pytest.mark.processes
def test_a_task_that_raised_first_and_ends_last_failed_first(tmp_path):
    (tmp_path / "train.py").write_text(_SLOW_TO_EXIT)
    command = [sys.executable, "-m", "tfdist", "launch", "local", "--num_workers=2", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "tfdist: worker:0 failed first (exit code 1); all tasks have ended"
