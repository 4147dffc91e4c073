# SPDX-License-Identifier: Apache-2.0
"""The data of a strategy with a policy: this worker's part of each batch.

In `fit` an iterator returns handles, and reads nothing: a second thread reads the part when it computes a contribution.
Other loops (`evaluate`, `predict`, custom loops) use the stock iterator over batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tfdist.data import handle as handles


@dataclasses.dataclass(eq=False)
class Pass:
    """One pass of `fit` over the data.

    Attributes:
      number: the same on all workers.
      iterator: iterator over this worker's parts, read by the second thread only.
      kind: of the handles.
    """

    number: int
    iterator: Any
    kind: handles.HandleKind

    def __post_init__(self) -> None:
        self.handle = self.kind.handle(handles.registry.open(self))


class PartIterator(handles.HandleIterator):
    """Iterator over the handles of one pass.

    It never ends if the number of batches is unknown or infinite; then `run` raises the end of the data.

    Args:
      begin: begins the pass, at the first handle: Keras makes iterators that it never uses.
      left: number of batches; below zero if it is unknown or infinite.
    """

    def __init__(self, begin: Callable[[], Pass], left: int) -> None:
        super().__init__()
        self._begin = begin
        self._left = left
        self._pass: Pass | None = None

    def next_handle(self) -> handles.BatchHandle | None:
        """See `HandleIterator`."""
        if self._left == 0:
            return None
        self._pass = self._pass or self._begin()
        self._left -= self._left > 0
        return self._pass.handle
