# SPDX-License-Identifier: Apache-2.0
"""Policies: which gradients are accepted, with which weights, and when an update is due. Pure Python, no TensorFlow.

Users list `Policy` objects in `policies=[...]`. composition.py checks that they are compatible, and combines them into
one `Aggregation`. The engine calls its methods in this order (base.py documents each):

    begin                     the strategy is built with a number of replicas
    opened                    Keras asks for an update
      may_start, started      a replica starts a gradient of the current step; `start` is both
      arrived                 the gradient has arrived: accepted or dropped, with which weight?
      lost, recovered         a replica dies or returns, at any time
      update_due              were enough gradients accepted?
      contributors            the replicas whose gradients form the update
    updated                   the update was made; returns its statistics, and the next step begins

A policy has no clock: the caller passes the time. Here two of three gradients are enough, so the gradient of replica 0
is dropped, and the replica starts again:

    >>> policy = BackupWorkers(spares=1)
    >>> policy.begin(total_num_replicas=3, strategy="MirroredStrategy")
    >>> policy.opened(time=0.0)
    >>> [policy.started(replica, time=0.0) for replica in range(3) if policy.may_start(replica)]
    [0, 0, 0]
    >>> policy.arrived(2, local_step=0, time=1.0)
    Arrival(accepted=True, staleness=0, weight=1.0, number=0)
    >>> policy.update_due
    False
    >>> policy.arrived(1, local_step=0, time=1.5).accepted, policy.update_due, policy.contributors
    (True, True, (2, 1))
    >>> update = policy.updated(time=1.6)
    >>> update.step, update.contributors, update.wait_secs, update.spread_secs
    (1, (2, 1), 1.5, 0.5)
    >>> policy.arrived(0, local_step=0, time=4.0)
    Arrival(accepted=False, staleness=1, weight=0.0, number=-1)
    >>> policy.started(0, time=4.0)
    1

`tfdist.planning.simulation` drives policies event by event, in simulated time.
"""

from tfdist.policies.backup_workers import BackupWorkers
from tfdist.policies.base import Aggregation, Arrival, Change, Policy, Update
from tfdist.policies.compression import Compression
from tfdist.policies.parameter_averaging import ParameterAveraging
from tfdist.policies.records import Contribution, Outcome
from tfdist.policies.staleness import BoundedStaleness, DropStale, SoftSync, StalenessScaling
from tfdist.policies.warmup import Warmup

__all__ = [
    "Aggregation",
    "Arrival",
    "BackupWorkers",
    "BoundedStaleness",
    "Change",
    "Compression",
    "Contribution",
    "DropStale",
    "Outcome",
    "ParameterAveraging",
    "Policy",
    "SoftSync",
    "StalenessScaling",
    "Update",
    "Warmup",
]
