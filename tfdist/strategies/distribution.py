# SPDX-License-Identifier: Apache-2.0
"""`strategy.distribution`: the parts of a strategy that checkpoints, telemetry, fault injection and callbacks use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.engines.base import Engine
from tfdist.engines.multi_worker.agreement import Agreement
from tfdist.policies.base import Policy
from tfdist.policies.saved_state import SavedState, WorkerState
from tfdist.serving.embedded import Attachment
from tfdist.telemetry.report import Recorder, Report


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
      bytes_sent: returns the bytes that each worker has sent so far; none where they are not counted.
    """

    recorder: Recorder
    saved_state: SavedState = dataclasses.field(default_factory=SavedState)
    engines: Sequence[Engine] = ()
    agreement: Agreement | None = None
    broadcast: Callable[[Sequence[Any]], None] = lambda variables: None
    serving: Attachment | None = None
    coordinator: Any = None
    bytes_sent: Callable[[], Sequence[int]] = lambda: ()

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
        self.engines = [engine for engine in engines if engine is not None]
        self.saved_state = SavedState(policies, self.engines, of_workers)

    def with_bytes_sent(self, report: Report) -> Report:
        """Returns a report with the bytes that each worker has sent, where they are counted."""
        sent = self.bytes_sent()
        return (
            dataclasses.replace(report, bytes_sent=dict(zip(report.bytes_sent, sent, strict=True))) if sent else report
        )

    def barrier(self, writes: bool = False) -> None:
        """Waits for the steps of all engines; see `Engine.barrier`."""
        for engine in self.engines:
            engine.barrier(writes)

    def close(self) -> None:
        """Ends the threads of all engines; may be called again."""
        for engine in self.engines:
            engine.close()
