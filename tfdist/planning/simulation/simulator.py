# SPDX-License-Identifier: Apache-2.0
"""The simulator: policies, a cluster, a network and a model in; throughput, waits, drops and use of the links out."""

from __future__ import annotations

import functools
import numbers
import random
from collections.abc import Callable, Iterable

from tfdist import _checks
from tfdist.planning.simulation import engines
from tfdist.planning.simulation.delay_distributions import DelayDistribution, constant
from tfdist.planning.simulation.engines import EngineModel
from tfdist.planning.simulation.event_loop import Costs, EventLoop
from tfdist.planning.simulation.models import ClusterModel, CodecModel, ModelProfile
from tfdist.planning.simulation.result import LinkUse, Result, Simulation
from tfdist.policies import composition
from tfdist.policies.base import Policy
from tfdist.policies.warmup import Warmup

Durations = Callable[[int, int], float]


def simulate(
    cluster: ClusterModel,
    model: ModelProfile | None = None,
    *,
    strategy: str = engines.PARAMETER_SERVER,
    policies: Iterable[Policy] | None = (),
    codec: CodecModel | None = None,
    num_updates: int = 100,
    steps_per_epoch: int = 0,
    seed: int = 0,
) -> Result:
    """Simulates training with the real policies on a model of a cluster.

    Computing times depend on seed, replica and attempt alone, so that two simulations with one seed differ by what
    was changed, and not by chance.

    Args:
      cluster: the machines.
      model: the trained model; by default one without bytes, whose examples are gradients.
      strategy: name of the strategy's class, or the short one of flags, such as "mirrored".
      policies: as for the strategy; new objects, which belong to no strategy yet.
      codec: cost of the codec; required with `tfdist.Compression`.
      num_updates: number of updates to simulate; with `ParameterAveraging` an update is one average.
      steps_per_epoch: updates of an epoch; required with `Warmup(epochs=...)`. Without a policy for gradients,
        asynchronous training ends each epoch when its last gradient is applied. Then all workers begin the next epoch
        together. Without this argument the epoch has no end.
      seed: seed of computing times and failures.

    Raises:
      ValueError: an argument is invalid, or policies are not compatible with the strategy or with each other.
      RuntimeError: no update can be made any more, because too many workers are lost.
    """
    model = ModelProfile() if model is None else model
    strategy = engines.SHORT_NAMES.get(strategy, strategy)
    if strategy not in engines.STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(engines.STRATEGIES)}. Received: strategy={strategy!r}")
    if strategy == engines.MIRRORED and cluster.workers != 1:
        raise ValueError(
            f"{strategy} trains on the devices of one worker; use ClusterModel(workers=1) and "
            f"ClusterModel(devices_per_worker={cluster.workers * cluster.devices_per_worker}). "
            f"Received: workers={cluster.workers}"
        )
    if strategy == engines.PARAMETER_SERVER and not cluster.servers:
        raise ValueError(
            f"{strategy} needs a parameter server; use ClusterModel(servers=1), or more. Received: servers=0"
        )
    _checks.check_count("simulate", "num_updates", num_updates)
    _checks.check_count("simulate", "steps_per_epoch", steps_per_epoch, at_least=0)
    policies = composition.check_policies(policies, strategy)
    given = tuple(map(repr, policies))
    replicas = cluster.devices_per_worker if strategy == engines.MIRRORED else cluster.workers
    composed = composition.compose(policies, strategy, replicas)
    if (composed.compression is None) != (codec is None):
        raise ValueError(
            "simulate(codec=...) is the cost of the codec of tfdist.Compression: give both, or none. "
            f"Received: {composed.compression or 'no Compression'!s}, codec={codec!r}"
        )
    if composed.warmup is not None and composed.warmup.unit == "epochs" and not steps_per_epoch:
        raise ValueError(f"{composed.warmup!r}: simulate(steps_per_epoch=...) must say how long an epoch is")
    engine = EngineModel(strategy, cluster, model, composed, codec)
    policy = engines.aggregation(strategy, composed, replicas)
    costs = engine.costs(policy.is_synchronous)
    times = ComputingTimes(cluster, model, engine, seed)
    loop = EventLoop(
        policy,
        times.secs,
        costs,
        warmup=composed.warmup,
        steps_per_epoch=steps_per_epoch,
        ends_epochs=strategy == engines.PARAMETER_SERVER and composed.aggregation is None,
        losses=[(each.secs, each.worker, each.back_after_secs) for each in cluster.failures],
    )
    loop.run(num_updates)
    return _result(loop, engine, costs, model, times, given)


