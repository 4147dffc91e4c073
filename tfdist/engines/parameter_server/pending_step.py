# SPDX-License-Identifier: Apache-2.0
"""One step on its way through `CoordinatedEngine`."""

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
    """A step: its program, its batch, and the futures that get its result."""

    program: Program
    tensors: Sequence[tf.Tensor]
    iterator: WorkerIterator | None = None
    wants_logs: bool = False
    took_batch: concurrent.futures.Future | None = None
    result: concurrent.futures.Future | None = None
    worker_fed: bool = False
    queued: bool = False
    # True for an update; and the number of updates made when it was begun last.
    is_update: bool = False
    local_step: int = 0
    # The batch that it takes, for a loop that may use it again.
    batch: Batch | None = None

    def suits(self, worker: int) -> bool:
        """True if `worker` could make it now. Only that worker's thread calls this."""
        return self.queued and (not self.worker_fed or self.iterator.has_batch(worker))


def resolve(future: concurrent.futures.Future | None, value: Any) -> None:
    """Gives the future its result, if somebody waits for it and has none yet."""
    if future is not None and not future.done():
        future.set_result(value)
