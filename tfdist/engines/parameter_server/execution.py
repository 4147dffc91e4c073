# SPDX-License-Identifier: Apache-2.0
"""The steps of one closure: one step, or those of an execution of Keras (`steps_per_execution`).

An execution of K steps is one handle, one closure, and, where the step is small, one call for K - 1 of them and one for
the last, which has the result:

    Keras' loop (chief)      a worker's thread (chief)          the worker's process
      zip(range(K), data):
      one handle, K batches
      queue one closure  -->  make_steps(count)            -->   K - 1 times: next batch of its share,
      logs of the newest                                         read variables, update, add 1 to `counter`
      finished closure        the last one alone           -->   once more
                         <--  staleness of each, and logs if they are due

Ownership: a closure is one worker's as long as its share lasts; the rest goes to another worker as one closure again
(`step_queue`). If a worker is lost in the middle, another one repeats the closure: updates that were made are made
again, at most K of them. The counter is on a parameter server. It counts the updates of all workers, so the staleness
of each of the K updates is exact, although the chief sees them arrive together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.engines.parameter_server.accumulation import Sums
from tfdist.engines.parameter_server.program import Program


@dataclasses.dataclass(frozen=True)
class MadeSteps:
    """The outcome of a closure.

    Attributes:
      values: the flat result of its last step on the chief, if it was wanted.
      batch: the batch of its last step on the worker, for a loop that may use it again.
      staleness: for each update, the number of other updates between its reading and its writing of the variables;
        None where the chief has to estimate it.
    """

    values: list[np.ndarray] | None
    batch: Sequence[tf.Tensor]
    staleness: list[int | None]


def make_steps(program: Program, count: int, wants_values: bool, inputs: Sequence[Any], sums: Sums | None) -> MadeSteps:
    """Makes steps on the worker of the calling thread, one after the other.

    Args:
      program: the traced step.
      count: how many steps.
      wants_values: True if the result of the last one is to be fetched.
      inputs: the arguments of the step; its batch is the next one of an iterator among them if there are several steps.
      sums: the worker's sums of gradients, if it accumulates them.
    """
    silent, outputs, staleness, chosen = count - wants_values, (), [], program
    while sums is None and silent >= program.num_several > 1:
        staleness += program.run_several(*inputs)
        silent -= program.num_several
    for is_wanted in [False] * silent + [True] * wants_values:
        given = inputs
        if sums is not None:
            given, is_update = [*inputs, *sums.handles], sums.count == program.accumulation.num_steps - 1
            chosen = program if is_update else program.adding
        outputs = chosen.run(*given) if is_wanted else chosen.run_silently(*given)
        if sums is not None:
            sums.count = (sums.count + 1) % program.accumulation.num_steps
        staleness += chosen.staleness_in(outputs)
    return MadeSteps(chosen.fetch(outputs) if wants_values else None, chosen.batch_in(outputs), staleness)
