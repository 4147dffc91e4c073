# SPDX-License-Identifier: Apache-2.0
"""Whoever is killed, by whatever signal and whenever: nobody is left behind."""

import os
import random
import signal
import subprocess
import sys
import uuid

import psutil
import pytest

pytestmark = pytest.mark.processes

_MARK = "TFDIST_TEST_KILLS"
# Each task has a child in a session of its own, and neither listens to anybody.
SCRIPT = """
import json, os, signal, subprocess
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
task = json.loads(os.environ["TF_CONFIG"])["task"]
subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("pid", task["type"], os.getpid(), flush=True)
while True: signal.pause()
"""
TASKS = 4  # Chief, two workers, a ps.
KILLS = pytest.mark.parametrize("kills", [3, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])


def family(mark):
    """Every process that carries the mark in its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@KILLS
def test_nobody_is_left_behind(kills, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    order = random.Random(0)
    for number in range(kills):
        mark = uuid.uuid4().hex
        command = [sys.executable, "-m", "tfdist.cli", "launch", "local", "--num_ps=1", "--grace_period_secs=0.2"]
        with subprocess.Popen(
            [*command, "train.py"],
            cwd=tmp_path,
            env={**os.environ, _MARK: mark},
            stdout=subprocess.PIPE,
            stderr=-3,
            text=True,
        ) as launcher:
            # Sometimes in the middle of the start.
            seen = [launcher.stdout.readline().split() for _ in range(order.randint(1, TASKS))]
            victims = {"launcher": launcher.pid, **{words[2]: int(words[3]) for words in seen}}
            victim = order.choice(sorted(victims))
            os.kill(victims[victim], order.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGABRT]))
            launcher.stdout.read()
            launcher.wait(30)
        _, alive = psutil.wait_procs(family(mark), timeout=20)
        left = [process.cmdline() for process in alive]
        for process in alive:
            process.kill()
        assert not left, f"kill {number} of {victim} left {left}"
