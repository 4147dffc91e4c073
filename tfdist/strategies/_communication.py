# SPDX-License-Identifier: Apache-2.0
"""Sums of the workers of a MultiWorkerMirroredStrategy: the argument `communication`, and `Compression`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import _log
from tfdist.compat.keras import models
from tfdist.compat.keras.optimizers import SumGradients, optimizers_of, trained_by
from tfdist.compression import choice
from tfdist.coordination import worker_waits
from tfdist.coordination.worker_waits import WorkerStatus
from tfdist.engines.agreement import Agreement
from tfdist.launchers.environment import AUTO, COMMUNICATION_VARIABLE, KINDS, MPI, TENSORFLOW
from tfdist.policies.compression import AUTO as AUTO_CODEC
from tfdist.policies.compression import Compression
from tfdist.step.gradients import DIFFERENCES, ErrorFeedback
from tfdist.transport import mpi
from tfdist.transport.sums import Messages, Traffic, WorkerSums

_WHAT = "starting MPI"


def check_communication(given: Any, name: str = "communication") -> None:
    """Raises ValueError unless the argument, or the variable of this name, is one of the three words."""
    if given not in KINDS:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, KINDS))}. Received: {given!r}")


def check_alone(communication: str) -> None:
    """Raises ValueError if a process without a cluster is one of several that an MPI launcher has started.

    Each of them would train a model of its own. Without a request for MPI they may be meant to, and a line says it.
    """
    size = mpi.size_of_job() or 1
    if size == 1:
        return
    remedy = "set TF_CONFIG for each process, or start them with `tfdist launch --communication=mpi`"
    if _asked(communication) == MPI:
        raise ValueError(
            f"communication='mpi': an MPI launcher has started {size} processes, and there is no cluster in TF_CONFIG, "
            f"so each would train alone; {remedy}"
        )
    _log.say(f"an MPI launcher has started {size} processes. Without TF_CONFIG each trains alone; {remedy}")


def connect(
    communication: str, agreement: Agreement, devices: Sequence[str], start_timeout_secs: float
) -> mpi.Mpi | None:
    """Starts MPI on all workers, if it is to be used; all call it.

    Args:
      communication: the argument.
      agreement: with the other workers.
      devices: of this worker's replicas.
      start_timeout_secs: longest wait for the others.

    Returns:
      MPI's sums; None for TensorFlow's collectives.

    Raises:
      ValueError: MPI is requested, and can't be used.
      RuntimeError: MPI could not be started.
    """
    asked = _asked(communication)
    own = {"asked": asked, "place": mpi.own_place(), **_local_state(asked, devices, len(agreement.tasks))}
    found = agreement.gather(own, _WHAT)
    if len({each["asked"] for each in found.values()}) > 1:
        shown = ", ".join(f"{task}: {each['asked']!r}" for task, each in found.items())
        raise ValueError(f"communication must be the same on all workers. Received: {shown}")
    problem = _problem({str(task): each for task, each in found.items()})
    if asked == MPI and problem:
        raise ValueError(f"communication='mpi': {problem}")
    if asked == TENSORFLOW or problem:
        if asked == AUTO and agreement.is_chief and any("library" in each for each in found.values()):
            _log.say(f"the workers use TensorFlow's collectives and not MPI: {problem}")
        return None

    job = agreement.from_chief(lambda: f"tfdist-{secrets.token_hex(8)}", _WHAT)
    index, places = agreement.tasks.index(agreement.task), [each["place"] for each in found.values()]
    are_launched = all("launched" in each for each in found.values())
    exchange = None if are_launched else _exchange(agreement, job, start_timeout_secs)
    started, error = None, ""
    try:
        started = mpi.start(index, places, exchange, job, lambda: _check(agreement), start_timeout_secs)
    except (RuntimeError, OSError) as failure:
        error = str(failure)
    failed = {task: text for task, text in agreement.gather(error, _WHAT).items() if text}
    if started is not None and not failed:
        # TensorFlow's collectives would tell the others of an error; MPI doesn't.
        agreement.is_known = lambda error: started.failure is not None
        if asked == AUTO and agreement.is_chief:
            _log.say(
                f"the workers sum by MPI ({own['library']}); communication='tensorflow' leaves it to TensorFlow's "
                "collectives"
            )
        return started
    if started is not None:
        started.failure = started.failure or ConnectionError("MPI is not used")
    shown = next(f"on {task}, {text}" for task, text in failed.items())
    if asked == MPI:
        raise RuntimeError(f"communication='mpi': {shown}")
    if agreement.is_chief:
        _log.say(f"the workers use TensorFlow's collectives and not MPI: {shown}")
    return None


def jointly(agreement: Agreement, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a sum of MPI's that is known as a wait for the other workers."""

    def within(*args: Any) -> Any:
        # A step calls it in a thread of TensorFlow's.
        is_in_main = threading.current_thread() is threading.main_thread()
        with agreement.joint(part=worker_waits.OUTSIDE if is_in_main else worker_waits.STEP):
            return function(*args)

    return within


