# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients under `Compression`, on one worker of a MultiWorkerMirroredStrategy.

Ownership: the strategy owns one `CompressedSums`. That owns the codec, which "auto" chooses, and the codec's state
(`ErrorFeedback`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import _log
from tfdist.compat.keras import models
from tfdist.compat.keras.optimizers import SumGradients, optimizers_of, trained_by
from tfdist.compression import choice
from tfdist.engines.agreement import Agreement
from tfdist.policies.compression import AUTO, Compression
from tfdist.step.gradients import DIFFERENCES, ErrorFeedback
from tfdist.transport.sums import Messages, Traffic, WorkerSums


class CompressedSums:
    """Sums gradients by the codec of a policy. A `policies.saved_state.WorkerState`.

    Args:
      compression: the policy.
      sums: of the workers, whose traffic is counted from now on.
      agreement: exchange of small values between the workers.

    Attributes:
      in_step: sums gradients in a step that all workers trace alike; None to sum them as they are.
      anywhere: likewise, at any other place.
      bytes_sent: returns the bytes that each worker has sent so far.
      of_differences: sums differences of parameters, in cross-replica context; None likewise.

    Raises:
      ValueError: the workers have different codecs.
    """

    def __init__(self, compression: Compression, sums: WorkerSums, agreement: Agreement) -> None:
        self._compression, self._sums, self._agreement = compression, sums, agreement
        given = agreement.gather(repr(compression), "comparing the codecs")
        if len({*given.values()}) > 1:
            shown = ", ".join(f"{task}: {policy}" for task, policy in given.items())
            raise ValueError(f"policies: all workers must have the same codec. Received: {shown}")
        senders = [str(task) for task in agreement.tasks]
        traffic = sums.traffic = Traffic(len(senders))
        self.bytes_sent = traffic.by_worker
        self._anywhere = Messages(sums, senders, agreement.tasks.index(agreement.task))
        self._feedback: ErrorFeedback | None = None
        self.in_step: SumGradients | None = None
        self.anywhere: SumGradients | None = None
        self.of_differences: SumGradients | None = None
        self._is_chosen = False
        if compression.codec != AUTO:
            self._use(compression.codec)

    def prepare(self, model: keras.Model) -> None:
        """Chooses the codec, before the first step of a built model is traced; all workers call it alike."""
        shapes = [] if self._is_chosen else _shapes_of(model)
        if not shapes:
            return
        how = self._sums.in_step, self._anywhere.senders, self._slowest, self._compression.error_bound
        try:
            with tf.init_scope():
                codec, reason = choice.choose(choice.made_up(shapes), *how)
        except Exception as error:
            # Errors other than TensorFlow's are sent to the other workers, which wait for this worker's measurements.
            raise RuntimeError(f'Compression("auto"): measuring the exchange failed: {error}') from error
        self._say(reason)
        if codec is None:
            # Steps are those without the policy then; to count would cost some hundredths of a small one.
            self._sums.traffic = None
        self._use(codec)

    def collect(self, model: keras.Model) -> tuple[Any, list[np.ndarray]]:
        """See `WorkerState.collect`."""
        if self._feedback is None:
            return None, []
        described, arrays = self._feedback.collect(model)
        is_worth_it = described is not None or self._compression.codec == AUTO
        return ({"codec": repr(self._feedback.codec), "state": described} if is_worth_it else None), arrays

    def distribute(self, model: keras.Model, described: Any, arrays: Sequence[np.ndarray]) -> None:
        """See `WorkerState.distribute`; "auto" continues with the codec of the checkpoint."""
        if described and not self._is_chosen:
            codec = next((each for each in choice.CANDIDATES if repr(each) == described["codec"]), None)
            if codec is not None:
                self._say(f"{codec!r}, as before")
                self._use(codec)
        if self._feedback is not None:
            self._feedback.distribute(model, described and described["state"], arrays)

    def _use(self, codec: Any) -> None:
        self._is_chosen = True
        if codec is None:
            return
        self._feedback = ErrorFeedback(codec, self._anywhere)
        self.anywhere = functools.partial(self._feedback.sum_all, self._anywhere)
        self.of_differences = functools.partial(self._feedback.sum, transport=self._anywhere, kind=DIFFERENCES)
        self.in_step = functools.partial(self._feedback.sum_all, dataclasses.replace(self._anywhere, is_in_step=True))

    def _slowest(self, value: float) -> float:
        return max(self._agreement.gather(value, "comparing the speed of sums").values())

    def _say(self, what: str) -> None:
        if self._agreement.is_chief:
            _log.say(f'Compression("auto"): {what}')


def _shapes_of(model: keras.Model) -> list[tuple[int, ...]]:
    """Returns the shapes of a model's dense gradients."""
    optimizers = [each for each in optimizers_of(model) if each.built]
    trained = {id(each): each for optimizer in optimizers for each in trained_by(optimizer)}
    for layer in models.layers_of(model):
        # Of a table, the rows of a batch are sent as they are.
        if isinstance(layer, keras.layers.Embedding):
            for table in layer.trainable_variables:
                trained.pop(id(table), None)
    return [tuple(each.shape) for each in trained.values()]