def simulate_policy(
    policy: Policy,
    durations: Durations | DelayDistribution | float,
    num_updates: int,
    total_num_replicas: int,
    warmup: Warmup | None = None,
) -> Simulation:
    """Runs a policy without a model of a cluster: only gradients take time, updates and communication take none.

    So it gives an upper limit for the engines' throughput. Each replica starts as soon as the policy allows it. If not
    all waiting replicas may start, the one with the oldest last start is first. No computation is cancelled: a late
    replica may miss the next update, too, which new durations for every step would not show.

        random_durations = random.Random(0)
        simulation = simulate_policy(
            BackupWorkers(spares=2), lambda replica, attempt: random_durations.expovariate(5.0), 1000, 8)
        simulation.updates_per_sec

    Args:
      policy: a policy that belongs to no strategy yet; of `ParameterServerStrategy`, unless it is an `Aggregation`.
      durations: returns the seconds that replica `replica` needs for its gradient number `attempt`, counted from 0 for
        each replica. Called once for each gradient, in the order of their starts. Or a number of seconds, or a
        distribution of `tfdist.testing`, drawn with seed 0.
      num_updates: number of updates to make.
      total_num_replicas: number of replicas.
      warmup: limits the replicas that take part at the start; one in steps.

    Raises:
      ValueError: an argument is invalid, or a duration is no number of seconds, 0 or more.
      RuntimeError: the policy lets no replica start, and no update is due.
    """
    _checks.check_count("simulate_policy", "num_updates", num_updates)
    _checks.check_count("simulate_policy", "total_num_replicas", total_num_replicas)
    given = composition.check_policies([policy], engines.PARAMETER_SERVER)
    composed = composition.compose(given, engines.PARAMETER_SERVER, total_num_replicas)
    aggregation = engines.aggregation(engines.PARAMETER_SERVER, composed, total_num_replicas)
    if warmup is not None:
        warmup.begin(total_num_replicas, "simulate_policy")
    loop = EventLoop(aggregation, _checked(durations), warmup=warmup)
    loop.run(num_updates)
    return Simulation(loop.time, tuple(loop.updates), loop.gradients, total_num_replicas, loop.times)


def _checked(durations: Durations | DelayDistribution | float) -> Durations:
    """Returns a function of the durations, which raises ValueError for one that is no time."""
    if isinstance(durations, DelayDistribution):
        return functools.partial(durations.draw, 0)

    def secs(replica: int, attempt: int) -> float:
        found = durations(replica, attempt) if callable(durations) else durations
        if not isinstance(found, numbers.Real) or not found >= 0:
            raise ValueError(f"simulate_policy(durations=...) must be seconds, 0 or more. Received: {found!r}")
        return found

    return secs