def _check(agreement: Agreement) -> None:
    agreement.check()
    if lost := agreement.lost():
        raise ConnectionError(worker_waits.never(WorkerStatus(str(agreement.task)), lost))


def _asked(communication: str) -> str:
    if communication != AUTO:
        return communication
    asked = os.environ.get(COMMUNICATION_VARIABLE) or AUTO
    check_communication(asked, COMMUNICATION_VARIABLE)
    return asked


def _exchange(agreement: Agreement, job: str, timeout_secs: float) -> mpi.Exchange:
    """Returns the exchange of a job's start, whose keys are its own: it may end early on one worker."""
    numbers = itertools.count()

    def exchange(new: Mapping[str, str]) -> dict[str, str]:
        place, found = f"{job}/{next(numbers)}", {}
        agreement.publish(f"{place}/{agreement.task}", json.dumps(dict(new)))
        for task in agreement.tasks:
            text = agreement.receive(f"{place}/{task}", timeout_secs)
            if text is None:
                raise TimeoutError(f"{task} has not come to the start of MPI within {timeout_secs:g} s")
            found |= json.loads(text)
        return found

    return exchange


def _local_state(asked: str, devices: Sequence[str], num_workers: int) -> dict[str, str]:
    """Returns what speaks against MPI on this worker as `problem`, and the name of its `library` if it has one.

    And `launched` if an MPI launcher has started as many processes as there are workers, with this one.
    """
    if asked == TENSORFLOW:
        return {}
    if any("CPU" not in device for device in devices):
        return {"problem": f"it sums on CPUs only; use 'auto', by which GPUs have NCCL. Received: device {devices[0]}"}
    size = mpi.size_of_job()
    if not mpi.is_installed():
        return {"problem": "it needs mpi4py and an MPI library: pip install '.[mpi]' in a checkout"}
    try:
        name = mpi.library_name()
    except (ImportError, RuntimeError, OSError) as error:
        return {"problem": f"mpi4py finds no MPI library ({error}): pip install mpich, or set MPI4PY_LIBMPI"}
    if asked == AUTO and size != num_workers and (problem := mpi.untried(name)):
        return {"problem": problem, "library": name}
    if mpi.needs_launcher(name) and size != num_workers:
        started = "none has" if size is None else f"it has started {size} processes for {num_workers} workers"
        return {
            "problem": f"{name} needs a launcher of its own; start the tasks with mpiexec or srun --mpi=pmix, one for "
            f"each worker, or use MPICH, which needs none: pip install mpich. Received: {started}"
        }
    return {"library": name, **({"launched": "yes"} if size == num_workers else {})}


def _problem(found: Mapping[str, Mapping[str, str]]) -> str:
    for task, each in found.items():
        if "problem" in each:
            return f"on {task}, {each['problem']}"
    libraries = {task: each.get("library", "") for task, each in found.items()}
    if len(set(libraries.values())) > 1:
        shown = ", ".join(f"{task}: {name}" for task, name in libraries.items())
        return f"all workers must use one MPI library. Received: {shown}"
    return ""


# Sums of gradients under `Compression`, on one worker.
#
# Ownership: the strategy owns one `CompressedSums`. That owns the codec, which "auto" chooses, and the codec's state
# (`ErrorFeedback`).


