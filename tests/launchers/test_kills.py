# SPDX-License-Identifier: Apache-2.0
"""Kills launchers and tasks at random: no process is left behind."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import uuid

import programs
import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.processes]

_MARK = "TFDIST_TEST_KILLS"
# Each task has a child in a session of its own, and neither listens to anybody.
SCRIPT = """
import json, os, signal, subprocess
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
task = json.loads(os.environ["TF_CONFIG"])["task"]
subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("pid", f"{task['type']}:{task['index']}", os.getpid(), flush=True)
while True: signal.pause()
"""
TASKS = 4  # Chief, two workers, a ps.


@pytest.mark.parametrize("kills", [3, pytest.param(200, marks=pytest.mark.timeout(1800))])
def test_nobody_is_left_behind(kills, tmp_path):
    """A worker that is killed is started again, and the next kill may come before, meanwhile or after."""
    (tmp_path / "train.py").write_text(SCRIPT)
    flags = ("--num_ps=1", "--grace_period_secs=0.2", "--restart_backoff_secs=0", "--max_worker_restarts=1")
    command = [sys.executable, "-m", "tfdist", "launch", "local", *flags, "train.py"]
    order, done = random.Random(0), []
    while len(done) < kills:
        mark = uuid.uuid4().hex
        env = {**os.environ, _MARK: mark}
        with subprocess.Popen(
            command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as launcher:
            # Sometimes in the middle of the start.
            victims = {"launcher": launcher.pid, **seen(launcher, order.randint(1, TASKS))}
            while victims:
                done.append(order.choice(sorted(victims)))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victims.pop(done[-1]), order.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGABRT]))
                if not done[-1].startswith("worker"):
                    break
                victims |= seen(launcher, order.randint(0, 1))
            launcher.stdout.read()
            launcher.wait(30)
        family = [each for each in psutil.process_iter() if programs.carries(each, _MARK, mark)]
        _, alive = psutil.wait_procs(family, timeout=20)
        left = [process.cmdline() for process in alive]
        for process in alive:
            process.kill()
        assert not left, f"kill {len(done)} of {done[-1]} left {left}"


def seen(launcher, count):
    """Up to so many tasks that have started, with their process ids."""
    lines = [launcher.stdout.readline().split() for _ in range(count)]
    return {words[2]: int(words[3]) for words in lines if words}
