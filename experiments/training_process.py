# SPDX-License-Identifier: Apache-2.0
"""Runs one training program of an experiment, with all of its processes. Needs no TensorFlow."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Mapping, Sequence

from tfdist.launchers.supervise import processes

# Makes logs readable; values that the user has set take precedence.
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "GRPC_VERBOSITY": "ERROR"}


def run(
    run_dir: pathlib.Path,
    command: Sequence[str],
    limit_secs: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> str | None:
    """Runs a command until it ends, with an empty directory for its results.

    Args:
      run_dir: the directory; its name is that of the run in the error.
      command: starts the run.
      limit_secs: longest run; None for any.
      environment: additional variables.

    Returns:
      An error with the end of the command's output, or None if its exit code is 0.
    """
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    own = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    # The supervisor ends all processes of the run, also if this program is killed.
    with processes.Supervisor() as supervisor:
        process = supervisor.start(run_dir.name, list(command), {**_QUIET, **own, **(environment or {})})
        ended = process.wait(limit_secs)
    if ended == 0:
        return None
    how = f"ended with exit code {ended}" if ended is not None else f"did not end within {limit_secs:.0f} s"
    return f"{run_dir.name} {how}; the end of its output:\n" + "\n".join(process.tail)