class CompressedSums:
    """Sums gradients by the codec of a policy. A `policies.saved_state.WorkerState`.

    Args:
      compression: the policy.
      sums: of the workers, whose traffic is counted from now on.
      agreement: exchange of small values between the workers.

    Attributes:
      in_step: sums gradients in a step that all workers trace alike; None to sum them as they are.
      anywhere: likewise, at any other place.
      bytes_sent: returns the bytes that each worker has sent so far.
      of_differences: sums differences of parameters, in cross-replica context; None likewise.

    Raises:
      ValueError: the workers have different codecs.
    """

    def __init__(self, compression: Compression, sums: WorkerSums, agreement: Agreement) -> None:
        self._compression, self._sums, self._agreement = compression, sums, agreement
        given = agreement.gather(repr(compression), "comparing the codecs")
        if len({*given.values()}) > 1:
            shown = ", ".join(f"{task}: {policy}" for task, policy in given.items())
            raise ValueError(f"policies: all workers must have the same codec. Received: {shown}")
        senders = [str(task) for task in agreement.tasks]
        traffic = sums.traffic = Traffic(len(senders))
        self.bytes_sent = traffic.by_worker
        self._anywhere = Messages(sums, senders, agreement.tasks.index(agreement.task))
        self._feedback: ErrorFeedback | None = None
        self.in_step: SumGradients | None = None
        self.anywhere: SumGradients | None = None
        self.of_differences: SumGradients | None = None
        self._is_chosen = False
        if compression.codec != AUTO_CODEC:
            self._use(compression.codec)

    def prepare(self, model: keras.Model) -> None:
        """Chooses the codec, before the first step of a built model is traced; all workers call it alike."""
        shapes = [] if self._is_chosen else _shapes_of(model)
        if not shapes:
            return
        how = self._sums.in_step, self._anywhere.senders, self._slowest, self._compression.error_bound
        try:
            with tf.init_scope():
                codec, reason = choice.choose(choice.made_up(shapes), *how)
        except Exception as error:
            # Errors other than TensorFlow's are sent to the other workers, which wait for this worker's measurements.
            raise RuntimeError(f'Compression("auto"): measuring the exchange failed: {error}') from error
        self._say(reason)
        if codec is None:
            # Steps are those without the policy then; to count would cost some hundredths of a small one.
            self._sums.traffic = None
        self._use(codec)

    def collect(self, model: keras.Model) -> tuple[Any, list[np.ndarray]]:
        """See `WorkerState.collect`."""
        if self._feedback is None:
            return None, []
        described, arrays = self._feedback.collect(model)
        is_worth_it = described is not None or self._compression.codec == AUTO_CODEC
        return ({"codec": repr(self._feedback.codec), "state": described} if is_worth_it else None), arrays

    def distribute(self, model: keras.Model, described: Any, arrays: Sequence[np.ndarray]) -> None:
        """See `WorkerState.distribute`; "auto" continues with the codec of the checkpoint."""
        if described and not self._is_chosen:
            codec = next((each for each in choice.CANDIDATES if repr(each) == described["codec"]), None)
            if codec is not None:
                self._say(f"{codec!r}, as before")
                self._use(codec)
        if self._feedback is not None:
            self._feedback.distribute(model, described and described["state"], arrays)

    def _use(self, codec: Any) -> None:
        self._is_chosen = True
        if codec is None:
            return
        self._feedback = ErrorFeedback(codec, self._anywhere)
        self.anywhere = functools.partial(self._feedback.sum_all, self._anywhere)
        self.of_differences = functools.partial(self._feedback.sum, transport=self._anywhere, kind=DIFFERENCES)
        self.in_step = functools.partial(self._feedback.sum_all, dataclasses.replace(self._anywhere, is_in_step=True))

    def _slowest(self, value: float) -> float:
        return max(self._agreement.gather(value, "comparing the speed of sums").values())

    def _say(self, what: str) -> None:
        if self._agreement.is_chief:
            _log.say(f'Compression("auto"): {what}')


def _shapes_of(model: keras.Model) -> list[tuple[int, ...]]:
    """Returns the shapes of a model's dense gradients."""
    optimizers = [each for each in optimizers_of(model) if each.built]
    trained = {id(each): each for optimizer in optimizers for each in trained_by(optimizer)}
    for layer in models.layers_of(model):
        # Of a table, the rows of a batch are sent as they are.
        if isinstance(layer, keras.layers.Embedding):
            for table in layer.trainable_variables:
                trained.pop(id(table), None)
    return [tuple(each.shape) for each in trained.values()]
