# SPDX-License-Identifier: Apache-2.0
"""Engine models: what crosses which link, for each strategy and its policies.

| strategy | gradients | model |
|---|---|---|
| ParameterServerStrategy | fetched and pushed by each worker | transfers queue at the servers' links |
| MultiWorkerMirroredStrategy | summed by all workers, one update at a time | ring all-reduce, all-gather of rows |
| MirroredStrategy | summed by the devices of one machine | ring all-reduce within the machine |
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tfdist.planning.simulation import links
from tfdist.planning.simulation.event_loop import Costs
from tfdist.planning.simulation.links import FifoLink, Link
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


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Cost of a collective exchange.

    Attributes:
      secs: its time.
      bytes_per_replica: bytes that each replica sends.
    """

    secs: float
    bytes_per_replica: float


class EngineModel:
    """Costs of one strategy on a cluster.

    Args:
      strategy: one of `STRATEGIES`.
      cluster: the cluster.
      model: the trained model.
      composed: the policies by role.
      codec: cost of the codec of `tfdist.Compression`; None without.
    """

    def __init__(
        self,
        strategy: str,
        cluster: ClusterModel,
        model: ModelProfile,
        composed: composition.Composition,
        codec: CodecModel | None,
    ) -> None:
        self.strategy = strategy
        self._cluster = cluster
        self._network = cluster.network
        self._model = model
        self._averaging = composed.averaging
        self._codec = codec

    @property
    def is_parameter_server(self) -> bool:
        """True if variables are on parameter servers."""
        return self.strategy == PARAMETER_SERVER

    @property
    def replicas(self) -> int:
        """Number of replicas, as the policies count them."""
        return self._cluster.devices_per_worker if self.strategy == MIRRORED else self._cluster.workers

    @property
    def devices_per_replica(self) -> int:
        """Number of devices of one replica."""
        return 1 if self.strategy == MIRRORED else self._cluster.devices_per_worker

    @property
    def steps_per_gradient(self) -> int:
        """H of `ParameterAveraging`: steps of a replica between two exchanges; 1 without."""
        return self._averaging.every_steps if self._averaging else 1

    def costs(self, is_synchronous: bool) -> Costs:
        """Builds the costs for the event loop, with new links."""
        within = self._within_secs() + self._codec_secs()
        if self.is_parameter_server:
            return self._server_costs(within, is_synchronous)
        update_secs = self._model.update_secs
        if self._averaging:
            # Each of the H local steps sums over the worker's devices and updates; only the average is exchanged.
            within = self.steps_per_gradient * (self._within_secs() + update_secs) + self._codec_secs()
            update_secs = 0.0
        return Costs(
            gradient_secs=within,
            update_secs=lambda count: self.exposed_secs(count) + update_secs,
            join_secs=self._join_secs,
            needs_all=True,
        )

    # Parameter servers.

    def _server_costs(self, within_secs: float, is_synchronous: bool) -> Costs:
        network, cluster, model, devices = self._network, self._cluster, self._model, self.devices_per_replica
        down_ratio, up_ratio = (self._codec.variables_ratio, self._codec.ratio) if self._codec else (1.0, 1.0)
        down_bytes = model.dense_bytes * down_ratio + model.sparse_bytes * devices
        up_bytes = model.dense_bytes * up_ratio + model.sparse_gradient_bytes * devices
        latency = network.within_latency_secs if cluster.is_one_machine else network.latency_secs
        capacity, most = self._server_capacity()
        is_fair = is_synchronous if network.queueing is None else network.queueing == "fair"
        kind = Link if is_fair else FifoLink
        takes_time = bool(down_bytes or up_bytes) and min(capacity, most) < math.inf
        down = kind(capacity, most) if takes_time else None
        up = kind(capacity, most) if takes_time else None
        return Costs(
            down=down,
            up=up,
            down_bytes=down_bytes,
            up_bytes=up_bytes,
            gradient_secs=within_secs + 2 * latency,
            update_secs=lambda count: model.update_secs,
        )

    def _server_capacity(self) -> tuple[float, float]:
        """Returns bytes per second of all servers together, and of one worker at most."""
        network, cluster = self._network, self._cluster
        if cluster.is_one_machine:
            return cluster.servers * network.within_bandwidth, network.within_bandwidth
        capacity = (network.server_bandwidth or network.bandwidth) * cluster.servers
        return capacity, network.bandwidth / min(cluster.workers_per_machine, cluster.workers)

    # Collectives.

    def exchange(self, participants: int) -> Exchange:
        """Returns the cost of the exchange of one update, or of one average."""
        size = self._model.dense_bytes
        if self._averaging:
            slots = self._model.optimizer_bytes if self._averaging.optimizer_state == "average" else 0.0
            return self._dense(size + slots, participants)
        rows = self._model.sparse_gradient_bytes * self.devices_per_replica
        dense = self._dense(size, participants)
        if not rows:
            return dense
        secs = links.ring_all_gather_secs(rows, participants, *self._collective_link())
        return Exchange(dense.secs + secs, dense.bytes_per_replica + (participants - 1) * rows)

    def _dense(self, size: float, participants: int) -> Exchange:
        if not size or participants == 1:
            return Exchange(0.0, 0.0)
        size *= self._codec.ratio if self._codec else 1.0
        if self._codec and not self._codec.commutes_with_sum:
            secs = links.ring_all_gather_secs(size, participants, *self._collective_link())
            decoding = participants * self._model.dense_bytes / self._codec.decode_bandwidth
            return Exchange(secs + decoding, (participants - 1) * size)
        secs = links.ring_all_reduce_secs(size, participants, *self._collective_link())
        return Exchange(secs, 2 * (participants - 1) / participants * size)

    def exposed_secs(self, participants: int) -> float:
        """Returns the time of an exchange that computing does not hide."""
        step_secs = self._model.mean_step_secs
        if step_secs is None and self._cluster.compute is not None:
            step_secs = self._cluster.compute.mean
        hidden = 0.0 if self._averaging else self._model.overlap * (step_secs or 0.0)
        return max(0.0, self.exchange(participants).secs - hidden)

    def _collective_link(self) -> tuple[float, float]:
        """Returns the bandwidth and the latency of a collective's messages."""
        network, cluster = self._network, self._cluster
        if self.strategy == MIRRORED or cluster.is_one_machine:
            return network.within_bandwidth, network.within_latency_secs
        # In a ring each machine's link is crossed once in each direction, however many workers the machine has.
        bandwidth = network.bandwidth
        if cluster.workers_per_machine > 1:
            bandwidth = min(bandwidth, network.within_bandwidth)
        return bandwidth, network.latency_secs

    def _join_secs(self, participants: int) -> float:
        size = self._model.dense_bytes + self._model.optimizer_bytes
        return links.broadcast_secs(size, participants, *self._collective_link())

    # Within a replica.

    def _within_secs(self) -> float:
        """Time in which the devices of one worker sum their gradients."""
        network = self._network
        return links.ring_all_reduce_secs(
            self._model.dense_bytes, self.devices_per_replica, network.within_bandwidth, network.within_latency_secs
        )

    def _codec_secs(self) -> float:
        if self._codec is None:
            return 0.0
        secs = self._model.dense_bytes / self._codec.encode_bandwidth
        if self.is_parameter_server or self._codec.commutes_with_sum:
            secs += self._model.dense_bytes / self._codec.decode_bandwidth
        return secs


def check_simulable(strategy: str, cluster: ClusterModel) -> None:
    """Checks that a strategy can run on a cluster.

    Raises:
      ValueError: it can't, or there is no such strategy.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}. Received: strategy={strategy!r}")
    if strategy == MIRRORED and cluster.workers != 1:
        raise ValueError(
            f"{MIRRORED} trains on the devices of one worker; use ClusterModel(workers=1) and "
            f"ClusterModel(devices_per_worker={cluster.workers * cluster.devices_per_worker}). "
            f"Received: workers={cluster.workers}"
        )
    if strategy == PARAMETER_SERVER and not cluster.servers:
        raise ValueError(
            f"{PARAMETER_SERVER} needs a parameter server; use ClusterModel(servers=1), or more. Received: servers=0"
        )


def aggregation(strategy: str, composed: composition.Composition, replicas: int) -> Aggregation:
    """Returns the policy that decides about gradients; by default the one that equals the strategy without policies."""
    if composed.aggregation is not None:
        return composed.aggregation
    # TensorFlow's meaning: parameter servers are asynchronous, the other strategies synchronous.
    default: Any = Asynchronous() if strategy == PARAMETER_SERVER else BackupWorkers(spares=0)
    default.begin(replicas, strategy)
    return default
