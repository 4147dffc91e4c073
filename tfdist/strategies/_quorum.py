# SPDX-License-Identifier: Apache-2.0
"""Starts the quorum server of a MultiWorkerMirroredStrategy with a policy, and connects each worker to it."""

from __future__ import annotations

import atexit
import os
import secrets
from typing import Any

from tfdist import _addresses
from tfdist.cluster import JOB_SECRET_VARIABLE, Cluster
from tfdist.engines.agreement import Agreement
from tfdist.policies.base import Aggregation
from tfdist.runtime import messages, own_address
from tfdist.runtime.quorum_client import QuorumClient
from tfdist.runtime.quorum_server import QuorumServer


def connect(
    policy: Aggregation, cluster: Cluster, agreement: Agreement, stall_timeout_secs: float
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

    Raises:
      ConnectionError: another worker was given a secret, and this one was not.
    """
    tasks, server = cluster.training_tasks, None
    names, own = [str(task) for task in tasks], os.environ.get(JOB_SECRET_VARIABLE)

    def start_server() -> dict[str, Any]:
        nonlocal server
        secret = own or secrets.token_hex(32)
        hosts = [_addresses.split(cluster.address(task))[0] for task in tasks]
        host = own_address.reachable(hosts[0], hosts, lambda line: messages.say(f"tfdist: {line}"))
        server = QuorumServer(policy, names, secret.encode(), host)
        server.start()
        atexit.register(server.close)
        return {"address": server.address, "secret": None if own else secret}

    opened = agreement.from_chief(start_server, "starting the quorum server")
    secret = opened["secret"] or own
    if secret is None:
        raise ConnectionError(
            f"{JOB_SECRET_VARIABLE} is set on {names[0]} and not here; give all workers the same, or none"
        )
    worker, address = tasks.index(cluster.task), tuple(opened["address"])
    return QuorumClient(address, worker, names, secret.encode(), stall_timeout_secs=stall_timeout_secs), server