class ComputingTimes:
    """Seconds that each replica computes for each of its gradients.

    Args:
      cluster: has the distribution, speeds and delays.
      model: may have the mean of one step.
      engine: says how many devices and steps a gradient has.
      seed: seed of the draws.

    Raises:
      ValueError: neither the cluster nor the model says how long a step takes.
    """

    def __init__(self, cluster: ClusterModel, model: ModelProfile, engine: EngineModel, seed: int) -> None:
        mean = model.mean_step_secs
        if mean is None and cluster.compute is None:
            remedy = 'add ModelProfile(step_secs="100ms"), or ClusterModel(compute=constant(secs=0.1))'
            raise ValueError(f"no step time is known; {remedy}. Received: neither")
        self._distribution = constant(mean) if cluster.compute is None else cluster.compute  # type: ignore[arg-type]
        self._scale = 1.0 if cluster.compute is None or mean is None else mean / cluster.compute.mean
        self.mean = self._distribution.mean * self._scale
        self._devices, self._steps, self._seed = engine.devices_per_replica, engine.steps_per_gradient, seed
        replicas = range(engine.replicas)
        self._factors = [1.0 / cluster.of_worker("speeds", replica, 1.0) for replica in replicas]
        self._delays = [cluster.of_worker("delays", replica, None) for replica in replicas]
        # One generator for each replica, so that its draws don't depend on the order of events.
        is_random = self._distribution.name != "constant"
        self._randoms = [random.Random(f"{seed}:{replica}") for replica in replicas] if is_random else []

    def secs(self, replica: int, attempt: int) -> float:
        """Returns the seconds of one gradient; called in the order of attempts for each replica."""
        delay = self._delays[replica]
        steps = range(attempt * self._steps, (attempt + 1) * self._steps)
        # The replica waits for the slowest of its devices.
        secs = sum(max(self._step(replica, each) for _ in range(self._devices)) for each in steps)
        secs *= self._factors[replica]
        return secs + sum(delay.draw(self._seed, replica, each) for each in steps) if delay else secs

    def _step(self, replica: int, attempt: int) -> float:
        if not self._randoms:
            return self.mean
        # In (0, 1), where quantiles are finite.
        uniform = self._randoms[replica].random() or 2.0**-54
        return self._distribution.inverse(uniform, attempt) * self._scale

    def mean_secs(self, replica: int) -> float:
        """Returns the expected seconds of one step of one device of a replica."""
        delay = self._delays[replica]
        return self.mean * self._factors[replica] + (delay.mean if delay else 0.0)


def _result(
    loop: EventLoop,
    engine: EngineModel,
    costs: Costs,
    model: ModelProfile,
    times: ComputingTimes,
    policies: tuple[str, ...],
) -> Result:
    secs, replicas = loop.time, engine.replicas
    examples = model.batch_size * engine.devices_per_replica * engine.steps_per_gradient
    count = sum(len(update.contributors) for update in loop.updates)
    alone = [1.0 / each if (each := times.mean_secs(replica)) else float("inf") for replica in range(replicas)]
    all_alone = model.batch_size * engine.devices_per_replica * sum(alone)
    examples_per_sec = count * examples / secs if secs else float("inf")
    # Seconds of all replicas together in which they compute, and in which they fetch, send and encode.
    computing = transfer = 0.0
    for each in loop.gradients:
        busy = max(0.0, min(each.computed, secs) - each.received)
        latency = min(busy, costs.gradient_secs)
        computing += busy - latency
        transfer += max(0.0, min(each.arrived, secs) - each.computed) + each.received - each.started + latency
    total = max(secs * replicas, 1e-300)
    return Result(
        seconds=secs,
        updates=tuple(loop.updates),
        gradients=loop.gradients,
        replicas=replicas,
        times=loop.times,
        examples_per_gradient=examples,
        strategy=engine.strategy,
        policies=policies,
        examples_per_sec=examples_per_sec,
        single_examples_per_sec=model.batch_size * max(alone),
        efficiency=examples_per_sec / all_alone if secs else 1.0,
        computing_share=computing / total,
        transfer_share=transfer / total,
        held_share=max(0.0, 1.0 - computing / total - transfer / total),
        held_secs=tuple(loop.held_secs),
        updating_secs=loop.busy_secs,
        links=_links(loop, engine, costs, secs),
    )


def _links(loop: EventLoop, engine: EngineModel, costs: Costs, secs: float) -> dict[str, LinkUse]:
    if engine.strategy == engines.PARAMETER_SERVER:
        both = {"from the servers": costs.down, "to the servers": costs.up}
        used = {name: (link.bytes_sent, link.bytes_sent / link.capacity) for name, link in both.items() if link}
    else:
        found = [(*engine.exchange(count), count, updates) for count, updates in loop.taking_part.items()]
        sent = sum(each * count * updates for _, each, count, updates in found)
        used = {"between replicas": (sent, sum(each * updates for each, _, _, updates in found))} if sent else {}
    return {name: LinkUse(sent, min(1.0, busy / secs) if secs else 0.0) for name, (sent, busy) in used.items()}
