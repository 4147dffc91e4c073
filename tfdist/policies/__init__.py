# SPDX-License-Identifier: Apache-2.0
"""Who contributes to an update, what counts, and when it is due: pure Python, without TensorFlow.

What users list in `policies=[...]` is a `Policy`; composition.py says which go together, and makes of them one
`Aggregation`, the one that decides. It is told what happens, in this order, and answers; base.py says what each call
means:

    begin                     the strategy is built: how many replicas there are
    opened                    Keras asks for an update
      may_start, started      a replica begins a gradient, of the step that is current then
      arrived                 it is there: does it count, with which weight?
      lost, back              a replica dies or returns, at any time
      update_due              are there enough?
      contributors            whose gradients to make the update from
    updated                   it was made: what it was made of, and what changed; the next step is current

It has no clock: the caller says when. Two of three replicas are enough here, so replica 0 is late, and starts anew:

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

`tfdist.policies.simulate` drives a policy event by event, in simulated time.
"""

from tfdist.policies.backup_workers import BackupWorkers
from tfdist.policies.base import Aggregation, Arrival, Change, Policy, Update
from tfdist.policies.parameter_averaging import ParameterAveraging
from tfdist.policies.staleness import BoundedStaleness, DropStale, SoftSync, StalenessScaling
from tfdist.policies.warmup import Warmup

__all__ = [
    "Aggregation",
    "Arrival",
    "BackupWorkers",
    "BoundedStaleness",
    "Change",
    "DropStale",
    "ParameterAveraging",
    "Policy",
    "SoftSync",
    "StalenessScaling",
    "Update",
    "Warmup",
]
