# SPDX-License-Identifier: Apache-2.0
"""The cluster of a MultiWorkerMirroredStrategy, from TF_CONFIG or a resolver: how a worker joins it, and leaves it."""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import os
import pathlib
import random
import secrets
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import _forks, _machine, _sockets
from tfdist import cluster as clusters
from tfdist.compat.tensorflow import context
from tfdist.coordination import keepalive, rendezvous, worker_waits
from tfdist.coordination.quorum import QuorumClient, QuorumServer
from tfdist.coordination.usage import Usage
from tfdist.engines.agreement import SEEDING, Agreement
from tfdist.launchers.supervise.notices import check_none_ended
from tfdist.policies.base import Aggregation

# At its end the chief, with which the service ends, waits so long for others that need nothing of it any more.
_FAREWELL_SECS = 10.0
# Likewise after a save of the chief's, which other workers come for when they are there.
_SAVED_SECS = 60.0
# Likewise after an exception, of which others may not have heard.
_TOLD_SECS = 3.0
# Time for a failed process to end.
_END_SECS = 3.0
_MESSAGE_CHARS = 500
_kept: list[Any] = []


def find_cluster(resolver: Any) -> clusters.Cluster | None:
    """Returns the cluster from TF_CONFIG or the resolver, checked; None to train alone."""
    if resolver is None:
        cluster = clusters.Cluster.from_environment()
    else:
        jobs = resolver.cluster_spec().as_dict()
        cluster = clusters.Cluster(jobs, clusters.Task(resolver.task_type, resolver.task_id)) if jobs else None
    if cluster:
        cluster.check_multi_worker()
    return cluster


def join_workers(cluster: clusters.Cluster, start_timeout_secs: float, has_policy: bool) -> None:
    """Waits for all workers, and makes TensorFlow's context join them.

    Args:
      cluster: the cluster.
      start_timeout_secs: longest wait for the start of all workers.
      has_policy: True if a policy decides which gradients make an update.

    Raises:
      RuntimeError: TensorFlow was used before, or a worker has ended.
      TimeoutError: a worker did not start in time.
      ConnectionError: the workers have different secrets.
    """
    if context.has_begun():
        # The stock strategy raises it only after all workers have started.
        received = f". Received: {made}" if (made := context.made_before()) else ""
        raise RuntimeError(
            "MultiWorkerMirroredStrategy must be built before TensorFlow is used; move it up, before the first tensor, "
            "data set or model. In a notebook, or where another strategy was built before, restart the program first"
            f"{received}"
        )
    if has_policy:
        # A late contribution may hold one of them, and the update must not wait for it; 0: one for each CPU.
        count = tf.config.threading.get_inter_op_parallelism_threads() or _machine.usable_cpus()
        tf.config.threading.set_inter_op_parallelism_threads(count + 1)
    tasks = cluster.training_tasks
    check = check_none_ended({str(task) for task in tasks})
    rendezvous.meet(cluster, start_timeout_secs, check=check, secret=os.environ.get(clusters.JOB_SECRET_VARIABLE, ""))
    context.configure_coordination(
        leader=f"/job:{tasks[0].type}/replica:0/task:0",
        jobs=collections.Counter(task.type for task in tasks),
        start_timeout_secs=start_timeout_secs,
        heartbeat_timeout_secs=keepalive.LOST_SECS,
    )


def share_random_state(agreement: Agreement) -> None:
    """Gives all workers the chief's random state, so that unseeded shuffles are the same everywhere.

    TensorFlow's global seed is drawn if the chief has set none; Python's and NumPy's generators take its state.
    """
    state = agreement.from_chief(_random_state, SEEDING)
    if state["is_drawn"]:
        context.set_drawn_seed(state["tensorflow"])
    elif context.global_seed() != state["tensorflow"]:
        tf.random.set_seed(state["tensorflow"])
    if not agreement.is_chief:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        name, words, *rest = state["numpy"]
        np.random.set_state((name, np.array(words, np.uint32), *rest))


def _random_state() -> dict[str, Any]:
    seed = context.global_seed()
    name, words, *rest = np.random.get_state()
    return {
        "tensorflow": secrets.randbelow(2**31) if seed is None else int(seed),
        "is_drawn": seed is None or context.is_drawn_seed(seed),
        "python": random.getstate(),
        "numpy": [name, words.tolist(), *rest],
    }


def share_usage(agreement: Agreement, own: Callable[[], Usage]) -> Callable[[], dict[str, Usage]]:
    """Posts the counters of this process, such as bytes sent, every second, from now on.

    Returns:
      A function for any thread that returns the counters of each worker that has posted some, by its name in reports.
    """
    known: dict[int, Usage] = {}
    # Storing has no time limit.
    agreement.on_look = lambda: (
        agreement.service_answers() and agreement.post(f"usage/{agreement.task}", own().to_json())
    )

    def usage() -> dict[str, Usage]:
        for index, task in enumerate(agreement.tasks):
            if task == agreement.task:
                known[index] = own()
            # The service ends with the program.
            elif not agreement.ended and (text := agreement.peek(f"usage/{task}")) is not None:
                known[index] = Usage.from_json(text)
        return {f"worker:{index}": each for index, each in sorted(known.copy().items())}

    return usage


