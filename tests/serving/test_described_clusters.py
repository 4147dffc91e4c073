# SPDX-License-Identifier: Apache-2.0
"""Parameter-server clusters described by TF_CONFIG: every task runs the same script, and all end with the chief."""

from __future__ import annotations

import contextlib
import pathlib
import subprocess
import sys

import programs
import pytest

from tfdist import Cluster, Task
from tfdist.launchers.supervise.processes import PortReservation

pytestmark = pytest.mark.processes
SCRIPT = """
strategy = tfdist.ParameterServerStrategy(start_timeout_secs=60)
print("chief", flush=True)
made = model(strategy)
made.fit(X, Y, verbose=0, epochs=2)
made.fit(tf.data.Dataset.from_tensors((X, Y)).repeat(), verbose=0, steps_per_epoch=4)
print("iterations", int(made.optimizer.iterations), flush=True)
print("I am", tfdist.task(), tfdist.is_chief(), tfdist.worker_index(), tfdist.num_workers(), flush=True)
"""
CLOSED = """
strategy.close()
try:
    tfdist.ParameterServerStrategy()
except RuntimeError as error:
    print("refused:", error, flush=True)
"""
TRAIN_ON = "made.fit(tf.data.Dataset.from_tensors((X, Y)).repeat(), steps_per_epoch=10**6, verbose=0)"


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_launched_tasks_need_no_grace_when_the_chief_is_done(tmp_path: pathlib.Path) -> None:
    """Each of them ends by itself: none is ended by the launcher, whose patience outlasts this test's."""
    path = tmp_path / "train.py"
    path.write_text(programs._HEADER + SCRIPT + CLOSED)
    flags = ["--num_workers=1", "--num_ps=1", "--grace_period_secs=100000"]
    command = [sys.executable, "-m", "tfdist", "launch", "local", *flags, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=programs.ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("iterations 8") == 1
    assert "I am chief:0 True 0 1" in done.stdout
    assert "refused: This program has closed a ParameterServerStrategy" in done.stdout
    # The chief alone comes past the line that builds the strategy.
    assert [line for line in done.stdout.splitlines() if line.endswith("chief")] == ["[chief:0] chief"]
    # They were told that it is done, and did not take it for lost.
    assert "has been gone" not in done.stdout + done.stderr


def test_workers_and_parameter_servers_notice_that_the_chief_was_killed(tmp_path: pathlib.Path) -> None:
    with PortReservation(3) as reserved, contextlib.ExitStack() as stack:
        addresses = [f"127.0.0.1:{port}" for port in reserved.ports]
        jobs = {job: {0: address} for job, address in zip(("chief", "worker", "ps"), addresses, strict=True)}
        tasks = {
            job: stack.enter_context(
                programs.running(
                    SCRIPT + TRAIN_ON, tmp_path, {"TF_CONFIG": Cluster(jobs, Task(job, 0)).to_tf_config()}, name=job
                )
            )
            for job in jobs
        }
        tasks["chief"].wait_for_output("iterations")
        tasks["chief"].process.kill()
        for job in ("worker", "ps"):
            assert tasks[job].wait(40) == 75, tasks[job].output
            assert f"{job}:0: the chief at {addresses[0]} has been gone" in tasks[job].output


def test_a_worker_whose_chief_never_comes_ends_with_an_error(tmp_path: pathlib.Path) -> None:
    with PortReservation(3) as reserved:
        addresses = [f"127.0.0.1:{port}" for port in reserved.ports]
        jobs = {job: {0: address} for job, address in zip(("chief", "worker", "ps"), addresses, strict=True)}
        env = {"TF_CONFIG": Cluster(jobs, Task("worker", 0)).to_tf_config()}
        with programs.running("tfdist.ParameterServerStrategy(start_timeout_secs=1)", tmp_path, env) as program:
            assert program.wait(60) == 1, program.output
            assert f"worker:0: the chief at {addresses[0]} did not come up" in program.output
            assert "start_timeout_secs=1" in program.output
