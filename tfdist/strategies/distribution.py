# SPDX-License-Identifier: Apache-2.0
"""`strategy.distribution`: the parts of a strategy that checkpoints, telemetry, fault injection and callbacks use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tfdist.engines.multi_worker.agreement import Agreement
from tfdist.policies.saved_state import SavedState
from tfdist.serving.embedded import Attachment
from tfdist.telemetry.report import Recorder


@dataclasses.dataclass
class Distribution:
    """Parts of a tfdist strategy for other parts of tfdist; set by the strategy's constructor.

    Those parts are layers below the strategies and can't import them, so they read
    `model.distribute_strategy.distribution`. Stock strategies have no such attribute.

    Attributes:
      recorder: statistics of the updates; records none without a policy.
      saved_state: state of the policies, for checkpoints.
      agreement: exchange of small values between workers; None if this process trains alone.
      broadcast: gives the chief's values to variables on all workers; needed only if there is an `agreement`.
      serving: the cluster's worker and ps processes, under ParameterServerStrategy only.
      coordinator: the `ClusterCoordinator`, under ParameterServerStrategy only.
    """

    recorder: Recorder
    saved_state: SavedState = dataclasses.field(default_factory=SavedState)
    agreement: Agreement | None = None
    broadcast: Callable[[Sequence[Any]], None] = lambda variables: None
    serving: Attachment | None = None
    coordinator: Any = None
