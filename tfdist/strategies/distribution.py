# SPDX-License-Identifier: Apache-2.0
"""`strategy.distribution`: the parts of a strategy that checkpoints, telemetry, fault injection and callbacks use."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.engines.base import Engine
from tfdist.engines.multi_worker.agreement import Agreement
from tfdist.policies.base import Policy
from tfdist.policies.saved_state import SavedState, WorkerState
from tfdist.policies.warmup import Warmup
from tfdist.runtime.usage import Sampler, Usage
from tfdist.serving.embedded import Attachment
from tfdist.telemetry.recorder import Recorder
from tfdist.telemetry.report import Report, with_usage


@dataclasses.dataclass
class Distribution:
    """Parts of a tfdist strategy for other parts of tfdist; set by the strategy's constructor.

    Those parts are layers below the strategies and can't import them, so they read
    `model.distribute_strategy.distribution`. Stock strategies have no such attribute.

    Attributes:
      recorder: statistics of the updates; records none without a policy.
      saved_state: state of the policies and engines, for checkpoints.
      engines: the engines that the strategy has chosen.
      agreement: exchange of small values between workers; None if this process trains alone.
      broadcast: gives the chief's values to variables on all workers; needed only if there is an `agreement`.
      serving: the cluster's worker and ps processes, under ParameterServerStrategy only.
      coordinator: the `ClusterCoordinator`, under ParameterServerStrategy only.
      bytes_sent: returns the bytes that each worker has sent so far, where tfdist counts them itself; else none.
      usage: returns the counters of the tasks' processes, by task; fetches them where they are elsewhere.
      own_usage: returns the counters of this process.
      task: name of this process, such as "chief:0".
      spares: returns the number of replicas that the current update doesn't wait for; None without `BackupWorkers`.
      is_warming: returns True during a warmup phase.
      policies: the user's policies.
      job: identifier of the job, the same on all workers.
      gradients_per_batch: number of gradients that are computed from one batch; 0 where the engine counts examples.
      replicas: indices of the replicas of this process; None for all.
      served_tasks: names of the worker and ps tasks that run no program of their own.
      sizes: sizes of the cluster, by name, for the comparison of runs.
    """

    recorder: Recorder
    saved_state: SavedState = dataclasses.field(default_factory=SavedState)
    engines: Sequence[Engine] = ()
    agreement: Agreement | None = None
    broadcast: Callable[[Sequence[Any]], None] = lambda variables: None
    serving: Attachment | None = None
    coordinator: Any = None
    bytes_sent: Callable[[], Sequence[int]] = lambda: ()
    usage: Callable[[], dict[str, Usage]] = dataclasses.field(init=False)
    own_usage: Callable[[], Usage] = dataclasses.field(default_factory=lambda: Sampler().sample)
    task: str = "chief:0"
    spares: Callable[[], int | None] = lambda: None
    is_warming: Callable[[], bool] = lambda: False
    policies: Sequence[Policy] = ()
    job: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))
    gradients_per_batch: Callable[[], int] = lambda: 0
    replicas: Sequence[int] | None = None
    served_tasks: Sequence[str] = ()
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        # Of a program without other processes.
        self.usage = lambda: {self.task: self.own_usage()}

    def take(
        self,
        policies: Sequence[Policy],
        *engines: Engine | None,
        of_workers: Mapping[str, WorkerState] | None = None,
    ) -> None:
        """Takes the policies of the strategy, and its engines; None is an engine that the strategy does not need.

        Args:
          policies: the user's argument.
          *engines: the engines.
          of_workers: see `SavedState`.
        """
        self.policies = tuple(policies)
        self.engines = [engine for engine in engines if engine is not None]
        warmup = next((policy for policy in policies if isinstance(policy, Warmup)), None)
        if warmup is not None:
            self.is_warming = lambda: not warmup.is_over
        self.saved_state = SavedState(policies, self.engines, of_workers)

    def complete(self, report: Report) -> Report:
        """Returns a report with the phase, the spares, and the counters of the tasks' processes."""
        sent, usage = self.bytes_sent(), self.usage()
        report = dataclasses.replace(
            report,
            phase="warmup" if self.is_warming() else "all",
            spares=self.spares(),
            restarts={name: each.restarts for name, each in usage.items() if each.restarts},
        )
        return with_usage(report, usage, dict(zip(report.bytes_sent, sent, strict=True)) if sent else {})

    def barrier(self, writes: bool = False) -> None:
        """Waits for the steps of all engines; see `Engine.barrier`."""
        for engine in self.engines:
            engine.barrier(writes)

    def close(self) -> None:
        """Ends the threads of all engines; may be called again."""
        for engine in self.engines:
            engine.close()
