# SPDX-License-Identifier: Apache-2.0
"""Element of the queue of `CoordinatedEngine`: a step, or the steps of an execution (`steps_per_execution`)."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.engines.parameter_server.program import Program
from tfdist.engines.parameter_server.worker_data import Batch, WorkerIterator


@dataclasses.dataclass(eq=False)
class Step:
    """Program and batch of a step, and the futures of its result.

    Attributes:
      count: how many steps are still to be made, one after the other by one worker as long as its share lasts.
      result: of the last of them, as are the logs.
    """

    program: Program
    tensors: Sequence[tf.Tensor]
    iterator: WorkerIterator | None = None
    wants_logs: bool = False
    took_batch: concurrent.futures.Future | None = None
    result: concurrent.futures.Future | None = None
    worker_fed: bool = False
    queued: bool = False
    # True for an update; and the number of updates and the time when it was last started.
    is_update: bool = False
    local_step: int = 0
    started_at: float = 0.0
    # The batch, for a loop that may use it again.
    batch: Batch | None = None
    count: int = 1

    def suits(self, worker: int) -> bool:
        """Returns True if `worker` can run the step now. Only that worker's thread calls this."""
        return self.queued and (not self.worker_fed or self.iterator.has_batch(worker))


def resolve(future: concurrent.futures.Future | None, value: Any) -> None:
    """Sets the result of a future, unless it is None or done."""
    if future is not None and not future.done():
        future.set_result(value)
