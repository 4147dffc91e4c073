# SPDX-License-Identifier: Apache-2.0
"""Engine models: what crosses which link, for each strategy and its policies.

| strategy | gradients | model |
|---|---|---|
| ParameterServerStrategy | fetched and pushed by each worker | transfers queue at the servers' links |
| MultiWorkerMirroredStrategy | summed by all workers, one update at a time | ring all-reduce, all-gather of rows |
| MirroredStrategy | summed by the devices of one machine | ring all-reduce within the machine |
"""

from __future__ import annotations

import math
from typing import Any

from tfdist.planning.simulation import event_loop
from tfdist.planning.simulation.event_loop import Costs, FifoLink, Link
from tfdist.planning.simulation.models import ClusterModel, CodecModel, ModelProfile
from tfdist.policies import composition
from tfdist.policies.asynchronous import Asynchronous
from tfdist.policies.backup_workers import BackupWorkers
from tfdist.policies.base import Aggregation

PARAMETER_SERVER = "ParameterServerStrategy"
MULTI_WORKER = "MultiWorkerMirroredStrategy"
MIRRORED = "MirroredStrategy"
STRATEGIES = (MIRRORED, MULTI_WORKER, PARAMETER_SERVER)
# Names in flags.
SHORT_NAMES = {"mirrored": MIRRORED, "multi_worker": MULTI_WORKER, "parameter_server": PARAMETER_SERVER}


class EngineModel:
    """Costs of one strategy on a cluster.

    Args:
      strategy: one of `STRATEGIES`.
      cluster: the cluster.
      model: the trained model.
      composed: the policies by role.
      codec: cost of the codec of `tfdist.Compression`; None without.

    Attributes:
      replicas: number of replicas, as the policies count them.
      devices_per_replica: devices of one replica.
      steps_per_gradient: H of `ParameterAveraging`: steps of a replica between two exchanges; 1 without.
    """

    def __init__(
        self,
        strategy: str,
        cluster: ClusterModel,
        model: ModelProfile,
        composed: composition.Composition,
        codec: CodecModel | None,
    ) -> None:
        self.strategy, self._averaging = strategy, composed.averaging
        self._cluster, self._network, self._model = cluster, cluster.network, model
        self._codec = codec or CodecModel(1.0, commutes_with_sum=True)
        devices, is_mirrored = cluster.devices_per_worker, strategy == MIRRORED
        self.replicas, self.devices_per_replica = (devices, 1) if is_mirrored else (cluster.workers, devices)
        self.steps_per_gradient = self._averaging.every_steps if self._averaging else 1

    def costs(self, is_synchronous: bool) -> Costs:
        """Builds the costs for the event loop, with new links."""
        size, network, codec, update_secs = self._model.dense_bytes, self._network, self._codec, self._model.update_secs
        within = network.within_bandwidth, network.within_latency_secs
        # The devices of a worker sum their gradients.
        step_secs = event_loop.ring_all_reduce_secs(size, self.devices_per_replica, *within)
        codec_secs = size / codec.encode_bandwidth
        if self.strategy == PARAMETER_SERVER or codec.commutes_with_sum:
            codec_secs += size / codec.decode_bandwidth
        if self.strategy == PARAMETER_SERVER:
            return self._server_costs(step_secs + codec_secs, is_synchronous)
        if self._averaging:
            # Each of the H local steps sums over the worker's devices and updates; only the average is exchanged.
            step_secs, update_secs = self.steps_per_gradient * (step_secs + update_secs), 0.0
        state = size + self._model.optimizer_bytes
        return Costs(
            gradient_secs=step_secs + codec_secs,
            update_secs=lambda count: self._exposed_secs(count) + update_secs,
            join_secs=lambda count: event_loop.broadcast_secs(state, count, *self._collective_link()),
            needs_all=True,
        )

    def _server_costs(self, within_secs: float, is_synchronous: bool) -> Costs:
        network, cluster, model, devices = self._network, self._cluster, self._model, self.devices_per_replica
        down_bytes = model.dense_bytes * self._codec.variables_ratio + model.sparse_bytes * devices
        up_bytes = model.dense_bytes * self._codec.ratio + model.sparse_gradient_bytes * devices
        # Bytes per second of a server's link, and of one worker at most.
        if cluster.is_one_machine:
            latency, server, most = network.within_latency_secs, network.within_bandwidth, network.within_bandwidth
        else:
            latency, server = network.latency_secs, network.server_bandwidth or network.bandwidth
            most = network.bandwidth / min(cluster.workers_per_machine, cluster.workers)
        capacity = server * cluster.servers
        is_fair = is_synchronous if network.queueing is None else network.queueing == "fair"
        takes_time = bool(down_bytes or up_bytes) and min(capacity, most) < math.inf
        kind = Link if is_fair else FifoLink
        down, up = (kind(capacity, most), kind(capacity, most)) if takes_time else (None, None)
        return Costs(down, up, down_bytes, up_bytes, within_secs + 2 * latency, lambda count: model.update_secs)

    # Collectives.

    def exchange(self, participants: int) -> tuple[float, float]:
        """Returns the seconds of the exchange of one update, or of one average, and the bytes that a replica sends."""
        size, rows, codec = self._model.dense_bytes, 0.0, self._codec
        others, link = participants - 1, self._collective_link()
        if not self._averaging:
            rows = self._model.sparse_gradient_bytes * self.devices_per_replica
        elif self._averaging.optimizer_state == "average":
            size += self._model.optimizer_bytes
        secs = sent = 0.0
        if size and others:
            size *= codec.ratio
            if codec.commutes_with_sum:
                secs, sent = (
                    event_loop.ring_all_reduce_secs(size, participants, *link),
                    2 * others / participants * size,
                )
            else:
                secs, sent = event_loop.ring_all_gather_secs(size, participants, *link), others * size
                secs += participants * self._model.dense_bytes / codec.decode_bandwidth
        if rows:
            secs, sent = secs + event_loop.ring_all_gather_secs(rows, participants, *link), sent + others * rows
        return secs, sent

    def _exposed_secs(self, participants: int) -> float:
        """Returns the time of an exchange that computing does not hide."""
        step_secs = self._model.mean_step_secs
        if step_secs is None and self._cluster.compute is not None:
            step_secs = self._cluster.compute.mean
        hidden = 0.0 if self._averaging else self._model.overlap * (step_secs or 0.0)
        return max(0.0, self.exchange(participants)[0] - hidden)

    def _collective_link(self) -> tuple[float, float]:
        """Returns the bandwidth and the latency of a collective's messages."""
        network, cluster = self._network, self._cluster
        if self.strategy == MIRRORED or cluster.is_one_machine:
            return network.within_bandwidth, network.within_latency_secs
        # In a ring each machine's link is crossed once in each direction, however many workers the machine has.
        within = network.within_bandwidth if cluster.workers_per_machine > 1 else math.inf
        return min(network.bandwidth, within), network.latency_secs


def aggregation(strategy: str, composed: composition.Composition, replicas: int) -> Aggregation:
    """Returns the policy that decides about gradients; by default the one that equals the strategy without policies."""
    if composed.aggregation is not None:
        return composed.aggregation
    # TensorFlow's meaning: parameter servers are asynchronous, the other strategies synchronous.
    default: Any = Asynchronous() if strategy == PARAMETER_SERVER else BackupWorkers(spares=0)
    default.begin(replicas, strategy)
    return default