def leave_at_exit(agreement: Agreement) -> None:
    """Ends the agreement with the program; the chief's after those of the others that may need its saves."""

    def leave() -> None:
        agreement.end()
        if agreement.ended == worker_waits.HAS_ENDED:
            with agreement.reporter.waiting("the end of the program"):
                _stay_for_others(agreement, _SAVED_SECS if agreement.numbers else _FAREWELL_SECS)
        agreement.close()

    _forks.at_exit(leave)


def _stay_for_others(agreement: Agreement, secs: float) -> None:
    """Waits on the chief, with which the service ends, so long for the ends of the others."""
    pending, until = {str(task) for task in agreement.tasks[1:] if agreement.is_chief}, time.monotonic() + secs
    with contextlib.suppress(ConnectionError):
        while pending and time.monotonic() < until:
            states = {task: agreement.read(task) for task in pending - agreement.lost().keys()}
            pending = {task for task, state in states.items() if state is None or not state.ended}
            time.sleep(0.1 if pending else 0.0)


def tell_others_of_errors(agreement: Agreement) -> None:
    """Lets an exception that ends this process end the others too, at once and with its message.

    Such a process ends for sure: TensorFlow, taken down with its cluster in error, now and then waits for ever.
    """
    previous, process = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        # A forked copy of the program is no worker.
        is_ours = os.getpid() == process and threading.current_thread() is threading.main_thread()
        stays, message = False, ""
        if is_ours:
            # One line in place of TensorFlow's many.
            with contextlib.suppress(Exception):
                error = agreement.failure_behind(error) or error
            kind = type(error)
            is_own = isinstance(error, Exception) and not isinstance(error, ConnectionError)
            # Once: a session may go on at a prompt.
            stays = agreement.is_chief and is_own and not agreement.is_known(error) and not agreement.ended
            # One line, because TensorFlow logs it on each worker.
            text = " ".join(str(error).split())[:_MESSAGE_CHARS]
            message = f"{agreement.task} ended with {kind.__name__}: {text}"
            with contextlib.suppress(Exception):
                agreement.end(message)
                if not stays and not agreement.is_known(error):
                    context.report_error(message)
        previous(kind, error, trace)
        if stays:
            # Before the service is told, which then fails for this process, too.
            with contextlib.suppress(BaseException):
                _stay_for_others(agreement, _TOLD_SECS)
            with contextlib.suppress(Exception):
                context.report_error(message)
        end_soon_after_exit()

    sys.excepthook = hook


def end_soon_after_exit() -> None:
    """From the moment on at which the program is over, its process ends within `_END_SECS`.

    TensorFlow's end in a cluster of which others go on takes 10 s now and then, and they go on waiting meanwhile.
    """
    _forks.at_exit(_end_within, _END_SECS)


def _end_within(secs: float) -> None:
    # Of all timers, this one needs no running interpreter, nor its lock. What it writes is of no use to anybody.
    nowhere = pathlib.Path(os.devnull).open("w")  # noqa: SIM115
    faulthandler.dump_traceback_later(secs, exit=True, file=nowhere)
    _kept.append(nowhere)


def connect_quorum(
    policy: Aggregation, cluster: clusters.Cluster, agreement: Agreement, stall_timeout_secs: float
) -> tuple[QuorumClient, QuorumServer | None]:
    """Starts the quorum server on the chief, and connects this worker to it; all workers call it.

    Without a launcher there is no secret. The chief then draws one and shares it through the coordination service,
    which is as trustworthy as the collectives that carry the gradients.

    Args:
      policy: decides which gradients make an update.
      cluster: the cluster.
      agreement: with the other workers.
      stall_timeout_secs: longest wait of an update without progress of the workers that it waits for.

    Returns:
      This worker's client, and on the chief the server.
    """
    tasks, server = cluster.training_tasks, None
    names, given = [str(task) for task in tasks], os.environ.get(clusters.JOB_SECRET_VARIABLE)

    def start_server() -> dict[str, Any]:
        nonlocal server
        secret = given or secrets.token_hex(32)
        server = QuorumServer(policy, names, secret.encode())
        server.start()
        _forks.at_exit(server.close)
        return {"port": server.port, "secret": None if given else secret}

    opened = agreement.from_chief(start_server, "starting the quorum server")
    # `join_workers` has found that all have the same, or none.
    secret = given or opened["secret"]
    worker, (host, _) = tasks.index(cluster.task), _sockets.split_address(cluster.address(tasks[0]))
    # The chief's own name may mean nothing on its own machine.
    host = host if worker else "localhost"
    address = host, opened["port"]
    client = QuorumClient(address, worker, names, secret.encode(), stall_timeout_secs=stall_timeout_secs)
    if server is not None:
        server.on_error = client.fail
    return client, server
