# SPDX-License-Identifier: Apache-2.0
"""Runs a part of a benchmark in a process of its own, which ends with this program, whatever ends it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from tfdist.launchers.supervise import processes

_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "ERROR"}


def result(script: str, arguments: Sequence[str], limit_secs: float) -> Any:
    """Runs a Python file, outside of any cluster, and returns the JSON data that it writes to the file `--result`.

    Raises:
      TimeoutError: it was not done after `limit_secs`.
      RuntimeError: it failed; ends with what it printed last.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"} | _QUIET
    with tempfile.NamedTemporaryFile("r") as output, processes.Supervisor() as supervisor:
        command = [sys.executable, script, *arguments, f"--result={output.name}"]
        process = supervisor.start(os.path.basename(script), command, environment)  # noqa: PTH119, a name and no more
        code = process.wait(limit_secs)
        if code is None:
            raise TimeoutError(f"{script} was not done after {limit_secs:g} s. Received: {' '.join(arguments)}")
        if code:
            raise RuntimeError(f"{script} ended with exit code {code}:\n" + "\n".join(process.tail))
        return json.load(output)
