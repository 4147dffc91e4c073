# SPDX-License-Identifier: Apache-2.0
"""A task of parameter servers whose port another process has taken names the port, and what to do about it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import programs
import pytest

from tfdist import Cluster, Task

PROGRAM = {
    "worker": "import sys; from tfdist.serving import task; sys.exit(task.main())",
    # The other tasks are met before the chief takes its own port.
    "chief": """
from tfdist.coordination import rendezvous
rendezvous.reach = lambda *args, **kwargs: None
import tfdist
tfdist.ParameterServerStrategy(start_timeout_secs=5)
""",
}


@pytest.mark.processes
@pytest.mark.timeout(150)
@pytest.mark.parametrize("task", list(PROGRAM))
def test_a_port_in_use_is_named(task: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        address = f"127.0.0.1:{used.getsockname()[1]}"
        jobs = {job: {0: f"127.0.0.1:{port}"} for port, job in enumerate(("chief", "worker", "ps"), start=1)}
        cluster = Cluster({**jobs, task: {0: address}}, Task(task, 0))
        env = {**os.environ, "TF_CONFIG": cluster.to_tf_config(), "TF_CPP_MIN_LOG_LEVEL": "3"}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM[task]],
            env=env,
            cwd=programs.ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 1
    line = done.stderr.strip().splitlines()[-1]
    assert f"{task}:0 can't listen on its port (Address already in use); end what uses it, or give the task" in line
    assert line.endswith(f"Received: {address}")
