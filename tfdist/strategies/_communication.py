# SPDX-License-Identifier: Apache-2.0
"""The argument `communication` of MultiWorkerMirroredStrategy: by what the workers sum tensors on CPUs."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.engines.multi_worker.agreement import Agreement
from tfdist.launchers.communication import AUTO, KINDS, MPI, TENSORFLOW, VARIABLE
from tfdist.runtime import messages
from tfdist.transport import mpi, pmi

_WHAT = "starting MPI"


def check(communication: Any) -> None:
    """Raises ValueError unless the argument is one of the three words."""
    if communication not in KINDS:
        raise ValueError(
            f"communication must be one of {', '.join(map(repr, KINDS))}. Received: communication={communication!r}"
        )


def connect(communication: str, agreement: Agreement, devices: Sequence[str]) -> mpi.Mpi | None:
    """Starts MPI on all workers, if it is to be used; all call it.

    Args:
      communication: the argument.
      agreement: with the other workers.
      devices: of this worker's replicas.

    Returns:
      MPI's sums; None for TensorFlow's collectives.

    Raises:
      ValueError: MPI is asked for, and can't be used.
      RuntimeError: MPI could not be started.
    """
    asked = communication if communication != AUTO else os.environ.get(VARIABLE, AUTO)
    own = {"asked": asked, "place": pmi.own_place(), **_local_state(asked, devices)}
    found = agreement.gather(own, _WHAT)
    if len({each["asked"] for each in found.values()}) > 1:
        shown = ", ".join(f"{task}: {each['asked']!r}" for task, each in found.items())
        raise ValueError(f"communication must be the same on all workers. Received: {shown}")
    problem = _problem({str(task): each for task, each in found.items()})
    if asked == MPI and problem:
        raise ValueError(f"communication='mpi': {problem}")
    if asked == TENSORFLOW or problem:
        return None

    def exchange(new: Mapping[str, str]) -> dict[str, str]:
        stored = agreement.gather(dict(new), _WHAT).values()
        return {key: value for each in stored for key, value in each.items()}

    job = agreement.from_chief(lambda: f"tfdist-{secrets.token_hex(8)}", _WHAT)
    places = [each["place"] for each in found.values()]
    started, error = None, ""
    try:
        started = mpi.start(job, agreement.tasks.index(agreement.task), places, exchange, agreement.check_others)
    except RuntimeError as failure:
        error = str(failure)
    failed = {task: text for task, text in agreement.gather(error, _WHAT).items() if text}
    if not failed:
        return started
    shown = next(f"on {task}, {text}" for task, text in failed.items())
    if asked == MPI:
        raise RuntimeError(f"communication='mpi': {shown}")
    if agreement.is_chief:
        messages.say(f"tfdist: the workers use TensorFlow's collectives and not MPI: {shown}")
    return None


def _local_state(asked: str, devices: Sequence[str]) -> dict[str, str]:
    """Returns what speaks against MPI on this worker as `problem`, or the name of its `library`."""
    if asked == TENSORFLOW:
        return {}
    if any("CPU" not in device for device in devices):
        return {"problem": f"it sums on CPUs only; use 'auto', by which GPUs have NCCL. Received: device {devices[0]}"}
    if asked == AUTO and not mpi.is_launched():
        return {"problem": "no launcher has set it up"}
    if not mpi.is_installed():
        return {"problem": "it needs mpi4py and an MPI library: pip install 'tfdist[mpi]'"}
    try:
        name = mpi.library()
    except (ImportError, RuntimeError) as error:
        return {"problem": f"mpi4py finds no MPI library ({error}): pip install mpich, or set MPI4PY_LIBMPI"}
    if mpi.needs_launcher(name) and not mpi.is_launched():
        return {
            "problem": f"{name} needs a launcher of its own; start the tasks with mpiexec or srun --mpi=pmix, or use "
            "MPICH, which needs none: pip install mpich"
        }
    return {"library": name}


def _problem(found: Mapping[str, Mapping[str, str]]) -> str:
    for task, each in found.items():
        if "problem" in each:
            return f"on {task}, {each['problem']}"
    libraries = {task: each.get("library", "") for task, each in found.items()}
    if len(set(libraries.values())) > 1:
        shown = ", ".join(f"{task}: {name}" for task, name in libraries.items())
        return f"all workers must use one MPI library. Received: {shown}"
    return ""
